"""Bytes of storages count once, as long as they live."""

import gc
import weakref

import torch

from torchbudget.cost.models.live_bytes import LiveBytes


def test_views_share_a_storage_and_freed_ones_do_not_count():
    live = LiveBytes("cpu")
    tensor, other = torch.zeros(10), torch.zeros(5)
    assert live.count(tensor) == 40
    assert live.count(tensor[:3]) == 0
    assert live.count(other) == 20
    assert live.count(torch.zeros(7, device="meta")) == 0
    view = tensor[2:]
    del tensor, other
    assert live.num_bytes == 40
    del view
    assert live.num_bytes == 0


def test_the_history_has_every_operation_in_whole_blocks():
    live = LiveBytes("cpu", block_bytes=64)
    with live:
        tensor = torch.zeros(17)
        del tensor
        torch.zeros(1)
    assert live.history == [128, 64]


def test_what_is_counted_does_not_keep_the_counter():
    tensor = torch.zeros(10)
    live = LiveBytes("cpu")
    live.count(tensor)
    gone = weakref.ref(live)
    del live
    gc.collect()
    assert gone() is None
