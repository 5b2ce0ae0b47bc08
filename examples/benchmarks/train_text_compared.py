"""What does a budget gain over fixed batches, batches grouped by length, and a limit of tokens?

Question: the model of `examples/train_text.py` is trained for one epoch from the same weights, on
the same docstrings, with the same number of samples in an optimizer step, under a budget for the
process. Only the micro-batches differ. Nobody may exceed the budget, so a fixed batch size is the
number of the *longest* samples that fit, and a limit of tokens is that number times their length.
How do padding, peak memory, time and the loss on held-out texts differ?

Command: python examples/benchmarks/train_text_compared.py [--budget BYTES] [--plot PNG]
[--device cuda] [--json PATH]

Hardware: one core of an Intel Xeon, Python 3.11, torch 2.13.0 CPU. Seconds are those of the
processor, which other work does not change much; with `--device cuda` those on the clock.

                          torchbudget  fixed batches  grouped by length  token limit
    optimizer steps                 2              2                  2            2
    micro-batches                  73             30                 30            8
    samples in each           1 to 47        2 to 22            2 to 22    22 to 153
    padding                      4.9%          80.3%               9.0%        32.9%
    fill of the budget          60.3%          89.6%              64.5%        92.8%
    peak memory               451 MiB        582 MiB            575 MiB      582 MiB
    peak / budget               0.704          0.910              0.898        0.909
    held-out loss               4.204          4.207              4.222        4.204
    seconds of measuring         10.2              –                  –            –
    seconds of training           3.4           19.8                4.1          4.8
    tokens/s                   30,697          5,277             25,405       21,828
    time / torchbudget's         1.00           5.82               1.21         1.41
    higher peak / budget ≤ 1: 0.90983, holds
    padding / that of fixed batches ≤ 1: 0.060923, holds

torchbudget cuts each step into the micro-batches that take the least time by its measured cost;
from run to run the times differ, and so the numbers of micro-batches. In five runs, some of them
beside other work, the last row was 4.5 to 6.1, 0.9 to 1.2 and 1.3 to 2.0.
"grouped by length" sorts 50 batches of random samples at a time, as the `LengthGroupedSampler` of
transformers does: here all samples, so that it pads least, and the first step has the long ones.
"token limit" is this library's planner with tokens in place of bytes, and without a time: its
micro-batches are full. The limit itself was computed from the measured cost, as was the fixed size;
otherwise both are found by trial.

The budget is for the peak of the process, interpreter and libraries included, or on a GPU for the
peak of the memory in use there. The first process measures the cost of a step, for all of them.
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

if __name__ == "__main__":  # importing torch takes seconds
    print("the same training under four kinds of batches: about a minute", file=sys.stderr)

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
    PaddedCost,
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

OURS, FIXED, GROUPED, TOKENS = "torchbudget", "fixed batches", "grouped by length", "token limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training run did.

    Attributes:
        cost: of a step, as the first process measured it.
        shapes: samples and padded length of every micro-batch, in order, `(batches, 2)`.
        batch_tokens: bytes of text in each, without padding, `(batches,)`.
        times_s: when each micro-batch began and the last one ended, by `clock`, `(batches + 1,)`.
        steps: optimizer steps.
        peak_bytes: the process's peak of memory in training and evaluation.
        loss: nats for each byte of the held-out texts.
    """

    cost: MeasuredCost
    measuring_s: float
    shapes: npt.NDArray[np.int64]
    batch_tokens: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.float64]
    steps: int
    peak_bytes: int
    loss: float

    @property
    def training_s(self) -> float:
        return float(self.times_s[-1] - self.times_s[0])

    @property
    def padding(self) -> float:
        """Share of all positions that are padding."""
        return 1 - self.batch_tokens.sum() / int(self.shapes.prod(axis=1).sum())

    @property
    def predicted_bytes(self) -> npt.NDArray[np.int64]:
        """Of each batch, `(batches,)`."""
        return self.cost.batch_bytes(*self.shapes.T)


def num_tokens(batch: PaddedBatch) -> int:
    return batch.num_tokens


