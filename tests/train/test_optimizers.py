"""Optimizers, schedulers and scalers do what a loop by hand does; the memory that they take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.support.large_steps import (
    EXACT,
    Data,
    accumulating,
    difference,
    large_step,
    loss_sum,
    make_model,
    parts_of,
    sgd,
)
from tests.support.ranks import group_of_one
from torchbudget import GradAccumulator, fit, memory_summary
from torchbudget.errors import ForeignStepWarning, OptionError


def test_a_scaler_skips_what_a_loop_by_hand_skips() -> None:
    """Overflowing steps are skipped, and the scale grows and shrinks, as in the plain loop."""

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    model, large = make_model("CNN"), make_model("CNN")
    theirs, by_hand = sgd(large), scaler()
    mine = scaler()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer := sgd(model), 1, 0.9)
    accumulator = GradAccumulator(
        optimizer, model, steps=2, scaler=mine, max_norm=1.0, scheduler=[schedule]
    )
    skipped, taken = [], 0
    for seed in range(8):
        data = Data.make(8, seed)
        factor = math.inf if seed in (2, 3, 6) else 1.0
        theirs.zero_grad()
        by_hand.scale(loss_sum(large, data) * factor / data.weight).backward()
        by_hand.unscale_(theirs)
        nn.utils.clip_grad_norm_(large.parameters(), 1.0)
        by_hand.step(theirs)
        by_hand.update()
        for number, piece in enumerate(parts_of(data, 4)):
            with accumulator.micro_batch(weight=piece.weight):
                accumulator.backward(loss_sum(model, piece) * (factor if number else 1))
        skipped.append(accumulator.last.skipped)
        taken += not accumulator.last.skipped
        assert mine.get_scale() == by_hand.get_scale()
        theirs.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    assert skipped == [seed in (2, 3, 6) for seed in range(8)]
    assert schedule.last_epoch == taken
    assert difference(model, large) <= EXACT


def stepped(
    gradient: float, weight: float, dtype: torch.dtype, scaler: torch.amp.GradScaler
) -> tuple[bool, bool]:
    """Whether a step with this gradient, unscaled, is skipped, and whether weights stay finite."""
    model = nn.Linear(4, 1, bias=False, dtype=dtype)
    accumulator = GradAccumulator(sgd(model), model, scaler=scaler)
    with accumulator.micro_batch(weight, last=True):
        accumulator.backward((model(torch.ones(1, 4, dtype=dtype)) * gradient).sum())
    return accumulator.last.skipped, bool(model.weight.isfinite().all())


# A gradient that its dtype has, and a weight that it is divided by, which makes it infinite.
OVERFLOWING = {
    torch.float16: (60_000.0, 0.25),
    torch.bfloat16: (1e38, 1e-3),
    torch.float32: (1e30, 1e-9),
    torch.float64: (1e300, 1e-9),
}


@pytest.mark.parametrize("dtype", OVERFLOWING, ids=str)
def test_what_only_the_weight_makes_infinite_is_not_stepped_with(dtype: torch.dtype) -> None:
    """Of every dtype that may be scaled. The scale is not lowered, which could not help."""
    kind = ShardedGradScaler if dtype is torch.float16 else torch.amp.GradScaler
    gradient, weight = OVERFLOWING[dtype]
    with group_of_one():  # which FSDP's scaler sums over
        scaler = kind("cpu", init_scale=1.0, growth_interval=9)
        for _ in range(3):
            assert stepped(gradient, weight, dtype, scaler) == (True, True)
        # What is large, and finite, is stepped with.
        assert stepped(gradient / 4, 1.0, dtype, scaler) == (False, True)
        assert scaler.get_scale() == 1


@pytest.mark.parametrize("max_norm", [None, math.inf])
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"scaler": 8.0}])
def test_optimizers_that_step_together_skip_together(
    options: dict[str, Any], max_norm: float | None
) -> None:
    """A step is skipped where one gradient is not finite; an infinite norm is only measured.

    An optimizer without gradients is left alone.
    """
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD([parameter], lr=1e-30) for parameter in parameters]
    if "scaler" in options:
        options = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
    accumulator = GradAccumulator(optimizers, steps=1, max_norm=max_norm, **options)
    for factor in (1e30, math.nan, math.inf) if options else (1e30,):
        with accumulator.micro_batch(1):
            accumulator.backward((parameters[0] * factor + parameters[1] * 1e30).sum())
        assert accumulator.last.skipped == (factor != 1e30)
        assert [one.tolist() for one in parameters] == [[-1.0] * 2, [-1.0] * 2, [0.0] * 2]


def test_a_step_that_is_not_finite_can_be_skipped() -> None:
    """Momentum and schedules stay, and the epoch's mean loss does not know the step."""
    model, before = make_model("CNN"), make_model("CNN")
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accumulator = GradAccumulator(
        optimizer, model, steps=2, skip_nonfinite=True, scheduler=schedule
    )
    data = [Data.make(4, seed) for seed in range(4)]

    def criterion(model: nn.Module, batch: Data) -> torch.Tensor:
        return loss_sum(model, batch) * (math.inf if batch is data[1] else 1)

    [epoch] = fit(
        model, data, criterion, accumulator, epochs=1, weight=lambda one: one.weight, progress=False
    )
    assert (epoch.steps, epoch.skipped, schedule.last_epoch) == (2, 1, 1)
    whole = Data(torch.cat([one.x for one in data[2:]]), torch.cat([one.y for one in data[2:]]))
    assert epoch.loss == pytest.approx(loss_sum(before, whole).item() / whole.weight)
    large_step(before, sgd(before), whole)
    assert difference(model, before) <= EXACT


