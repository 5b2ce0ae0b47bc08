"""A loader of a step that is made in several ways, on real steps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchbudget as tb
from tests.support.steps import step_of
from torchbudget.errors import OptionError
from torchbudget.machine.peaks import peak_memory

pytestmark = pytest.mark.slow
WIDTH, LONGEST, SAMPLES = 64, 4096, 96


class Net(nn.Module):
    """Blocks whose activations may be computed again."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            more = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            x = x + more
        return x


def ways_of(model: Net, train: Callable[[Any], object]) -> tuple[Callable[[Any], None], ...]:
    def plain(batch: Any) -> None:
        model.recomputes = False
        train(batch)

    def recomputed(batch: Any) -> None:
        model.recomputes = True
        train(batch)

    return plain, recomputed


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    torch.manual_seed(0)
    lengths = np.random.default_rng(0).lognormal(6, 1, SAMPLES).clip(16, LONGEST).astype(int)
    lengths[:2] = 16, LONGEST
    return [torch.randn(length, WIDTH, dtype=torch.float64) for length in lengths]


def loss_of(model: nn.Module, batch: tb.PaddedBatch) -> Tensor:
    mask = batch.mask[..., None]
    loss: Tensor = torch.where(mask, model(batch.data).square(), 0).sum()
    return loss


def budget_of(model: Net, data: list[Tensor]) -> int:
    """So many bytes that the longest sample alone has 0.6 of what it needs beside the model."""
    plain = copy.deepcopy(model)
    step = step_of(partial(loss_of, plain), plain, optimizer=partial(torch.optim.SGD, lr=1e-9))
    cost = tb.loader(data, step, "4GiB").batch_sampler.cost  # type: ignore[union-attr]
    least, most = (int(cost.batch_bytes(1, length)) for length in (16, LONGEST))
    return int(least + 0.6 * (most - least))


def test_each_batch_is_made_in_the_fastest_way_that_fits(data: list[Tensor]) -> None:
    """Peaks stay within the budget, and the step is that of all samples at once, plain."""
    torch.manual_seed(1)
    model = Net().double()
    budget = budget_of(model, data)
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    accumulator = tb.GradAccumulator(optimizer, module=model)

    def train(batch: tb.PaddedBatch) -> None:
        with accumulator.micro_batch(weight=batch.num_samples):
            accumulator.backward(loss_of(model, batch))

    step = tb.alternatives(*ways_of(model, train))
    with pytest.raises(OptionError, match="samples_per_step"):
        tb.loader(data, step, budget)
    loader = tb.loader(data, step, budget, samples_per_step=SAMPLES)
    sampler: Any = loader.batch_sampler
    assert sampler.report().fullest <= 1
    ways, peaks = Counter[int](), []
    gradient: list[Tensor] = []
    hook = optimizer.register_step_pre_hook(
        lambda *_: gradient.extend(
            one.grad.clone() for one in model.parameters() if one.grad is not None
        )
    )
    tb.warm_up(step, loader)
    gradient.clear()
    accumulator = tb.GradAccumulator(optimizer, module=model, steps=sampler)
    for batch in sampler.tracked(loader):
        ways[step.choose(batch)] += 1
        with peak_memory(torch.device("cpu")) as peak:
            step(batch)
        peaks.append(peak.bytes)
    hook.remove()
    assert set(ways) == {0, 1}
    assert ways[0] > ways[1]
    assert 0.7 * budget < max(peaks) <= budget
    loss = sum(loss_of(whole, tb.PadCollate()([one])) for one in data) / SAMPLES
    loss.backward()  # type: ignore[union-attr]
    for one, expected in zip(gradient, whole.parameters(), strict=True):
        torch.testing.assert_close(one, expected.grad, rtol=1e-12, atol=1e-12)


def test_predict_takes_alternatives(data: list[Tensor]) -> None:
    """Its forwards are measured each; outputs are those of either."""
    torch.manual_seed(1)
    model = Net().double().eval()
    calls = Counter[str]()

    def whole(batch: tb.PaddedBatch) -> Tensor:
        calls["whole"] += 1
        return torch.where(batch.mask[..., None], model(batch.data), 0).sum(1)

    def in_parts(batch: tb.PaddedBatch) -> Tensor:
        calls["in parts"] += 1
        parts = zip(batch.data.chunk(2, 1), batch.mask.chunk(2, 1), strict=True)
        return sum(torch.where(m[..., None], model(x), 0).sum(1) for x, m in parts)  # type: ignore[return-value]

    outputs = tb.predict(tb.alternatives(whole, in_parts), data, "1200MiB", progress=False)
    expected = torch.stack([model(one).sum(0).detach() for one in data])
    torch.testing.assert_close(outputs, expected)
    assert calls["in parts"]
