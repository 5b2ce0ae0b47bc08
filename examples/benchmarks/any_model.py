"""Is the cost of any class of model traced, and how far is it from the truth over the whole box?

Question: measured with `method="trace"`, how far is a cost from the traced peak of other shapes of
1 to 256 samples, all corners included, and of the shapes that fill one budget, for the classes of
models that people train; how many traces and seconds does it take, and when is no form found?

Command: PYTHONPATH=. python examples/benchmarks/any_model.py [--shapes N] [--models TEXT …]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, transformers 5.24.0;
`--shapes 30`, on one core beside other work, which shows in the seconds.

    step                       multiples  axes  forms  traces  fallback  shapes  beyond    under   margin  covered      over  frontier  seconds
    encoder, padding masked            1     1      3      16                42       0   -0.05%    0.50%   +0.45%     +0.5%     +0.5%      2.8
    encoder, padding counted           1     1      3      16                42       0   -0.05%    0.50%   +0.45%     +0.5%     +0.5%      3.5
    encoder, fused and masked          1     1      2      16                42       0   -0.02%    0.50%   +0.48%     +0.5%     +0.5%      2.6
    decoder, rotary                    1     1      3      16                42       0   -0.06%    0.50%   +0.44%     +0.9%     +0.8%      3.6
    translator, relative bias          1     2      2      30     peaks      46       0   -8.91%   16.85%   +6.45%   +725.6%    +20.8%     18.5
    encoder, relative bias             1     1      4      16                41       0   -0.03%    0.50%   +0.47%     +0.5%     +0.5%      2.9
    encoder, disentangled              1     1      5      16                42       0   -0.00%    0.61%   +0.61%     +3.4%     +0.9%      4.5
    captioner                          1     2      8      24                46       0   -0.00%    0.50%   +0.50%  +3648.4%  +3747.5%     14.4
    two towers, contrastive            1     1      5      16                42       0   -0.02%    0.50%   +0.48%     +0.5%     +0.5%      3.7
    all pairs, contrastive             1     1      2      16                42       0   -0.35%    0.50%   +0.19%     +1.3%     +0.9%      1.3
    loss in chunks                     1     1      1      16     table      42       0  -27.09%  242.11%   +9.00%   +666.3%   +367.7%      4.9
    experts, capacity                  1     1      3      16                42       0   -0.21%    0.50%   +0.29%     +1.8%     +3.4%      3.4
    experts, by value                  1     –      –       –     error       –       –        –        –        –         –         –        –
    speech                             1     1      2      16                42       0   +0.01%    0.50%   +0.51%     +6.1%     +5.6%      4.2
    speech                             4     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      2.0
    speech, CTC                        1     1      2      16                42       0   +0.01%    0.50%   +0.51%     +6.1%     +5.6%      5.6
    speech, CTC                        4     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      2.0
    LSTM                               1     1      2      16                42       0   -0.00%    0.99%   +0.99%     +3.0%     +3.4%      1.0
    GRU                                1     1      2      16                42       0   -0.01%    0.50%   +0.50%     +0.5%     +0.5%      4.5
    LSTM, packed                       1     –      –       –     error       –       –        –        –        –         –         –        –
    loop of LSTM cells                 1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      6.2
    loop of GRU cells                  1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%     10.1
    additive attention                 1     2      2      30     peaks      46       0   -3.90%   15.92%  +11.41%   +121.5%    +67.9%     33.3
    many short samples                 1     1      4      16                42       0   -0.02%    0.50%   +0.49%     +0.5%     +1.7%      1.7
    U-Net                              1     2      3      30                46       0   -0.42%    2.41%   +1.98%     +5.8%     +7.3%      8.4
    U-Net                              8     2      4      23                46       0   +0.00%    0.50%   +0.50%     +0.5%     +0.5%      6.9
    pyramid                            1     2      6      30                46       0   -1.16%    3.32%   +2.14%    +26.9%    +18.6%     27.0
    pyramid                           16     2      4      23                46       0   -0.20%    0.50%   +0.30%     +0.5%     +0.5%     18.0
    two optimizers                     1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      4.7
    two networks in turn               1     1      3      16                42       0   -0.23%    0.50%   +0.50%     +3.2%     +9.1%      2.4
    two networks in turn               4     1      2      16                42       0   -0.02%    0.50%   +0.49%     +0.5%     +0.5%      2.4
    low rank                           1     1      3      16                42       0   -0.00%    0.59%   +0.59%     +1.8%     +0.6%      3.5
    autocast                           1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      7.5
    checkpoint, reentrant              1     1      6      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%     12.0
    checkpoint, not reentrant          1     1      7      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%     11.4
    accumulated                        1     1      1      16     table      40       0  -52.83%  224.01%   +9.00%   +225.4%    +54.4%      5.7
    large parameters                   1     1      2      16                34       0   -0.00%    0.50%   +0.50%     +0.5%         –      2.4
    conformer                          1     1      3      16                42       0   +0.01%    0.79%   +0.81%    +15.5%    +16.0%      4.2
    conformer                          4     1      3      16                42       0   -0.00%    1.19%   +1.19%     +4.6%     +1.2%      4.5
    windows                            1     2      2      30     table      46       0  -11.05%  130.17%   +9.00%   +307.6%   +448.0%     16.9
    windows                           32     2      1      23                46       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%     11.5
    volumes                            1     3      2      33                54       0   -0.07%    0.50%   +0.43%     +0.6%     +0.5%      5.5
    volumes                            2     3      2      33                54       0   -0.08%    0.50%   +0.45%     +0.5%     +0.5%      6.0
    documents                          1     2      3      24                46       0   -0.02%    0.50%   +0.48%     +0.5%     +0.5%      8.2
    point cloud                        1     1      1      16                42       0   -0.01%    0.50%   +0.49%     +0.5%     +0.5%      1.4
    BERT                               1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.6%     +0.5%      4.5
    BERT, sdpa                         1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.6%     +0.5%      3.6
    DeBERTa-v2                         1     1      5      16                42       0   -0.02%    0.50%   +0.49%     +0.5%     +0.5%      5.1
    T5                                 1     2     11      24                46       0   -0.02%    0.50%   +0.48%     +0.6%     +0.5%     12.6
    T5, encoder                        1     1      4      16                41       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      3.6
    BART                               1     2      9      24                46       0   -0.03%    0.50%   +0.47%     +0.5%     +0.5%     13.4
    BART, sdpa                         1     2      5      24                46       0   -0.02%    0.50%   +0.48%     +0.5%     +0.5%     10.0
    GPT-2                              1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      3.8
    GPT-2, sdpa                        1     1      2      16                42       0   -0.01%    0.50%   +0.49%     +0.5%     +0.5%      2.8
    Llama                              1     1      3      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      4.8
    Llama, sdpa                        1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      3.8
    Qwen 3                             1     1      3      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      5.3
    Gemma 3                            1     1      3      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      6.2
    Gemma 3, sdpa                      1     1      2      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      5.4
    Mixtral, batched                   1     1      4      16                42       0   -0.01%    0.50%   +0.49%     +0.6%     +0.5%      5.3
    Mixtral, grouped                   1     1      3      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      4.9
    Switch                             1     2     10      30                46       0   -0.05%    0.50%   +0.45%     +0.6%    +12.2%     15.4
    Longformer                         1     1      2      16     table      42       0   -9.18%   33.53%   +9.00%   +385.0%   +116.5%     10.4
    Longformer                        32     1      2      16                42       0   -0.00%    2.26%   +2.27%     +6.9%     +2.3%      9.6
    BigBird                            1     1      2      16                42       0   -0.66%    3.90%   +2.49%    +12.6%     +8.3%     14.2
    BigBird                           16     1      2      16                42       0   -0.00%    3.32%   +3.33%    +11.6%     +3.3%     22.1
    LED                                1     2      5      30                46       0   -1.50%    0.50%   -1.01%    +48.1%    +76.6%     61.1
    LED                               32     2      5      30                46       0   -0.06%    1.78%   +1.73%     +7.5%     +1.8%     40.0
    Whisper                            1     1      3      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%     14.4
    Wav2Vec2                           1     1      5      16                42       0   +0.01%    1.06%   +1.07%    +19.4%    +18.2%     11.7
    Wav2Vec2                          80     1      6      16                42       0   -0.01%    0.50%   +0.50%     +0.5%     +0.5%     10.1
    CLIP                               1     1      4      16                42       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%      6.9
    Segformer                          1     2      2      30     table      46       0   -3.25%   58.96%   +9.00%   +206.0%    +91.6%     18.2
    Segformer                         32     2      4      23                46       0   -0.00%    0.50%   +0.50%     +0.5%     +0.5%     17.5
    Segformer, pixels                  1     2      2      30                46       0   -0.13%   12.72%  +12.75%    +40.8%    +41.5%     41.1
    Segformer, pixels                 32     2      2      30                46       0   -0.00%    0.97%   +0.98%     +2.9%     +1.0%     17.8
    Swin                               1     2      2      30     table      46       0  -20.60%   31.88%   +4.78%    +81.1%    +45.4%     26.0
    Swin                              32     2      1      30                46       0   +0.00%    0.50%   +0.50%     +1.3%     +0.5%     14.3
    ViT                                1     2      3      30                46       0   -0.53%    6.81%   +6.66%    +51.9%   +490.7%     10.8
    ViT                               16     2      4      23                46       0   -0.22%    0.50%   +0.28%     +0.5%     +0.5%      5.0
    classes that cannot be traced ≤ 3: 2, holds
    least covered ≥ 0: 0.0019478, holds
    most over on the frontier ≤ 0.05: 37.475, DOES NOT HOLD
    most over in the box ≤ 0.15: 36.484, DOES NOT HOLD
    fallbacks ≤ 3: 4, DOES NOT HOLD
    traces, 1 axes ≤ 16: 16, holds
    traces, 2 axes ≤ 30: 30, holds
    seconds to measure ≤ 30: 39.966, DOES NOT HOLD
    least covered, sizes that layers round ≥ 0: -0.010064, DOES NOT HOLD
    most over on the frontier, sizes that layers round ≤ 0.05: 4.907, DOES NOT HOLD
    most over in the box, sizes that layers round ≤ 0.15: 0.51887, DOES NOT HOLD
    fallbacks, sizes that layers round ≤ 3: 4, DOES NOT HOLD
    traces, 1 axes, sizes that layers round ≤ 16: 16, holds
    traces, 2 axes, sizes that layers round ≤ 30: 30, holds
    seconds to measure, sizes that layers round ≤ 30: 61.071, DOES NOT HOLD
    experts, by value: ValueDependentError: the shapes in the step depend on values of tensors (aten.nonzero.defau …
    LSTM, packed: ValueDependentError: the shapes in the step depend on values of tensors (aten._pack_padded_seque …

What this table showed was mended after it: that a sample short on one axis counted for all lengths on
the other ("captioner", "translator, relative bias"), which are within 15 % anywhere in the tests of
classes since; and that LED was under by 1 %, where the margin is at least 2 % now. "RWKV" is new.

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
