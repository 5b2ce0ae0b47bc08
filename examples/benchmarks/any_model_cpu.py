"""Is the budget kept and filled by any class of model, whether it can be traced or only be run?

Question: with `measure_cost(budget=…)` by "auto" and by "run", each class, method and budget in a
process of its own, how near to the budget does the process's high-water mark of resident memory
come over an epoch of ragged batches, how full are the batches planned, and how long does measuring
take?

Command: PYTHONPATH=. python examples/benchmarks/any_model_cpu.py [--steps N] [--budgets K]
[--models TEXT …] [--methods auto run] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, glibc 2.36.

    step                    method  budget  runs  measuring, s  margin  steps    peak  largest  predicted   alone  epoch, s
    all pairs, contrastive    auto      96     6           6.3   2.93%      3  0.9731   0.9731     0.9997  0.8278       0.6
    all pairs, contrastive     run      96    11           5.4   2.93%      3  0.9736   0.9728     0.9998  0.8197       0.7
    large parameters          auto       –     –             –       –      –       –        –          –       –         –
    large parameters           run      96     3           3.0   2.26%     50  0.9484   0.9480     0.9676  0.9676      12.5
    errors ≤ 0: 1, DOES NOT HOLD
    highest peak / budget ≤ 1: 0.97355, holds
    largest step / budget, at least ≥ 0.9: 0.94801, holds
    least mean predicted / budget, auto ≥ 0.9: 0.99967, holds
    least mean predicted / budget, run ≥ 0.85: 0.96756, holds
    seconds to measure ≤ 30: 6.2571, holds
    runs of a measurement, auto ≤ 8: 6, holds
    runs of a measurement, run ≤ 18: 11, holds
    large parameters, auto: torchbudget.errors.OversizeError: 50 of 50 samples are over the budget alone, the first at index 0: size 315 needs 533 MiB of 530 MiB; raise the budget, shorten those samples, or choose oversize='skip' or 'alone'

The table is of two classes, from before the benchmark began with `configure_allocators`.

`budget` is MiB beyond the process's memory before it measures, with what measuring imports: 1.5 and 4 times what a step on one
sample of the largest size needs, or of 64 MiB where that is less. `peak` is the high-water mark
over the epoch / the whole budget, `largest` that of the step whose predicted bytes are the most /
the budget, `predicted` the mean over all steps but the last of what was predicted / the budget;
`alone` is that of one sample of the largest size. Sizes are log-normal, an eighth of the largest
size on average on every axis, clipped; an epoch is about N full batches of the median size. Masks
and packed sequences have the lengths of the samples.
"""  # noqa: E501  (tables)

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from _common import Results, parser, timed

from tests.support.model_classes import CLASSES
from tests.support.model_classes.case import Case
from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    configure_allocators,
    measure_cost,
    trace_peak_bytes,
)
from torchbudget.errors import CostError
from torchbudget.machine.high_water import reset_peak_memory
from torchbudget.machine.process_tree import process_memory

MODELS = (
    "encoder, padding masked",
    "encoder, disentangled",
    "decoder, rotary",
    "translator, relative bias",
    "all pairs, contrastive",
    "experts, by value",
    "speech, CTC",
    "LSTM, packed",
    "U-Net",
    "checkpoint, not reentrant",
    "large parameters",
)
TIMES = (1.5, 4.0)
LEAST_BYTES = 64 * 2**20
MOST_SAMPLES = 20_000
# Their memory depends on values, so that "auto" only runs them.
UNTRACEABLE = ("experts, by value", "LSTM, packed")