def grouped_by_length(sizes: npt.NDArray[Any], n: int, seed: int) -> list[list[int]]:
    """Batches of n samples, of similar lengths: 50 batches are sorted at a time."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    batches = []
    for part in np.split(order, range(50 * n, len(order), 50 * n)):
        part = part[np.argsort(-sizes[part], kind="stable")]
        batches += [part[first : first + n].tolist() for first in range(0, len(part), n)]
    return batches


def batches_of(
    kind: str, sizes: npt.NDArray[Any], cost: MeasuredCost, options: argparse.Namespace
) -> Any:
    """The micro-batches of an epoch, lists of indices."""
    fits = int(cost.capacity(sizes.max(), parse_bytes(options.budget)))
    fixed = min(fits, options.samples_per_step)
    if kind == FIXED:
        return BatchSampler(RandomSampler(range(len(sizes))), fixed, False)
    if kind == GROUPED:
        return grouped_by_length(sizes, fixed, options.seed)
    limit: Any = (cost, options.budget)
    if kind == TOKENS:
        limit = (PaddedCost(unit_bytes=1, unit="tokens"), fits * int(sizes.max()))
    per_step, seed = options.samples_per_step, options.seed
    return MemoryBudgetBatchSampler(sizes, *limit, samples_per_step=per_step, seed=seed)


def run(
    kind: str,
    options: argparse.Namespace,
    texts: list[bytes],
    held_out_texts: list[bytes],
    cost: MeasuredCost | None,
) -> Run:
    """Train a new model for one epoch, and evaluate it; without a cost, measure it before."""
    configure_allocators()
    torch.set_num_threads(1)  # waiting threads would count as seconds of the processor
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    torch.manual_seed(options.seed)
    data, held_out = (ByteData(part, options.max_length) for part in (texts, held_out_texts))
    sizes = sizes_of(data, "ids", progress=False)
    model = Transformer(options.max_length).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    began_s = clock()
    cost = cost or measured_cost(model, optimizer, options.max_length, options.budget)
    measuring_s = clock() - began_s

    batches = batches_of(kind, sizes, cost, options)
    steps: dict[str, Any] = {"samples": options.samples_per_step}
    if isinstance(batches, MemoryBudgetBatchSampler):
        steps = {"steps": batches}
    accumulator = GradAccumulator(optimizer, model, **steps)
    pinned = options.device == "cuda"
    loader: DataLoader[Any] = DataLoader(
        data, batch_sampler=batches, collate_fn=PadCollate(), pin_memory=pinned
    )
    held_out_sampler = MemoryBudgetBatchSampler(
        sizes_of(held_out, "ids", progress=False), cost, options.budget, shuffle=False
    )
    held_out_loader: DataLoader[Any] = DataLoader(
        held_out, batch_sampler=held_out_sampler, collate_fn=PadCollate()
    )

    shapes, tokens, times_s = [], [], []

    def criterion(model: nn.Module, batch: PaddedBatch) -> Tensor:
        times_s.append(clock())
        shapes.append((batch.num_samples, *batch.padded_size))
        tokens.append(batch.num_tokens)
        return loss_sum(model, batch)

    common: dict[str, Any] = {"weight": num_tokens, "device": options.device}
    with peak_memory(options.device) as peak:
        train_epoch(model, loader, criterion, accumulator, progress=True, **common)
        times_s.append(clock())
        loss = evaluate(model, held_out_loader, loss_sum, **common)
    return Run(
        cost=cost,
        measuring_s=measuring_s,
        shapes=np.array(shapes),
        batch_tokens=np.array(tokens),
        times_s=np.array(times_s),
        steps=accumulator.last.number if accumulator.last else 0,
        peak_bytes=peak.bytes,
        loss=loss,
    )


def report(runs: dict[str, Run], budget_bytes: int, path: Path | None) -> None:
    """Print the runs side by side."""
    results = Results(dict.fromkeys(("", *runs), ""))
    ours, fixed = runs[OURS], runs[FIXED]

    def row(name: str, text: Callable[[Run], str]) -> None:
        results.row(**{"": name} | {kind: text(run) for kind, run in runs.items()})

    row("optimizer steps", lambda run: f"{run.steps:,}")
    row("micro-batches", lambda run: f"{len(run.shapes):,}")
    row("samples in each", lambda run: "{:,} to {:,}".format(*np.sort(run.shapes[:, 0])[[0, -1]]))
    row("padding", lambda run: f"{run.padding:.1%}")
    row("fill of the budget", lambda run: f"{run.predicted_bytes.mean() / budget_bytes:.1%}")
    row("peak memory", lambda run: format_bytes(run.peak_bytes))
    row("peak / budget", lambda run: f"{run.peak_bytes / budget_bytes:.3f}")
    row("held-out loss", lambda run: f"{run.loss:.3f}")
    row("seconds of measuring", lambda run: f"{run.measuring_s:.1f}" if run is ours else "–")
    row("seconds of training", lambda run: f"{run.training_s:.1f}")
    row("tokens/s", lambda run: f"{run.batch_tokens.sum() / run.training_s:,.0f}")
    row("time / torchbudget's", lambda run: f"{run.training_s / ours.training_s:.2f}")
    results.bar("higher peak / budget", max(r.peak_bytes for r in runs.values()) / budget_bytes, 1)
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
    return Figure(figsize=(10, 7), layout="constrained")


def plot(figure: Any, runs: dict[str, Run], budget_bytes: int) -> None:
    """Draw every batch over the seconds that it took, in one panel for each run."""
    mebi = 2**20
    panels = figure.subplots(len(runs), 1, sharex=True)
    for axes, (kind, run) in zip(panels, runs.items(), strict=True):
        base = int(run.cost.batch_bytes(0, 0)) / mebi
        own = run.predicted_bytes / mebi - base
        text = own * run.batch_tokens / run.shapes.prod(axis=1)
        began_s, took_s = run.times_s[:-1] - run.times_s[0], np.diff(run.times_s)
        common = {"width": took_s, "align": "edge", "edgecolor": "white"}
        common["linewidth"] = 0.5 if len(own) < 60 else 0  # edges would hide narrow bars
        axes.bar(began_s, text, bottom=base, color="C0", label="text", **common)
        axes.bar(
            began_s, own - text, bottom=base + text, color="#c6d9ec", label="padding", **common
        )
        axes.bar(0, base, run.training_s, align="edge", color="0.85", label="process and model")
        axes.axhline(budget_bytes / mebi, color="C3", label="budget")
        title = (
            f"{kind}: {run.training_s:.1f} s, {run.padding:.0%} padding, {len(own)} micro-batches"
        )
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_ylim(0, 1.08 * budget_bytes / mebi)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(0, None)
    figure.supylabel("memory (MiB)", fontsize="medium")
    steps = runs[OURS].steps
    panels[-1].set_xlabel(
        f"seconds of {steps} optimizer steps on the same texts; a bar: a micro-batch"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def compare(options: argparse.Namespace) -> None:
    """Train all ways, print the table and draw the plot."""
    budget_bytes = parse_bytes(options.budget)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no GPU")
    if options.plot and not options.plot.parent.is_dir():
        raise OptionError(f"--plot {options.plot}: there is no such folder")
    figure = load_figure() if options.plot else None  # before the training, in case it is missing

    texts = list(islice(docstrings(options.seed), options.samples + options.samples // 8 + 1))
    parts = (texts[: options.samples], texts[options.samples :])  # to train on, and held out
    runs: dict[str, Run] = {}
    cost = None
    for kind in (OURS, FIXED, GROUPED, TOKENS):
        print(f"{kind}: {'training' if cost else 'measuring, then training'}", file=sys.stderr)
        # A fresh interpreter, whose peak of memory is its own.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            runs[kind] = pool.submit(run, kind, options, *parts, cost).result()
        cost = runs[kind].cost
        print(
            f"    {len(runs[kind].shapes)} batches in {runs[kind].training_s:.1f} s",
            file=sys.stderr,
        )
    report(runs, budget_bytes, options.json)
    if figure is not None:
        plot(figure, runs, budget_bytes)
        figure.savefig(options.plot, format="png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", default="640MiB", help="memory of the training process, or of the GPU")
    add("--samples", type=int, default=640, help="docstrings to train on")
    add("--samples-per-step", type=int, default=320, help="docstrings in an optimizer step")
    add("--max-length", type=int, default=1024, help="bytes at which docstrings are cut")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--seed", type=int, default=0, help="of docstrings, weights and order")
    add("--plot", type=Path, help="draw every batch, under the budget, into this PNG")
    add("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    try:
        compare(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
