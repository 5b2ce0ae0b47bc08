"""Pinned memory, and copies to a GPU that return early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.batches import tensors_of
from torchbudget import (
    BudgetedIterableDataset,
    PackCollate,
    PackedBatch,
    PadCollate,
    PaddedBatch,
    PaddedCost,
)

pytestmark = [
    pytest.mark.gpu,
    # Python 3.12 and later warn of every fork of a process that has threads, as CUDA's.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
SAMPLES = [{"x": torch.arange(1000.0 + 37 * i), "y": i, "s": "text"} for i in range(64)]


@pytest.mark.parametrize("as_tuples", [False, True])
@pytest.mark.parametrize(
    ("collate", "kind"), [(PadCollate(), PaddedBatch), (PackCollate(), PackedBatch)]
)
def test_batches_are_pinned_and_keep_their_type(collate: Any, kind: type, as_tuples: bool) -> None:
    """By the loader's own thread; copies to the card and back are the batch, bit for bit.

    Samples on the card are collated there.
    """
    samples: list[Any] = [tuple(one.values()) for one in SAMPLES] if as_tuples else SAMPLES
    loader = DataLoader(samples, batch_size=8, collate_fn=collate, num_workers=2, pin_memory=True)
    for at, batch in enumerate(loader):
        expected = collate(samples[8 * at : 8 * at + 8])
        assert isinstance(batch, kind)
        assert all(tensor.is_pinned() for tensor in tensors_of(batch))
        moved = batch.to("cuda", non_blocking=True)
        assert all(tensor.is_cuda for tensor in tensors_of(moved))
        assert all(tensor.is_cuda for tensor in tensors_of(collate(moved.samples())))
        back = moved.to("cpu", non_blocking=True)  # which waits
        assert all(map(torch.equal, tensors_of(back), tensors_of(expected)))
        assert batch.lengths.tolist() == expected.lengths.tolist()


def test_batches_of_a_tracked_stream_are_pinned() -> None:
    """The position beside each comes through the thread that pins them: the rest is the rest."""

    def made() -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            [SAMPLES[:30], SAMPLES[30:]], PaddedCost(unit_bytes=4), 40_000, size="x", window=16
        )

    def loop(stream: BudgetedIterableDataset) -> Iterator[Any]:
        options: dict[str, Any] = {"num_workers": 2, "pin_memory": True}
        return stream.tracked(DataLoader(stream, batch_size=None, **options))

    whole = [batch.lengths.tolist() for batch in loop(made())]
    running = made()
    for done, batch in enumerate(loop(running), 1):
        assert all(tensor.is_pinned() for tensor in tensors_of(batch))
        if done % 4 == 1:
            following = made()
            following.load_state_dict(running.state_dict())
            assert [one.lengths.tolist() for one in loop(following)] == whole[done:]


def test_pinned_bytes_are_bounded() -> None:
    """Blocks of pinned memory are powers of two: at most twice what is in flight, and a little.

    The epoch has five times as much.
    """
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None:
        pytest.skip("this torch does not count pinned memory")
    samples = [torch.ones(2**20 + i) for i in range(128)]  # 4 MiB each, and a little
    loader = DataLoader(
        samples, batch_size=2, collate_fn=PadCollate(), num_workers=2, pin_memory=True
    )
    names = ("reserved_bytes.current", "allocated_bytes.current")  # the latter in newer torch
    name = next((one for one in names if one in statistics()), None)
    if name is None:
        pytest.skip("this torch counts pinned memory under another name")
    before = statistics()[name]
    largest = max(batch.nbytes for batch in loader)
    added = statistics()[name] - before
    in_flight = 2 * 2 + 2  # two workers prefetch two each; one is returned, one is in use
    assert largest <= added <= 2 * in_flight * largest + 8 * 2**20
