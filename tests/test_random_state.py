"""Random generators: their states are taken together, and restored bit for bit."""

from __future__ import annotations

import io
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch

from torchbudget.random_state import RandomState


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),  # keeps a second value for the next call
        float(np.random.rand()),  # noqa: NPY002 (the legacy generator is what is restored)
        float(np.random.randn()),  # noqa: NPY002 (likewise; and it keeps a second value)
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_what_comes_after_restoring_is_what_came() -> None:
    """Python's, NumPy's and torch's numbers repeat, more than once from the same state."""
    draws()
    state = RandomState.take()
    expected = draws()
    for _ in range(2):
        state.restore()
        assert draws() == expected


def test_a_saved_state_loads_without_pickle() -> None:
    """A checkpoint of it can be loaded with `weights_only=True`."""
    file = io.BytesIO()
    torch.save(asdict(RandomState.take()), file)
    expected = draws()
    file.seek(0)
    RandomState(**torch.load(file, weights_only=True)).restore()
    assert draws() == expected


def test_cuda_is_not_initialized() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is initialized already")
    assert RandomState.take().cuda is None
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_numbers_of_every_device_come_back() -> None:
    devices = range(torch.cuda.device_count())
    torch.cuda.init()
    state = RandomState.take()
    expected = [torch.rand(4, device=device) for device in devices]
    state.restore()
    again = [torch.rand(4, device=device) for device in devices]
    assert all(map(torch.equal, again, expected))
