"""A training whose device is limited to its budget first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import torchbudget.train.fit as fit_module
from torchbudget import GradAccumulator, fit
from torchbudget.errors import BudgetError


def test_the_models_device_is_limited_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, where it was asked for; a budget that cannot be read is refused."""
    calls: list[object] = []
    limit = fit_module.limit_device_memory

    def record(budget: object, device: torch.device) -> None:
        calls.append((budget, device))
        limit(budget, device)

    monkeypatch.setattr(fit_module, "limit_device_memory", record)
    model = nn.Linear(2, 1)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append("batch")
        return F.mse_loss(model(x), torch.zeros(len(x), 1), reduction="sum")

    def train(**options: object) -> None:
        loader = DataLoader(torch.ones(4, 2), batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(model, loader, loss, GradAccumulator(optimizer, model), epochs=1, **options)

    train()
    assert calls == ["batch"] * 2
    calls.clear()
    train(device_limit="8GiB")
    assert calls == [("8GiB", torch.device("cpu")), "batch", "batch"]
    with pytest.raises(BudgetError):
        train(device_limit="much")
