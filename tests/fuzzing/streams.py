"""Streams of any source under any transforms, whose reads fail, that are stopped and go on.

What must hold: over all workers of all ranks each sample comes as often as its transforms make it;
all ranks have as many batches; none is over the budget; what failed and was begun again from the
last state yields the rest of what would have come; another epoch, or the rest after a window's
boundary, is complete on any number of workers and ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from tests.fuzzing.drawing import drawn
from tests.fuzzing.faults import FUSE, Fault, Killed, check_is_made, fused
from tests.support.oracles import stated_bytes
from tests.support.refusals import Refused, accepted
from tests.support.resuming import as_json
from tests.support.strategies import problems
from tests.support.streams import KINDS, Indexed, OneProcess, size_of, source_of, workers_of
from torchbudget import BudgetedIterableDataset, transforms
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.errors import SampleError

EPOCHS = 2
STARTS = 8

# ---------------------------------------------------------------------- transforms


def thrice(sample: Any) -> list[Any]:
    """None, one, two or three of it."""
    return [sample] * (sample[0] % 4)


def is_kept(sample: Any) -> bool:
    return bool(sample[0] % 5)


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


def same(sample: Any) -> Any:
    return sample


TRANSFORMS: dict[str, Any] = {
    "same": same,
    "thrice": transforms.expand(thrice),
    "kept": transforms.keep_if(is_kept),
    "shrunk": shrunk,
    "sometimes shrunk": transforms.random_apply(0.5, shrunk),
    "broken": broken,
}


def copies(number: int, names: list[str]) -> int:
    """How often a sample is to come."""
    found = 1
    if "thrice" in names:
        found *= number % 4
    if "kept" in names:
        found *= bool(number % 5)
    if "broken" in names:
        found *= number % 7 != 3
    return found


# ---------------------------------------------------------------------- faults


def fused_collate(samples: list[Any]) -> list[Any]:
    FUSE()
    return list(samples)


class FusedSource:
    """An iterable that may fail before any of its samples."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Any:
        return map(fused, self.source)


class FusedIndexed(Indexed):
    def __getitem__(self, index: int) -> Any:
        return fused(super().__getitem__(index))


def with_fuse(source: Any) -> Any:
    """The same samples, of which any may fail to be read."""
    if isinstance(source, list):
        return [FusedSource(shard) for shard in source]
    if isinstance(source, Indexed):
        return FusedIndexed(source.samples)
    if isinstance(source, IterableDataset):  # it splits itself
        return source
    if callable(source):
        return lambda shard, shards: map(fused, source(shard, shards))
    return FusedSource(source)


# ---------------------------------------------------------------------- a case


