"""A sampler, and a stream, on several ranks: given by hand, or those of `torch.distributed`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_scripts import script
from tests.support.rank_scripts.planning import OTHERS
from tests.support.ranks import run_ranks, torchrun
from tests.support.samplers import LENGTHS, counted, sampler_of
from tests.support.streams import SIZES, make
from torchbudget.errors import UnevenRanksError


def test_an_uneven_number_is_refused_before_the_first_batch() -> None:
    """Samples that stand alone and are no multiple of the ranks': `len` and `iter` say so.

    `drop_last=True` is the way out that they name; a second look at the epoch meets it again.
    """
    options: dict[str, Any] = {"max_batch_size": 1, "num_replicas": 2}
    for rank in range(2):
        sampler = sampler_of([1, 2, 3], rank=rank, **options)
        batches = iter(sampler)
        for look in (lambda: len(sampler), lambda: next(batches), lambda: next(batches)):  # noqa: B023
            with pytest.raises(UnevenRanksError, match=r"3 samples that need 3 .*drop_last=True"):
                look()
        assert sampler.epoch == sampler.state_dict()["epoch"] == 0
    with pytest.raises(
        UnevenRanksError, match="1 samples are left of epoch 0, too few for 2 ranks"
    ):
        len(sampler_of([1], rank=0, **options))
    those = [sampler_of([1, 2, 3], rank=rank, drop_last=True, **options) for rank in range(2)]
    assert [len(sampler) for sampler in those] == [1, 1]
    drawn = [list(sampler) for sampler in those]
    assert [len(batches) for batches in drawn] == [1, 1]
    assert drawn[0] != drawn[1]


# ---------------------------------------------------------------------- ranks that start later


def stopped(rank: int, batches: int = 3) -> Any:
    """A sampler of two ranks, within an epoch."""
    sampler = sampler_of(num_replicas=2, rank=rank)
    loop = iter(sampler)
    for _ in range(batches):
        next(loop)
    return sampler


def stream_of(rank: int, state: Any = None, epoch: int = 0) -> Any:
    """The batches of a stream that knows its ranks from the beginning, as JSON has them."""
    stream = make("shards", num_replicas=2, rank=rank)
    if state is None:
        stream.set_epoch(epoch)
    else:
        stream.load_state_dict(state)
    return json.loads(json.dumps(list(stream)))


def every(parts: Iterable[Any], total: int) -> bool:
    """Whether all ranks' batches are each sample once, and as many on each."""
    parts = list(parts)
    return counted(batch for part in parts for batch in part) == Counter(range(total))


@pytest.mark.distributed
@pytest.mark.parametrize("start", [run_ranks, torchrun])
def test_ranks_that_start_after_the_sampler_was_made(start: Any, tmp_path: Path) -> None:
    """Each draws its own part: in loaders made before, after `len`, after a state was loaded.

    What a loop has begun alone is not gone on with, unless the epoch is chosen anew.
    """
    begun_stream = make("shards", num_replicas=2, rank=0)
    list(begun_stream)
    streamed_state = begun_stream.state_dict()
    states = [json.dumps(one) for one in (stopped(0).state_dict(), streamed_state)]
    found = start(script("planning.start_late"), tmp_path, 2, *states)
    for rank, one in enumerate(found):
        drawn, part = list(sampler_of(num_replicas=2, rank=rank)), stopped(rank)
        assert one["ranks"] == [2, rank, 0]
        assert one["by hand"] == [2, 3]
        assert one["alone"] == [len(sampler_of())] * 2
        assert one["len"] == [len(drawn)] * 2
        assert one["batches"] == [drawn, drawn]
        assert one["resumed"] == one["chosen"] == drawn[3:]
        assert "but torch.distributed now has 2 ranks" in one["refused"][0]
        assert "ranks: saved 1, now 2" in one["refused"][1]
        assert "their numbers of batches differ" in one["refused"][2]
        assert one["copied"] == drawn
        part.set_epoch(1)
        assert one["later"] == list(part)
        assert one["resumed stream"] == stream_of(rank, state=streamed_state)
        assert one["later stream"] == stream_of(rank, epoch=1)
    assert every((one["batches"][0] for one in found), 300)
    for number in range(3):
        parts = [one["streams"][number] for one in found]
        assert every(parts, len(SIZES))
        assert number == 2 or len({len(part) for part in parts}) == 1


@pytest.mark.distributed
@pytest.mark.slow
def test_a_spawned_worker_takes_what_its_parent_saw(tmp_path: Path) -> None:
    """It has no process group to ask: the parts of both ranks are still each sample once."""
    first, second = run_ranks(script("planning.spawn"), tmp_path, 2)
    assert len(first) == len(second)
    assert sorted(number for batch in first + second for number in batch) == list(range(60))


# ---------------------------------------------------------------------- ranks that differ


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of two ranks, each case of the script in turn."""
    return run_ranks(script("planning.compare"), tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.distributed
def test_what_differs_is_an_error_on_every_rank(compared: Any) -> None:
    """Otherwise samples would come twice or never, in silence; it names `agree`.

    What was read is compared at the first batch of a loop that is tracked, or has no workers: it
    knows its window. Else each sample comes once, on equal numbers of batches.
    """
    for case, (told, first) in compared[0][0].items():
        found = [first, compared[1][0][case][1]]
        if not told:
            assert sum(map(sum, found)) == len(LENGTHS), case
            assert len(found[0]) == len(found[1]), case
        elif told == OTHERS:
            assert all(one.startswith(f"RankError: {OTHERS}") for one in found), case
        else:
            for one in found:
                assert one.startswith("RankError: all ranks must plan the same samples"), case
                assert "agree(cost, budget)" in one, case
                assert told in one, case


@pytest.mark.distributed
def test_what_is_read_apart_need_not_be_the_same(compared: Any) -> None:
    """Ranks given by hand, and ranks that each read their own part of the source."""
    for _, each in compared:
        assert sum(each["by hand"]) == len(LENGTHS)
        assert len(each["each its own"]) == 3
    outcomes = compared[0][1]
    assert sum(outcomes["alone afterwards"]) < len(LENGTHS)
    assert sum(outcomes["loader, alone"]) == len(LENGTHS)  # no other rank has called it
    assert sum(outcomes["thread"]) < len(LENGTHS)


@pytest.mark.distributed
def test_what_fails_on_one_rank_fails_on_all(compared: Any) -> None:
    """A budget that cannot be read keeps no other rank waiting."""
    first, second = (each["not agreed"] for _, each in compared)
    assert first.startswith("BudgetError")
    assert second.startswith("RankError: rank 0 failed, see its traceback: BudgetError")


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """The others raise at the group's timeout, instead of waiting for it in their first step."""
    first, _, third = run_ranks(script("planning.missing"), tmp_path, 3)
    assert first.startswith("RankError: not all ranks have")
    assert "Rank 1 failed" in first or "Ranks 1 failed" in first
    assert third.startswith("RankError: not all ranks have")
