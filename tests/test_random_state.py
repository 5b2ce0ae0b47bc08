"""Random generators: their states are taken together, and restored bit for bit."""

from __future__ import annotations

import io
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

from torchbudget import joint_backward
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


class DropsOnSecond(nn.Module):
    """Dropout whose numbers come from the second device."""

    def __init__(self, devices: TwoDevices) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.generator = devices.generators[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), 4, generator=self.generator, dtype=torch.float64) > 0.5
        return self.layer(x) * kept


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    """A mock, since this runs where there is no second device."""
    devices = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    return devices


def test_every_device_of_an_accelerator_comes_back(two_devices: TwoDevices) -> None:
    state = RandomState.take()
    expected = [torch.rand(3, generator=one) for one in two_devices.generators]
    state.restore()
    again = [torch.rand(3, generator=one) for one in two_devices.generators]
    assert all(map(torch.equal, again, expected))


def test_dropout_on_a_second_device_is_the_same_in_both_passes(two_devices: TwoDevices) -> None:
    """The gradient of a joint criterion is the whole batch's, to 1e-12."""
    model = DropsOnSecond(two_devices)
    x = torch.randn(6, 3, dtype=torch.float64)
    before = model.generator.get_state()
    joint_backward(model, x.split(2), lambda z: (z @ z.T).logsumexp(1).mean())
    found, after = model.layer.weight.grad.clone(), model.generator.get_state()
    model.zero_grad()
    model.generator.set_state(before)
    z = torch.cat([model(part) for part in x.split(2)])
    (z @ z.T).logsumexp(1).mean().backward()
    assert (found - model.layer.weight.grad).norm() <= 1e-12 * found.norm()
    assert torch.equal(model.generator.get_state(), after)
