"""Train a small language model on ragged text, with the memory of the process under a budget.

    python examples/train_text.py --budget 640MiB

A byte-level transformer learns the docstrings of Python's standard library: most are short, a few
are very long. The cost of a training step is measured on the step itself, and every micro-batch
takes as many samples as fit. The budget covers the whole process: on the CPU its peak of resident
memory, interpreter and libraries included (workers of the DataLoader are processes of their own);
on a GPU the peak of the memory in use there.

`examples/benchmarks/train_text_compared.py` trains the same with fixed batches, for comparison.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchbudget import (
    GradAccumulator,
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    TorchBudgetError,
    configure_allocators,
    format_bytes,
    limit_device_memory,
    measure_cost,
    parse_bytes,
    sizes_of,
)
from torchbudget.machine.peaks import peak_memory

# ---------------------------------------------------------------------- data


def docstrings(seed: int) -> Iterator[bytes]:
    """Every distinct docstring of the standard library, file by file, the files in random order."""
    library = Path(sysconfig.get_path("stdlib"))
    # Not the standard library's own text, or not there in every installation.
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [p for p in library.rglob("*.py") if excluded.isdisjoint(p.relative_to(library).parts)]
    files.sort()
    random.Random(seed).shuffle(files)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    seen = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and text not in seen:
                seen.add(text)
                yield text.encode()


class ByteData(Dataset[dict[str, Tensor]]):
    """Texts as bytes, each of which predicts the next one; a zero byte begins and ends a text."""

    def __init__(self, texts: Iterable[bytes], max_length: int) -> None:
        self._texts = [(b"\0" + text + b"\0")[: max_length + 1] for text in texts]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.tensor(list(self._texts[index]))
        return {"ids": text[:-1], "labels": text[1:]}


# ---------------------------------------------------------------------- model


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(n, L, width)` to the same shape."""
        qkv = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        # Padding is on the right, where causal attention never looks: no mask is needed.
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Transformer(nn.Module):
    """A decoder of bytes: ids `(n, L)` to logits `(n, L, 256)`."""

    def __init__(self, max_length: int, width: int = 64, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(max_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy, summed over the bytes that are not padding (whose label is -100)."""
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


# ---------------------------------------------------------------------- training


def measured_cost(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_length: int, budget: str
) -> MeasuredCost:
    """The bytes of a training step by its batch's shape, measured in this process."""
    device = next(model.parameters()).device

    def step(batch: dict[str, Tensor]) -> None:
        loss_sum(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(n: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(256, (n, length), device=device)
        return {"ids": ids, "labels": ids.clone()}

    return measure_cost(step, make_batch, max_size=max_length, budget=budget, accumulate=True)


def train(options: argparse.Namespace) -> None:
    configure_allocators()  # freed memory is returned: ragged batches need ever new shapes
    torch.manual_seed(options.seed)
    data = ByteData(islice(docstrings(options.seed), options.samples), options.max_length)
    sizes = sizes_of(data, "ids")

    model = Transformer(options.max_length).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cost = measured_cost(model, optimizer, options.max_length, options.budget)
    print(limit_device_memory(options.budget, options.device))  # whoever shares the GPU is safe
    sampler = MemoryBudgetBatchSampler(
        sizes, cost, options.budget, samples_per_step=options.samples_per_step, seed=options.seed
    )
    print(sampler.report(), end="\n\n")

    loader = DataLoader(
        data, batch_sampler=sampler, collate_fn=PadCollate(), num_workers=options.workers
    )
    # The gradient of a step is the mean over all bytes of text in it, however they are batched.
    accumulator = GradAccumulator(optimizer, model, steps=sampler, max_norm=1.0)
    with peak_memory(options.device) as peak:
        for epoch in range(options.epochs):
            for batch in loader:
                batch = batch.to(options.device)
                with accumulator.micro_batch(weight=batch.num_tokens):
                    accumulator.backward(loss_sum(model, batch))
                if accumulator.stepped:
                    print(f"epoch {epoch}, step {accumulator.last.number}: ", end="")
                    print(f"loss {accumulator.last.loss:.3f}")
    share = peak.bytes / parse_bytes(options.budget)
    print(f"peak memory {format_bytes(peak.bytes)}, {share:.3f} of the budget")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a language model under a budget of memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", default="640MiB", help="memory of this process, or of the GPU")
    add("--samples", type=int, default=768, help="docstrings to train on")
    add("--samples-per-step", type=int, default=256, help="docstrings in an optimizer step")
    add("--epochs", type=int, default=2)
    add("--max-length", type=int, default=1024, help="bytes at which docstrings are cut")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--workers", type=int, default=0, help="processes that load data")
    add("--seed", type=int, default=0, help="of docstrings, weights and order")
    options = parser.parse_args()
    try:
        train(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
