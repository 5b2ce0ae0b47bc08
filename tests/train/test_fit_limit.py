"""A training whose device is limited to its budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import GiB, GradAccumulator, fit
from torchbudget.errors import BudgetError
from torchbudget.train import fit as fit_module

BEYOND = 18 * 2**20  # what torch's allocator takes past its limit, which is left free


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that are limited; each stands for the one that is put in its place."""
    limited: list[torch.device] = []
    limit = fit_module.limit_device_memory

    def record(budget: object, device: torch.device) -> None:
        limited.append(device)
        limit(budget, "cuda")

    monkeypatch.setattr(fit_module, "limit_device_memory", record)
    return limited


def train(when_run: Callable[[], object], **options: object) -> None:
    """Two epochs of two steps; a function is called in each batch."""
    model = nn.Linear(2, 1)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        when_run()
        return F.mse_loss(model(x), torch.zeros(len(x), 1), reduction="sum")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, model, steps=1)
    loader = DataLoader(torch.ones(4, 2), batch_size=2)
    fit(model, loader, loss, accumulator, epochs=2, **options)


def test_the_limit_leaves_room_for_what_the_first_steps_load(
    monkeypatch: pytest.MonkeyPatch, devices: list[torch.device]
) -> None:
    """It is the budget less what is outside the allocator: at first, after a step, an evaluation.

    Kernels are loaded by the first batch of each, and none later.
    """
    fake = put_in_place(monkeypatch, FakeDevice(free_before_bytes=GiB(80)))
    fake.load(GiB(0.5))
    rooms: list[float] = []

    def run() -> None:
        rooms.append((fake.now.fraction * GiB(80) + BEYOND) / GiB(1))
        if len(rooms) in (1, 3):  # the first batch of the training, and that of the validation
            fake.load(GiB(1))

    train(run, device_limit="8GiB", validation=[torch.ones(2, 2)])
    assert rooms == pytest.approx([7.5, 6.5, 6.5, 5.5, 5.5, 5.5], abs=1e-6)
    assert devices == [torch.device("cpu")] * 3


def test_what_is_loaded_may_leave_nothing_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, devices: list[torch.device]
) -> None:
    """Then the first step says so, and not an allocation of a later one."""
    fake = put_in_place(monkeypatch, FakeDevice(free_before_bytes=GiB(80)))
    with pytest.raises(BudgetError, match=r"uses 9 GiB outside torch's allocator"):
        train(lambda: fake.load(GiB(9)), device_limit="8GiB")
    assert len(devices) == 2


def test_nothing_is_limited_unless_asked_for(devices: list[torch.device]) -> None:
    """A budget that cannot be read is refused before the first batch."""
    train(lambda: None)
    assert devices == []
    batches: list[None] = []
    with pytest.raises(BudgetError):
        train(lambda: batches.append(None), device_limit="much")
    assert batches == []
