"""Is the cost of any class of model traced, and how far is it from the truth over the whole box?

Question: measured with `method="trace"`, how far is a cost from the traced peak of other shapes of
1 to 256 samples, all corners included, and of the shapes that fill one budget, for the classes of
models that people train; how many traces and seconds does it take, and when is no form found?

Command: PYTHONPATH=. python examples/benchmarks/any_model.py [--shapes N] [--models TEXT …]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU.

    step                    axes  forms  traces  fallback  shapes  beyond   under  margin  covered   over  frontier  seconds
    decoder, rotary            1      3      16                32       0  -0.06%   0.50%   +0.44%  +0.9%     +0.8%      8.5
    all pairs, contrastive     1      2      16                32       0  -0.29%   0.50%   +0.26%  +1.3%     +0.9%      1.1
    speech, CTC                1      2      16                32       0  -0.00%   0.50%   +0.50%  +3.2%     +3.0%      2.4
    many short samples         1      4      16                32       0  -0.02%   0.50%   +0.49%  +0.5%     +1.7%      2.0
    volumes                    3      2      33                44       0  -0.07%   0.50%   +0.43%  +0.6%     +0.5%      3.1
    classes that cannot be traced ≤ 3: 0, holds
    least covered ≥ 0: 0.0025793, holds
    most over on the frontier ≤ 0.05: 0.029755, holds
    most over in the box ≤ 0.15: 0.0321, holds
    fallbacks ≤ 3: 0, holds
    traces, 1 axes ≤ 16: 16, holds
    traces, 2 axes ≤ 30: 0, holds
    seconds to measure ≤ 30: 8.4566, holds

`under` is the lowest fitted / traced − 1 without the margin, `covered` the lowest with it, and
`over` the highest with it: over the box, and on the frontier, which is the batches of eight
sizes with as many samples as the cost lets into one budget, that of 4 samples of the largest size.
`beyond` are shapes that the cost does not vouch for; they are left out. `traces` are those of one
measurement, with the one that warms up and the one that is repeated. A fallback is a fit to the
peaks alone or a table. Sizes of the box are log-uniform from the smallest to the largest, as is the
number of samples; a class whose traces take seconds has fewer shapes. The frontier is that of a
second measurement with that budget. Classes of transformers follow where it is installed.
"""  # noqa: E501  (tables)

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable
from itertools import product
from typing import TypeAlias

import numpy as np
from _common import Results, parser, timed

from tests.support.model_classes import CLASSES
from tests.support.model_classes.case import Case
from torchbudget import MeasuredCost, measure_cost
from torchbudget.cost.measuring.tracing import tracing
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.units import MAX_BYTES

Size: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, Size]

BOX_S = 60.0  # the shapes of one box take no longer
FRONTIER = 8
# Experts that take the tokens that chose them, packed sequences, the CTC loss: their memory depends
# on values.
UNTRACEABLE = 3


def ends(case: Case) -> tuple[Size, Size]:
    """The smallest and the largest size, a number for every axis."""
    largest = tuple(np.atleast_1d(case.max_size).tolist())
    smallest = tuple(np.broadcast_to(case.min_size, len(largest)).tolist())
    return smallest, largest


def box_shapes(case: Case, count: int) -> list[Shape]:
    """The corners, then as many shapes, log-uniform."""
    rng = np.random.default_rng(7)
    smallest, largest = ends(case)
    corners = product((1, case.max_n), *zip(smallest, largest, strict=True))
    shapes = [(n, tuple(size)) for n, *size in corners]
    low, high = np.log((1, *smallest)), np.log((case.max_n, *largest))
    drawn = np.exp(rng.uniform(low, high, (count, len(low)))).round().astype(int)
    return shapes + [(n, tuple(size)) for n, *size in drawn.tolist()]


def frontier_shapes(case: Case, cost: MeasuredCost, budget: int) -> list[Shape]:
    """As many samples as fit, of sizes from the smallest to the largest."""
    smallest, largest = ends(case)
    sizes = np.geomspace(smallest, largest, FRONTIER).round().astype(int).tolist()
    counts = [int(cost.capacity(as_size(tuple(size)), budget)) for size in sizes]
    # A table or a cap may let in millions of the smallest.
    return [(n, tuple(size)) for n, size in zip(counts, sizes, strict=True) if 1 <= n <= 2**16]


def as_size(size: Size) -> Size | int:
    return size if len(size) > 1 else size[0]


def traced_peaks(case: Case, shapes: Iterable[Shape], limit_s: float) -> list[int]:
    """The traced peak of each shape, of as many as the seconds allow."""
    start_s, peaks = time.perf_counter(), []
    with tracing(case.step, TrainingState(case.step)) as trace:
        for n, size in shapes:
            peaks.append(trace(case.make_batch(n, as_size(size))).peak_bytes)
            if time.perf_counter() - start_s > limit_s:
                break
    return peaks


