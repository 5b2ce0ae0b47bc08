"""Copies of tensors in a file."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from torchbudget.errors import CostError
from torchbudget.restoring import copied


def test_values_come_back():
    """Every dtype and layout, scalars and empty tensors, bit for bit; as often as asked."""
    tensors = [
        torch.tensor(3.5),
        torch.zeros(0),
        torch.randn(4, 5).t(),
        torch.randn(6)[::2],
        torch.randn(7, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, requires_grad=True),
        torch.tensor(float("nan")),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    with copied(tensors) as put_back:
        for _ in range(2):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.zero_()
            put_back()
            for tensor, value in zip(tensors, before, strict=True):
                assert torch.equal(tensor.nan_to_num(9), value.nan_to_num(9))


def test_a_folder_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is written. The disk's room is made up: no disk is to be filled."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with (
        pytest.raises(CostError, match=r"400 B, but .* has only 100 B free; set TMPDIR"),
        copied([torch.zeros(100)]),
    ):
        pass
