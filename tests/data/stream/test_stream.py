"""Streams: exactly once, equal numbers of batches, never over, resumed anywhere."""

from __future__ import annotations

import json
import warnings
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.support.oracles import bytes_of
from tests.support.refusals import Refusals, two_fit
from tests.support.resuming import in_parts
from tests.support.strategies import limits, problems
from tests.support.streams import (
    TOKENS,
    Numbered,
    OneProcess,
    loader_of,
    numbers,
    processes_of,
    same,
    shards_of,
    size_of,
    workers_of,
)
from torchbudget import BudgetedIterableDataset, MemoryBudget, PaddedCost
from torchbudget.errors import (
    BudgetError,
    OptionError,
    OtherNumbersWarning,
    OversizeError,
    SampleError,
    StateError,
    StateMismatchError,
    UnevenRanksError,
)


def number_of_group(sample: Any) -> int:
    return int(sample[0] % 2)


@st.composite
def streams(draw: st.DrawFn, *, most_ranks: int = 8) -> tuple[Any, dict[str, Any], Any]:
    """Sizes, and the arguments of a stream over them."""
    sizes, cost, budget = draw(problems(most=120))
    ranks = draw(st.integers(1, most_ranks))
    options: dict[str, Any] = {
        "size": size_of,
        "window": draw(st.integers(4 * ranks, 60 + 4 * ranks)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
        "num_replicas": ranks,
        "rank": 0,
        "collate_fn": list,
        "limits": draw(limits(sizes.max(axis=0), packed=hasattr(cost, "base_bytes"))),
    }
    if draw(st.booleans()):
        options["group"] = number_of_group
    if draw(st.booleans()):
        options["look_ahead"] = draw(st.integers(20_000, 60_000))
    if draw(st.booleans()):
        options["transforms"] = [same]
    source = Numbered(sizes)
    if draw(st.booleans()):
        source = shards_of(sizes, draw(st.lists(st.integers(0, 200), max_size=4)))
    return sizes, {"cost": cost, "budget": max(budget, 1), **options}, source


@st.composite
def other_rules(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a stream's micro-batches; the budget is a factor."""
    most = draw(st.sampled_from([None, 1, 3]))
    return {"budget": draw(st.integers(1, 3)), "max_batch_size": most, "limits": []}


REFUSALS = Refusals()


@pytest.fixture(scope="module", autouse=True)
def most_cases_are_accepted() -> Iterator[None]:
    yield
    REFUSALS.check()


def reasons_of(made: Any) -> dict[str, bool]:
    """Why samples may not be dealt evenly to several ranks.

    With a source that all read, and room for two samples in every micro-batch, only where there are
    fewer samples than ranks; a look-ahead of some hundred samples changes nothing.
    """
    sizes, options, source = made
    ranks = options["num_replicas"]
    even = two_fit(sizes, options["cost"], options["budget"], options) and len(sizes) >= ranks
    even &= not isinstance(source, list) and "group" not in options
    return {f"{ranks} ranks": ranks > 1 and not even}


@given(streams(), st.integers(1, 4))
def test_exactly_once_equal_numbers_and_never_over(made: Any, workers: int) -> None:
    """Over all ranks and workers; each worker of a rank has as many as that of any other.

    Where samples cannot be dealt evenly all ranks say so.
    """
    sizes, options, source = made
    make = partial(BudgetedIterableDataset, source, **options)
    batches = [
        REFUSALS.accepted(lambda mine=mine: [list(process) for process in mine], reasons_of(made))
        for mine in processes_of(make, workers)
    ]
    if None in batches:
        assert set(map(type, batches)) == {type(None)}
        return
    everything = [batch for rank in batches for worker in rank or [] for batch in worker]
    assert numbers(everything) == list(range(len(sizes)))
    assert len({tuple(map(len, rank or [])) for rank in batches}) == 1
    for batch in everything:
        for cost, amount in [(options["cost"], options["budget"]), *options["limits"]]:
            assert bytes_of([size for _, size in batch], cost) <= amount
        if "group" in options:
            assert len(set(map(number_of_group, batch))) == 1


@given(streams(most_ranks=3), st.integers(1, 3), st.data())
def test_resumed_at_any_batch(made: Any, workers: int, data: st.DataObject) -> None:
    """In every process alone: what was given, and the rest, are the uninterrupted epoch.

    The state is plain, and no larger than at the beginning but for a few digits, and one bit for
    each sample of a window that was begun.
    """
    _, options, source = made
    make = partial(BudgetedIterableDataset, source, **options)
    for process in (process for rank in processes_of(make, workers) for process in rank):
        lengths: set[int] = set()

        def save(running: Any, done: int, lengths: set[int] = lengths) -> Any:
            lengths.add(len(json.dumps(running.state_dict())))
            return running.state_dict()

        save(process, 0)
        whole = REFUSALS.accepted(lambda process=process: list(process), reasons_of(made))
        if whole is None:
            return
        again = partial(OneProcess, slot=process.slot)
        stops = data.draw(st.lists(st.integers(0, len(whole)), max_size=2))
        assert in_parts(lambda again=again: again(make()), stops, save=save) == whole
        assert max(lengths) < min(lengths) + 80 + options["window"] // 6


@given(streams(most_ranks=3), st.integers(1, 2), st.data())
def test_under_other_rules_from_any_batch(made: Any, workers: int, data: st.DataObject) -> None:
    """What is left comes once, on equal numbers of batches, within the new rules; and so again.

    The state of one rank serves all, and the same rules continue with the same batches.
    """
    _, options, source = made
    worker = data.draw(st.integers(0, workers - 1))
    state, taken, whole = None, list[int](), list[int]()
    for rules in [{}, *data.draw(st.lists(other_rules(), min_size=1, max_size=3))]:
        now = options | rules | {"budget": options["budget"] * rules.get("budget", 1)}
        make = partial(BudgetedIterableDataset, source, **now)

        def resumed(make: Any = make, state: Any = state) -> list[OneProcess]:
            those = [rank[worker] for rank in processes_of(make, workers)]
            for one in those if state is not None else ():
                one.load_state_dict(state)
            return those

        reasons = reasons_of((made[0], now, source))
        if taken:  # two may fit, but what is left may be fewer samples than ranks
            reasons = {f"{now['num_replicas']} ranks": now["num_replicas"] > 1}
        rest = REFUSALS.accepted(lambda: [list(one) for one in resumed()], reasons)
        if rest is None:
            return
        everything = [batch for rank in rest for batch in rank]
        whole = whole or numbers(everything)
        assert sorted(taken + numbers(everything)) == whole
        assert len(set(map(len, rest))) == 1
        for batch in everything:
            for cost, amount in [(now["cost"], now["budget"]), *now["limits"]]:
                assert bytes_of([size for _, size in batch], cost) <= amount
        stop = data.draw(st.integers(0, len(rest[0])))
        running = [(one, [*islice(one, stop)]) for one in resumed()]
        assert [batches for _, batches in running] == [rank[:stop] for rank in rest]
        states = [json.loads(json.dumps(one.state_dict())) for one, _ in running]
        assert all(one == states[0] for one in states)
        state = states[0]
        if state["epoch"]:
            return
        taken += numbers([batch for _, batches in running for batch in batches])
        again = resumed(make, state)
        assert [[*one] for one in again] == [rank[stop:] for rank in rest]


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 3), st.integers(20, 200))
def test_other_numbers_of_workers_and_ranks_go_on(
    before: int, workers: int, ranks: int, n: int
) -> None:
    """After a window: every remaining sample once. Within one it is refused."""
    sizes = np.random.default_rng(n).integers(1, 30, n)

    def stream(ranks: int) -> BudgetedIterableDataset:
        options = {"size": size_of, "window": 16, "num_replicas": ranks, "rank": 0}
        return BudgetedIterableDataset(Numbered(sizes), TOKENS, 90, **options, collate_fn=list)

    running = stream(1)
    reader = iter(running)
    begun = list(islice(reader, before))
    state = json.loads(json.dumps(running.state_dict()))
    others = [one for rank in processes_of(lambda: stream(ranks), workers) for one in rank]
    for one in others:
        one.load_state_dict(state)
    if workers_of(state)[0]["rounds"] and (workers, ranks) != (1, 1):
        with pytest.raises(StateMismatchError, match="end of a window"):
            list(others[0])
        return
    rest: list[Any] = []
    try:
        for one in others:
            rest += list(one)
    except UnevenRanksError:
        assert n - len(numbers(begun)) < ranks
        return
    if state["epoch"] == 0:
        assert numbers(begun + rest) == list(range(n))


