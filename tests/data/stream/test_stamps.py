"""What carries a position beside a batch: through pinning, and out of order."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data._utils.pin_memory import pin_memory

from tests.support.resuming import as_json
from tests.support.streams import loader_of, tracked_loop
from tests.support.tracked_streams import SIZES, make, samples_of
from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.data.stream.tracking import StampedBatch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Pinned:
    """A batch that pins itself, as torch asks it to; tensors can be pinned with a device only."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self.is_pinned = is_pinned

    def pin_memory(self) -> Pinned:
        return Pinned(is_pinned=True)


def test_a_loader_that_pins_pins_the_batch() -> None:
    """And leaves what came with it as it was."""
    cursor = StreamCursor.beginning(3, 7)
    stamped = StampedBatch({"x": Pinned(), "text": "a"}, 2, cursor, 7)
    found = pin_memory(stamped)
    assert isinstance(found, StampedBatch)
    assert found.batch["x"].is_pinned
    assert found.batch["text"] == "a"
    assert (found.worker, found.cursor, found.sizes) == (2, cursor, 7)


def test_out_of_order_in_workers_that_persist() -> None:
    """From any batch of any epoch, every remaining sample of it comes once."""
    running = make("iterable")
    loader = loader_of(running, 3, persistent_workers=True, in_order=False)
    for epoch in range(3):
        taken: list[Any] = []
        for batch in running.tracked(loader):
            taken.append(batch)
            if len(taken) % 9 == 4:
                following = make("iterable")
                following.load_state_dict(as_json(running.state_dict()))
                assert following.epoch == epoch
                rest = list(tracked_loop(following, 3, in_order=False))
                assert samples_of(taken + rest) == list(range(len(SIZES)))
        assert samples_of(taken) == list(range(len(SIZES)))
