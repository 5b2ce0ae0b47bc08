"""Steps whose memory does not only depend on the shape of their batch in one formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchbudget import MeasuredCost, measure_cost, trace_peak_bytes
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.units import MAX_BYTES

WIDTH = 32


def full_step(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Any:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        forward(model, batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def traced(step: Any, **options: Any) -> MeasuredCost:
    return measure_cost(step, make_batch, **{"max_size": 1024, "method": "trace"} | options)


@pytest.mark.filterwarnings("ignore:no formula fits:torchbudget.errors.MeasureWarning")
def test_one_sample_may_take_another_way() -> None:
    """Attention for one sample alone: a batch of one of the largest size is not under-predicted."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        return (hidden @ hidden.mT).softmax(-1) @ hidden if len(x) == 1 else hidden

    step = full_step(forward)
    cost = traced(step)
    for length in (1024, 600):
        assert trace_peak_bytes(step, make_batch(1, length)) <= cost.batch_bytes(1, length)


def test_an_integer_beside_a_table_that_grows() -> None:
    """The integer is only computed with; a buffer that grows with the longest sample is said."""
    table = [torch.zeros(1, 1)]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(table[0]) < x.shape[1]:
            table[0] = torch.zeros(x.shape[1], 1)
        return model(x + table[0][: x.shape[1]]) / int((x > 0).sum())

    with pytest.warns(MeasureWarning, match="allocated when it ends"):
        cost = traced(full_step(forward))
    assert cost.vouched is None


@pytest.mark.filterwarnings("ignore:no formula fits:torchbudget.errors.MeasureWarning")
def test_patches_of_any_length_are_said() -> None:
    """No form follows lengths that layers round down; of multiples of the patch one does."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        whole = x.shape[1] // 16 * 16
        patches = x[:, :whole].unflatten(1, (-1, 16)).mean(2)
        return model(patches.repeat(1, 64, 1))

    def noted(cost: MeasuredCost) -> bool:
        return any("patches, strides or windows" in note for note in cost.notes)

    step = full_step(forward)
    free = traced(step, min_size=16)
    rounded = traced(step, min_size=16, size_multiple=16)
    assert noted(free)
    assert not noted(rounded)
    for n, length in ((40, 32), (200, 176), (7, 1024)):
        peak = trace_peak_bytes(step, make_batch(n, length))
        assert peak <= int(rounded.batch_bytes(n, length)) <= 1.02 * peak
        assert peak <= int(free.batch_bytes(n, length))


def test_nothing_is_predicted_for_longer_samples() -> None:
    cost = traced(full_step(lambda model, x: model(x)), max_size=64)
    assert cost.batch_bytes([1, 1], [64, 65]).tolist()[1] == MAX_BYTES
    assert cost.capacity([64, 65], 2**40).tolist()[1] == 0
    assert "sizes: up to 64" in cost.report()


def test_arrays_are_looked_at_too() -> None:
    """A function that ignores what it is asked for is noticed in batches of NumPy's arrays."""
    step = full_step(lambda model, arrays: model(torch.from_numpy(arrays[0])))
    with pytest.raises(CostError, match="make_batch ignores"):
        measure_cost(step, lambda *_: [np.ones((4, 8), np.float32)], max_size=99, method="trace")


def test_a_batch_that_cannot_be_made() -> None:
    """The shape is named, and what to do about short ones."""

    def refuse(n: int, size: int) -> torch.Tensor:
        if size < 50:
            raise ValueError("too short")
        return make_batch(n, size)

    step = full_step(lambda model, x: model(x))
    with pytest.raises(CostError, match=r"make_batch\(2, 16\) raised .*too short.* pass min_size"):
        measure_cost(step, refuse, max_size=1024, method="trace")
    measure_cost(step, refuse, max_size=1024, min_size=50, method="trace")


def test_an_integer_that_becomes_a_shape_is_refused_by_every_trace() -> None:
    """As the longest length that is not padding; a divisor is none, see the other tests."""

    def cut(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch[:, : int((batch[0, :, 0] > 0).sum())])

    def divided(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch) / int((batch[..., 0] > 0).sum())

    with pytest.raises(CostError, match="becomes a shape or a number of turns"):
        traced(full_step(cut))
    with pytest.raises(CostError, match="becomes a shape or a number of turns"):
        trace_peak_bytes(full_step(cut), make_batch(2, 30))
    assert traced(full_step(divided)).batch_bytes(4, 100) > 0
