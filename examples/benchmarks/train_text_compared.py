"""What does a budget gain over fixed batches of the same worst-case memory?

Question: the model of `examples/train_text.py` is trained twice for one epoch, each time in a
process of its own, from the same weights, on the same docstrings, with the same number of samples
in an optimizer step: in micro-batches that fill the budget, and in fixed batches of as many of the
*longest* samples as fit it, which is what a fixed batch size must be if no batch may exceed the
budget. How do padding, peak memory and speed differ?

Command: python examples/benchmarks/train_text_compared.py [--budget BYTES] [--plot PNG]
[--device cuda] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU; other work ran on
both, which shows in the seconds.

                          torchbudget  fixed batches of 12
    optimizer steps                 3                    3
    micro-batches                  12                   64
    samples in each         12 to 118             12 to 12
    padding                     41.9%                76.8%
    fill of the budget          90.8%                71.5%
    budget                    640 MiB              640 MiB
    peak memory               629 MiB              621 MiB
    peak / budget               0.983                0.970
    held-out loss               3.558                3.557
    seconds of measuring        106.7                 77.2
    seconds of training          68.4                221.6
    tokens/s                    2,069                  639
    speed-up                    3.24×                1.00×
    higher peak / budget ≤ 1: 0.9833, holds
    padding / that of fixed batches ≤ 1: 0.54584, holds

On the CPU the budget is for the process's peak of resident memory, interpreter and libraries
included (workers of the DataLoader are processes of their own); on a GPU for the peak of the memory
in use there. The cost of a step is measured in each process before it trains.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _common import Results
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from torchbudget import (
    GradAccumulator,
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    TorchBudgetError,
    configure_allocators,
    evaluate,
    format_bytes,
    parse_bytes,
    sizes_of,
)
from torchbudget.errors import MissingExtraError, OptionError
from torchbudget.machine.peaks import peak_memory
from torchbudget.train.loop import train_epoch

sys.path.append(str(Path(__file__).parent.parent))

from train_text import ByteData, Transformer, docstrings, loss_sum, measured_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training run did.

    Attributes:
        cost: of a step, as it was measured in the process.
        shapes: samples and padded length of every micro-batch, in order, `(batches, 2)`.
        tokens: bytes of text that were learned from, without padding.
        steps: optimizer steps.
        peak_bytes: the process's peak of memory in training and evaluation.
        loss: nats for each byte of the held-out texts.
    """

    cost: MeasuredCost
    measuring_s: float
    training_s: float
    shapes: npt.NDArray[np.int64]
    tokens: float
    steps: int
    peak_bytes: int
    loss: float

    @property
    def padding(self) -> float:
        """Share of all positions that are padding."""
        return 1 - self.tokens / int(self.shapes.prod(axis=1).sum())

    @property
    def predicted_bytes(self) -> npt.NDArray[np.int64]:
        """Of each batch, `(batches,)`."""
        return self.cost.batch_bytes(*self.shapes.T)


def num_tokens(batch: PaddedBatch) -> int:
    return batch.num_tokens


def run(
    options: argparse.Namespace, texts: list[bytes], held_out_texts: list[bytes], *, fixed: bool
) -> Run:
    """Measure the cost of a step, train a new model for one epoch, and evaluate it."""
    configure_allocators()
    torch.manual_seed(options.seed)
    data, held_out = (ByteData(part, options.max_length) for part in (texts, held_out_texts))
    sizes = sizes_of(data, "ids", progress=False)
    model = Transformer(options.max_length).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    began_s = time.perf_counter()
    cost = measured_cost(model, optimizer, options.max_length, options.budget)
    measuring_s = time.perf_counter() - began_s

    sampler: Any
    if fixed:
        fits = int(cost.capacity(sizes.max(), parse_bytes(options.budget)))
        sampler = BatchSampler(RandomSampler(data), min(fits, options.samples_per_step), False)
        accumulator = GradAccumulator(optimizer, model, samples=options.samples_per_step)
    else:
        sampler = MemoryBudgetBatchSampler(
            sizes,
            cost,
            options.budget,
            samples_per_step=options.samples_per_step,
            seed=options.seed,
        )
        accumulator = GradAccumulator(optimizer, model, steps=sampler)
    pinned = options.device == "cuda"
    loader: DataLoader[Any] = DataLoader(
        data, batch_sampler=sampler, collate_fn=PadCollate(), pin_memory=pinned
    )
    held_out_sampler = MemoryBudgetBatchSampler(
        sizes_of(held_out, "ids", progress=False), cost, options.budget, shuffle=False
    )
    held_out_loader: DataLoader[Any] = DataLoader(
        held_out, batch_sampler=held_out_sampler, collate_fn=PadCollate()
    )

    shapes = []

    def criterion(model: nn.Module, batch: PaddedBatch) -> Tensor:
        shapes.append((batch.num_samples, *batch.padded_size))
        return loss_sum(model, batch)

    common: dict[str, Any] = {"weight": num_tokens, "device": options.device}
    with peak_memory(options.device) as peak:
        began_s = time.perf_counter()
        steps = train_epoch(model, loader, criterion, accumulator, progress=True, **common)
        training_s = time.perf_counter() - began_s
        loss = evaluate(model, held_out_loader, loss_sum, **common)
    return Run(
        cost=cost,
        measuring_s=measuring_s,
        training_s=training_s,
        shapes=np.array(shapes),
        tokens=sum(step.weight for step in steps),
        steps=len(steps),
        peak_bytes=peak.bytes,
        loss=loss,
    )


