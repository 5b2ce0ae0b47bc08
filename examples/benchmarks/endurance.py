"""Do the laws hold over a million batches?

Question: over random sizes, costs, budgets, numbers of ranks and options, is any batch over its
budget, is any index missing or repeated, do ranks get unequal counts, does `len` differ from what
comes, does a resumed epoch differ from an uninterrupted one?

Command: python examples/benchmarks/endurance.py [--batches N] [--seed S] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    checked            number
    samplers              411
    batches         1,037,539
    samples         2,156,740
    resumed               411
    axes                  168
    packed                113
    one rank              233
    num_samples            99
    oversize=skip         103
    drop_last              91
    one axis              243
    padded                298
    ranks                 178
    replacement            61
    weights                53
    oversize=alone        100
    oversize=raise        208
    refused                23
    seconds               469
    violations ≤ 0: 0, holds

Costs are recomputed in whole numbers from the samples' own sizes, by a formula that shares nothing
with the library: coefficients are whole eighths of a byte. A sampler is resumed once, after a
random number of batches: on the same ranks every remaining batch must be the same, on another
number of ranks every remaining sample must come once, under the budget. Samples that cannot be
dealt evenly must be refused before the first batch; such a case counts as `refused`.

It ends with exit status 1 at the first violation, and prints the case that broke the law.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _common import Batches, Results, Sizes, flat, options, padded_sizes, timed

from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.errors import OptionError, UnevenRanksError


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sampler's settings; coefficients are in eighths of a byte."""

    sizes: Sizes
    packs: bool
    fixed: int
    floor: int
    sample: int
    unit: list[int]
    pair: list[list[int]]
    budget: int
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)

    def samplers(self, ranks: int | None = None) -> list[MemoryBudgetBatchSampler]:
        one = len(self.unit) == 1
        coefficients: dict[str, Any] = {
            "fixed_bytes": self.fixed,
            "sample_bytes": self.sample / 8,
            "unit_bytes": self.unit[0] / 8 if one else [unit / 8 for unit in self.unit],
            "pair_bytes": self.pair[0][0] / 8 if one else np.array(self.pair) / 8,
        }
        if self.packs:
            cost: Any = PackedCost(**coefficients)
        else:
            cost = PaddedCost(**coefficients, floor_bytes=self.floor)
        number = ranks or self.ranks
        return [
            MemoryBudgetBatchSampler(
                self.sizes, cost, self.budget, num_replicas=number, rank=rank, **self.settings
            )
            for rank in range(number)
        ]

    def item_bytes(self, sizes: Sizes) -> Sizes:
        """Of samples of these sizes, shape `(k,)`: whole eighths, rounded up to bytes."""
        multiple = self.settings["size_multiple"]
        lengths = -(-sizes.astype(np.int64).reshape(len(sizes), -1) // multiple) * multiple
        eighths = self.sample + lengths @ np.array(self.unit)
        eighths += np.einsum("ki,ij,kj->k", lengths, np.array(self.pair), lengths)
        return -(-eighths // 8)

    def batch_bytes(self, batches: Batches) -> Sizes:
        indices, counts = flat(batches)
        if self.packs:
            starts = np.cumsum(counts) - counts
            return self.fixed + np.add.reduceat(self.item_bytes(self.sizes[indices]), starts)
        each = self.item_bytes(padded_sizes(self.sizes, indices, counts))
        return np.maximum(self.fixed + counts * each, self.floor)


def draw_sizes(rng: np.random.Generator, samples: int, axes: int) -> Sizes:
    shape = (samples, axes)
    kind = rng.integers(5)
    if kind == 0:
        sizes = rng.integers(0, 200, shape)
    elif kind == 1:
        sizes = np.full(shape, rng.integers(1, 50))
    elif kind == 2:
        sizes = np.clip(rng.lognormal(3, 1.2, shape), 1, 3000)
    elif kind == 3:
        sizes = np.where(
            rng.random(shape) < 0.2, rng.integers(400, 500, shape), rng.integers(1, 9, shape)
        )
    else:
        sizes = rng.integers(1, 9, shape)
        sizes[rng.integers(samples)] = 4000
    dtype = [np.int64, np.int32, np.uint16][rng.integers(3)]
    return sizes.astype(dtype)[:, 0] if axes == 1 else sizes.astype(dtype)


def log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def draw_case(rng: np.random.Generator) -> Case:
    axes = int(rng.choice([1, 1, 1, 2, 3]))
    ranks = int(rng.choice([1, 1, 1, 1, 2, 3, 8, 16]))
    packs = bool(rng.random() < 0.3)
    # Every rank plans for all of them: what would take minutes comes with fewer samples.
    plain = axes == 1 and ranks == 1 and not packs
    samples = log_uniform(rng, 1, 200_000 if plain else 20_000 // ranks)
    ranks = min(ranks, samples)
    settings: dict[str, Any] = {
        "seed": int(rng.integers(2**40)),
        "shuffle": bool(rng.random() < 0.8),
        "drop_last": bool(rng.random() < 0.2),
        "size_multiple": int(rng.choice([1, 1, 8])),
        "oversize": str(rng.choice(["raise", "raise", "skip", "alone"])),
    }
    window = log_uniform(rng, ranks, max(min(samples, 4096 if axes == 1 else 256), ranks))
    settings[str(rng.choice(["window", "samples_per_step"]))] = window
    if rng.random() < 0.3:
        settings["max_batch_size"] = int(rng.integers(8, 100))
    if rng.random() < 0.3 and not packs:
        settings["batch_size_multiple"] = int(rng.choice([2, 8]))
    if settings["shuffle"] and rng.random() < 0.2:
        settings["replacement"] = True
    if settings["shuffle"] and rng.random() < 0.2:
        settings["weights"] = rng.random(samples) + 0.01
    if rng.random() < 0.2:
        most = samples if "weights" in settings and "replacement" not in settings else 2 * samples
        settings["num_samples"] = int(rng.integers(max(ranks, window), max(most, window) + 1))
    case = Case(
        sizes=draw_sizes(rng, samples, axes),
        packs=packs,
        fixed=int(rng.integers(1000)),
        floor=0 if packs else int(rng.choice([0, 500])),
        sample=int(rng.integers(1, 80)),
        unit=rng.integers(0, 400, axes).tolist(),
        pair=(rng.integers(0, 3, (axes, axes)) * bool(rng.random() < 0.5)).tolist(),
        budget=0,
        ranks=ranks,
        settings=settings,
    )
    # From a little more than the costliest sample alone to a hundred of it; where samples may be
    # oversize, from the median one.
    items = case.item_bytes(case.sizes)
    largest = np.atleast_1d(case.sizes.max(axis=0))[None]
    base = int(case.item_bytes(largest)[0])
    if settings["oversize"] != "raise":
        base = int(np.median(items))
    budget = max(case.fixed + int(base * (1 + rng.exponential(4))), case.floor) + 1
    object.__setattr__(case, "budget", budget)
    return case


class LawBrokenError(Exception):
    """A law is broken."""


def must(holds: object, law: str) -> None:
    if not holds:
        raise LawBrokenError(law)


def check_budget(case: Case, batches: Batches) -> None:
    must(all(batches), "a batch is empty")
    over = case.batch_bytes(batches) > case.budget
    if case.settings["oversize"] == "alone":
        over &= flat(batches)[1] > 1
    must(not over.any(), "a batch is over the budget")
    most = case.settings.get("max_batch_size", np.inf)
    must(max(map(len, batches)) <= most, "a batch has more than max_batch_size samples")


def check_indices(case: Case, drawn: Counter[int], dropped: int) -> None:
    """Each index as often as it is to come."""
    fits = np.ones(len(case.sizes), bool)
    if case.settings["oversize"] == "skip":
        # An oversize sample is one that is over the budget in a batch of its own.
        alone = np.maximum(case.fixed + case.item_bytes(case.sizes), case.floor)
        fits = alone <= case.budget
    kept = int(fits.sum())
    total = case.settings.get("num_samples", kept)
    counts = np.zeros(len(fits), np.int64)
    for index, count in drawn.items():
        counts[index] = count
    must(not counts[~fits].any(), "an oversize sample was not skipped")
    must(counts.sum() == total - dropped, "samples are missing or too many")
    if not case.settings.get("replacement"):
        most = -(-total // kept)
        must(counts.max() <= most, "an index is repeated")
        if not dropped:
            must(counts[fits].min() >= total // kept, "an index is missing")


def check_resuming(case: Case, done: int, whole: list[Batches], rng: np.random.Generator) -> None:
    """Save after `done` batches of every rank, and go on: on these ranks, and on others."""
    rank = int(rng.integers(case.ranks))
    sampler = case.samplers()[rank]
    batches = iter(sampler)
    for _ in range(done):
        next(batches)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = case.samplers()[rank]
    resumed.load_state_dict(state)
    if done == len(whole[rank]):
        must(resumed.epoch == 1, "an epoch that is done does not go on to the next")
        return
    must(len(resumed) == len(whole[rank]), "len after resuming is wrong")
    must(resumed.batches_left == len(whole[rank]) - done, "batches_left is wrong")
    must(list(iter(resumed)) == whole[rank][done:], "resumed differs from uninterrupted")
    if case.settings["drop_last"]:
        return
    window = case.settings.get("window") or case.settings["samples_per_step"]
    most = min(window, sum(len(batch) for batches in whole for batch in batches), 16)
    others = case.samplers(int(rng.integers(1, most + 1)))
    for other in others:
        other.load_state_dict(state)
    try:
        rest = [list(iter(other)) for other in others]
    except UnevenRanksError:
        return
    must(len({len(batches) for batches in rest}) == 1, "ranks are unequal after resuming on others")
    left = Counter(flat([batch for batches in whole for batch in batches[done:]])[0].tolist())
    came = Counter(flat([batch for batches in rest for batch in batches])[0].tolist())
    must(left == came, "the remaining samples differ on another number of ranks")
    check_budget(case, [batch for batches in rest for batch in batches])


def check(case: Case, rng: np.random.Generator) -> Counter[str]:
    """One epoch on all ranks; what was checked."""
    try:
        next(iter(case.samplers()[0]))
    except UnevenRanksError:
        return Counter(refused=1)
    except OptionError as error:
        if "drop_last=True leaves nothing" not in str(error):
            raise
        return Counter(refused=1)
    samplers = case.samplers()
    epochs = [list(iter(sampler)) for sampler in samplers]  # without asking for len
    batches = [batch for epoch in epochs for batch in epoch]
    must(len({len(epoch) for epoch in epochs}) == 1, "ranks have unequal numbers of batches")
    samplers[0].set_epoch(0)
    must(len(samplers[0]) == len(epochs[0]), "len is wrong")
    steps = list(case.samplers()[-1].steps)
    must(sum(steps) == len(epochs[0]), "steps do not add up to the batches")
    if not batches:
        return Counter(samplers=1)
    check_budget(case, batches)
    drawn = flat(batches)[0]
    dropped = samplers[0].report().dropped if case.settings["drop_last"] else 0
    check_indices(case, Counter(drawn.tolist()), dropped)
    check_resuming(case, int(rng.integers(len(epochs[0]) + 1)), epochs, rng)
    checked = Counter(samplers=1, batches=len(batches), samples=len(drawn), resumed=1)
    checked["axes" if case.sizes.ndim > 1 else "one axis"] += 1
    checked["packed" if case.packs else "padded"] += 1
    checked["ranks" if case.ranks > 1 else "one rank"] += 1
    checked.update(
        name for name in ("replacement", "weights", "num_samples") if name in case.settings
    )
    checked[f"oversize={case.settings['oversize']}"] += 1
    checked["drop_last"] += case.settings["drop_last"]
    return checked


def main() -> None:
    logging.getLogger("torchbudget").setLevel(logging.ERROR)  # it warns of oversize samples
    arguments = options(__doc__, batches=1_000_000, seed=0)
    checked: Counter[str] = Counter()
    violation = None

    def run() -> None:
        nonlocal violation
        number = 0
        while checked["batches"] < arguments.batches and violation is None:
            rng = np.random.default_rng([arguments.seed, number])
            case = draw_case(rng)
            try:
                checked.update(check(case, rng))
            except LawBrokenError as law:
                violation = f"case [{arguments.seed}, {number}]: {law}\n{case}"
            number += 1

    elapsed, _ = timed(run)
    results = Results({"checked": "", "number": ",d"})
    for name, number in checked.items():
        results.row(checked=name, number=number)
    results.row(checked="seconds", number=round(elapsed.wall_s))
    results.bar("violations", int(violation is not None), 0)
    results.finish(arguments.json)
    if violation is not None:
        sys.exit(violation)


if __name__ == "__main__":
    main()
