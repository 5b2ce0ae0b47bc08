"""Is the budget of a CUDA device kept and filled, by a model of torch's caching allocator?

Question: with `measure_cost(method="trace", device="cuda")` and no device at hand, how much of the
budget is reserved over an epoch of ragged batches, with expandable segments and with fixed ones,
with and without a cap of the allocator; and how much of it do tensors take?

Command: PYTHONPATH=. python examples/benchmarks/cuda_reserve.py [--steps N] [--budgets K]
[--models TEXT …] [--json PATH]

Hardware: 2 cores of an Intel Xeon, Python 3.11, torch 2.13.0 CPU, no GPU; `--steps 300`.

    step                      budget    segments  margin  factor  steps     off  filled  reserved  capped  retries  ooms
    encoder, fused attention   1,500  expandable    0.5%    1.06    300  0.005%  0.9638    0.9827  0.9827        0     0
    encoder, fused attention   1,500       fixed    0.5%    7.02    300  0.006%  0.5236    0.5520  0.5520        0     0
    encoder, fused attention   4,000  expandable    0.5%    1.03    300  0.000%  0.9728    0.9880  0.9880        0     0
    encoder, fused attention   4,000       fixed    0.5%   11.29    300  0.012%  0.2404    0.2835  0.2835        0     0
    decoder, scores kept       1,500  expandable    0.5%    1.15    300  0.003%  0.9218    0.9747  0.9747        1     0
    decoder, scores kept       1,500       fixed    0.5%   12.34    300  0.096%  0.4913    0.5200  0.5200        0     0
    decoder, scores kept       4,000  expandable    0.5%    1.09    300  0.000%  0.9243    0.9875  0.9925      231     0
    decoder, scores kept       4,000       fixed    0.5%   24.22    300  0.008%  0.2027    0.2545  0.2545        0     0
    encoder and decoder        1,500  expandable    0.5%    1.14    300  0.003%  0.9268    0.9747  0.9733        1     0
    encoder and decoder        1,500       fixed    0.5%   14.56    300  0.021%  0.4852    0.5293  0.5293        0     0
    encoder and decoder        4,000  expandable    0.5%    1.08    300  0.001%  0.9308    0.9885  0.9880       71     0
    encoder and decoder        4,000       fixed    0.5%   16.73    300  0.011%  0.2178    0.2660  0.2660        0     0
    images                     1,500  expandable    3.4%    1.10    300  0.229%  0.9183    0.9493  0.9493        0     0
    images                     1,500       fixed    3.4%   16.15    300  8.959%  0.4765    0.4853  0.4853        0     0
    images                     4,000  expandable    3.4%    1.06    300  0.453%  0.9201    0.9615  0.9615        6     0
    images                     4,000       fixed    3.4%   18.56    300  0.290%  0.2098    0.2215  0.2215        0     0
    graphs                     1,500  expandable    0.5%    1.48    300  0.001%  0.8161    0.9640  0.9760       47     0
    graphs                     1,500       fixed    0.5%    6.59    300  0.164%  0.5298    0.7267  0.7267        0     0
    graphs                     4,000  expandable    0.5%    1.43    270  0.000%  0.7459    0.9660  0.9860       10     0
    graphs                     4,000       fixed    0.5%    6.67    300  0.000%  0.2917    0.5430  0.5430        0     0
    heavy                      1,500  expandable    0.5%    1.20    215  0.001%  0.9140    0.9773  0.9640      207     0
    heavy                      1,500       fixed    0.5%    5.11    300  0.001%  0.6030    0.7960  0.7960        0     0
    heavy                      4,000  expandable    0.5%    1.15     48  0.000%  0.8899    0.9865  0.9660       43     0
    heavy                      4,000       fixed    0.5%    5.67    232  0.001%  0.3324    0.5760  0.5760        0     0
    waves                      1,500  expandable    0.5%    1.23    300  0.096%  0.8936    0.9773  0.9773        0     0
    waves                      1,500       fixed    0.5%   19.93    300  0.260%  0.4716    0.4853  0.4853        0     0
    waves                      4,000  expandable    0.5%    1.18    300  0.026%  0.8701    0.9865  0.9865        0     0
    waves                      4,000       fixed    0.5%   28.70    300  0.038%  0.1954    0.2020  0.2020        0     0
    U-Net                      1,500  expandable    2.5%    1.20    300  0.917%  0.8881    0.9507  0.9507        0     0
    U-Net                      1,500       fixed    2.5%    3.32    300  1.574%  0.6049    0.7040  0.7040        0     0
    U-Net                      4,000  expandable    2.5%    1.14    300  0.403%  0.8719    0.9565  0.9565        0     0
    U-Net                      4,000       fixed    2.5%    4.56    300  4.913%  0.3431    0.4785  0.4785        0     0
    decoder, rotary            1,500  expandable    0.5%    1.16    300  0.037%  0.9199    0.9680  0.9680        0     0
    decoder, rotary            1,500       fixed    0.5%   12.34    300  0.109%  0.4912    0.5213  0.5213        0     0
    decoder, rotary            4,000  expandable    0.5%    1.09    300  0.086%  0.9252    0.9880  0.9930      242     0
    decoder, rotary            4,000       fixed    0.5%   22.16    300  0.060%  0.2059    0.2875  0.2875        0     0
    all pairs, contrastive     1,500  expandable    0.5%    1.04    300  5.649%  0.9677    0.9787  0.9787        0     0
    all pairs, contrastive     1,500       fixed    0.5%   14.71    300  0.008%  0.4813    0.5000  0.5000        0     0
    all pairs, contrastive     4,000  expandable    0.5%    1.00    300  0.025%  0.9809    0.9860  0.9860        0     0
    all pairs, contrastive     4,000       fixed    0.5%   21.33    300  1.115%  0.2063    0.2110  0.2110        0     0
    highest reserved / budget, expandable ≤ 1: 0.993, holds
    least reserved / budget, expandable ≥ 0.93: 0.94933, holds
    highest reserved / budget, fixed ≤ 1: 0.796, holds
    out of memory ≤ 0: 0, holds

`budget` is in MiB, 600 of which are assumed for the context. `factor` is in the cost's notes: while
measuring an epoch was replayed, which reserved so many times what comes and goes in its costliest
step. `steps` is below 300 where the drawn sizes made fewer batches. `reserved` is context and reserved bytes at their peak over the epoch / the budget,
without a cap; `capped` with a cap of the budget less the context, and less the 18 MiB by which a
cap is passed where segments grow; there `retries` counts allocations that succeeded once the cache
was flushed. `filled` is the same as `reserved` with allocated bytes. Sizes are log-normal, an
eighth of the largest size on average on every axis, clipped; the sampler plans them. Some steps are
traced, and the requests of all others are computed from them; `off` is how far these are at most
from three that were traced as well, as a share of all that the step allocates. Where it is above
0.2 %, as layers with strides round sizes, the epoch is made of the traced steps alone.
"""  # noqa: E501  (tables)

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from _common import Results, parser

