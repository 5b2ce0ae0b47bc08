"""Is the cut that is predicted to take the least time the fastest in truth?

Question: five kinds of steps are measured under a budget of the CPU. How far is the predicted time
of 20 shapes that were not timed from the real one, and of the smallest shape and twice its samples?
The samples of one optimizer step are then cut by the chosen cap on a micro-batch's time, by eight
other caps, and into full micro-batches, and every cut is trained on: how much longer does the
chosen one take than the best?

Command: PYTHONPATH=. python examples/benchmarks/least_time.py [--samples N] [--turns K] [--mib K]
[--models TEXT …] [--plot PNG] [--json PATH]

Hardware: 2 cores of an AMD EPYC, one thread, Python 3.11, torch 2.13.0 CPU.

    kind                 median  worst  smallest  twice  micro-batches  of full  full  to best
    decoder               +6.5%   +18%      -23%   -15%             22        3  1.90    1.114
    encoder               -0.7%   +24%      -23%   -21%             47        2  2.59    1.000
    images, two axes      -3.2%   -20%       +7%   +99%             44        2  3.15    1.000
    recurrent            -16.1%   -27%      -31%   -27%             10        1  2.32    1.000
    embeddings, forward   -3.8%   +15%       +6%   +15%             48        1  5.65    1.062
    chosen cut / best of all ≤ 1.04: 1.114, DOES NOT HOLD
    median error ≤ 0.1: 0.16055, DOES NOT HOLD
    worst error ≤ 0.35: 0.27008, holds
    error of the smallest shapes ≤ 0.25: 0.99313, DOES NOT HOLD

The arguments of this run: `--samples 128 --turns 3`. The machine shares its processor: in another
run the recurrent steps were predicted within 0.1 % in the median, and the decoder's within 7.9 %.
On the CPU, tensors below 128 KiB come from malloc's heap, and larger ones from the kernel, page by
page; so steps of few and short samples take less than any line predicts.

`median` and `worst` are predicted / real time − 1 over the 20 shapes, `smallest` and `twice` those
of one and of two samples of the smallest size; the real time is the least of three, without the
optimizer's step. Cuts are trained on in turn, and the least time of each counts; the one that came
out best is timed again in as many turns, beside the chosen one. `full` is the time of full
micro-batches / that of the chosen cut.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Results, lognormal, no_garbage_collection, parser
from torch import Tensor, nn

from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, MiB, measure_cost
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.solver import solve

VOCABULARY = 2000
CAPS = 2.0 ** np.array([-4, -3, -2, -1, 1, 2, 3, 4])  # of the chosen one
SHAPES = 20


@dataclass(frozen=True)
class Kind:
    """A micro-batch of a kind of training; `sizes` of the samples of a step."""

    work: Callable[[Any], object]
    make_batch: Callable[[int, Any], Any]
    sizes: Any
    parameters: list[Tensor]


def ids(n: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (n, length))


def encoder_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def texts(samples: int) -> Any:
    return lognormal(samples, 4, 0.9, 4, 512)


def decoder(samples: int) -> Kind:
    parts = nn.ModuleList(
        [nn.Embedding(VOCABULARY, 128), encoder_layers(), nn.Linear(128, VOCABULARY)]
    )

    def work(x: Tensor) -> None:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found = parts[2](parts[1](parts[0](x), mask=mask, is_causal=True))
        nn.functional.cross_entropy(found.flatten(0, 1), x.flatten(), reduction="sum").backward()

    return Kind(work, ids, texts(samples), [*parts.parameters()])


def encoder(samples: int) -> Kind:
    parts = nn.ModuleList([nn.Embedding(VOCABULARY, 128), encoder_layers(), nn.Linear(128, 2)])

    def work(x: Tensor) -> None:
        found = parts[2](parts[1](parts[0](x))[:, 0])
        nn.functional.cross_entropy(found, x[:, 0] % 2, reduction="sum").backward()

    return Kind(work, ids, texts(samples), [*parts.parameters()])


def images(samples: int) -> Kind:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 3, 3, padding=1),
    )  # fmt: skip

    def work(x: Tensor) -> None:
        (model(x) - x).pow(2).sum().backward()

    both = [lognormal(samples, 4, 0.5, 8, 256), lognormal(samples + 1, 4, 0.5, 8, 256)[1:]]
    sizes = np.stack(both, axis=1)
    return Kind(work, lambda n, hw: torch.randn(n, 3, *hw), sizes, [*model.parameters()])


def recurrent(samples: int) -> Kind:
    parts = nn.ModuleList(
        [nn.Embedding(VOCABULARY, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 100)]
    )

    def work(x: Tensor) -> None:
        found = parts[2](parts[1](parts[0](x))[0])
        nn.functional.cross_entropy(
            found.flatten(0, 1), x.flatten() % 100, reduction="sum"
        ).backward()

    sizes = lognormal(samples, 3.5, 0.7, 4, 128)
    return Kind(work, ids, sizes, [*parts.parameters()])


def embeddings(samples: int) -> Kind:
    parts = nn.ModuleList([nn.Embedding(VOCABULARY, 128), encoder_layers()]).eval()

    def work(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return parts[1](parts[0](x)).mean(1)

    return Kind(work, ids, texts(samples), [])


KINDS = {
    "decoder": decoder,
    "encoder": encoder,
    "images, two axes": images,
    "recurrent": recurrent,
    "embeddings, forward": embeddings,
}


def measured(kind: Kind, budget: int) -> MeasuredCost:
    optimizer = torch.optim.AdamW(kind.parameters) if kind.parameters else None

    def step(batch: Any) -> None:
        kind.work(batch)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    # A forward is timed only if its pass is long: as if there were a thousand times the samples.
    sizes = kind.sizes if kind.parameters else np.repeat(kind.sizes, 1000, axis=0)
    return measure_cost(step, kind.make_batch, sizes=sizes, budget=budget, accumulate=True)


def padded(size: Any) -> Any:
    return tuple(map(int, size)) if np.ndim(size) else int(size)


def seconds_of(kind: Kind, batches: list[Any]) -> float:
    with no_garbage_collection():
        start_s = time.perf_counter()
        for batch in batches:
            kind.work(batch)
        took_s = time.perf_counter() - start_s
    for parameter in kind.parameters:
        parameter.grad = None
    return took_s


def least_of(kind: Kind, batch: Any) -> float:
    """The least seconds of three micro-batches, after one that warms up."""
    found = []
    with no_garbage_collection():
        for _ in range(4):
            start_s = time.perf_counter()
            kind.work(batch)
            found.append(time.perf_counter() - start_s)
    return min(found[1:])


def predicted_s(cost: MeasuredCost, n: int, size: Any) -> float:
    return float(cost.time.batch_bytes(n, size)) / 1e9


def errors(kind: Kind, cost: MeasuredCost, budget: int) -> list[float]:
    """Predicted / real − 1, of one and two samples of the smallest size, then of other shapes."""
    rng = np.random.default_rng(1)
    smallest = padded(min(kind.sizes, key=np.prod))
    shapes = [(1, smallest), (2, smallest)]
    for size in rng.choice(kind.sizes, SHAPES):
        most = int(cost.capacity(size, budget // 2))
        shapes.append((max(int(most ** rng.random()), 1), padded(size)))
    found = []
    for n, size in shapes:
        batch = kind.make_batch(n, size)
        real_s = least_of(kind, batch)
        found.append(predicted_s(cost, n, size) / real_s - 1)
    return found


def cut(cost: MeasuredCost, sizes: Any, budget: int, cap: float | None) -> tuple[list[Any], Any]:
    """The micro-batches under another cap than the chosen one, and the sampler's rules."""
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget, samples_per_step=len(sizes), rank=0)
    plan = sampler.plan
    most = None if cap is None else max(int(cap * (plan.rules.most_time or 1)), 1)
    rules = replace(plan.rules, most_time=most)
    block = solve(rules, np.asarray(sizes)[None], Dealing(even_sums=True))
    bounds = zip(block.starts.tolist(), block.stops.tolist(), strict=True)
    return [block.samples[start:stop] for start, stop in bounds], plan.rules


