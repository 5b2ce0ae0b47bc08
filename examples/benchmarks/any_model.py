"""Is the cost of any class of model traced, and how far is it from the truth over the whole box?

Question: measured with `method="trace"`, for the classes of models that people train: how many
shapes are exact, tested or interpolated, how far is each from a concrete trace of its own, also on
the frontier of a budget; and how many traces and seconds does it take?

Command: PYTHONPATH=. python examples/benchmarks/any_model.py [--shapes N] [--models TEXT …]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, transformers 5.24.0.

    step                       multiples  axes  pieces  traces  exact  tested  grid  traced low  traced high    low   over  frontier  seconds
    not recorded yet

`traced low` and `high` are the errors of `traced_bytes`, `low` and `over` those of `batch_bytes`,
which is the running maximum over fewer and shorter samples, over the box of shapes; `frontier` is
the highest of the batches of eight sizes with as many samples as the cost lets into the budget of 4
samples of the largest size. Classes whose layers have patches, strides or windows have two rows:
sizes of all kinds, and multiples of what those divide, stated by `size_multiple=`. Sizes of the box
are log-uniform from the smallest to the largest, as is the number of samples; a class whose traces
take seconds has fewer shapes. Classes of transformers follow where it is installed.
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
from torchbudget.cost.tracing import Tracer
from torchbudget.restoring import TrainingState

Size: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, Size]

BOX_S = 60.0  # the shapes of one box take no longer
FRONTIER = 8
MOSTLY = 0.9  # of the shapes of a class
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

    def made(shape: tuple[int, ...]) -> Any:
        return case.make_batch(shape[0], as_size(shape[1:]))

    tracer = Tracer(case.step, made, TrainingState(case.step))
    for n, size in shapes:
        peaks.append(int(tracer.concrete((n, *size)).peaks([(n, *size)])[0]))
        if time.perf_counter() - start_s > limit_s:
            break
    return peaks


class Compared:
    """A cost against the traced peaks of shapes."""

    def __init__(self, cost: MeasuredCost, shapes: list[Shape], peaks: list[int]) -> None:
        self.labels, self.traced, self.predicted = [], [], []
        for (n, size), peak in zip(shapes, peaks, strict=False):
            shape = n, as_size(size)
            self.labels.append(cost.label(*shape))
            self.traced.append(int(cost.traced_bytes(*shape)) / peak - 1)
            self.predicted.append(int(cost.batch_bytes(*shape)) / peak - 1)

    def errors(self, label: str) -> list[float]:
        return [e for e, one in zip(self.traced, self.labels, strict=True) if one == label]


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
    filling = frontier_shapes(truth, cost, budget, multiple)
    frontier = Compared(cost, filling, traced_peaks(truth, filling, BOX_S))
    called_exact = box.errors("exact") + frontier.errors("exact")
    return {
        "pieces": len(cost.pieces),
        "traces": len(cost.probes) + len(cost.pieces),
        **{label: box.labels.count(label) for label in ("exact", "tested")},
        "grid": box.labels.count("interpolated"),
        "traced low": min(box.traced),
        "traced high": max(box.traced),
        "low": min(box.predicted + frontier.predicted),
        "over": max(box.predicted),
        "frontier": max(frontier.predicted, default=None),
        "wrong": sum(error != 0 for error in called_exact),
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
            **dict.fromkeys(("pieces", "traces", "exact", "tested", "grid"), "d"),
            **dict.fromkeys(("traced low", "traced high"), "+.2%"),
            **dict.fromkeys(("low", "over", "frontier"), "+.1%"),
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
                row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
            results.row(**row)
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
    known = [(row["exact"] + row["tested"]) / (row["exact"] + row["tested"] + row["grid"])
             for row in rows]  # fmt: skip
    most = sum(share >= MOSTLY for share in known) / len(rows)
    results.bar("classes that are mostly exact or tested", most, 0.85, at_least=True)
    wrong = sum(row["wrong"] for row in rows)
    results.bar("shapes that are not exact where called so", wrong, 0)
    results.bar("lowest", min(row["low"] for row in rows), -0.002, at_least=True)
    on_frontier = [row["frontier"] for row in rows if row["frontier"] is not None]
    results.bar("most over on the frontier", max(on_frontier, default=0), 0.03)
    results.bar("most over in the box", max(row["over"] for row in rows), 0.1)


if __name__ == "__main__":
    main()