def ends(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The smallest and the largest size, a number for every axis."""
    largest = tuple(np.atleast_1d(case.max_size).tolist())
    return tuple(np.broadcast_to(case.min_size, len(largest)).tolist()), largest


def as_size(size: Any) -> int | tuple[int, ...]:
    return tuple(map(int, size)) if len(size) > 1 else int(size[0])


def budget_of(case: Case, times: float) -> tuple[int, int]:
    """The process's memory while idle, and the budget above it."""
    for n in (2, 1):  # kernels are loaded, the optimizer's state is made
        case.step(case.make_batch(n, case.max_size))
    with suppress(CostError):  # of a step that cannot be traced
        trace_peak_bytes(case.step, case.make_batch(1, case.max_size))  # what measuring imports
    idle = process_memory().resident_bytes
    reset_peak_memory()
    case.step(case.make_batch(1, case.max_size))
    needed = (process_memory().peak_resident_bytes or 0) - idle
    return idle, idle + int(times * max(needed, LEAST_BYTES))


def ragged_batch(case: Case, sizes: np.ndarray) -> Any:
    """A batch padded to the largest of its samples, with their true lengths where it has any."""
    batch = case.make_batch(len(sizes), as_size(sizes.max(0)))
    if "lengths" in batch:
        batch["lengths"] = torch.from_numpy(sizes[:, 0].copy())
    return batch


def draw_sizes(case: Case, cost: MeasuredCost, budget: int, steps: int) -> np.ndarray:
    """The sizes of so many samples as fill about `steps` batches, shape `(samples, d)`."""
    rng = np.random.default_rng(0)
    smallest, largest = map(np.array, ends(case))

    def draw(count: int) -> np.ndarray:
        factors = rng.lognormal(-2.1, 0.8, (count, len(largest)))
        return np.clip(largest * factors, smallest, largest).astype(int)

    median = np.median(draw(1000), axis=0).astype(int)
    each = int(cost.capacity(as_size(median), budget))
    return draw(int(np.clip(steps * each, 50, MOST_SAMPLES)))


def epoch(name: str, method: Any, times: float, steps: int) -> dict[str, float]:
    """Measure and train in this process."""
    configure_allocators()
    case = CLASSES[name]()
    idle, budget = budget_of(case, times)
    measuring, cost = timed(
        lambda: measure_cost(
            case.step,
            case.make_batch,
            max_size=case.max_size,
            min_size=ends(case)[0],
            budget=budget,
            method=method,
        )
    )
    sizes = draw_sizes(case, cost, budget, steps)
    peaks, predicted = [], []

    def train() -> None:
        for indices in MemoryBudgetBatchSampler(sizes, cost, budget):
            reset_peak_memory()
            case.step(ragged_batch(case, sizes[indices]))
            peaks.append(process_memory().peak_resident_bytes or 0)
            size = as_size(sizes[indices].max(0))
            predicted.append(int(cost.batch_bytes(len(indices), size)))

    training, _ = timed(train)
    return {
        "budget": round((budget - idle) / 2**20),
        "runs": sum(probe.how == "run" for probe in cost.probes),
        "measuring, s": measuring.wall_s,
        "margin": cost.margin,
        "steps": len(peaks),
        "peak": max(peaks) / budget,
        "largest": peaks[int(np.argmax(predicted))] / budget,
        "predicted": float(np.mean(predicted[:-1] or predicted)) / budget,
        "alone": int(cost.batch_bytes(1, case.max_size)) / budget,
        "epoch, s": training.wall_s,
    }


def row_of(name: str, method: str, times: float, steps: int) -> dict[str, Any]:
    """The row of one process."""
    command = [sys.executable, __file__, "--epoch", name, method, str(times), str(steps)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        last = finished.stderr.strip().rsplit("\n", 1)[-1]
        return {"method": method, "error": last or f"exit status {finished.returncode}"}
    return {"method": method, **json.loads(finished.stdout)}


def main() -> None:
    if sys.argv[1:2] == ["--epoch"]:
        name, method, times, steps = sys.argv[2:]
        print(json.dumps(epoch(name, method, float(times), int(steps))))
        return
    line = parser(__doc__, steps=8, budgets=len(TIMES))
    line.add_argument("--models", nargs="+", default=[""], help="parts of the names to compare")
    line.add_argument("--methods", nargs="+", default=["auto", "run"])
    arguments = line.parse_args()
    results = Results(
        {
            "step": "",
            "method": "",
            "budget": ",d",
            "runs": "d",
            "measuring, s": ".1f",
            "margin": ".2%",
            "steps": ",d",
            "peak": ".4f",
            "largest": ".4f",
            "predicted": ".4f",
            "alone": ".4f",
            "epoch, s": ".1f",
        }
    )
    for name in MODELS:
        if not any(part in name for part in arguments.models):
            continue
        for method in arguments.methods:
            for times in TIMES[: arguments.budgets]:
                results.row(step=name, **row_of(name, method, times, arguments.steps))
    bars(results)
    results.finish(arguments.json)
    for row in results.rows:
        if "error" in row:
            print(f"{row['step']}, {row['method']}: {row['error']}")


def bars(results: Results) -> None:
    rows = [row for row in results.rows if "error" not in row]
    results.bar("errors", len(results.rows) - len(rows), 0)
    if not rows:
        return
    results.bar("highest peak / budget", max(row["peak"] for row in rows), 1)
    least = min(row["largest"] for row in rows)
    results.bar("largest step / budget, at least", least, 0.9, at_least=True)
    for method, limit in (("auto", 0.9), ("run", 0.85)):
        fills = [row["predicted"] for row in rows if row["method"] == method]
        if fills:
            results.bar(
                f"least mean predicted / budget, {method}", min(fills), limit, at_least=True
            )
    results.bar("seconds to measure", max(row["measuring, s"] for row in rows), 30)
    runs = {True: [0], False: [0]}
    for row in rows:
        runs[row["method"] == "auto" and row["step"] not in UNTRACEABLE].append(row["runs"])
    results.bar("runs of a measurement, traced", max(runs[True]), 8)
    results.bar("runs of a measurement, run alone", max(runs[False]), 18)


if __name__ == "__main__":
    main()