def plot(cuts: list[tuple[str, int, float, bool]], path: Path) -> None:
    """Draw the time of each cut by its number of micro-batches, and mark the chosen ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for colour, kind in enumerate(dict.fromkeys(name for name, *_ in cuts)):
        own = sorted((number, time, chosen) for name, number, time, chosen in cuts if name == kind)
        numbers, times, chosen = zip(*own, strict=True)
        axes.plot(numbers, times, ".-", color=f"C{colour}", label=kind, linewidth=1)
        at = chosen.index(True)
        axes.plot(numbers[at], times[at], "o", color=f"C{colour}", markersize=9)
    axes.set(xscale="log", xlabel="micro-batches of one optimizer step; the fewest are full")
    axes.set_ylabel("seconds / those of the fastest")
    axes.set_ylim(0.95, None)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    arguments = parser(__doc__, samples=512, turns=5, mib=1024)
    arguments.add_argument("--models", nargs="*", default=[""], metavar="TEXT")
    arguments.add_argument("--plot", type=Path, help="draw each cut's time into this PNG")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    formats = {
        "kind": "", "median": "+.1%", "worst": "+.0%", "smallest": "+.0%", "twice": "+.0%",
        "micro-batches": "d", "of full": "d", "full": ".2f", "to best": ".3f",
    }  # fmt: skip
    results = Results(formats)
    drawn: list[tuple[str, int, float, bool]] = []
    budget = MiB(options.mib)
    for name, make in KINDS.items():
        if not any(text in name for text in options.models):
            continue
        torch.manual_seed(0)
        kind = make(options.samples)
        cost = measured(kind, budget)
        smallest, twice, *others = errors(kind, cost, budget)
        cuts: dict[Any, list[Any]] = {}
        for cap in (1.0, None, *CAPS.tolist()):
            indices, rules = cut(cost, kind.sizes, budget, cap)
            cuts[cap] = [
                kind.make_batch(len(one), padded(kind.sizes[one].max(axis=0))) for one in indices
            ]
        if rules.most_time is None:
            cuts = {None: cuts[None], 1.0: cuts[None]}

        def turns(names: list[Any], cuts: Any = cuts, kind: Any = kind) -> dict[Any, float]:
            times = [
                {one: seconds_of(kind, cuts[one]) for one in names} for _ in range(options.turns)
            ]
            return {one: min(turn[one] for turn in times) for one in names}

        first = turns([*cuts])
        for cap, seconds in first.items():
            drawn.append((name, len(cuts[cap]), seconds / min(first.values()), cap == 1.0))
        again = turns([1.0, min(first, key=first.__getitem__)])
        results.row(**{
            "kind": name, "median": float(np.median(others)), "smallest": smallest, "twice": twice,
            "worst": max(others, key=abs), "micro-batches": len(cuts[1.0]),
            "of full": len(cuts[None]), "full": first[None] / first[1.0],
            "to best": again[1.0] / min(again.values()),
        })  # fmt: skip
    if options.plot:
        plot(drawn, options.plot)
    rows = results.rows
    results.bar("chosen cut / best of all", max(row["to best"] for row in rows), 1.04)
    results.bar("median error", max(abs(row["median"]) for row in rows), 0.1)
    results.bar("worst error", max(abs(row["worst"]) for row in rows), 0.35)
    ends = max(abs(row[one]) for row in rows for one in ("smallest", "twice"))
    results.bar("error of the smallest shapes", ends, 0.25)
    results.finish(options.json)


if __name__ == "__main__":
    main()
