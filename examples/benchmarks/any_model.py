"""Is the cost of any class of model traced, and how far is it from the truth over the whole box?

Question: measured with `method="trace"`, how far is a cost from the traced peak of other shapes of
1 to 256 samples, all corners included, and of the shapes that fill one budget, for the classes of
models that people train; how many traces and seconds does it take, and when is no form found?

Command: PYTHONPATH=. python examples/benchmarks/any_model.py [--shapes N] [--models TEXT …]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, transformers 5.24.0;
`--shapes 30`, OMP_NUM_THREADS=1, on one core, while the other one had work of its own.

    step                       multiples  axes  forms  traces  fallback  shapes  beyond    under   margin  covered     over  frontier  seconds
    encoder, padding masked            1     1      3      15                42       0   -0.05%    0.50%   +0.45%    +0.5%     +0.5%      3.0
    encoder, padding counted           1     1      3      15                42       0   -0.05%    0.50%   +0.45%    +0.5%     +0.5%      2.7
    encoder, fused and masked          1     1      2      15                42       0   -0.02%    0.50%   +0.48%    +0.5%     +0.5%      2.3
    decoder, rotary                    1     1      3      15                42       0   -0.06%    0.50%   +0.44%    +0.9%     +0.8%      2.8
    translator, relative bias          1     2      9      29                46       0   -0.27%    0.50%   +0.23%    +0.5%     +0.5%     11.4
    encoder, relative bias             1     1      4      15                41       0   -0.03%    0.50%   +0.47%    +0.5%     +0.5%      2.6
    encoder, disentangled              1     1      5      15                42       0   -0.01%    0.61%   +0.60%    +3.4%     +0.9%      3.7
    captioner                          1     2      6      25                46       0   -0.13%    0.50%   +0.37%    +0.5%     +0.5%      6.8
    two towers, contrastive            1     1      5      16                42       0   -0.02%    0.50%   +0.48%    +0.5%     +0.5%      3.3
    all pairs, contrastive             1     1      2      16                42       0   -0.35%    0.50%   +0.19%    +1.3%     +0.9%      0.6
    loss in chunks                     1     1      1      16     table      42       0  -27.09%  242.11%   +9.00%  +666.3%   +367.7%      3.6
    experts, capacity                  1     1      3      16                42       0   -0.21%    0.50%   +0.29%    +1.8%     +3.4%      2.7
    experts, by value                  1     –      –       –     error       –       –        –        –        –        –         –        –
    speech                             1     1      2      15                42       0   +0.01%    2.00%   +0.66%    +7.7%     +5.6%      1.9
    speech                             4     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      1.5
    speech, CTC                        1     1      2      15                42       0   +0.01%    2.00%   +0.66%    +7.7%     +5.6%      1.9
    speech, CTC                        4     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      1.5
    LSTM                               1     1      2      16                42       0   -0.00%    0.99%   +0.99%    +3.0%     +3.4%      0.8
    GRU                                1     1      2      16                42       0   -0.01%    0.50%   +0.50%    +0.5%     +0.5%      4.0
    LSTM, packed                       1     –      –       –     error       –       –        –        –        –        –         –        –
    loop of LSTM cells                 1     1      2      16                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      5.3
    loop of GRU cells                  1     1      2      16                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      4.9
    additive attention                 1     2      2      29     peaks      46       0   -3.90%   15.92%  +11.41%  +121.5%    +67.9%     17.6
    many short samples                 1     1      4      16                42       0   -0.02%    0.50%   +0.49%    +0.5%     +1.7%      1.7
    U-Net                              1     2      3      30                46       0   -0.42%    4.95%   +2.29%    +8.4%     +7.3%      7.9
    U-Net                              8     2      4      24                46       0   +0.00%    0.50%   +0.50%    +0.5%     +0.5%      6.3
    pyramid                            1     2      6      29                46       0   -1.16%    3.32%   +2.14%   +26.9%    +18.6%     14.0
    pyramid                           16     2      4      23                46       0   -0.20%    0.50%   +0.30%    +0.5%     +0.5%      6.7
    two optimizers                     1     1      2      16                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      2.3
    two networks in turn               1     1      3      15                42       0   -0.23%    0.50%   +0.50%    +3.2%     +9.1%      1.1
    two networks in turn               4     1      2      15                42       0   -0.02%    0.50%   +0.49%    +0.5%     +0.5%      1.0
    low rank                           1     1      3      15                42       0   -0.00%    0.59%   +0.59%    +1.8%     +0.6%      2.4
    autocast                           1     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      3.0
    checkpoint, reentrant              1     1      6      16                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      5.7
    checkpoint, not reentrant          1     1      7      16                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      5.6
    accumulated                        1     1      1      16     table      40       0  -52.83%  224.01%   +9.00%  +225.4%    +54.4%      5.1
    large parameters                   1     1      2      16                34       0   -0.00%    0.50%   +0.50%    +0.5%         –      1.9
    conformer                          1     1      3      15                42       0   +0.01%    2.00%   +1.29%   +16.9%    +16.0%      4.3
    conformer                          4     1      3      15                42       0   -0.00%    1.19%   +1.19%    +4.6%     +1.2%      3.8
    windows                            1     2      2      30     table      46       0  -11.05%  130.17%   +9.00%  +307.6%   +448.0%     12.6
    windows                           32     2      1      23                46       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      5.2
    volumes                            1     3      2      33                54       0   -0.07%    0.50%   +0.43%    +0.6%     +0.5%      2.5
    volumes                            2     3      2      33                54       0   -0.08%    0.50%   +0.45%    +0.5%     +0.5%      2.9
    documents                          1     2      3      24                46       0   -0.02%    0.50%   +0.48%    +0.5%     +0.5%      5.2
    point cloud                        1     1      1      15                42       0   -0.01%    0.50%   +0.49%    +0.5%     +0.5%      1.2
    BERT                               1     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.6%     +0.5%      3.6
    BERT, sdpa                         1     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.6%     +0.5%      2.8
    DeBERTa-v2                         1     1      5      16                42       0   -0.05%    0.50%   +0.45%    +0.5%     +0.5%      4.6
    T5                                 1     2     11      24                46       0   -0.02%    0.50%   +0.48%    +0.6%     +0.5%     10.1
    T5, encoder                        1     1      4      15                41       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      2.8
    BART                               1     2      9      24                46       0   -0.03%    0.50%   +0.47%    +0.5%     +0.5%      9.9
    BART, sdpa                         1     2      5      24                46       0   -0.02%    0.50%   +0.48%    +0.5%     +0.5%      9.2
    GPT-2                              1     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      3.5
    GPT-2, sdpa                        1     1      2      15                42       0   -0.01%    0.50%   +0.49%    +0.5%     +0.5%      2.9
    Llama                              1     1      3      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      3.5
    Llama, sdpa                        1     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      2.8
    Qwen 3                             1     1      3      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      3.7
    Gemma 3                            1     1      3      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      4.1
    Gemma 3, sdpa                      1     1      2      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      3.7
    Mixtral, batched                   1     1      4      15                42       0   -0.01%    0.50%   +0.49%    +0.6%     +0.5%      3.7
    Mixtral, grouped                   1     1      3      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      4.1
    RWKV                               1     1      2      16                42       0   -1.86%    4.00%   +0.50%    +5.7%     +2.4%      7.3
    Switch                             1     2     10      30                46       0   -0.05%    0.50%   +0.45%    +0.6%     +2.6%     10.3
    Longformer                         1     1      2      16     table      42       0   -9.18%   33.53%   +9.00%  +385.0%   +116.5%      7.9
    Longformer                        32     1      2      15                42       0   -0.00%    2.26%   +2.27%    +6.9%     +2.3%      6.7
    BigBird                            1     1      2      15                42       0   -1.19%    2.98%   +1.75%    +9.9%     +8.3%     10.8
    BigBird                           16     1      2      15                42       0   -0.00%    3.32%   +3.33%   +11.6%     +3.3%     12.2
    LED                                1     2      5      29                46       0   -1.50%    2.00%   +0.47%   +50.3%    +76.6%     33.7
    LED                               32     2      5      29                46       0   -0.06%    1.78%   +1.73%    +7.5%     +1.8%     22.1
    Whisper                            1     1      3      15                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      5.8
    Wav2Vec2                           1     1      5      16                42       0   +0.01%    2.00%   +1.25%   +20.5%    +18.2%      4.9
    Wav2Vec2                          80     1      6      16                42       0   -0.01%    0.50%   +0.50%    +0.5%     +0.5%      4.1
    CLIP                               1     1      4      16                42       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      5.7
    Segformer                          1     2      2      29     table      46       0   -3.25%   58.96%   +9.00%  +206.0%    +91.6%     13.7
    Segformer                         32     2      4      24                46       0   -0.00%    0.50%   +0.50%    +0.5%     +0.5%      7.4
    Segformer, pixels                  1     2      2      30                46       0   -0.13%   12.72%  +12.75%   +40.8%    +41.5%     15.7
    Segformer, pixels                 32     2      2      29                46       0   -0.00%    0.97%   +0.98%    +2.9%     +1.0%     10.3
    Swin                               1     2      2      30     table      46       0  -20.60%   31.88%   +4.78%   +81.1%    +45.4%     19.4
    Swin                              32     2      1      29                46       0   +0.00%    0.50%   +0.50%    +1.3%     +0.5%     13.6
    ViT                                1     2      3      30                46       0   -0.53%    6.81%   +6.66%   +51.9%   +490.7%     11.2
    ViT                               16     2      4      24                46       0   -0.22%    0.50%   +0.28%    +0.5%     +0.5%      5.0
    classes that cannot be traced ≤ 3: 2, holds
    least covered ≥ 0: 0.0019478, holds
    most over on the frontier ≤ 0.05: 0.034, holds
    most over in the box ≤ 0.15: 0.1164, holds
    fallbacks ≤ 3: 3, holds
    traces, 1 axes ≤ 16: 16, holds
    traces, 2 axes ≤ 30: 30, holds
    seconds to measure ≤ 30: 22.12, holds
    least covered, sizes that layers round ≥ 0: 0.0042997, holds
    most over on the frontier, sizes that layers round ≤ 0.05: 4.907, DOES NOT HOLD
    most over in the box, sizes that layers round ≤ 0.15: 0.51887, DOES NOT HOLD
    fallbacks, sizes that layers round ≤ 3: 4, DOES NOT HOLD
    traces, 1 axes, sizes that layers round ≤ 16: 16, holds
    traces, 2 axes, sizes that layers round ≤ 30: 30, holds
    seconds to measure, sizes that layers round ≤ 30: 33.686, DOES NOT HOLD
    experts, by value: ValueDependentError: the shapes in the step depend on values of tensors (aten.nonzero.default …
    LSTM, packed: ValueDependentError: the shapes in the step depend on values of tensors (aten._pack_padded_sequenc …

"Switch" is of a run of its own, after what its steps of other operations take of many samples was
bounded by the line between two of them: before, it was 28 % too high on the frontier.

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
from torchbudget.restoring import TrainingState
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