from tests.support.model_classes import CLASSES
from tests.support.training_cases import CASES, Training
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, measure_cost
from torchbudget.cost.measuring.assumed_device import AssumedDevice
from torchbudget.cost.measuring.caching_allocator import (
    AllocatorOutOfMemoryError,
    CachingAllocator,
)
from torchbudget.cost.measuring.requests import Requests
from torchbudget.cost.measuring.reserving import replay_epoch, requests_at
from torchbudget.cost.measuring.tracing import tracing
from torchbudget.restoring import TrainingState

Size: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, Size]

MODELS: dict[str, Callable[[], Training]] = {
    **{name: CASES[name] for name in ("encoder, fused attention", "decoder, scores kept")},
    **{name: CASES[name] for name in ("encoder and decoder", "images", "graphs", "heavy", "waves")},
    **{name: CLASSES[name] for name in ("U-Net", "decoder, rotary", "all pairs, contrastive")},
}
SEGMENTS = {"expandable": "expandable_segments:True", "fixed": "expandable_segments:False"}
BUDGETS = (1500, 4000)
MOST_SAMPLES = 2_000_000
PASSED = 18 * 2**20  # requests are compared with a cap in steps of 2 MiB, pages have 20 MiB
FITTED = {1: 6, 2: 13}  # twice as many are traced
CHECKED = 3
FAR = 2e-3


