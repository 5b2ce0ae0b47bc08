"""Streams of any source under any transforms, which fail, are stopped and go on.

What must hold: over all workers of all ranks each sample comes as often as its transforms make it;
all ranks have as many batches; none is over the budget; what failed and was begun again from the
last state yields the rest of what would have come; the rest after a window's boundary is complete
on any number of workers and ranks, which are refused within a window; the rest after any batch is
complete under another cost, other limits and another look-ahead; states are small, and those of all
ranks are one; ranks with unequal numbers of workers are refused.
"""

from __future__ import annotations

import json
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
import torch
from hypothesis import strategies as st

from tests.fuzzing.faults import FUSE, Fault, Killed, drawn
from tests.support.oracles import bytes_of
from tests.support.refusals import Refused, accepted, two_fit
from tests.support.resuming import as_json
from tests.support.sampler_cases import check_batch
from tests.support.strategies import limits, problems
from tests.support.streams import KINDS, OneProcess, size_of, source_of, workers_of
from torchbudget import BudgetedIterableDataset, PackedCost, PaddedCost, best_shapes, transforms
from torchbudget.checks import shape_of
from torchbudget.data.same_on_ranks import _raise_difference
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.errors import OtherNumbersWarning, RankError, StateMismatchError

EPOCHS = 2


def thrice(sample: Any) -> list[Any]:
    """None, one, two or three of it."""
    return [sample] * (sample[0] % 4)


def shrunk(sample: Any) -> Any:
    """Of a random size below its own, drawn in any of the ways."""
    number, size = sample
    shares = transforms.rng().random(), random.random(), np.random.random(), float(torch.rand(()))
    return number, (np.asarray(size) * shares[number % 4]).astype(int).tolist()


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


def group_of(sample: Any) -> int:
    return int(sample[0] % 2)


@st.composite
def limited(draw: st.DrawFn, *, most: int, fits: bool) -> tuple[Any, Any, int, list[Any]]:
    """Sizes, a cost, a budget, and further limits that each sample fits."""
    sizes, cost, budget = draw(problems(most=most, fits=fits))
    largest = -(-sizes.max(axis=0).astype(np.int64) // 4) * 4  # also after rounding
    return sizes, cost, budget, draw(limits(largest, packed=hasattr(cost, "base_bytes")))


class StreamCase:
    """A stream's arguments, and what must come of it.

    Args:
        chance: chooses the arguments, where it stops, and how it goes on.
        problem: of `limited`.
        oversize: the stream's option.
    """

    def __init__(self, chance: random.Random, problem: Any, oversize: str = "raise") -> None:
        self.chance, self.oversize = chance, oversize
        self.sizes, self.cost, budget, further = problem
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
        if chance.random() < 0.5:
            self.options["limits"] = further
        padded = self.sizes.ndim == 1 and not hasattr(self.cost, "base_bytes")
        if chance.random() < 0.3:
            self.options["group"] = group_of
        elif padded and self.oversize == "raise" and chance.random() < 0.4:
            most = self.options.get("max_batch_size")
            self.options.pop("limits", None)
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
        ranks: int = 0,
        **rules: Any,
    ) -> Any:
        """One process of a rank: the stream itself where the rank has no other."""
        functions = [TRANSFORMS[name][0] for name in self.names]
        functions += [fused] * (fuse == "transform")
        source, ranks = source_of(self.kind, self.sizes, self.cuts), ranks or self.ranks
        options = self.options | {"transforms": functions, "num_replicas": ranks, "rank": rank}
        options |= {"cost": self.cost, "budget": self.budget} | rules
        options["collate_fn"] = fused if fuse == "collate" else list
        stream = process = BudgetedIterableDataset(source, **options)
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
        even &= not self.names and workers == 1 and "group" not in self.options
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

    def check_batches(self, batches: list[list[Any]], **rules: Any) -> None:
        """None is empty, too large or over the budget, by the sizes that samples have in it."""
        options = self.options | {"cost": self.cost, "budget": self.budget} | rules
        for batch in batches:
            sizes = [size for _, size in batch]
            check_batch(sizes, options["cost"], options["budget"], options)
            if "group" in options:
                assert len(set(map(group_of, batch))) == 1, "two groups in a batch"

    def other_rules(self) -> dict[str, Any]:
        """Another cost and budget, caps and look-ahead, that go with the sizes and options."""
        chance, rules = self.chance, dict[str, Any]()
        if "max_shapes" in self.options:
            return {"budget": self.budget * chance.choice([1, 2, 3])}
        rules["max_batch_size"] = chance.randint(1, self.options.get("max_batch_size", 20))
        rules["look_ahead"] = chance.choice([None, 10_000, 60_000])
        if self.oversize == "skip":  # under another budget it would skip others
            return rules
        rules["budget"] = self.budget * chance.choice([1, 2, 3])
        if self.oversize == "raise" and "limits" not in self.options and chance.random() < 0.5:
            unit_bytes: Any = [chance.randint(0, 50) for _ in range(self.sizes[0].size)]
            cost = chance.choice([PaddedCost, PackedCost])(
                fixed_bytes=chance.randint(0, 1000),
                sample_bytes=chance.randint(1, 9),
                unit_bytes=unit_bytes if self.sizes.ndim == 2 else unit_bytes[0],
            )
            largest = self.sizes.max(axis=0).astype(np.int64)
            rules |= {
                "cost": cost,
                "budget": int(cost.batch_bytes(1, largest)) * chance.randint(1, 9),
            }
        return rules

    def shape_of(self, batch: list[Any]) -> tuple[int, int]:
        """The shape that a batch is padded to."""
        return shape_of(self.options["max_shapes"], len(batch), max(size for _, size in batch))

    def check_epoch(self, ranks: list[list[list[Any]]]) -> None:
        """The batches of each worker of each rank are a whole epoch."""
        everything = [batch for rank in ranks for worker in rank for batch in worker]
        self.check_batches(everything)
        lengths = {tuple(map(len, rank)) for rank in ranks}
        assert len(lengths) == 1 or self.apart, "numbers of batches of the ranks"
        if "max_shapes" in self.options and not self.apart:
            shapes = [[[self.shape_of(b) for b in one] for one in rank] for rank in ranks]
            assert all(one == shapes[0] for one in shapes), "ranks of a round have other shapes"
        number = self.options.get("batches_per_epoch")
        if number is not None:
            assert all(sum(map(len, rank)) == number for rank in ranks), "batches_per_epoch"
            assert len(self.process(0, 0, 1)) == number, "len"
            return
        came, expected = Counter(n for batch in everything for n, _ in batch), self.expected()
        assert came <= expected, "samples come too often"
        assert came == expected or self.options["drop_last"], "samples are missing"

    def check(self) -> Counter[str]:
        """Whole epochs; a process that fails and goes on; the rest in other processes."""
        told = Counter[str]()
        with warnings.catch_warnings():
            if self.options["drop_last"]:  # a worker of few samples may drop all of them
                warnings.simplefilter("ignore", OtherNumbersWarning)
            for epoch in range(EPOCHS):
                ranks = self.batches(self.ranks, self.workers, len(self.sizes), epoch=epoch)
                self.check_epoch(ranks)
                told["batches"] += sum(len(worker) for rank in ranks for worker in rank)
            rank, worker = self.chance.randrange(self.ranks), self.chance.randrange(self.workers)
            told += faults(self, rank, worker, ranks[rank][worker])
            told += unequal(self)
            if "batches_per_epoch" not in self.options and self.expected():
                told += remeasured(self)
                if self.kind in ("iterable", "map", "shards"):
                    told += elsewhere(self)
        return told