class Compared:
    """A cost against the traced peaks of shapes that it vouches for."""

    def __init__(self, cost: MeasuredCost, shapes: list[Shape], peaks: list[int]) -> None:
        pairs = []
        for (n, size), peak in zip(shapes, peaks, strict=False):
            shape = n, as_size(size)
            pairs.append((int(cost.batch_bytes(*shape)), int(cost.fitted_bytes(*shape)), peak))
        inside = [pair for pair in pairs if pair[0] < MAX_BYTES]
        self.beyond = len(pairs) - len(inside)
        self.fitted = [fitted / peak - 1 for _, fitted, peak in inside]
        self.predicted = [predicted / peak - 1 for predicted, _, peak in inside]


def fallback_of(cost: MeasuredCost) -> str:
    if cost.table is not None:
        return "table"
    return "" if cost.vouched is None else "peaks"


def compare(make: Callable[[], Case], count: int) -> dict[str, object]:
    """The row of one class."""
    case = make()

    def measure(budget: int | None) -> MeasuredCost:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure_cost(
                case.step,
                case.make_batch,
                max_size=case.max_size,
                min_size=ends(case)[0],
                budget=budget,
                method="trace",
            )

    elapsed, cost = timed(lambda: measure(None))
    truth = make()
    shapes = box_shapes(truth, count)
    box = Compared(cost, shapes, traced_peaks(truth, shapes, BOX_S))
    _, largest = ends(truth)
    [budget] = traced_peaks(truth, [(4, largest)], BOX_S)
    budgeted = measure(budget)
    filling = frontier_shapes(truth, budgeted, budget)
    frontier = Compared(budgeted, filling, traced_peaks(truth, filling, BOX_S))
    return {
        "forms": len(cost.forms),
        "traces": len(cost.probes) + 2,
        "fallback": fallback_of(cost),
        "shapes": len(box.fitted) + box.beyond + len(frontier.fitted) + frontier.beyond,
        "beyond": box.beyond + frontier.beyond,
        "under": min(box.fitted + frontier.fitted),
        "margin": cost.margin,
        "covered": min(box.predicted + frontier.predicted),
        "over": max(box.predicted),
        "frontier": max(frontier.predicted, default=None),
        "seconds": elapsed.wall_s,
    }


def main() -> None:
    line = parser(__doc__, shapes=30)
    line.add_argument("--models", nargs="+", default=[""], help="parts of the names to compare")
    arguments = line.parse_args()
    classes = dict(CLASSES)
    if importlib.util.find_spec("transformers"):
        from tests.support.transformers_classes import CLASSES as OTHERS

        classes |= OTHERS
    results = Results(
        {
            "step": "",
            "axes": "d",
            "forms": "d",
            "traces": "d",
            "fallback": "",
            "shapes": "d",
            "beyond": "d",
            "under": "+.2%",
            "margin": ".2%",
            "covered": "+.2%",
            "over": "+.1%",
            "frontier": "+.1%",
            "seconds": ".1f",
        }
    )
    for name, make in classes.items():
        if not any(part in name for part in arguments.models):
            continue
        try:
            axes = len(ends(make())[1])
            results.row(step=name, axes=axes, **compare(make, arguments.shapes))
        except Exception as error:  # noqa: BLE001  # a class that fails is a row
            results.row(step=name, fallback="error", error=f"{type(error).__name__}: {error}")
    bars(results)
    results.finish(arguments.json)
    for row in results.rows:
        if "error" in row:
            print(f"{row['step']}: {row['error']}")


def bars(results: Results) -> None:
    rows = [row for row in results.rows if "error" not in row]
    results.bar("classes that cannot be traced", len(results.rows) - len(rows), UNTRACEABLE)
    if not rows:
        return
    results.bar("least covered", min(row["covered"] for row in rows), 0, at_least=True)
    frontier = [row["frontier"] for row in rows if row["frontier"] is not None]
    results.bar("most over on the frontier", max(frontier, default=0), 0.05)
    results.bar("most over in the box", max(row["over"] for row in rows), 0.15)
    results.bar("fallbacks", sum(row["fallback"] != "" for row in rows), 3)
    for axes, limit in ((1, 16), (2, 30)):
        counts = [row["traces"] for row in rows if row["axes"] == axes]
        results.bar(f"traces, {axes} axes", max(counts, default=0), limit)
    results.bar("seconds to measure", max(row["seconds"] for row in rows), 30)


if __name__ == "__main__":
    main()