def ends(case: Training) -> tuple[Size, Size]:
    """The smallest and the largest size: by default a sixteenth of it."""
    largest = tuple(np.atleast_1d(case.max_size).tolist())
    smallest = max(getattr(case, "min_size", 1), min(largest) // 16)
    return tuple(smallest for _ in largest), largest


def as_size(size: Size) -> int | Size:
    return size if len(size) > 1 else size[0]


def measured(case: Training, budget: int) -> MeasuredCost:
    smallest, largest = ends(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return measure_cost(
            case.step,
            case.make_batch,
            max_size=largest,
            min_size=smallest,
            budget=budget,
            method="trace",
            device="cuda",
        )


def planned(case: Training, cost: MeasuredCost, budget: int, steps: int) -> list[Shape]:
    """The shapes of so many batches."""
    rng = np.random.default_rng(3)
    smallest, largest = map(np.array, ends(case))

    def draw(count: int) -> np.ndarray:
        factors = rng.lognormal(-2.1, 0.8, (count, len(largest)))
        return np.clip(largest * factors, smallest, largest).astype(int)

    median = as_size(tuple(np.median(draw(1000), axis=0).astype(int).tolist()))
    most = int(np.clip(2 * steps * cost.capacity(median, budget), 1000, MOST_SAMPLES))
    sizes = draw(most)
    batches = islice(MemoryBudgetBatchSampler(sizes, cost, budget), steps)
    return [(len(one), tuple(sizes[one].max(0).tolist())) for one in batches]


def requests_of(case: Training, shapes: list[Shape]) -> tuple[list[Requests], float]:
    """Those of every step, and how far the computed ones are off; traced ones where that is far."""
    rng = np.random.default_rng(4)
    distinct = list(dict.fromkeys(shapes))
    count = min(FITTED[len(shapes[0][1])] + CHECKED, len(distinct))
    chosen = [distinct[at] for at in rng.choice(len(distinct), count, replace=False)]
    # Fewer samples of some sizes: batches that are all full do not tell the terms apart.
    fewer = [(max(n // 8, 2), size) for n, size in chosen[CHECKED:]]
    with tracing(case.step, TrainingState(case.step), torch.device("cuda")) as trace:
        real = {
            (n, size): trace(case.make_batch(n, as_size(size))).requests
            for n, size in dict.fromkeys(chosen + fewer)
        }
    held_out = chosen[:CHECKED]
    fitted = {shape: one for shape, one in real.items() if shape not in held_out}
    computed = requests_at(fitted, held_out)
    off = (
        1.0
        if computed is None
        else max(map(difference, computed, [real[shape] for shape in held_out]))
    )
    if off > FAR:
        return [real[chosen[at]] for at in rng.integers(0, len(chosen), len(shapes))], off
    return requests_at(real, shapes) or [], off


def difference(one: Requests, other: Requests) -> float:
    """The part of all bytes by which two steps differ."""
    if len(one.sizes) != len(other.sizes):
        return 1.0
    return float(np.abs(one.sizes - other.sizes).sum() / other.sizes.sum())


def replay(steps: list[Requests], device: AssumedDevice, cap: int | None) -> CachingAllocator:
    """The allocator after an epoch, or after the step that ran out of memory."""
    allocator = CachingAllocator(device.settings, cap_bytes=cap)
    with suppress(AllocatorOutOfMemoryError):
        replay_epoch(steps, device, allocator)
    return allocator


def compare(make: Callable[[], Training], mib: int, segments: str, steps: int) -> dict[str, Any]:
    """The row of one model, budget and kind of segments."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = SEGMENTS[segments]
    budget, case = mib * 2**20, make()
    cost = measured(case, budget)
    note = next(note for note in cost.notes if "mixed shapes reserve" in note)
    shapes = planned(case, cost, budget, steps)
    requests, off = requests_of(case, shapes)
    device = AssumedDevice.detect()
    free = replay(requests, device, None)
    slack = PASSED if device.settings.expandable else 0
    capped = replay(requests, device, budget - device.context_bytes - slack)

    def share(num_bytes: int) -> float:
        return (device.context_bytes + num_bytes) / budget

    return {
        "segments": segments,
        "margin": cost.margin,
        "factor": float(note.partition("reserve ")[2].partition(" times")[0]),
        "steps": len(shapes),
        "off": off,
        "filled": share(free.peak_allocated_bytes),
        "reserved": share(free.peak_reserved_bytes),
        "capped": share(capped.peak_reserved_bytes),
        "retries": capped.num_alloc_retries,
        "ooms": capped.num_ooms + free.num_ooms,
    }


def main() -> None:
    line = parser(__doc__, steps=500, budgets=len(BUDGETS))
    line.add_argument("--models", nargs="+", default=[""], help="parts of the names to compare")
    arguments = line.parse_args()
    torch.set_num_threads(1)
    results = Results(
        {
            "step": "",
            "budget": ",d",
            "segments": "",
            "margin": ".1%",
            "factor": ".2f",
            "steps": ",d",
            "off": ".3%",
            "filled": ".4f",
            "reserved": ".4f",
            "capped": ".4f",
            "retries": "d",
            "ooms": "d",
        }
    )
    for name, make in MODELS.items():
        if not any(part in name for part in arguments.models):
            continue
        for mib in BUDGETS[: arguments.budgets]:
            for segments in SEGMENTS:
                row = compare(make, mib, segments, arguments.steps)
                results.row(step=name, budget=mib, **row)
    for segments in SEGMENTS:
        rows = [row for row in results.rows if row["segments"] == segments]
        both = [row[way] for row in rows for way in ("reserved", "capped")]
        results.bar(f"highest reserved / budget, {segments}", max(both), 1)
        if segments == "expandable":
            results.bar(f"least reserved / budget, {segments}", min(both), 0.93, at_least=True)
    results.bar("out of memory", sum(row["ooms"] for row in results.rows), 0)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
