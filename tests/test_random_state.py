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
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_what_comes_after_restoring_is_what_came() -> None:
    """Python's, NumPy's and torch's numbers repeat, more than once from the same state.

    A checkpoint of it can be loaded with `weights_only=True`.
    """
    draws()
    state, file = RandomState.take(), io.BytesIO()
    torch.save(asdict(state), file)
    expected = draws()
    file.seek(0)
    for one in (state, state, RandomState(**torch.load(file, weights_only=True))):
        one.restore()
        assert draws() == expected


def test_cuda_is_not_initialized() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is initialized already")
    assert not RandomState.take().devices
    assert not torch.cuda.is_initialized()


class TwoDevices:
    """A device module in place of `torch.cuda`: it stands for a machine with two GPUs."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.generators[device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.generators[device].set_state(state)


def test_every_device_of_an_accelerator_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock, since this runs where there is no second device."""
    devices = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    state = RandomState.take()
    expected = [torch.rand(3, generator=one) for one in devices.generators]
    state.restore()
    again = [torch.rand(3, generator=one) for one in devices.generators]
    assert all(map(torch.equal, again, expected))