class StreamCase:
    """A stream's arguments, and what must come of it."""

    def __init__(
        self, chance: random.Random, *, samples: tuple[int, ...] = (10, 20, 40, 100)
    ) -> None:
        self.chance = chance
        self.oversize = chance.choice(["raise", "raise", "raise", "skip", "alone"])
        most = chance.choice(samples)
        sizes, cost, budget = drawn(problems(most=most, fits=self.oversize == "raise"), chance)
        self.sizes, self.cost, self.budget = sizes, cost, max(budget, 1)
        self.kind = chance.choice(KINDS)
        self.cuts = [chance.randint(0, 200) for _ in range(chance.randint(0, 4))]
        self.ranks, self.workers = chance.choice([1, 1, 2, 3, 5]), chance.choice([1, 1, 2, 3])
        if self.kind == "splits itself":
            self.workers = 1
        self.names = [name for name in TRANSFORMS if chance.random() < 0.25]
        self.apart = self.kind == "function" and self.ranks > 1
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
            self.options["split"] = "workers"
        if chance.random() < 0.3:
            self.options["look_ahead"] = chance.randint(2_000, 60_000)
        if chance.random() < 0.3:
            self.options["max_batch_size"] = chance.randint(1, 20)
        if chance.random() < 0.15:
            self.options["batches_per_epoch"] = chance.randint(1, 30)
        if "broken" in self.names:
            if self.ranks > 1 and not self.apart:
                self.names.remove("broken")
            else:
                self.options["on_error"] = "skip"
        if chance.random() < 0.1 and not {"shrunk", "sometimes shrunk"} & set(self.names):
            self.options["threads"] = 2
        # A sample that is shrunk may fit.
        if self.oversize == "skip":
            self.names = [name for name in self.names if "shrunk" not in name]

    def make(self, *, fuse: str | None = None, **changed: Any) -> BudgetedIterableDataset:
        """A stream, whose fuse is in its source, its transforms or its collate."""
        source = source_of(self.kind, self.sizes, self.cuts)
        if fuse == "source":
            source = with_fuse(source)
        functions = [TRANSFORMS[name] for name in self.names]
        options = {
            "num_replicas": self.ranks,
            "rank": 0,
            "collate_fn": fused_collate if fuse == "collate" else list,
            "transforms": [*functions, fused] if fuse == "transform" else functions,
            **self.options,
            **changed,
        }
        budget = options.pop("budget", self.budget)
        return BudgetedIterableDataset(source, self.cost, budget, **options)

    def bytes_of(self, batch: list[Any]) -> float:
        """From the sizes of the samples as they are in it."""
        multiple = self.options["size_multiple"]
        sizes = np.array([size for _, size in batch], np.int64)
        return stated_bytes(self.cost, -(-sizes // multiple) * multiple)

    def reasons(self, ranks: int, workers: int, samples: int) -> dict[str, bool]:
        """Why the samples may not be dealt evenly.

        They can be where all ranks read the whole, and every micro-batch has room for two.
        """
        multiple = self.options["size_multiple"]
        largest = np.max(self.sizes, axis=0).astype(np.int64)
        pair = stated_bytes(self.cost, np.stack([-(-largest // multiple) * multiple] * 2))
        even = pair <= self.budget and self.options.get("max_batch_size") != 1
        even &= self.kind in ("iterable", "map") and "look_ahead" not in self.options
        even &= samples >= ranks and self.oversize == "raise"
        even &= not self.names and workers == 1
        return {
            " ranks": ranks > 1 and not even,
            "the source has no samples": (
                "batches_per_epoch" in self.options or not self.expected()
            ),
        }

    def expected(self) -> Counter[int]:
        """How often each sample is to come."""
        plain = np.asarray(self.sizes).tolist()
        counts = Counter({n: copies(n, self.names) for n in range(len(plain))})
        if self.oversize == "skip":
            fits = [self.bytes_of([one]) <= self.budget for one in enumerate(plain)]
            counts = Counter({n: count for n, count in counts.items() if fits[n]})
        return +counts

    def check_batches(self, batches: list[list[Any]], budget: int | None = None) -> None:
        """None is empty, too large or over the budget."""
        limit = self.budget if budget is None else budget
        for batch in batches:
            assert batch, "an empty batch"
            assert len(batch) <= self.options.get("max_batch_size", len(batch)), "max_batch_size"
            if self.oversize != "alone" or len(batch) > 1:
                bytes_ = self.bytes_of(batch)
                assert bytes_ <= limit * (1 + 1e-12), f"{bytes_} bytes of {limit}"

    def check_epoch(self, ranks: list[list[list[Any]]]) -> None:
        """The batches of each worker of each rank are a whole epoch."""
        everything = [batch for rank in ranks for worker in rank for batch in worker]
        self.check_batches(everything)
        lengths = {tuple(map(len, rank)) for rank in ranks}
        assert len(lengths) == 1 or self.apart, "numbers of batches of the ranks"
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
    epochs = whole_epochs(case, case.ranks, case.workers)
    for ranks in epochs:
        case.check_epoch(ranks)
        told["batches"] += sum(len(worker) for rank in ranks for worker in rank)
    rank, worker = chance.randrange(case.ranks), chance.randrange(case.workers)
    told += faults(case, rank, worker, [ranks[rank][worker] for ranks in epochs])
    goes_on = "batches_per_epoch" not in case.options and case.kind in ("iterable", "map", "shards")
    if goes_on and case.expected():
        told += elsewhere(case)
    return told


def process_of(case: StreamCase, rank: int, worker: int, workers: int, **changed: Any) -> Any:
    """One process: a stream that is iterated as it is, where its rank has no other."""
    ranks = changed.get("num_replicas", case.ranks)
    if workers == 1:
        return case.make(rank=rank, **changed)
    slot = WorkerSlot(worker=worker, workers=workers, rank=rank, ranks=ranks)
    return OneProcess(case.make(**changed), slot)


def epochs_of(case: StreamCase, rank: int, worker: int, workers: int, **changed: Any) -> list[Any]:
    """The batches of one process; epochs advance by themselves where it has the stream alone."""
    process = process_of(case, rank, worker, workers, **changed)
    found = []
    for epoch in range(EPOCHS):
        if workers > 1:
            process = process_of(case, rank, worker, workers, **changed)
            process.stream.set_epoch(epoch)
        found.append(list(process))
    return found


def whole_epochs(case: StreamCase, ranks: int, workers: int, **changed: Any) -> list[Any]:
    """Of each epoch, the batches of each worker of each rank; all of them refuse, or none."""
    changed["num_replicas"], reasons = ranks, case.reasons(ranks, workers, len(case.sizes))
    found, refusals = [], []
    for rank in range(ranks):
        mine = [partial(epochs_of, case, rank, n, workers, **changed) for n in range(workers)]
        try:
            found.append(accepted(lambda mine=mine: [one() for one in mine], reasons))
        except Refused as refused:
            refusals.append(refused)
    if refusals:
        assert not found or case.apart, "some ranks refuse, and others go on"
        raise refusals[0]
    return [[[worker[epoch] for worker in rank] for rank in found] for epoch in range(EPOCHS)]


# ---------------------------------------------------------------------- faults and resuming


def faults(case: StreamCase, rank: int, worker: int, epochs: list[Any]) -> Counter[str]:
    """One process fails again and again; with what was saved, the rest is the rest."""
    chance, told, state, done = case.chance, Counter[str](), None, 0
    whole = epochs[0] if case.workers > 1 else [batch for epoch in epochs for batch in epoch]
    skips, in_threads = "on_error" in case.options, "threads" in case.options
    # A read or a transform that fails would be skipped, and none is killed alone in a thread.
    places = ["collate"] if skips and in_threads else ["source", "transform", "collate"]
    fuse = chance.choice(places)
    FUSE.kind = Killed if skips else chance.choice([Fault, Killed])
    if in_threads:
        FUSE.kind = Fault
    share = chance.choice([0.1, 0.5, 1])
    while done < len(whole):
        told["starts"] += 1
        process = process_of(case, rank, worker, case.workers, fuse=fuse)
        if state is not None:
            process.load_state_dict(as_json(state))
        FUSE.left = chance.randint(1, 40) if told["starts"] < STARTS else 0
        taken = 0
        try:
            while done + taken < len(whole):
                batches = iter(process)
                while (batch := next_of(batches, again=chance.random() < 0.5)) is not None:
                    assert batch == whole[done + taken], "resumed is not as uninterrupted"
                    taken += 1
                    if chance.random() < share:
                        state, done, taken = process.state_dict(), done + taken, 0
                if case.workers == 1:  # the state is that of the next epoch's beginning
                    state, done, taken = process.state_dict(), done + taken, 0
                else:
                    done, taken = done + taken, 0
                    assert done == len(whole), "the rest is too short"
        except (Fault, Killed, SampleError) as error:
            check_is_made(error)
            told["faults"] += 1
    FUSE.left = 0
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
    chance = case.chance
    one = {"num_replicas": 1}
    stream = case.make(**one)
    taken: list[list[Any]] = []
    states = [(0, stream.state_dict())]
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
    changed = {"num_replicas": ranks, "budget": budget}
    left = len({n for batch in taken[done:] for n, _ in batch})
    rest = []
    for rank in range(ranks):
        mine = [process_of(case, rank, n, workers, **changed) for n in range(workers)]
        for process in mine:
            process.load_state_dict(as_json(state))
        try:
            rest.append(
                accepted(
                    lambda mine=mine: [list(process) for process in mine],
                    case.reasons(ranks, workers, left),
                )
            )
        except Refused as refused:
            assert not rest, "some ranks refuse, and others go on"
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
