"""Bytes of storages count once, as long as they live."""

import torch

from torchbudget.cost.models.live_storages import LiveStorages


def test_views_share_a_storage_and_freed_ones_do_not_count():
    live = LiveStorages()
    tensor, other = torch.zeros(10), torch.zeros(5)
    assert live.add(tensor.untyped_storage(), 40) == 40
    assert live.add(tensor[:3].untyped_storage(), 40) == 0
    assert live.add(other.untyped_storage(), 20) == 20
    view = tensor[2:]
    del tensor, other
    assert live.num_bytes == 40
    del view
    assert live.num_bytes == 0
