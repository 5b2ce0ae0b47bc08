"""A sampler, and a stream, on several ranks: given by hand, or those of `torch.distributed`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_scripts import script
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
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two ranks, each case of the script in turn."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(script("planning.compare"), folder, 2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("budget", "budget_bytes: 2000 on rank 0, 1700 on rank 1"),
        ("cost", "cost: "),
        ("time", "time: "),
        ("limits", "limits: "),
        ("seed", "seed: 0 on rank 0, 1 on rank 1"),
        ("sizes", f"the number of samples: {len(LENGTHS)} on rank 0, {len(LENGTHS) - 1} on rank 1"),
        ("window", "window: 64 on rank 0, 65 on rank 1"),
        ("batches_per_epoch", "batches_per_epoch: 8 on rank 0, 9 on rank 1"),
        ("epoch", "epoch: 0 on rank 0, 1 on rank 1"),
        ("state", "rounds: 0 on rank 0, 3 on rank 1"),
        ("once", "window: "),
        ("twice", "window: "),
        ("stream", "budget_bytes: 2000 on rank 0, 1700 on rank 1"),
        ("stream, workers", "seed: 0 on rank 0, 1 on rank 1"),
        ("stream, look_ahead", "look_ahead: "),
        ("stream, epoch", "epoch: 0 on rank 0, 1 on rank 1"),
        ("stream, plain", "window: 64 on rank 0, 65 on rank 1"),
        ("stream, 1 and 2 workers", "the number of workers (at least 1): 1 on rank 0, 2 on rank 1"),
        ("stream, 1 and 2 workers of shards", "the number of workers (at least 1): 1 on rank 0"),
        ("stream, 1 and 2 workers of parts", "the number of workers (at least 1): 1 on rank 0"),
        ("stream, as before on one", "the number of workers (at least 1): 1 on rank 0, 2 on rank"),
        ("packed and padded", "cost: "),
        ("stream, the host's look-ahead", "look_ahead: 250000000 on rank 0, 125000000 on rank 1"),
        ("stream, unequal later", "the number of workers (at least 1): 2 on rank 0, 3 on rank 1"),
    ],
)
def test_what_differs_is_an_error_on_every_rank(
    outcomes: list[dict[str, Any]], case: str, told: str
) -> None:
    """Otherwise samples would come twice or never, in silence; it names `agree`."""
    for each in outcomes:
        assert each[case].startswith("RankError: all ranks must plan the same samples")
        assert "agree(cost, budget)" in each[case]
        assert told in each[case]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["of rank", "of rank, workers", "of rank, plain", "crops"])
def test_other_samples_are_an_error_on_every_rank(
    outcomes: list[dict[str, Any]], case: str
) -> None:
    """At the first batch of a loop that is tracked, or has no workers: it knows its window."""
    for each in outcomes:
        assert each[f"stream, {case}"].startswith("RankError: rank 0 and rank 1 read different")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        "same",
        "agreed",
        "stream, agreed",
        "stream, same",
        "stream, same, out of order",
        "stream, same, with a worker and without",
        "stream, parts of a look-ahead",
    ],
)
def test_ranks_that_agree_share_all_samples(outcomes: list[dict[str, Any]], case: str) -> None:
    """Each sample comes once, on equal numbers of batches, under the smallest budget."""
    numbers = [each[case] for each in outcomes]
    assert sum(map(sum, numbers)) == len(LENGTHS)
    assert len(numbers[0]) == len(numbers[1])


@pytest.mark.distributed
def test_what_is_read_apart_need_not_be_the_same(outcomes: list[dict[str, Any]]) -> None:
    """Ranks given by hand, and ranks that each read their own part of the source."""
    for each in outcomes:
        assert sum(each["by hand"]) == len(LENGTHS)
        assert len(each["stream, each its own"]) == 3
    assert sum(outcomes[0]["alone afterwards"]) < len(LENGTHS)
    assert sum(outcomes[0]["loader, alone"]) == len(LENGTHS)  # no other rank has called it
    assert sum(outcomes[0]["thread"]) < len(LENGTHS)


@pytest.mark.distributed
def test_what_fails_on_one_rank_fails_on_all(outcomes: list[dict[str, Any]]) -> None:
    """A budget that cannot be read keeps no other rank waiting."""
    first, second = (each["not agreed"] for each in outcomes)
    assert first.startswith("BudgetError")
    assert second.startswith("RankError: rank 0 failed, see its traceback: BudgetError")


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """The others raise at the group's timeout, instead of waiting for it in their first step."""
    first, _, third = run_ranks(script("planning.missing"), tmp_path, 3)
    assert first.startswith("RankError: not all ranks have")
    assert "Rank 1 failed" in first or "Ranks 1 failed" in first
    assert third.startswith("RankError: not all ranks have")
