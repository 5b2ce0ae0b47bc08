"""Streams of any source under any transforms, which fail, are stopped and go on.

What must hold: over all workers of all ranks each sample comes as often as its transforms make it;
all ranks have as many batches; none is over the budget; what failed and was begun again from the
last state yields the rest of what would have come; the rest after a window's boundary is complete
on any number of workers and ranks; the rest after any batch is complete under another cost; ranks
with unequal numbers of workers are refused.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzzing.faults import FUSE, Fault, Killed, drawn
from tests.support.oracles import bytes_of
from tests.support.refusals import Refused, accepted, two_fit
from tests.support.resuming import as_json
from tests.support.sampler_cases import check_batch
from tests.support.strategies import problems
from tests.support.streams import KINDS, OneProcess, size_of, source_of, workers_of
from torchbudget import BudgetedIterableDataset, best_shapes, transforms
from torchbudget.checks import shape_of
from torchbudget.data.same_on_ranks import _raise_difference
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.errors import OtherNumbersWarning, RankError

EPOCHS = 2


def thrice(sample: Any) -> list[Any]:
    """None, one, two or three of it."""
    return [sample] * (sample[0] % 4)


def shrunk(sample: Any) -> Any:
    """Of a random size below its own, drawn in any of the ways."""
    number, size = sample
    shares = transforms.rng().random(), random.random()
    return number, (np.asarray(size) * shares[number % 2]).astype(int).tolist()


def broken(sample: Any) -> Any:
    """It fails where the sample's number says so."""
    if sample[0] % 7 == 3:
        raise ValueError("a broken sample")
    return sample


# Each with how often the sample of a number comes out of it.
TRANSFORMS: dict[str, tuple[Any, Callable[[int], int]]] = {
    "thrice": (transforms.expand(thrice), lambda number: number % 4),
    "kept": (transforms.keep_if(lambda sample: sample[0] % 5 > 0), lambda number: number % 5 > 0),
    "shrunk": (shrunk, lambda _: 1),
    "sometimes shrunk": (transforms.random_apply(0.5, shrunk), lambda _: 1),
    "broken": (broken, lambda number: number % 7 != 3),
}


def fused(value: Any) -> Any:
    """A transform or collate that may fail."""
    FUSE()
    return value


