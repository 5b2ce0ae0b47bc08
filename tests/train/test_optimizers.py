"""Optimizers, schedulers and scaler of a step do what a loop by hand does."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.large_steps import (
    EXACT,
    Data,
    difference,
    large_step,
    loss_sum,
    make_model,
    parts_of,
    sgd,
)
from torchbudget import GradAccumulator, fit
from torchbudget.errors import ForeignStepWarning, OptionError


def test_schedulers_and_several_optimizers() -> None:
    """Two networks of two optimizers, each with its schedule, step together."""
    models = [make_model("CNN"), make_model("tied")]
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1), sgd(models[1])]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    accumulator = GradAccumulator(optimizers, models, steps=2, scheduler=schedulers, max_norm=1.0)
    twins = copy.deepcopy(models)
    theirs = [torch.optim.SGD(twins[0].parameters(), lr=0.1), sgd(twins[1])]
    others = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in theirs]
    for seed in range(3):
        data = Data.make(8, seed)
        for piece in parts_of(data, 4):
            with accumulator.micro_batch(weight=piece.weight):
                accumulator.backward(loss_sum(models[0], piece))
                accumulator.backward(loss_sum(models[1], piece))
        (sum(loss_sum(twin, data) for twin in twins) / data.weight).backward()
        nn.utils.clip_grad_norm_([p for t in twins for p in t.parameters()], 1.0)
        for one in [*theirs, *others]:
            one.step()
        for one in theirs:
            one.zero_grad()
    assert max(map(difference, models, twins)) <= EXACT
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.1 / 8, 0.1 / 8]


def test_a_scaler_skips_what_a_loop_by_hand_skips() -> None:
    """Overflowing steps are skipped, and the scale grows and shrinks, as in the plain loop."""

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    model, large = make_model("CNN"), make_model("CNN")
    theirs, by_hand = sgd(large), scaler()
    mine = scaler()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer := sgd(model), 1, 0.9)
    accumulator = GradAccumulator(
        optimizer, model, steps=2, scaler=mine, max_norm=1.0, scheduler=schedule
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


def test_an_overflow_of_one_optimizer_is_that_of_all() -> None:
    """Optimizers that step together skip together; one without gradients is left alone."""
    models = [nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)]
    before = copy.deepcopy(models)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = GradAccumulator([sgd(m) for m in models], models, scaler=scaler, max_norm=1.0)
    for factor in (math.inf, 1.0):
        with accumulator.micro_batch(weight=2, last=True):
            x = torch.ones(2, 3)
            accumulator.backward(models[0](x).sum() * factor + models[1](x).square().sum())
        assert accumulator.last.skipped == (factor == math.inf)
        moved = [difference(m, b) > 0 for m, b in zip(models, before, strict=True)]
        assert moved == [factor == 1, factor == 1, False]
    assert all(torch.isfinite(p).all() for m in models for p in m.parameters())


def test_a_scaler_needs_each_parameter_in_one_optimizer() -> None:
    """It would divide the gradient by its scale twice."""
    model = make_model("CNN")
    optimizers = [sgd(model), sgd(model)]
    with pytest.raises(OptionError, match="in one optimizer"):
        GradAccumulator(optimizers, scaler=torch.amp.GradScaler("cpu"))
    GradAccumulator(optimizers)


@pytest.mark.parametrize("max_norm", [None, math.inf])
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"scaler": 8.0}])
def test_finite_gradients_whose_norm_overflows_are_stepped_with(
    options: dict[str, Any], max_norm: float | None
) -> None:
    """An infinite norm is only measured; a step is skipped where a gradient is not finite."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1e-30) for parameter in parameters]
    if "scaler" in options:
        options = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
    accumulator = GradAccumulator(optimizers, steps=1, max_norm=max_norm, **options)
    for factor in (1e30, math.nan, math.inf) if options else (1e30,):
        with accumulator.micro_batch(1):
            accumulator.backward(sum((parameter * factor).sum() for parameter in parameters))
        assert accumulator.last.skipped == (factor != 1e30)
        assert all(parameter.tolist() == [-1.0, -1.0] for parameter in parameters)


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
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model)
    accumulator.load_state_dict({**accumulator.state_dict(), "steps": steps})
    for parameter in model.parameters():
        inner = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, inner=inner: inner.step())
    data = Data.make(4)
    with (
        pytest.warns(ForeignStepWarning, match="raised after its backward"),
        pytest.raises(OptionError, match="steps inside the backward"),
        accumulator.micro_batch(data.weight),
    ):
        accumulator.backward(loss_sum(model, data))
