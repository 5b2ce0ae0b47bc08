"""How well does a cost that was only traced predict other shapes?

Question: fitted to at most 8 traced shapes, how far is `measure_cost(method="trace")` from the
traced peak of 40 other shapes, of models whose bytes grow in different ways, and how long does a
shape take?

Command: PYTHONPATH=. python examples/benchmarks/traced_cost.py [--shapes N] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU.

    step                      axes  fitted  forms    under     over  margin  covered  s a shape
    encoder, fused attention     1       6      2  -0.011%  +0.001%   0.10%  +0.093%       0.20
    encoder, SGD                 1       6      2  -0.020%  +0.001%   0.10%  +0.084%       0.10
    encoder, momentum            1       6      2  -0.014%  +0.001%   0.10%  +0.090%       0.13
    encoder, foreach             1       6      2  -0.008%  +0.001%   0.10%  +0.097%       0.15
    encoder, bfloat16            1       6      2  -0.011%  +0.001%   0.10%  +0.093%       0.24
    encoder, checkpointed        1       6      3  -0.003%  +0.000%   0.10%  +0.101%       0.16
    decoder, scores kept         1       6      3  -0.015%  +0.000%   0.10%  +0.089%       0.16
    decoder, checkpointed        1       6      6  -0.007%  +1.923%   0.10%  +0.097%       0.18
    encoder and decoder          2       8      8  -0.026%  +0.003%   0.10%  +0.078%       0.36
    LSTM                         1       6      2  -0.004%  +0.001%   0.10%  +0.100%       0.08
    GRU                          1       6      3  -0.006%  +0.001%   0.10%  +0.098%       0.53
    waves                        1       6      2  -0.047%  +0.150%   0.10%  +0.057%       0.08
    images                       2       8      3  -0.411%  +1.927%   0.80%  +0.391%       0.08
    heavy                        1       6      2  -0.000%  +0.000%   0.10%  +0.104%       0.04
    heavy, foreach               1       6      3  -0.000%  +0.000%   0.10%  +0.104%       0.02
    graphs                       2       8      6  -0.021%  +0.016%   0.10%  +0.085%       0.09
    fitted shapes ≤ 8: 8, holds
    worst underestimate before the margin ≤ 0.005: 0.0041096, holds
    worst underestimate after it ≤ 0: -0.00056978, holds
    worst overestimate ≤ 0.03: 0.019267, holds
    seconds a shape ≤ 1: 0.53373, holds

`under` and `over` are the lowest and the highest fitted / traced − 1, without the margin; `covered`
is the lowest with it. The other shapes have 1 to 64 samples, and on every axis an eighth of the
largest size to all of it, evenly on a logarithmic scale. `axes` are the ragged ones; `forms` of
which the largest counts were found. A GRU's loop over its length takes an operation for each unit:
its sizes go up to 32 here.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

import numpy as np
from _common import Results, options, timed

from tests.support.training_cases import BASES, CASES, VARIANTS, Training
from torchbudget import measure_cost
from torchbudget.cost.measuring.tracing import tracing
from torchbudget.cost.measuring.training_state import TrainingState


def other_shapes(largest: tuple[int, ...], count: int) -> tuple[list[int], list[tuple[int, ...]]]:
    rng = np.random.default_rng(7)
    n = np.round(2.0 ** rng.uniform(0, 6, count)).astype(int).tolist()
    sizes = np.round(largest * 2.0 ** rng.uniform(-3, 0, (count, len(largest)))).astype(int)
    return n, [tuple(size) for size in sizes.tolist()]


def traced_peaks(training: Training, n: list[int], sizes: list[tuple[int, ...]]) -> list[int]:
    with tracing(training.step, TrainingState(training.step)) as trace:
        return [
            trace(training.make_batch(number, size if len(size) > 1 else size[0])).peak_bytes
            for number, size in zip(n, sizes, strict=True)
        ]


def main() -> None:
    arguments = options(__doc__, shapes=40, models=len(CASES), variants=0)
    cases = dict(islice(CASES.items(), arguments.models))
    if arguments.variants:
        cases = {
            f"{base}, {variant}": partial(vary, BASES[base])
            for base in BASES
            for variant, vary in VARIANTS.items()
        }
    results = Results(
        {
            "step": "",
            "axes": "d",
            "fitted": "d",
            "forms": "d",
            "under": "+.3%",
            "over": "+.3%",
            "margin": ".2%",
            "covered": "+.3%",
            "s a shape": ".2f",
        }
    )
    for name, make in cases.items():
        training = make()
        max_size = 32 if name.startswith("GRU") else training.max_size
        largest = tuple(np.atleast_1d(max_size).tolist())
        elapsed, cost = timed(
            lambda training=training, max_size=max_size: measure_cost(
                training.step, training.make_batch, max_size=max_size, method="trace"
            )
        )
        n, sizes = other_shapes(largest, arguments.shapes)
        peaks = traced_peaks(make(), n, sizes)
        shapes = np.array(sizes) if len(largest) > 1 else np.array(sizes)[:, 0]
        errors = cost.fitted_bytes(n, shapes) / peaks - 1
        results.row(
            step=name,
            axes=len(largest),
            fitted=sum(not probe.held_out for probe in cost.probes),
            forms=len(cost.forms),
            under=float(errors.min()),
            over=float(errors.max()),
            margin=cost.margin,
            covered=float((cost.batch_bytes(n, shapes) / peaks - 1).min()),
            # The first shape is stepped on once more, to warm up, and again at the end.
            **{"s a shape": elapsed.wall_s / (len(cost.probes) + 2)},
        )
    columns = {key: [row[key] for row in results.rows] for key in results.formats}
    results.bar("fitted shapes", max(columns["fitted"]), 8)
    results.bar("worst underestimate before the margin", -min(columns["under"]), 0.005)
    results.bar("worst underestimate after it", -min(columns["covered"]), 0)
    results.bar("worst overestimate", max(columns["over"]), 0.03)
    results.bar("seconds a shape", max(columns["s a shape"]), 1)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