class StreamCase:
    """A stream's arguments, and what must come of it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.oversize = chance.choice(["raise", "raise", "raise", "skip", "alone"])
        strategy = problems(most=chance.choice([10, 20, 40, 100]), fits=self.oversize == "raise")
        self.sizes, self.cost, budget = drawn(strategy, chance)
        self.budget, self.kind = max(budget, 1), chance.choice(KINDS)
        self.cuts = [chance.randint(0, 200) for _ in range(chance.randint(0, 4))]
        self.ranks, self.workers = chance.choice([1, 1, 2, 3, 5]), chance.choice([1, 1, 2, 3])
        self.apart = self.kind == "function" and self.ranks > 1
        self.names = [name for name in TRANSFORMS if chance.random() < 0.25]
        if self.ranks > 1 and not self.apart:  # on_error="skip" goes with ranks that read apart
            self.names = [name for name in self.names if name != "broken"]
        if self.oversize == "skip":  # a sample that is shrunk may fit
            self.names = [name for name in self.names if "shrunk" not in name]
        self.options: dict[str, Any] = {
            "size": size_of,
            "window": chance.randint(4 * self.ranks, 60 + 4 * self.ranks),
            "shuffle": chance.random() < 0.6,
            "seed": chance.randint(0, 2**30),
            "oversize": self.oversize,
            "drop_last": chance.random() < 0.15,
            "size_multiple": chance.choice([1, 1, 1, 4]) if self.oversize != "raise" else 1,
            "uneven": self.apart,
        }
        if self.kind == "splits itself":
            self.workers, self.options["split"] = 1, "workers"
        if "broken" in self.names:
            self.options["on_error"] = "skip"
        if chance.random() < 0.3:
            self.options["look_ahead"] = chance.randint(2_000, 60_000)
        if chance.random() < 0.3:
            self.options["max_batch_size"] = chance.randint(1, 20)
        padded = self.sizes.ndim == 1 and not hasattr(self.cost, "base_bytes")
        if padded and self.oversize == "raise" and chance.random() < 0.4:
            most = self.options.get("max_batch_size")
            self.options["max_shapes"] = best_shapes(
                self.sizes, self.cost, self.budget, chance.randint(1, 6), max_batch_size=most
            )
        if chance.random() < 0.15:
            self.options["batches_per_epoch"] = chance.randint(1, 30)

    def process(
        self,
        rank: int,
        worker: int,
        workers: int,
        *,
        epoch: int = 0,
        state: Any = None,
        fuse: str = "",
        budget: int = 0,
        ranks: int = 0,
        rules: dict[str, Any] | None = None,
    ) -> Any:
        """One process of a rank: the stream itself where the rank has no other."""
        functions = [TRANSFORMS[name][0] for name in self.names]
        functions += [fused] * (fuse == "transform")
        source, ranks = source_of(self.kind, self.sizes, self.cuts), ranks or self.ranks
        options = self.options | {"transforms": functions, "num_replicas": ranks, "rank": rank}
        options["collate_fn"] = fused if fuse == "collate" else list
        options |= rules or {}
        stream = process = BudgetedIterableDataset(
            source, self.cost, budget or self.budget, **options
        )
        if workers > 1:
            slot = WorkerSlot(worker=worker, workers=workers, rank=rank, ranks=ranks)
            process = OneProcess(stream, slot)
        if state is None:
            stream.set_epoch(epoch)
        else:
            process.load_state_dict(as_json(state))
        return process

    def batches(
        self, ranks: int, workers: int, samples: int, **options: Any
    ) -> list[list[list[Any]]]:
        """The batches of each worker of each rank; all ranks refuse, or none."""
        reasons, options = self.reasons(ranks, workers, samples), options | {"ranks": ranks}

        def of_rank(rank: int) -> Any:
            mine = [partial(self.process, rank, n, workers, **options) for n in range(workers)]
            try:
                return accepted(lambda: [list(make()) for make in mine], reasons)
            except Refused as refused:
                return refused

        found = [of_rank(rank) for rank in range(ranks)]
        refusals = [one for one in found if isinstance(one, Refused)]
        if refusals:
            assert len(refusals) == ranks or self.apart, "some ranks refuse, and others go on"
            raise refusals[0]
        return found

    def reasons(self, ranks: int, workers: int, samples: int) -> dict[str, bool]:
        """Why the samples may not be dealt evenly.

        They can be where all ranks read the whole, and every micro-batch has room for two.
        """
        even = two_fit(self.sizes, self.cost, self.budget, self.options)
        even &= self.kind in ("iterable", "map")
        # One sample for each rank has to fit; a small one takes some 500 bytes.
        even &= self.options.get("look_ahead", 10**9) >= 1000 * ranks
        even &= "max_shapes" not in self.options and samples >= ranks and self.oversize == "raise"
        even &= not self.names and workers == 1
        is_empty = "batches_per_epoch" in self.options or not self.expected()
        return {
            " ranks": ranks > 1 and not even,
            "the source has no samples": is_empty,
            "drop_last=True drops all": self.options["drop_last"],
        }

    def expected(self) -> Counter[int]:
        """How often each sample is to come."""
        sizes, multiple, counts = self.sizes, self.options["size_multiple"], Counter[int]()
        for n in range(len(sizes)):
            if self.oversize != "skip" or bytes_of(sizes, self.cost, [n], multiple) <= self.budget:
                counts[n] = prod(TRANSFORMS[name][1](n) for name in self.names)
        return +counts

    def check_batches(self, batches: list[list[Any]], budget: int) -> None:
        """None is empty, too large or over the budget, by the sizes that samples have in it."""
        for batch in batches:
            check_batch([size for _, size in batch], self.cost, budget, self.options)

    def shape_of(self, batch: list[Any]) -> tuple[int, int]:
        """The shape that a batch is padded to."""
        return shape_of(self.options["max_shapes"], len(batch), max(size for _, size in batch))

    def check_epoch(self, ranks: list[list[list[Any]]]) -> None:
        """The batches of each worker of each rank are a whole epoch."""
        everything = [batch for rank in ranks for worker in rank for batch in worker]
        self.check_batches(everything, self.budget)
        lengths = {tuple(map(len, rank)) for rank in ranks}
        assert len(lengths) == 1 or self.apart, "numbers of batches of the ranks"
        if "max_shapes" in self.options and not self.apart:
            shapes = [[[self.shape_of(b) for b in one] for one in rank] for rank in ranks]
            assert all(one == shapes[0] for one in shapes), "ranks of a round have other shapes"
        number = self.options.get("batches_per_epoch")
        if number is not None:
            assert all(sum(map(len, rank)) == number for rank in ranks), "batches_per_epoch"
            return
        came, expected = Counter(n for batch in everything for n, _ in batch), self.expected()
        assert came <= expected, "samples come too often"
        assert came == expected or self.options["drop_last"], "samples are missing"


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """Whole epochs; a process that fails and goes on; the rest in other processes."""
    case, told = StreamCase(chance), Counter[str]()
    if case.options["drop_last"]:  # a worker of few samples may drop all of them
        warnings.simplefilter("ignore", OtherNumbersWarning)
    for epoch in range(EPOCHS):
        ranks = case.batches(case.ranks, case.workers, len(case.sizes), epoch=epoch)
        case.check_epoch(ranks)
        told["batches"] += sum(len(worker) for rank in ranks for worker in rank)
    rank, worker = chance.randrange(case.ranks), chance.randrange(case.workers)
    told += faults(case, rank, worker, ranks[rank][worker])
    told += unequal(case)
    if "batches_per_epoch" not in case.options and case.expected():
        told += remeasured(case)
    goes_on = "batches_per_epoch" not in case.options and case.kind in ("iterable", "map", "shards")
    if goes_on and case.expected():
        told += elsewhere(case)
    return told


def faults(case: StreamCase, rank: int, worker: int, whole: list[Any]) -> Counter[str]:
    """One process of the last epoch fails again and again; with what was saved, it ends."""
    chance, told, state, done = case.chance, Counter[str](), None, 0
    fuse, share = chance.choice(["transform", "collate"]), chance.choice([0.1, 0.5, 1])
    # A transform that fails would be skipped.
    kind = Killed if "on_error" in case.options else chance.choice([Fault, Killed])
    while done < len(whole):
        told["starts"] += 1
        options = {"epoch": EPOCHS - 1, "state": state, "fuse": fuse}
        process, taken = case.process(rank, worker, case.workers, **options), done
        with FUSE.lit(chance, 40, told, kind):
            batches = iter(process)
            while (batch := next_of(batches, again=chance.random() < 0.5)) is not None:
                assert batch == whole[taken], "resumed is not as uninterrupted"
                taken += 1
                if chance.random() < share:
                    state, done = process.state_dict(), taken
            assert taken == len(whole), "the rest is too short"
            done = taken
    return told


def unequal(case: StreamCase) -> Counter[str]:
    """What `tracked` compares on ranks differs where their numbers of workers do."""
    numbers = [case.chance.choice([1, 2, 3]) for _ in range(case.ranks)]
    streams = [case.process(rank, 0, 1) for rank in range(case.ranks)]
    facts = [
        one._options.dealing(one._options.slot(workers=n))
        for one, n in zip(streams, numbers, strict=True)
    ]
    if case.apart or len(set(numbers)) == 1:
        return Counter()
    with pytest.raises(RankError, match="the number of workers"):
        _raise_difference(facts)
    return Counter(unequal=1)


def remeasured(case: StreamCase) -> Counter[str]:
    """One worker of every rank, stopped after any batch, goes on under other rules; and again."""
    chance, state, rules = case.chance, None, dict[str, Any]()
    worker, budget, told = chance.randrange(case.workers), case.budget, Counter[str]()
    taken, whole = Counter[str](), Counter[str]()
    ranks = [chance.randrange(case.ranks)] if case.apart else [*range(case.ranks)]
    for stage in range(3):
        options = {"state": state, "budget": budget, "rules": rules}

        def resumed(options: Any = options) -> list[Any]:
            return [case.process(rank, worker, case.workers, **options) for rank in ranks]

        left = 0 if stage else len(case.sizes)
        reasons = case.reasons(case.ranks, case.workers, left)
        try:
            rest = accepted(lambda: [list(one) for one in resumed()], reasons)
        except Refused as refused:
            return told + Counter({f"refused under another cost: {refused}": 1})
        everything = [batch for rank in rest for batch in rank]
        case.check_batches(everything, budget)
        came = Counter(map(repr, chain.from_iterable(everything)))
        assert len(set(map(len, rest))) == 1, "numbers of batches of the ranks"
        whole = whole or came
        if case.options["drop_last"]:
            assert taken + came <= whole or stage, "samples come too often"
        else:
            assert taken + came == whole, "the samples differ under another cost"
        running, stop = resumed(), chance.randint(0, len(rest[0]))
        for one, batches in zip(running, rest, strict=True):
            assert [*islice(one, stop)] == batches[:stop], "resumed is not as uninterrupted"
            taken.update(map(repr, chain.from_iterable(batches[:stop])))
        state = running[0].state_dict()
        if state["epoch"] or not whole:
            break
        told["remeasured"] += 1
        budget = case.budget * (1 if case.oversize == "skip" else chance.choice([1, 2, 3]))
        most = chance.randint(1, case.options.get("max_batch_size", 20))
        rules = {} if "max_shapes" in case.options else {"max_batch_size": most}
    return told


def next_of(batches: Any, *, again: bool) -> Any:
    """The next batch, or `None`; where a collate fails, perhaps after it was asked for again."""
    try:
        return next(batches, None)
    except Fault:
        if not again:
            raise
    return next(batches, None)


def elsewhere(case: StreamCase) -> Counter[str]:
    """What a single process has begun goes on in others, at any boundary of a window."""
    chance, taken = case.chance, list[list[Any]]()
    stream = case.process(0, 0, 1, ranks=1)
    states = [(0, stream.state_dict())]
    try:
        accepted(lambda: list(case.process(0, 0, 1, ranks=1)), case.reasons(1, 1, len(case.sizes)))
    except Refused as refused:
        return Counter({f"refused alone: {refused}": 1})
    for batch in stream:
        taken.append(batch)
        state = stream.state_dict()
        if not workers_of(state)[0]["rounds"] and state["epoch"] == 0:
            states.append((len(taken), state))
    done, state = chance.choice(states)
    ranks, workers = chance.choice([1, 2, 3]), chance.choice([1, 2, 3])
    if "on_error" in case.options:  # with ranks that plan from one source it is refused
        ranks = 1
    if case.kind == "shards" and done:
        workers = 1
    budget = case.budget * (1 if case.oversize == "skip" else chance.choice([1, 2]))
    left = len({n for batch in taken[done:] for n, _ in batch})
    try:
        rest = case.batches(ranks, workers, left, state=state, budget=budget)
    except Refused as refused:
        return Counter({f"refused elsewhere: {refused}": 1})
    assert len({tuple(map(len, rank)) for rank in rest}) == 1, "numbers of batches of the ranks"
    everything = [batch for rank in rest for worker in rank for batch in worker]
    case.check_batches(everything, budget)
    came = Counter(map(repr, chain.from_iterable([*taken[:done], *everything])))
    expected = Counter(map(repr, chain.from_iterable(taken)))
    if case.options["drop_last"]:
        numbers = Counter(n for batch in [*taken[:done], *everything] for n, _ in batch)
        assert numbers <= case.expected(), "samples come too often"
    else:
        assert came == expected, "the samples differ elsewhere"
    return Counter(elsewhere=1)