@pytest.mark.parametrize("steps", [0, 5])
def test_an_optimizer_in_the_backward_is_noticed(steps: int) -> None:
    """A hook of the user's that steps.

    Also where the training goes on after steps of another run.
    """
    accumulator, model = accumulating()
    accumulator.load_state_dict({**accumulator.state_dict(), "steps": steps})
    for parameter in model.parameters():
        inner = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, inner=inner: inner.step())
    data = Data.make(4)
    with (
        pytest.warns(ForeignStepWarning, match="raised after its backward"),
        pytest.raises(OptionError, match="steps an optimizer inside the backward"),
        accumulator.micro_batch(data.weight),
    ):
        accumulator.backward(loss_sum(model, data))


# ---------------------------------------------------------------------- memory


def after_a_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def test_every_tensor_counts_once() -> None:
    """Parameters, frozen ones, buffers, shared ones, half precision and two moments."""
    embed = nn.Embedding(10, 4)
    head = nn.Linear(4, 10, bias=False)
    head.weight = embed.weight
    frozen = nn.Linear(4, 4).requires_grad_(False).half()
    model = nn.Sequential(embed, nn.BatchNorm1d(4), frozen, head)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    assert memory_summary(model, optimizer).total.optimizer_bytes == 0
    summary = memory_summary(model, after_a_step(optimizer))
    assert [one.name for one in summary.modules] == ["0", "1", "2"]
    total = summary.total
    assert (total.parameters, total.learnable) == (40 + 8 + 20, 48)
    assert total.weight_bytes == 4 * 48 + 2 * 20 + (4 * 8 + 8)
    assert total.gradient_bytes == 4 * 48
    assert total.optimizer_bytes == 2 * 4 * 48 + 2 * 4 + 4  # and a count for each of three
    lines = str(summary).splitlines()
    assert len(lines) == 1 + 3 + 1
    assert lines[-1].split()[:4] == ["total", "Sequential", "68", "48"]


def test_memory_that_tensors_share_counts_once() -> None:
    """Two parameters in one storage, a buffer that is expanded, and a view of another buffer."""
    flat = torch.zeros(30)
    one, two = nn.Module(), nn.Module()
    one.weight, two.weight = nn.Parameter(flat[:10]), nn.Parameter(flat[10:])
    one.register_buffer("mask", torch.zeros(1).expand(1000, 1000))
    two.register_buffer("positions", torch.arange(100))
    two.register_buffer("first", two.positions[:10])
    optimizer = torch.optim.SGD([one.weight, two.weight], lr=0.1, momentum=0.9)
    summary = memory_summary(nn.ModuleList([one, two]), after_a_step(optimizer))
    assert [one.weight_bytes for one in summary.modules] == [4 * 30 + 4, 8 * 100]
    assert summary.total.parameters == 30
    assert summary.total.gradient_bytes == 4 * 30
    assert summary.total.optimizer_bytes == 4 * 30
