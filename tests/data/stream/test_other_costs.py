"""Streams that go on within a window under another cost, and look-aheads on several ranks."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import pytest
import torch

from tests.support.resuming import as_json
from tests.support.streams import (
    KINDS,
    SIZES,
    TOKENS,
    loader_of,
    make,
    numbers,
    same,
    tracked_loop,
    workers_of,
)
from torchbudget import BudgetedIterableDataset, PackedCost, PaddedCost, transforms
from torchbudget.errors import UnevenRanksError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
OTHERS: dict[str, Any] = {
    "a measured cost": (PaddedCost(unit_bytes=1, sample_bytes=7, fixed_bytes=31), {}),
    "less": (TOKENS, {"budget": 120}),
    "packed": (PackedCost(unit_bytes=1), {"budget": 210}),
    "of a predicate": (lambda batch, _: len(batch) < 4, {"budget": None}),
    "shapes": (TOKENS, {"max_shapes": [(2, 60), (5, 40), (9, 20)]}),
}


def under(other: str, kind: str = "iterable", **options: Any) -> BudgetedIterableDataset:
    """The stream of `make`, under one of the other costs."""
    cost, changed = OTHERS[other]
    return make(kind, cost=cost, **options | changed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tracked_loop_goes_on_under_another_cost(kind: str, workers: int) -> None:
    """What is left comes once, with workers and without, again after that, and after a copy."""
    whole = sorted(chain.from_iterable(loader_of(make(kind), workers)))
    for done, further, other in ((7, 4, "a measured cost"), (22, 1, "less"), (40, 9, "packed")):
        running = make(kind)
        came = [*islice(tracked_loop(running, workers), done)]
        assert any(one["rounds"] for one in workers_of(running.state_dict()))
        second = under(other, kind)
        second.load_state_dict(as_json(running.state_dict()))
        again = under(other, kind)
        loop = tracked_loop(second, workers)
        again.load_state_dict(as_json(second.state_dict()))  # before its first batch
        came += islice(loop, further)
        third, fourth = under("less", kind), under(other, kind)
        third.load_state_dict(as_json(second.state_dict()))
        fourth.load_state_dict(as_json(second.state_dict()))
        rest = [*loop]
        assert sorted(chain(*came, *tracked_loop(third, workers))) == whole
        assert [*tracked_loop(fourth, workers)] == rest
        assert [*tracked_loop(again, workers)] == [*came[done:], *rest]


@pytest.mark.parametrize("other", ["of a predicate", "shapes"])
@pytest.mark.parametrize("options", [{}, {"look_ahead": 4000}, {"drop_last": True}])
def test_ranks_go_on_under_any_other_cut(other: str, options: dict[str, Any]) -> None:
    """Every sample once, on equal numbers of batches; of one predicate the same goes on."""
    ranks = {"num_replicas": 2, "window": 30} | options
    for done in (1, 5, 11, 17):
        came, rest = [], []
        for rank in range(2):
            running = make(**ranks, rank=rank)
            came += islice(running, done)
            stream = under(other, **ranks, rank=rank)
            stream.load_state_dict(as_json(running.state_dict()))
            rest.append([*stream])
        assert len(rest[0]) == len(rest[1])
        found = numbers([*came, *chain.from_iterable(rest)])
        assert found == sorted(set(found))
        assert len(found) == len(SIZES) or "drop_last" in options


def test_the_last_round_of_ranks_is_cut_anew_with_the_rest() -> None:
    """Of a pass whose last samples no round can take alone, under another cost at any batch."""

    def stream(rank: int, budget: int) -> BudgetedIterableDataset:
        kept = transforms.keep_if(lambda sample: sample[0] < 62 or sample[0] == 70)
        return make(num_replicas=2, rank=rank, budget=budget, window=31, transforms=[kept])

    whole = [[*stream(rank, 130)] for rank in range(2)]
    assert numbers([*whole[0], *whole[1]]) == [*range(62), 70]
    for done in range(1, len(whole[0])):
        rest = []
        for rank in range(2):
            running, other, again = stream(rank, 130), stream(rank, 200), stream(rank, 130)
            assert [*islice(running, done)] == whole[rank][:done]
            again.load_state_dict(as_json(running.state_dict()))
            assert [*again] == whole[rank][done:]
            other.load_state_dict(as_json(running.state_dict()))
            rest += other
        assert numbers([*rest, *whole[0][:done], *whole[1][:done]]) == [*range(62), 70]


# ---------------------------------------------------------------------- look-aheads on ranks


class Recordings:
    """Samples of 20 to 700 KB, of some 200 bytes in a micro-batch."""

    def __init__(self, number: int = 90) -> None:
        self.number = number

    def __iter__(self) -> Any:
        for n in range(self.number):
            yield {"n": n, "x": torch.zeros(5_000 + n * 7_919 % 170_000)}


def frames(sample: Any) -> int:
    return sample["x"].numel() // 1000


@pytest.mark.parametrize("options", [{}, {"group": lambda sample: sample["n"] % 2}])
@pytest.mark.parametrize(("ranks", "most"), [(2, None), (3, 1), (4, 3), (6, 1)])
def test_a_look_ahead_on_ranks(ranks: int, most: int | None, options: dict[str, Any]) -> None:
    """Samples that ranks cannot share wait for the next part, and their bytes count there.

    Every sample once, on equal numbers of batches; the rest equals the rest from any batch.
    """

    def streams(rank: int) -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            Recordings(), PaddedCost(unit_bytes=1), 400, size=frames, window=21,
            look_ahead="4MiB", max_batch_size=most, num_replicas=ranks, rank=rank,
            collate_fn=same, **options,
        )  # fmt: skip

    whole = [[[one["n"] for one in batch] for batch in streams(rank)] for rank in range(ranks)]
    assert sorted(chain.from_iterable(chain.from_iterable(whole))) == list(range(90))
    assert len(set(map(len, whole))) == 1
    for done in range(1, len(whole[0]), 4):
        stream, other = streams(1), streams(1)
        list(islice(stream, done))
        other.load_state_dict(as_json(stream.state_dict()))
        assert [[one["n"] for one in batch] for batch in other] == whole[1][done:]


def test_a_look_ahead_that_holds_too_few_samples() -> None:
    """It is refused where one sample for each rank has more bytes, and says what to raise."""
    stream = BudgetedIterableDataset(
        Recordings(), PaddedCost(unit_bytes=1), 400, size=frames, look_ahead="1MiB",
        num_replicas=5, rank=0, max_batch_size=1,
    )  # fmt: skip
    with pytest.raises(UnevenRanksError, match="samples fill the look-ahead of 1 MiB"):
        list(stream)
