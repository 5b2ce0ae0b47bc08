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
Classes whose layers have patches, strides or windows have two rows: sizes of all kinds, and
multiples of what those divide, stated by `size_multiple=`. Steps over sizes that layers round
follow no polynomial, and measured costs say so in their notes. Bars of what is too high are those
of forms; fallbacks are counted.
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
from typing import Any, TypeAlias

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


def ends(case: Case, multiple: int = 1) -> tuple[Size, Size]:
    """The smallest and the largest size, a number for every axis."""
    largest = np.atleast_1d(case.max_size) // multiple * multiple
    smallest = np.broadcast_to(rounded_up(np.array(case.min_size), multiple), len(largest))
    return tuple(smallest.tolist()), tuple(largest.tolist())


def rounded_up(sizes: np.ndarray, multiple: int) -> np.ndarray:
    return -(-sizes // multiple) * multiple


def box_shapes(case: Case, count: int, multiple: int = 1) -> list[Shape]:
    """The corners, then as many shapes, log-uniform."""
    rng = np.random.default_rng(7)
    smallest, largest = ends(case, multiple)
    corners = product((1, case.max_n), *zip(smallest, largest, strict=True))
    shapes = [(n, tuple(size)) for n, *size in corners]
    low, high = np.log((1, *smallest)), np.log((case.max_n, *largest))
    drawn = np.exp(rng.uniform(low, high, (count, len(low)))).round().astype(int)
    drawn[:, 1:] = rounded_up(drawn[:, 1:], multiple)
    return shapes + [(n, tuple(size)) for n, *size in drawn.tolist()]


def frontier_shapes(case: Case, cost: MeasuredCost, budget: int, multiple: int = 1) -> list[Shape]:
    """As many samples as fit, of sizes from the smallest to the largest."""
    smallest, largest = ends(case, multiple)
    between = np.geomspace(smallest, largest, FRONTIER).round().astype(int)
    sizes = rounded_up(between, multiple).tolist()
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


def compare(make: Callable[[], Case], count: int, multiple: int = 1) -> dict[str, object]:
    """The row of one class, on sizes that are multiples."""
    case = make()
    smallest, largest = ends(case, multiple)

    def measure(budget: int | None) -> MeasuredCost:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure_cost(
                case.step,
                case.make_batch,
                max_size=largest if len(largest) > 1 else largest[0],
                min_size=smallest,
                budget=budget,
                method="trace",
                size_multiple=multiple,
            )

    elapsed, cost = timed(lambda: measure(None))
    truth = make()
    shapes = box_shapes(truth, count, multiple)
    box = Compared(cost, shapes, traced_peaks(truth, shapes, BOX_S))
    [budget] = traced_peaks(truth, [(4, largest)], BOX_S)
    budgeted = measure(budget)
    filling = frontier_shapes(truth, budgeted, budget, multiple)
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
            "multiples": "d",
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
        case = make()
        for multiple in sorted({1, case.multiple}):
            row: dict[str, Any] = {"step": name, "multiples": multiple}
            try:
                row |= {"axes": len(ends(case)[1]), **compare(make, arguments.shapes, multiple)}
            except Exception as error:  # noqa: BLE001  # a class that fails is a row
                row |= {"fallback": "error", "error": f"{type(error).__name__}: {error}"}
            results.row(**row, is_rounded=multiple < case.multiple)
    bars(results)
    results.finish(arguments.json)
    for row in results.rows:
        if "error" in row:
            print(f"{row['step']}: {row['error']}")


def bars(results: Results) -> None:
    """Of sizes as a user is told to pad them; then of those that layers round themselves."""
    failed = sum("error" in row for row in results.rows)
    results.bar("classes that cannot be traced", failed, UNTRACEABLE)
    for rounded, beside in ((False, ""), (True, ", sizes that layers round")):
        rows = [row for row in results.rows if "error" not in row and row["is_rounded"] == rounded]
        if not rows:
            continue
        least = min(row["covered"] for row in rows)
        results.bar(f"least covered{beside}", least, 0, at_least=True)
        fitted = [row for row in rows if not row["fallback"]]
        on_frontier = [row["frontier"] for row in fitted if row["frontier"] is not None]
        results.bar(f"most over on the frontier{beside}", max(on_frontier, default=0), 0.05)
        most = max((row["over"] for row in fitted), default=0)
        results.bar(f"most over in the box{beside}", most, 0.15)
        results.bar(f"fallbacks{beside}", sum(row["fallback"] != "" for row in rows), 3)
        for axes, limit in ((1, 16), (2, 30)):
            counts = [row["traces"] for row in rows if row["axes"] == axes]
            results.bar(f"traces, {axes} axes{beside}", max(counts, default=0), limit)
        results.bar(f"seconds to measure{beside}", max(row["seconds"] for row in rows), 30)


if __name__ == "__main__":
    main()
