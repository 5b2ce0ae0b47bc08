"""States of streams whose ranks do not stand in one place, and what takes states apart."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.support.streams import make
from torchbudget import BudgetedIterableDataset
from torchbudget.errors import StateError, StateMismatchError


def of_rank(rank: int, ranks: int = 2) -> BudgetedIterableDataset:
    """A stream whose ranks each read a part of their own."""
    options = {"window": 12, "batches_per_epoch": 8, "num_replicas": ranks, "rank": rank}
    return make("function", budget=120, **options)


@pytest.mark.parametrize("done", [1, 4])  # within a window, and at its boundary
def test_the_state_of_another_rank_is_refused(done: int) -> None:
    """Where each rank stands elsewhere: its state has its name, and all of them are no state."""
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