@given(streams(most_ranks=3), st.integers(1, 3), st.integers(1, 15))
def test_len_is_what_comes(made: Any, workers: int, batches: int) -> None:
    """On every rank, over its workers; unless one has no samples, or they cannot be dealt."""
    _, options, source = made
    make = partial(BudgetedIterableDataset, source, **options, batches_per_epoch=batches)
    assert len(make()) == batches
    reasons = reasons_of(made) | {"the source has no samples": True}
    for rank in processes_of(make, workers):
        found = REFUSALS.accepted(
            lambda rank=rank: sum(len(list(process)) for process in rank), reasons
        )
        if found is None:
            return
        assert found == batches


def test_drop_last_leaves_only_what_is_full() -> None:
    """What could still have taken a sample is dropped at the stream's end, and nowhere else."""
    sizes = [2] * 103
    options: dict[str, Any] = {"size": size_of, "window": 40, "collate_fn": list}
    stream = BudgetedIterableDataset(Numbered(sizes), TOKENS, 20, **options, drop_last=True)
    assert [len(batch) for batch in stream] == [10] * 10
    make = partial(
        BudgetedIterableDataset,
        Numbered(sizes),
        TOKENS,
        20,
        **options,
        drop_last=True,
        num_replicas=2,
        rank=0,
    )
    assert len({sum(map(len, map(list, rank))) for rank in processes_of(make, 1)}) == 1


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_epoch_of_which_drop_last_leaves_nothing(workers: int) -> None:
    """A tracked loop and a process that reads all of it raise, a worker beside others warns."""

    def loader() -> DataLoader[Any]:
        stream = BudgetedIterableDataset(shards, TOKENS, 20, size=size_of, **options)
        return loader_of(stream, workers)

    options: dict[str, Any] = {"drop_last": True, "collate_fn": len}
    shards = [list(Numbered([2] * n)) for n in (3, 2)]
    found = loader()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherNumbersWarning)  # of forked workers
        with pytest.raises(OptionError, match="drop_last=True drops all samples of the epoch"):
            list(found.dataset.tracked(found))  # type: ignore[attr-defined]
    error: Any = (
        (OptionError, "of the epoch") if workers < 2 else (OtherNumbersWarning, "of worker")
    )
    with pytest.raises(error[0], match=f"drop_last=True drops all samples {error[1]}"):
        list(loader())
    shards.append(list(Numbered([2] * 20)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherNumbersWarning)
        assert sum(loader()) == 20
    options["batches_per_epoch"] = 2
    shards.pop()
    with pytest.raises(SampleError, match="skipping or drop_last leave samples"):
        list(loader())


def test_a_predicate_instead_of_a_cost() -> None:
    """`should_add(batch, sample)`, in the order of the stream; and dealt to ranks."""

    def should_add(batch: list[Any], sample: Any) -> bool:
        return sum(size for _, size in batch) + sample[1] <= 10

    def stream(ranks: int, **options: Any) -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            Numbered([3, 4, 5, 1, 9, 2, 2]),
            should_add,
            None,
            shuffle=False,
            collate_fn=list,
            num_replicas=ranks,
            rank=0,
            **options,
        )

    assert [[s for _, s in b] for b in stream(1)] == [[3, 4], [5, 1], [9], [2, 2]]
    assert [[s for _, s in b] for b in stream(1, size=size_of)] == [[9], [5, 4], [3, 2, 2, 1]]
    for ranks in (2, 3, 7):
        batches = [list(one) for [one] in processes_of(partial(stream, ranks), 1)]
        assert numbers([b for rank in batches for b in rank]) == list(range(7))
        assert len(set(map(len, batches))) == 1


