"""Optimizers, schedulers and scaler of a step do what a loop by hand does."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.support.large_steps import (
    EXACT,
    Data,
    difference,
    loss_sum,
    make_model,
    parts_of,
    sgd,
)
from torchbudget import GradAccumulator
from torchbudget.errors import ForeignStepWarning, OptionError, StateError


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


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, whose own `__init__` never runs: no hook sees its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.__dict__.update(vars(inner))
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure: None = None) -> None:
        self.inner.step(closure)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=8.0)])
def test_an_optimizer_that_runs_no_hooks_has_stepped(scaler: torch.amp.GradScaler | None) -> None:
    """With or without a scaler its step is taken, and the schedulers advance."""
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    accumulator = GradAccumulator(Wrapper(inner), model, steps=1, scheduler=schedule, scaler=scaler)
    for factor in (1.0, math.inf) if scaler else (1.0,):
        with accumulator.micro_batch(weight=2):
            accumulator.backward(model(torch.ones(2, 3)).sum() * factor)
        assert accumulator.last is not None
        assert accumulator.last.skipped == (factor == math.inf)
    assert schedule.get_last_lr() == [0.05]


def test_the_state_of_other_optimizers_is_refused() -> None:
    models = [make_model("CNN"), make_model("tied")]
    state = GradAccumulator([sgd(model) for model in models], models).training_state()
    with pytest.raises(StateError, match="2 optimizers, there are 1"):
        GradAccumulator(sgd(models[0]), models[0]).load_training_state(state)


def test_a_scaler_needs_each_parameter_in_one_optimizer() -> None:
    """It would divide the gradient by its scale twice."""
    model = make_model("CNN")
    optimizers = [sgd(model), sgd(model)]
    with pytest.raises(OptionError, match="in one optimizer"):
        GradAccumulator(optimizers, scaler=torch.amp.GradScaler("cpu"))
    GradAccumulator(optimizers)


def test_an_infinite_norm_is_only_measured() -> None:
    """Finite gradients stay finite where their norm overflows, since nothing is clipped."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1e-30)
    accumulator = GradAccumulator(optimizer, steps=1, max_norm=math.inf)
    with accumulator.micro_batch(1):
        accumulator.backward((parameter * 1e30).sum())
    assert accumulator.last.gradient_norm == math.inf
    assert parameter.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_several_optimizers_step_with_finite_gradients_whose_norm_overflows(max_norm) -> None:
    """A scaler lowers its scale only where a gradient overflows: it would never step again."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1e-30) for parameter in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = GradAccumulator(optimizers, steps=1, max_norm=max_norm, scaler=scaler)
    for factor in (1e30, math.nan, math.inf):
        with accumulator.micro_batch(1):
            accumulator.backward(sum((parameter * factor).sum() for parameter in parameters))
        assert accumulator.last.skipped == (factor != 1e30)
        assert all(parameter.tolist() == [-1.0, -1.0] for parameter in parameters)


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
