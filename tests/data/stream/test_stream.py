"""Streams: exactly once, equal numbers of batches, never over, resumed anywhere."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.fuzzing.streams import StreamCase, limited
from tests.support.refusals import REFUSALS
from tests.support.streams import (
    TOKENS,
    Numbered,
    loader_of,
    make,
    numbers,
    processes_of,
    size_of,
)
from torchbudget import BudgetedIterableDataset, MemoryBudget, PaddedCost
from torchbudget.errors import (
    BudgetError,
    OptionError,
    OtherNumbersWarning,
    OversizeError,
    SampleError,
)


@st.composite
def stream_cases(draw: st.DrawFn) -> StreamCase:
    """Streams of any source, ranks, workers and options, with oversize samples too."""
    oversize = draw(st.sampled_from(["raise", "raise", "raise", "skip", "alone"]))
    problem = draw(limited(most=60, fits=oversize == "raise"))
    return StreamCase(draw(st.randoms(use_true_random=False)), problem, oversize)


@given(stream_cases())
def test_streams_keep_their_laws(case: StreamCase) -> None:
    """Laws 1 to 5 and 7, stopped and started again anywhere: see `tests.fuzzing.streams`."""
    REFUSALS.accepted(case.check, {})


def test_drop_last_leaves_only_what_is_full() -> None:
    """What could still have taken a sample is dropped at the stream's end, and nowhere else."""
    stream = make(Numbered([2] * 103), budget=20, window=40, drop_last=True)
    assert [len(batch) for batch in stream] == [10] * 10


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
        return make(Numbered([3, 50, 4]), budget=18, oversize=oversize)

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
    "iterator": (iter([1]), {}, OptionError, "used up after one epoch.*that returns an iterator"),
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