def in_own_process(*arguments: Any, fixed: bool) -> Run:
    """Run in a fresh interpreter, whose peak of memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *arguments, fixed=fixed).result()


def report(ours: Run, fixed: Run, budget_bytes: int, path: Path | None) -> None:
    """Print the two runs side by side."""
    names = ("", "torchbudget", f"fixed batches of {fixed.shapes[:, 0].max()}")
    results = Results(dict.fromkeys(names, ""))

    def row(name: str, text: Callable[[Run], str]) -> None:
        results.row(**dict(zip(names, (name, text(ours), text(fixed)), strict=True)))

    row("optimizer steps", lambda run: f"{run.steps:,}")
    row("micro-batches", lambda run: f"{len(run.shapes):,}")
    row("samples in each", lambda run: "{:,} to {:,}".format(*np.sort(run.shapes[:, 0])[[0, -1]]))
    row("padding", lambda run: f"{run.padding:.1%}")
    row("fill of the budget", lambda run: f"{run.predicted_bytes.mean() / budget_bytes:.1%}")
    row("budget", lambda _: format_bytes(budget_bytes))
    row("peak memory", lambda run: format_bytes(run.peak_bytes))
    row("peak / budget", lambda run: f"{run.peak_bytes / budget_bytes:.3f}")
    row("held-out loss", lambda run: f"{run.loss:.3f}")
    row("seconds of measuring", lambda run: f"{run.measuring_s:.1f}")
    row("seconds of training", lambda run: f"{run.training_s:.1f}")
    row("tokens/s", lambda run: f"{run.tokens / run.training_s:,.0f}")
    row("speed-up", lambda run: f"{fixed.training_s / run.training_s:.2f}×")
    peak_bytes = max(ours.peak_bytes, fixed.peak_bytes)
    results.bar("higher peak / budget", peak_bytes / budget_bytes, 1)
    results.bar("padding / that of fixed batches", ours.padding / fixed.padding, 1)
    results.finish(path)


def load_figure() -> Any:
    """An empty figure of matplotlib.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError.of("matplotlib", "plot") from None
    return Figure(figsize=(10, 4), layout="constrained")


def plot(figure: Any, ours: Run, fixed: Run, budget_bytes: int) -> None:
    """Draw the predicted cost of every batch under the budget, one panel for each run."""
    mebi = 2**20
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("torchbudget", f"fixed batches of {fixed.shapes[:, 0].max()}")
    for axes, title, run in zip(panels, titles, (ours, fixed), strict=True):
        number = np.arange(1, len(run.shapes) + 1)
        costs = run.predicted_bytes / mebi
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


def compare(options: argparse.Namespace) -> None:
    """Train both ways, print the table and draw the plot."""
    budget_bytes = parse_bytes(options.budget)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no GPU")
    if options.plot and not options.plot.parent.is_dir():
        raise OptionError(f"--plot {options.plot}: there is no such folder")
    figure = load_figure() if options.plot else None  # before the training, in case it is missing

    texts = list(islice(docstrings(options.seed), options.samples + options.samples // 8 + 1))
    parts = (texts[: options.samples], texts[options.samples :])  # to train on, and held out
    ours = in_own_process(options, *parts, fixed=False)
    fixed = in_own_process(options, *parts, fixed=True)
    report(ours, fixed, budget_bytes, options.json)
    if figure is not None:
        plot(figure, ours, fixed, budget_bytes)
        figure.savefig(options.plot, format="png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", default="640MiB", help="memory of the training process, or of the GPU")
    add("--samples", type=int, default=768, help="docstrings to train on")
    add("--samples-per-step", type=int, default=256, help="docstrings in an optimizer step")
    add("--max-length", type=int, default=2048, help="bytes at which docstrings are cut")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--seed", type=int, default=0, help="of docstrings, weights and order")
    add("--plot", type=Path, help="draw what every batch costs into this PNG")
    add("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    try:
        compare(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
