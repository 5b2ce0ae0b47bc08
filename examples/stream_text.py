"""Train on text that is streamed from files, with all batches bounded by bytes of memory.

    python examples/stream_text.py --budget 64MiB

Every file of Python's standard library is a shard; its docstrings are the samples. How many there
are, and how long, is unknown until the files are read. A byte-level transformer learns them: the
cost of a batch is traced on its training step, without running it, and `BudgetedIterableDataset`
cuts the samples into batches whose tensors fit the budget. The run stops in the middle of the
second epoch, and a new stream resumes from the saved state: every remaining sample comes once,
although the workers of the `DataLoader` have read ahead.

The table shows batches, samples, padding and the largest predicted cost of each part of the run.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from train_text import Transformer, loss_sum

from torchbudget import (
    BudgetedIterableDataset,
    PadCollate,
    PaddedBatch,
    TorchBudgetError,
    format_bytes,
    measure_cost,
    parse_bytes,
)

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file: Path) -> Iterator[bytes]:
    """The docstrings of one file, in order."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text:
            yield text.encode()


def to_sample(text: bytes, max_length: int) -> dict[str, Tensor]:
    """Bytes, each of which predicts the next one; a zero byte begins and ends a text."""
    ids = torch.frombuffer(bytearray(b"\0" + text[: max_length - 1] + b"\0"), dtype=torch.uint8)
    return {"ids": ids[:-1].long(), "labels": ids[1:].long()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=parse_bytes, default=parse_bytes("64MiB"), help="of tensors"
    )
    parser.add_argument("--files", type=int, default=60, help="of the standard library")
    parser.add_argument("--max-length", type=int, default=512, help="texts are cut to this many")
    parser.add_argument("--window", type=int, default=512, help="samples that are sorted together")
    parser.add_argument("--workers", type=int, default=1, help="processes that read")
    arguments = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))[: arguments.files]
    torch.manual_seed(0)
    model = Transformer(arguments.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        (loss_sum(model, batch) / batch.num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(n: int, length: int) -> PaddedBatch:
        return PadCollate()([to_sample(b"a" * (length - 1), arguments.max_length)] * n)

    def make_stream() -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            [partial(docstrings, file) for file in files],
            cost,
            arguments.budget,
            size="ids",
            transforms=[partial(to_sample, max_length=arguments.max_length)],
            window=arguments.window,
            look_ahead="16MiB",
        )

    try:
        cost = measure_cost(step, make_batch, max_size=arguments.max_length, method="trace")
        stream = make_stream()
    except TorchBudgetError as error:
        parser.error(str(error))
    print(f"{len(files)} files, {format_bytes(arguments.budget)} of tensors for each step")
    print("part                batches  samples  padding  largest / budget  seconds")

    def train(name: str, batches: Iterator[PaddedBatch]) -> int:
        began = time.perf_counter()
        count = samples = tokens = padded = largest = 0
        for batch in batches:
            step(batch)
            count += 1
            samples += batch.num_samples
            tokens += batch.num_tokens
            padded += batch["ids"].numel()
            predicted = int(cost.batch_bytes(batch.num_samples, batch["ids"].shape[1]))
            largest = max(largest, predicted)
        took = time.perf_counter() - began
        print(
            f"{name:18}  {count:7,}  {samples:7,}  {1 - tokens / max(padded, 1):7.2%}  "
            f"{largest / arguments.budget:16.3f}  {took:7.1f}"
        )
        return samples

    loader = DataLoader(stream, batch_size=None, num_workers=arguments.workers)
    whole = train("epoch 0", stream.tracked(loader))
    begun = train("epoch 1, begun", islice(stream.tracked(loader), 4))
    state = stream.state_dict()

    stream = make_stream()
    stream.load_state_dict(state)
    loader = DataLoader(stream, batch_size=None, num_workers=arguments.workers)
    rest = train("epoch 1, the rest", stream.tracked(loader))
    print(f"every sample once: {begun} + {rest} = {whole}")


if __name__ == "__main__":
    main()
