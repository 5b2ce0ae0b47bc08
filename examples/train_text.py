"""Train a small language model on ragged text, with all memory bounded by one number of bytes.

    python examples/train_text.py --budget 640MiB --plot batches.png

A byte-level transformer learns the docstrings of Python's standard library: most are short, a few
are very long. What a training step costs is measured on the step itself. The model is trained
twice, each time in a process of its own, from the same weights, on the same docstrings, for one
epoch, with the same number of samples in an optimizer step:

- in the micro-batches of `MemoryBudgetBatchSampler`, each as many samples as fit the budget;
- in fixed batches of as many of the *longest* samples as fit the budget, which is what a fixed
  batch size has to be if no batch may exceed the budget.

The budget holds for the whole process, as the kernel counts it: on the CPU the peak of resident
memory, interpreter and libraries included (workers of the DataLoader are processes of their own
and not in it); on a GPU the peak of what torch's allocator reserves. The table at the end compares
the two runs, and says how near to the budget the real peak came.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    TorchBudgetError,
    format_bytes,
    measure_cost,
    parse_bytes,
    sizes_of,
)
from torchbudget.errors import MissingExtraError, OptionError

T = TypeVar("T")

# How the training processes manage memory. Ragged batches ask for ever new shapes, and whoever
# keeps something for the old ones grows.
ENVIRONMENT = {
    # oneDNN compiles kernels for every new shape. It keeps the last 1,024 of them by default, which
    # came to 13 MiB after 200 shapes, and was still growing.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    # CUDA's segments grow instead of being replaced. Torch 2.6 knows the second name only; where
    # the first one is known it is read first.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}

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
    """Texts as bytes, each of which predicts the next one; a zero byte begins and ends a text.

    Args:
        texts: N byte strings.
        max_length: a sample's `ids` and `labels` are cut to this many.
    """

    def __init__(self, texts: Iterable[bytes], max_length: int) -> None:
        self._texts = [b"\0" + text + b"\0" for text in texts]
        self._texts = [text[: max_length + 1] for text in self._texts]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.tensor(list(self._texts[index]))
        return {"ids": text[:-1], "labels": text[1:]}


# ---------------------------------------------------------------------- model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a `Transformer`."""

    max_length: int
    layers: int = 2
    heads: int = 2
    width: int = 64
    classes: int = 256  # the values of a byte


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(n, L, width)` to the same shape."""
        qkv = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        # Padding is on the right, where causal attention never looks: no mask is needed.
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.perceptron_norm(x))


class Transformer(nn.Module):
    """A decoder of bytes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.classes, config.width)
        self.position = nn.Embedding(config.max_length, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids `(n, L)` to logits `(n, L, classes)`."""
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy, summed over the bytes that are no padding (whose label is -100)."""
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def measured_cost(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> MeasuredCost:
    """What a training step on a batch costs in this process, measured under the budget.

    Gradients stay between the steps (`set_to_none=False`), as they do while micro-batches add to
    them; with them and the optimizer's step, this is the most that any micro-batch asks for.
    """

    def step(batch: dict[str, Tensor]) -> None:
        loss_sum(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def make_batch(n: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(256, (n, length), device=options.device)
        return {"ids": ids, "labels": ids.clone()}

    return measure_cost(step, make_batch, max_size=options.max_length, budget=options.budget_bytes)


# ---------------------------------------------------------------------- one process, one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training run did.

    Attributes:
        cost: of a step, as it was measured in the process.
        measuring_s: seconds that measuring took.
        shapes: samples and padded length of every micro-batch, in order, `(batches, 2)`.
        tokens: bytes of text that were learned from, padding left out.
        steps: optimizer steps.
        elapsed_s: seconds of training, on the wall.
        peak_bytes: the most memory that the process held while it trained and was evaluated.
        loss: nats for each byte of the held-out texts.
    """

    cost: MeasuredCost
    measuring_s: float
    shapes: np.ndarray[Any, np.dtype[np.int64]]
    tokens: int
    steps: int
    elapsed_s: float
    peak_bytes: int
    loss: float

    @property
    def padding(self) -> float:
        """Share of all positions that are padding."""
        return 1 - self.tokens / int(self.shapes.prod(axis=1).sum())


def train_one(
    options: argparse.Namespace,
    train_texts: list[bytes],
    held_out_texts: list[bytes],
    fixed: bool,
) -> Run:
    """Measure what a step costs, train a new model for one epoch, and evaluate it.

    Args:
        options: the command line's.
        train_texts: texts to learn from.
        held_out_texts: texts for the evaluation.
        fixed: fixed batches of as many samples as fit whatever their length; otherwise
            micro-batches of as many samples as fit.
    """
    model, optimizer = new_model(options)
    data = ByteData(train_texts, options.max_length)
    sizes = sizes_of(data, "ids", progress=False)
    began_s = time.perf_counter()
    cost = measured_cost(model, optimizer, options)
    measuring_s = time.perf_counter() - began_s

    common = {"num_workers": options.workers, "pin_memory": options.device == "cuda"}
    if not fixed:
        sampler = MemoryBudgetBatchSampler(
            sizes,
            cost,
            options.budget_bytes,
            samples_per_step=options.samples_per_step,
            seed=options.seed,
        )
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate(), **common)
    else:
        capacity = int(cost.capacity(sizes.max(), options.budget_bytes))
        batch_size = min(capacity, options.samples_per_step)
        loader = DataLoader(
            data, batch_size=batch_size, shuffle=True, collate_fn=PadCollate(), **common
        )

    held_out = ByteData(held_out_texts, options.max_length)
    in_order = MemoryBudgetBatchSampler(
        sizes_of(held_out, "ids", progress=False), cost, options.budget_bytes, shuffle=False
    )
    held_out_loader = DataLoader(held_out, batch_sampler=in_order, collate_fn=PadCollate())

    forget_peak(options.device)
    began_s = time.perf_counter()
    name = "fixed batches" if fixed else "torchbudget"
    shapes, tokens, steps = train_epoch(
        model, optimizer, with_bar(loader, name), len(data), options
    )
    elapsed_s = time.perf_counter() - began_s
    loss = evaluate(model, held_out_loader, options.device)
    return Run(
        cost=cost,
        measuring_s=measuring_s,
        shapes=np.array(shapes),
        tokens=tokens,
        steps=steps,
        elapsed_s=elapsed_s,
        peak_bytes=peak_bytes(options.device),
        loss=loss,
    )


def new_model(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose weights are a function of the seed, and its optimizer."""
    torch.manual_seed(options.seed)
    model = Transformer(ModelConfig(max_length=options.max_length)).to(options.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[PaddedBatch],
    num_samples: int,
    options: argparse.Namespace,
) -> tuple[list[tuple[int, int]], int, int]:
    """Train on every batch once.

    Micro-batches differ in samples and in bytes, so each adds the gradient of its *sum*, and the
    sum is divided when the step is complete: the gradient is the mean over all real bytes of the
    step's samples, however they were cut into micro-batches.

    Returns:
        The shapes of the batches, the real bytes in them, and the optimizer steps taken.
    """
    shapes, all_samples, all_tokens, steps = [], 0, 0, 0
    samples = tokens = 0  # of the step so far
    for batch in batches:
        shapes.append((batch.num_samples, *batch.padded_size))
        all_samples += batch.num_samples
        samples += batch.num_samples
        tokens += batch.num_tokens
        loss_sum(model, batch.to(options.device, non_blocking=True)).backward()
        if samples >= options.samples_per_step or all_samples == num_samples:
            for parameter in model.parameters():
                parameter.grad /= tokens
            optimizer.step()
            optimizer.zero_grad()
            all_tokens += tokens
            steps += 1
            samples = tokens = 0
    if options.device == "cuda":
        torch.cuda.synchronize()  # what is still running belongs to the time of training
    return shapes, all_tokens, steps


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[PaddedBatch], device: str) -> float:
    """Mean cross-entropy over all real bytes."""
    total, tokens = 0.0, 0
    for batch in batches:
        total += loss_sum(model, batch.to(device)).item()
        tokens += batch.num_tokens
    return total / tokens


def forget_peak(device: str) -> None:
    """Let the peak of memory begin at what is held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # where it is not allowed, the peak includes the imports'
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """The most memory that this process held since `forget_peak`."""
    return torch.cuda.max_memory_reserved() if device == "cuda" else read_status("VmHWM")


def read_status(field: str) -> int:
    """A field of this process's status as the kernel keeps it, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024


def with_bar(batches: DataLoader[Any], name: str) -> Iterable[PaddedBatch]:
    """The batches, behind a progress bar where there is a terminal and tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc=name, unit="batch", disable=None)


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a fresh interpreter, whose peak of memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# ---------------------------------------------------------------------- what came out


def print_table(ours: Run, fixed: Run, budget_bytes: int) -> None:
    """Print the two runs side by side."""
    rows = [("", "torchbudget", f"fixed batches of {fixed.shapes[:, 0].max()}")]

    def row(name: str, text: Callable[[Run], str]) -> None:
        rows.append((name, text(ours), text(fixed)))

    row("optimizer steps", lambda run: f"{run.steps:,}")
    row("micro-batches", lambda run: f"{len(run.shapes):,}")
    row("samples in each", lambda run: "{:,} to {:,}".format(*np.sort(run.shapes[:, 0])[[0, -1]]))
    row("padding", lambda run: f"{run.padding:.1%}")
    row("fill of the budget", lambda run: f"{predicted(run).mean() / budget_bytes:.1%}")
    row("budget", lambda _: format_bytes(budget_bytes))
    row("peak memory", lambda run: format_bytes(run.peak_bytes))
    row("peak / budget", lambda run: f"{run.peak_bytes / budget_bytes:.3f}")
    row("held-out loss", lambda run: f"{run.loss:.3f}")
    row("seconds of measuring", lambda run: f"{run.measuring_s:.1f}")
    row("seconds of training", lambda run: f"{run.elapsed_s:.1f}")
    row("tokens/s", lambda run: f"{run.tokens / run.elapsed_s:,.0f}")
    row("speed-up", lambda run: f"{fixed.elapsed_s / run.elapsed_s:.2f}×")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        columns = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *columns]))


def predicted(run: Run) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The predicted bytes of each batch, `(batches,)`."""
    return run.cost.batch_bytes(*run.shapes.T)


def load_figure() -> type[Any]:
    """Matplotlib's figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError.of("matplotlib", "plot") from None
    return Figure


def plot(figure: Any, ours: Run, fixed: Run, budget_bytes: int) -> None:
    """Draw the predicted cost of every batch under the budget, one panel for each run.

    Args:
        figure: an empty matplotlib figure.
        ours: the run of micro-batches that fit the budget.
        fixed: the run of fixed batches.
        budget_bytes: the budget.
    """
    mebi = 2**20
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("torchbudget", f"fixed batches of {fixed.shapes[:, 0].max()}")
    for axes, title, run in zip(panels, titles, (ours, fixed), strict=True):
        number = np.arange(1, len(run.shapes) + 1)
        costs = predicted(run) / mebi
        base = int(run.cost.batch_bytes(0, 0)) / mebi
        axes.bar(number, costs - base, bottom=base, width=0.9, color="C0", label="batch, predicted")
        axes.axhspan(0, base, color="0.85", label="process and model")
        axes.axhline(budget_bytes / mebi, color="C3", label="budget")
        axes.axhline(run.peak_bytes / mebi, color="0.2", linestyle=":", label="peak, measured")
        axes.set_title(f"{title}: {len(number)} batches, {run.padding:.0%} padding", fontsize=11)
        axes.set_xlabel("batch, in the order of training")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(0.4, len(number) + 0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 1.05 * budget_bytes / mebi)
    panels[0].set_ylabel("memory of the training step (MiB)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


# ---------------------------------------------------------------------- the command line


def at_least(least: int) -> Callable[[str], int]:
    """A reader of ints that are no smaller."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


def make_parser() -> argparse.ArgumentParser:
    """The options and their defaults."""
    parser = argparse.ArgumentParser(
        description="Train a small language model on ragged text under a budget of bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", default="640MiB", help="memory of the training process, or of the GPU")
    add("--samples", type=at_least(1), default=768, help="docstrings to train on")
    add("--samples-per-step", type=at_least(1), default=256, help="docstrings in an optimizer step")
    add("--max-length", type=at_least(1), default=2048, help="bytes at which docstrings are cut")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--workers", type=at_least(0), default=0, help="processes that load data")
    add("--seed", type=at_least(0), default=0, help="of docstrings, weights and order")
    add("--plot", type=Path, help="draw what every batch costs into this PNG")
    return parser


def compare(options: argparse.Namespace) -> None:
    """Train both ways, print the table and draw the plot."""
    options.budget_bytes = budget_bytes = parse_bytes(options.budget)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no GPU")
    if options.plot and not options.plot.parent.is_dir():
        raise OptionError(f"--plot {options.plot}: there is no such folder")
    figure = load_figure()(figsize=(10, 4), layout="constrained") if options.plot else None

    held_out = math.ceil(options.samples / 8)
    texts = list(islice(docstrings(options.seed), options.samples + held_out))
    if len(texts) < options.samples + held_out:
        raise OptionError(
            f"--samples {options.samples} and {held_out} held out need more docstrings than the "
            f"{len(texts)} in {sysconfig.get_path('stdlib')}"
        )
    train_texts, held_out_texts = texts[: options.samples], texts[options.samples :]

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read once, when a process starts
    ours = in_own_process(train_one, options, train_texts, held_out_texts, False)
    fixed = in_own_process(train_one, options, train_texts, held_out_texts, True)
    print_table(ours, fixed, budget_bytes)
    if figure is not None:
        plot(figure, ours, fixed, budget_bytes)
        figure.savefig(options.plot, format="png", dpi=150)


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    try:
        compare(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
