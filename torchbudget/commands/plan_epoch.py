"""`sizes`: sizes from columns into a file; `plan`: an epoch under a budget, from such a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchbudget.commands import Answer, Command, as_json, save_figure
from torchbudget.cost.measured import MeasuredCost, load_cost
from torchbudget.cost.padded import PackedCost, PaddedCost
from torchbudget.cost.protocol import CostModel, IntArray, Sizes
from torchbudget.data.columns import sizes_of_columns
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.display import aligned
from torchbudget.errors import CostError, OptionError, OversizeError, UnevenRanksError
from torchbudget.files import write_whole
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan
from torchbudget.plan.report import PlanReport
from torchbudget.units import parse_bytes

_DESCRIPTION: Final = """\
Plan an epoch of samples of these sizes under a budget, and report it: fill, padding, numbers of
micro-batches and samples, imbalance of ranks. Only the sizes are read. With the samples of a step
and a measured cost, the plan takes the least time, and several budgets are compared by it.

  python -m torchbudget plan sizes.npy --budget 8GiB --cost cost.json
  python -m torchbudget plan lengths.txt --budget 16384 --unit-bytes 1  # a budget in tokens
  python -m torchbudget plan sizes.npy --cost cost.json --samples-per-step 1024 \\
    --budget 8GiB --budget 16GiB  # the predicted time by budget
  python -m torchbudget plan sizes.npy --budget 8GiB --cost cost.json --ranks 8 --out plan"""
SIZES_HELP: Final = (
    "a file of ints: .npy, .npz (as sizes_of keeps them), text of one line for each sample, or a "
    "JSON list; several columns are several ragged axes; - reads stdin"
)
_NUMBER: Final[dict[str, Any]] = {"type": int, "metavar": "N"}
_RULES: Final[dict[str, dict[str, Any]]] = {
    "samples_per_step": _NUMBER,
    "window": _NUMBER,
    "max_batch_size": _NUMBER,
    "batch_size_multiple": {**_NUMBER, "default": 1},
    "size_multiple": {**_NUMBER, "default": 1},
    "seed": {**_NUMBER, "default": 0},
    "oversize": {"choices": ("raise", "skip", "alone"), "default": "raise"},
    "drop_last": {"action": "store_true"},
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    unit_help = "instead: bytes of one element, such as a token; one number for each ragged axis"
    fixed_help = 'bytes of the step besides the elements, such as "500MB"'
    add = parser.add_argument
    add("sizes", metavar="SIZES", help=SIZES_HELP)
    budget_help = 'the device\'s bytes, such as "8GiB"; several are compared by the predicted time'
    add("--budget", required=True, action="append", metavar="BYTES", help=budget_help)
    cost = parser.add_mutually_exclusive_group(required=True)
    cost.add_argument("--cost", metavar="FILE", help="a saved cost, as `measure` writes it")
    cost.add_argument("--unit-bytes", type=float, nargs="+", metavar="BYTES", help=unit_help)
    add("--fixed-bytes", metavar="BYTES", help=fixed_help)
    add("--packed", action="store_true", help="batches without padding")
    add("--ranks", dest="num_replicas", default=1, **_NUMBER)
    rules = parser.add_argument_group("batches, as MemoryBudgetBatchSampler's arguments")
    for name, kind in _RULES.items():
        rules.add_argument(f"--{name.replace('_', '-')}", **kind)
    add("--json", action="store_true", help="JSON instead of a table")
    add("--figure", metavar="FILE", type=Path, help="draw sizes and padding: .png, .svg, .pdf")
    add("--min-fill", type=float, metavar="SHARE", help="fail if the fill is lower, such as 0.9")
    add("--epoch", default=0, **_NUMBER)
    add("--out", metavar="DIR", type=Path, help="a new folder for the micro-batches of all ranks")


def _run(options: argparse.Namespace) -> Answer:
    sizes, cost = read_sizes(options.sizes), _cost(options)
    rules = {name: getattr(options, name) for name in ("num_replicas", *_RULES)}
    alone = options.json or options.figure or options.min_fill or options.out
    if len(options.budget) > 1 and alone:
        raise OptionError("--json, --figure, --min-fill and --out go with one --budget")
    if options.out is not None and options.out.exists():
        raise OptionError(f"--out {options.out} exists: give a new folder")
    try:
        samplers = [
            MemoryBudgetBatchSampler(sizes, cost, budget, rank=0, **rules)
            for budget in options.budget
        ]
        for sampler in samplers:
            sampler.set_epoch(options.epoch)
        sampler = samplers[0]
        report = sampler.report()
        if report.epoch_s is not None and options.min_fill is not None:
            raise OptionError(
                "--min-fill does not go with a plan of least time, which need not fill the budget"
            )
        if len(samplers) > 1:
            return Answer(text=_by_budget(options.budget, [one.report() for one in samplers], cost))
    except (OversizeError, UnevenRanksError) as error:
        return Answer(failed=(str(error),))
    if options.figure is not None:
        from torchbudget.observe.figures import plot_sizes

        save_figure(plot_sizes(sampler.plan, epoch=options.epoch), options.figure)
    if options.out is not None:
        _write_plan(sampler.plan, options.epoch, options.out)
    text = as_json(asdict(report)) if options.json else str(report)
    if options.min_fill is None or report.fill >= options.min_fill:
        return Answer(text=text)
    failed = f"the fill is {report.fill:.1%}, below {options.min_fill:.1%}"
    return Answer(text=text, failed=(failed,))


def _write_plan(plan: Plan, epoch: int, folder: Path) -> None:
    """Write the micro-batches of an epoch, rank after rank, as arrays that can be mapped.

    `indices[starts[k] : starts[k + 1]]` is micro-batch k: of B on each rank, the b-th of rank r has
    k = r·B + b. Step s ends after its `ends[s]`-th micro-batch, on every rank.
    """
    ranks, rounds = plan.ranks.number, []
    batches: list[list[IntArray]] = [[] for _ in range(ranks)]
    for span in plan.spans(Cursor(epoch=epoch)):
        runs = map(slice, span.block.starts.tolist(), span.block.stops.tolist())
        found = [span.indices[run] for run in runs]
        for rank in range(ranks):
            batches[rank] += found[rank::ranks]
        rounds += span.block.rounds.tolist()
    steps = rounds if plan.ranks.even_sums else [1] * sum(rounds)
    together = [*chain.from_iterable(batches)]
    _save(folder / "indices.npy", np.concatenate(together))
    _save(folder / "starts.npy", np.cumsum([0, *map(len, together)]))
    _save(folder / "ends.npy", np.cumsum(steps))


def _save(path: Path, values: Sizes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: np.save(file, values))
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def _by_budget(budgets: Sequence[str], reports: Sequence[PlanReport], cost: CostModel) -> str:
    """A table of the predicted time under each budget.

    Raises:
        OptionError: the plans have no predicted time.
    """
    room = (cost.room if isinstance(cost, MeasuredCost) else None) or 0
    rows = [("budget", "seconds", "micro-batches", "padding", "fullest", "")]
    for budget, report in zip(budgets, reports, strict=True):
        if report.epoch_s is None:
            raise OptionError(
                "several budgets are compared by the predicted time of an epoch: pass "
                "--samples-per-step, and a --cost that was measured by real steps"
            )
        is_beyond = report.fullest * parse_bytes(budget) > room
        rows.append((
            budget, f"{report.epoch_s:,.1f}", f"{report.batches:,}", f"{report.padding:.1%}",
            f"{report.fullest:.1%}", "extrapolated" if is_beyond else "",
        ))  # fmt: skip
    return "\n".join(aligned(rows))


def _cost(options: argparse.Namespace) -> CostModel:
    """The saved cost, or the one of the coefficients."""
    if options.cost is None:
        kind = PackedCost if options.packed else PaddedCost
        units = options.unit_bytes if len(options.unit_bytes) > 1 else options.unit_bytes[0]
        fixed_bytes = 0 if options.fixed_bytes is None else parse_bytes(options.fixed_bytes)
        return kind(unit_bytes=units, fixed_bytes=fixed_bytes)
    if options.fixed_bytes is not None:
        raise OptionError("--fixed-bytes goes with --unit-bytes: a saved cost has its own")
    try:
        cost = load_cost(options.cost)
        return cost.packed() if options.packed else cost
    except (CostError, OSError) as error:
        raise OptionError(f"--cost {options.cost}: {error}") from error


def read_sizes(name: str) -> Sizes:
    """The sizes in a file, shape `(N,)` or `(N, d)`; `-` is stdin.

    Columns of text stand apart by blanks or commas. A first line without numbers is a header. A
    .npy file is mapped, not read.

    Raises:
        OptionError: the file cannot be read, or has no sizes in it.
    """
    path = Path(name)
    try:
        if path.suffix in (".npy", ".npz"):
            found: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            sizes: Sizes = found["sizes"] if path.suffix == ".npz" else found
            return sizes
        text = (sys.stdin.read() if name == "-" else path.read_text("utf-8")).strip()
        if text.startswith("["):
            return np.array(json.loads(text))
        lines = text.replace(",", " ").splitlines()
        if not any(character.isdigit() for character in lines[0]):
            del lines[0]
        return np.array([[int(number) for number in line.split()] for line in lines], np.int64)
    except OSError as error:
        raise OptionError(f"cannot read {name}: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive raises anything
        raise OptionError(f"{name} has no sizes in it: {error}") from error


_OF_SIZES: Final = """\
Read the sizes of samples from columns of Parquet files: integers, or lengths of lists and strings.
Quote a glob: a shell may sort its files in another order than data sets do.

  python -m torchbudget sizes 'data/*.parquet' --column length --out sizes.npy"""


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", metavar="FILES", nargs="+", help="paths, globs or URLs of Parquet files, in order")
    add("--column", action="append", required=True, metavar="NAME", help="several are several axes")
    add("--out", required=True, metavar="FILE", type=Path, help="the sizes: .npy")


def _run_sizes(options: argparse.Namespace) -> Answer:
    columns = options.column if len(options.column) > 1 else options.column[0]
    sizes = sizes_of_columns(options.files, columns)
    _save(options.out, sizes)
    return Answer(text=f"{len(sizes):,} samples in {options.out}")


SIZES: Final = Command("sizes from columns of Parquet files", _OF_SIZES, _add_sizes, _run_sizes)
PLAN: Final = Command("an epoch under a budget", _DESCRIPTION, _add_arguments, _run)
