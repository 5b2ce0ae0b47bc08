"""States of streams: of other samples than this one has, malformed, and of many workers."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.streams import (
    SIZES,
    TOKENS,
    OneProcess,
    begun_at,
    loader_of,
    make,
    source_of,
    tracked_loop,
    workers_of,
)
from torchbudget import BudgetedIterableDataset, TableCost, transforms
from torchbudget.data.stream.cursor import StreamState, WorkerSlot
from torchbudget.errors import StateError, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def stream_of(kind: str, sizes: Any = SIZES, **options: Any) -> BudgetedIterableDataset:
    return make(source_of(kind, sizes, []), shuffle=kind != "map", **options)


def shorter(sample: Any) -> Any:
    return sample[0], sample[1] // 2 + 1


def double(sample: Any) -> int:
    return 2 * int(sample[1])


def parity(sample: Any) -> Any:
    return sample[0] % 2


def halves(sample: Any) -> Any:
    return sample[0] % 64 < 32


def at_most(most: int, batch: list[Any], sample: Any) -> bool:
    return len(batch) < most


SEVEN, FIVE = ({"cost": partial(at_most, n), "budget": None} for n in (7, 5))
KEPT = {"transforms": [transforms.keep_if(lambda sample: sample[0] != 2)]}
# What it was saved under, what it is loaded under, and at how many of nine positions it is refused:
# at the boundary of a window another cut would be right.
OTHERS: dict[str, tuple[Any, Any, str, int]] = {
    "window": ({}, {"window": 30}, "window: saved 64", 9),
    "seed": ({}, {"seed": 3}, "seed", 9),
    "transforms": ({}, {"transforms": [shorter]}, "other sizes", 9),
    "fewer samples": ({}, KEPT, "", 4),
    "size": ({}, {"size": double}, "other sizes", 9),
    "source": ({}, {"sizes": SIZES[1:]}, "other sizes", 9),
    "predicate": (SEVEN, FIVE, "", 4),
    "a group": ({}, {"group": parity}, "other sizes or cuts", 7),
    "no group": ({"group": parity}, {}, "other sizes or cuts", 7),
    "another group": ({"group": parity}, {"group": halves}, "other sizes or cuts", 7),
}


@pytest.mark.parametrize("kind", ["iterable", "map"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_stream_is_refused(name: str, kind: str) -> None:
    """Before a batch comes that would be wrong; the same stream goes on."""
    saved, changed, message, least = OTHERS[name]
    running, refusals = stream_of(kind, **saved), []
    for _ in islice(running, 9):
        state = running.state_dict()
        twin, other = stream_of(kind, **saved), stream_of(kind, **changed)
        twin.load_state_dict(state)
        next(iter(twin))
        try:
            other.load_state_dict(state)
            list(other)
        except StateMismatchError as error:
            refusals.append(str(error))
    assert len(refusals) >= least
    assert all(re.search(message, refusal) for refusal in refusals)


def test_another_number_of_workers_is_refused() -> None:
    """Unless one process has read all of the source alone."""
    _, stream = begun_at(1)
    with pytest.raises(StateMismatchError, match="num_workers=2"):
        list(loader_of(stream, 3))
    whole = list(tracked_loop(make(batches_per_epoch=24), 0))
    stream = make(batches_per_epoch=12)
    assert [*tracked_loop(stream, 1), *tracked_loop(stream, 0)] == whole
    list(tracked_loop(stream := make(batches_per_epoch=12), 3))
    with pytest.raises(StateMismatchError, match="num_workers=3"):
        list(tracked_loop(stream, 2))


@pytest.mark.parametrize("done", [1, 4])  # within a window, and at its boundary
def test_the_state_of_another_rank_is_refused(done: int) -> None:
    """Where each rank stands elsewhere: its state has its name, and all of them are no state."""

    def of_rank(rank: int) -> BudgetedIterableDataset:
        options = {"window": 12, "batches_per_epoch": 8, "num_replicas": 2, "rank": rank}
        return make("function", budget=120, **options)

    states = []
    for rank in range(2):
        list(islice(stream := of_rank(rank), done))
        states.append(stream.state_dict())
        assert set(states[rank]) == {"epoch", "goes_on_by", f"rank {rank} of 2"}
    other = of_rank(1)
    other.load_state_dict(states[0])
    with pytest.raises(StateMismatchError, match="rank"):
        next(iter(other))
    with pytest.raises(StateError, match="pass that of one rank"):
        of_rank(1).load_state_dict(states[0] | states[1])
    mine = of_rank(1)
    mine.load_state_dict(states[1])
    assert list(mine) == list(of_rank(1))[done:]


@pytest.mark.parametrize("broken", [
    {"rounds": "x"}, {"start": None}, {"number": -1}, {"first_epoch": True}, {"to_come": "x"},
    {"checksum": "x"}, {"turn": 2}, {"workers": 3}, {"workers": [[1]]}, {"dealing": None},
    {"epoch": -1}, {"epoch": None}, {"part": "x"}, {"part": [1, None, [4, "x"]]}, {"part": [1]},
])  # fmt: skip
def test_malformed_states(broken: dict[str, Any]) -> None:
    """Refused where they are loaded, and nothing is lost."""
    whole, stream = begun_at(3, 0)
    good = stream.state_dict()
    [process] = good["processes"]
    parts, bad = dict(process), dict(good)
    for name, value in broken.items():
        if name == "epoch":
            bad[name] = value
        elif name in parts:
            parts[name] = value
        else:
            cursor = {**workers_of(good)[0], name: value}
            parts["workers"] = [list(cursor.values())[1:]]
    with pytest.raises(StateError, match="malformed"):
        stream.load_state_dict({**bad, "processes": (parts,)})
    with pytest.raises(StateError, match="state_dict"):
        stream.load_state_dict({"version": 9})
    assert list(stream) == whole[3:]


def test_a_state_of_many_workers_is_small() -> None:
    """What all of them have in common is saved once: 100 bytes a worker, and a bit a sample."""
    shards = [[str(n) for n in range(64)] for _ in range(64)]
    stream = BudgetedIterableDataset(shards, TOKENS, 20, size=len, window=32)
    slots = [WorkerSlot(worker=n, workers=32, rank=0, ranks=1) for n in range(32)]
    cursors = []
    for slot in slots:
        reader = iter(OneProcess(stream, slot))
        list(islice(reader, 11))
        cursors.append(reader.cursor)
        assert cursors[-1].rounds
    dealing = stream._options.dealing(slots[0])
    plain = StreamState(cursors=cursors, dealing=dealing, turn=3).to_plain(seeks=False)
    assert len(json.dumps(plain)) <= 700 + 32 * (100 + 32 // 8)
    found = StreamState.of_plain(json.loads(json.dumps(plain)))
    assert (found.turn, [at[:-1] for at in found.cursors]) == (3, [at[:-1] for at in cursors])
    assert found.to_plain(seeks=False) == plain


@pytest.mark.parametrize("samples", [7, 12])
def test_the_rest_of_a_pass_that_ranks_cannot_share_is_dropped(samples: int) -> None:
    """With `drop_last` the next pass begins without it, in a run that goes on there as well."""
    sizes = [5, 3, 472, 4, 2, 427, 9, 30, 1, 1, 1, 8][-samples:]
    cost = TableCost(numbers=(56, 2), sizes=((28,), (20000,)), peak_bytes=(1105, 189810))
    ranks: dict[str, Any] = {"num_replicas": 5, "batches_per_epoch": 19, "drop_last": True}

    def stream(rank: int) -> BudgetedIterableDataset:
        options = {"cost": cost, "budget": 1_518_480, "window": 67}
        return stream_of("map", sizes, **options, **ranks, rank=rank)

    for rank in range(5):
        whole = [*map(as_list, stream(rank))]
        loop, states = stream(rank), []
        for _ in loop.tracked(DataLoader(loop, batch_size=None)):
            states.append(loop.state_dict())  # noqa: PERF401  (it moves with the loop)
        for number, state in enumerate(states[:-1], 1):
            again = stream(rank)
            again.load_state_dict(state)
            assert [*map(as_list, again)] == whole[number:]


def as_list(batch: Any) -> Any:
    return [tuple(map(int, sample)) for sample in batch]