def test_oversize() -> None:
    def stream(oversize: Any) -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            Numbered([3, 50, 4]), TOKENS, 18, size=size_of, oversize=oversize, collate_fn=list
        )

    with pytest.raises(
        OversizeError,
        match="at sample 1 of the items from 0 on: size 50 needs 50 B of 18 B",
    ):
        list(stream("raise"))
    skipping = stream("skip")
    assert numbers(list(skipping)) == [0, 2]
    assert skipping.skipped_samples.oversize == 1
    assert sorted(len(batch) for batch in stream("alone")) == [1, 2]


class Spent:
    def __iter__(self) -> Iterator[int]:
        return iter(())


def never() -> bool:
    return False


def two(shard: int, num_shards: int) -> Iterator[int]:
    return iter([shard, num_shards])


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "iterator": (iter([1]), {}, OptionError, "used up after one epoch"),
    "samples": (["a", "b"], {}, OptionError, "MemoryBudgetBatchSampler"),
    "no shards": ([], {}, OptionError, "empty"),
    "a file's name": ("texts.jsonl", {}, OptionError, "characters, keys or columns"),
    "splits": (UserDict(train=[1], test=[2]), {}, OptionError, "one split of a data set"),
    "splits as shards": ([UserDict(train=[1])], {}, OptionError, "shard 0 is a UserDict"),
    "table": (pd.DataFrame({"x": [1]}), {}, OptionError, "the rows of a table"),
    "Arrow table": (pa.table({"x": [1]}), {}, OptionError, "the rows of a table"),
    "tables as shards": ([pd.DataFrame({"x": [1]})], {}, OptionError, "shard 0 is a DataFrame"),
    "number": (5, {}, OptionError, "expected an iterable"),
    "no cost": (Spent(), {"cost": 5}, OptionError, "a predicate"),
    "class": (Spent(), {"cost": PaddedCost}, OptionError, "a predicate"),
    "no budget": (Spent(), {"budget": None}, BudgetError, "must limit the device"),
    "window": (Spent(), {"window": 1, "num_replicas": 2, "rank": 0}, OptionError, "at least the 2"),
    "split": (Spent(), {"split": "nodes"}, OptionError, "split"),
    "a part of what is the same": (range(9), {"split": "ranks"}, OptionError, "map-style"),
    "oversize": (Spent(), {"oversize": "drop"}, OptionError, "oversize"),
    "on_error": (Spent(), {"on_error": "drop"}, OptionError, "on_error"),
    "skip on ranks": (
        Spent(),
        {"on_error": "skip", "num_replicas": 2, "rank": 0},
        OptionError,
        r"transforms\.keep_if.*function \(shard, num_shards\)",
    ),
    "skip on ranks by index": (
        range(9),
        {"on_error": "skip", "num_replicas": 2, "rank": 0},
        OptionError,
        r"transforms\.keep_if.*function \(shard, num_shards\)",
    ),
    "iterators as shards": ([iter([1])], {}, OptionError, "shard 0 is an iterator"),
    "shuffle": (Spent(), {"shuffle": 1}, OptionError, "bool"),
    "threads": (Spent(), {"threads": -1}, OptionError, "threads"),
    "predicate": (Spent(), {"cost": never, "max_batch_size": 3}, OptionError, "alone decides"),
    "a predicate's limits": (
        Spent(),
        {"cost": never, "limits": [(TOKENS, 9)]},
        OptionError,
        "alone decides",
    ),
    "group": (Spent(), {"group": "language"}, OptionError, "group must be a function"),
    "a predicate's group": (
        Spent(),
        {"cost": never, "budget": None, "group": str},
        OptionError,
        "group must be",
    ),
    "limits": (Spent(), {"limits": [TOKENS]}, OptionError, "pairs of a cost model and an amount"),
    "no limits": (Spent(), {"limits": None}, OptionError, "pairs of a cost model and an amount"),
    "a predicate's budget": (Spent(), {"cost": never}, OptionError, "pass None as the budget"),
    "a predicate's oversize": (
        Spent(),
        {"cost": never, "budget": MemoryBudget(host=10), "oversize": "skip"},
        OptionError,
        "leave out oversize",
    ),
    "a hang": (two, {"num_replicas": 2, "rank": 0}, OptionError, "wait"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_hold_is_refused_at_once(case: str) -> None:
    source, options, error, text = WRONG[case]
    arguments = {"cost": TOKENS, "budget": 10} | options
    with pytest.raises(error, match=text):
        BudgetedIterableDataset(source, **arguments)


def test_states_of_other_streams_are_refused() -> None:
    def stream(**options: Any) -> BudgetedIterableDataset:
        arguments = {"cost": TOKENS, "budget": 90, "window": 20} | options
        return BudgetedIterableDataset(
            Numbered(range(1, 60)), **arguments, size=size_of, collate_fn=list
        )

    running = stream()
    next(iter(running))
    state = running.state_dict()
    for options, text in (
        ({"window": 30}, "window: saved 20"),
        ({"seed": 3}, "seed"),
        ({"num_replicas": 2, "rank": 0}, "end of a window"),
    ):
        other = stream(**options)
        with pytest.raises(StateMismatchError, match=text):  # noqa: PT012 (at either)
            other.load_state_dict(state)
            iter(other)
    with pytest.raises(StateError, match="state_dict"):
        running.load_state_dict({"version": 9})