def faults(case: StreamCase, rank: int, worker: int, whole: list[Any]) -> Counter[str]:
    """One process of the last epoch fails again and again; with what was saved, it ends."""
    chance, told, state, done = case.chance, Counter[str](), None, 0
    fuse, share = chance.choice(["transform", "collate"]), chance.choice([0.1, 0.5, 1])
    small = len(json.dumps(case.process(rank, worker, case.workers, epoch=1).state_dict()))
    small += 80 + case.options["window"] // 6  # a few digits, and a bit for each sample
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
                    assert len(json.dumps(state)) < small, "a large state"
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
    """One worker of every rank, stopped after any batch, goes on under other rules; and again.

    The state of one rank serves all.
    """
    chance, state, rules, told = case.chance, None, dict[str, Any](), Counter[str]()
    worker, ranks = chance.randrange(case.workers), [*range(case.ranks)]
    taken, whole = Counter[str](), Counter[str]()
    if case.apart:
        ranks = [chance.choice(ranks)]
    for stage in range(3):

        def resumed(state: Any = state, rules: Any = rules) -> list[Any]:
            options = {"state": state, **rules}
            return [case.process(rank, worker, case.workers, **options) for rank in ranks]

        reasons = case.reasons(case.ranks, case.workers, 0 if stage else len(case.sizes))
        try:
            rest = accepted(lambda: [list(one) for one in resumed()], reasons)
        except Refused as refused:
            return told + Counter({f"refused under another cost: {refused}": 1})
        everything = [batch for rank in rest for batch in rank]
        case.check_batches(everything, **rules)
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
        state, *others = (as_json(one.state_dict()) for one in running)
        assert all(one == state for one in others), "states of the ranks"
        if state["epoch"] or not whole:
            break
        again = [[*one] for one in resumed(state)]
        assert again == [batches[stop:] for batches in rest], "resumed is not as uninterrupted"
        told["remeasured"] += 1
        rules = case.other_rules()
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
        if state["epoch"] == 0:
            states.append((len(taken), state))
    within = [state for _, state in states if workers_of(state)[0]["rounds"]]
    if within:
        two = (1, 2) if "on_error" in case.options else chance.choice([(1, 2), (2, 1)])
        other = case.process(0, 0, two[1], state=chance.choice(within), ranks=two[0])
        with pytest.raises(StateMismatchError, match="end of a window"):
            list(other)
    done, state = chance.choice([one for one in states if one[1] not in within])
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
    case.check_batches(everything, budget=budget)
    came = Counter(map(repr, chain.from_iterable([*taken[:done], *everything])))
    expected = Counter(map(repr, chain.from_iterable(taken)))
    if case.options["drop_last"]:
        numbers = Counter(n for batch in [*taken[:done], *everything] for n, _ in batch)
        assert numbers <= case.expected(), "samples come too often"
    else:
        assert came == expected, "the samples differ elsewhere"
    return Counter(elsewhere=1)


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """One stream."""
    oversize = chance.choice(["raise", "raise", "raise", "skip", "alone"])
    strategy = limited(most=chance.choice([10, 20, 40, 100]), fits=oversize == "raise")
    return StreamCase(chance, drawn(strategy, chance), oversize).check()
