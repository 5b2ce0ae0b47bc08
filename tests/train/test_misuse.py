"""Misuse of an accumulator: each kind is warned of, and what is no misuse is not."""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.large_steps import (
    EXACT,
    Data,
    accumulate,
    accumulating,
    difference,
    large_step,
    loss_sum,
    make_model,
    parts_of,
    sgd,
)
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, PaddedCost
from torchbudget.errors import (
    BatchNormWarning,
    ForeignStepWarning,
    ForgottenStepWarning,
    MovingStateWarning,
    ReductionWarning,
)


def test_flush_forgotten_between_epochs() -> None:
    data = Data.make(20)
    sampler = MemoryBudgetBatchSampler(
        np.full(20, 7), PaddedCost(unit_bytes=1), 28, samples_per_step=10
    )
    accumulator, model = accumulating(steps=sampler)
    accumulate(accumulator, model, [data[next(iter(sampler))]])
    with pytest.warns(ForgottenStepWarning, match="earlier epoch"):
        accumulate(accumulator, model, [data[next(iter(sampler))]])
    accumulator.flush()


CHANGES: dict[str, Any] = {
    "step": lambda training: training["optimizer"].step(),
    "zero_grad": lambda training: training["optimizer"].zero_grad(),
    "zero_grad in place": lambda training: training["optimizer"].zero_grad(set_to_none=False),
    "clip": lambda training: nn.utils.clip_grad_norm_(training["model"].parameters(), 1e-3),
    "backward": lambda training: loss_sum(training["model"], Data.make(2)).backward(),
}


@pytest.mark.parametrize("place", ["between", "before the backward", "after the backward"])
@pytest.mark.parametrize("how", CHANGES)
def test_gradients_that_others_change_are_noticed(how: str, place: str) -> None:
    """Between two micro-batches of a step, or inside the second one."""
    if how == "step" and place != "between":
        return
    model = make_model("CNN")
    training = {"model": model, "optimizer": sgd(model)}
    accumulator = GradAccumulator(training["optimizer"], model, steps=3)
    accumulate(accumulator, model, [Data.make(4)])

    def go_on() -> None:
        if place == "between":
            CHANGES[how](training)
        with accumulator.micro_batch(weight=4):
            if place == "before the backward":
                CHANGES[how](training)
            accumulator.backward(loss_sum(model, Data.make(4)))
            if place == "after the backward":
                CHANGES[how](training)

    what = "parameters" if how == "step" else "gradients"
    with pytest.warns(ForeignStepWarning, match=f"other code changed {what} in the middle"):
        go_on()
    accumulator.flush()


def test_several_backwards_of_a_micro_batch_are_fine() -> None:
    """Those of its losses, and of what `backward_runs` announces; nor what failed and is undone."""
    model = nn.Linear(2, 1)
    accumulator = GradAccumulator(sgd(model), model, steps=2)

    def step(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            for _ in range(2):
                accumulator.backward(model(x).sum())
            with accumulator.backward_runs():
                model(x).sum().backward()
            if len(x) == 4:
                raise MemoryError

    for _ in range(2):
        accumulator.run_or_split(step, torch.ones(4, 2))
    assert accumulator.stepped


@pytest.mark.parametrize("place", ["before", "before run_or_split", "inside"])
def test_gradients_of_before_are_noticed(place: str) -> None:
    """They count for the step; also where `run_or_split` has set them aside."""
    model, data = make_model("CNN"), Data.make(4)
    accumulator = GradAccumulator(sgd(model), model, steps=1)

    def run(batch: Any) -> None:
        with accumulator.micro_batch(weight=4):
            if place == "inside":
                loss_sum(model, data).backward()
            accumulator.backward(loss_sum(model, Data(*batch)))

    if place != "inside":
        loss_sum(model, data).backward()
    with pytest.warns(ForeignStepWarning, match="there were gradients before"):
        accumulator.run_or_split(run, (data.x, data.y)) if "run" in place else run((data.x, data.y))


def test_a_micro_batch_that_raised_takes_those_before_it_along() -> None:
    """Their gradients are the same tensors: the step begins again, and is exact."""
    model, large = make_model("CNN"), make_model("CNN")
    optimizer, theirs = sgd(model), sgd(large)
    accumulator = GradAccumulator(optimizer, model, steps=2)
    first, *data = [Data.make(4, seed=seed) for seed in range(3)]
    accumulate(accumulator, model, [first])

    def raising() -> None:
        with accumulator.micro_batch(weight=1):
            accumulator.backward(loss_sum(model, first))
            raise KeyboardInterrupt

    raised = pytest.raises(KeyboardInterrupt)
    with pytest.warns(ForeignStepWarning, match="raised after its backward") as found, raised:
        raising()
    assert found[0].filename == __file__  # not that of contextlib
    assert accumulator.pending == 0
    accumulate(accumulator, model, data)
    (sum(loss_sum(large, one) for one in data) / sum(one.weight for one in data)).backward()
    theirs.step()
    assert difference(model, large) <= EXACT


def test_steps_of_others_between_steps_are_fine() -> None:
    """Where no step is in progress, and when the accumulator is gone, there is no warning."""
    model = make_model("CNN")
    optimizer = sgd(model)
    accumulator = GradAccumulator(optimizer, model, steps=2)
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    large_step(model, optimizer, Data.make(4))
    optimizer.zero_grad()
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    del accumulator
    gc.collect()
    large_step(model, optimizer, Data.make(4))


def cross_entropy(reduction: str) -> Any:
    return lambda x: nn.functional.cross_entropy(x, torch.zeros(4).long(), reduction=reduction)


@pytest.mark.parametrize(
    ("loss_of", "mean"),
    [
        (cross_entropy("mean"), False),
        (cross_entropy("sum"), True),
        (lambda x: x.square().mean(), False),
        (lambda x: x.square().mean((0, 1)), False),
        (lambda x: nn.functional.l1_loss(x, torch.zeros_like(x)), False),
        (lambda x: nn.functional.mse_loss(x, torch.zeros_like(x)).float(), False),
        (lambda x: x.square().mean().squeeze().view(1), False),
    ],
)
def test_the_wrong_reduction_is_noticed(loss_of: Any, mean: bool) -> None:
    """Also of a loss that was cast; not of one sample, of a mean per sample, nor of a product."""
    model = nn.Linear(3, 2).double()
    x = torch.ones(4, 3, dtype=torch.float64)
    accumulator = GradAccumulator(sgd(model), model, steps=1, mean=mean)
    with pytest.warns(ReductionWarning, match="loss is a"), accumulator.micro_batch(weight=4):
        accumulator.backward(loss_of(model(x)))
    accumulator = GradAccumulator(sgd(model), model, steps=1, mean=mean)
    for loss in (loss_of(model(x)) * 4, model(x).mean(1).sum(), model(x[:1, :]).sum().mean()):
        with accumulator.micro_batch(weight=4):
            accumulator.backward(loss)
    with accumulator.micro_batch(weight=1):
        accumulator.backward(loss_of(model(x)))


def accumulate_ones(accumulator: GradAccumulator, model: nn.Module) -> None:
    for _ in range(2):
        with accumulator.micro_batch(weight=4):
            accumulator.backward(model(torch.ones(4, 3)).square().sum())


def test_batch_normalisation_is_noticed() -> None:
    """In steps of several micro-batches; without running statistics in evaluation mode, too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for steps, warned in ((1, False), (2, True)):
        accumulator = GradAccumulator(sgd(model), model, steps=steps)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            accumulate_ones(accumulator, model)
        assert [w.category for w in seen] == [BatchNormWarning] * warned
    model.eval()
    accumulate_ones(GradAccumulator(sgd(model), model, steps=2), model)
    model[1] = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.warns(BatchNormWarning, match="running statistics"):
        accumulate_ones(GradAccumulator(sgd(model), model, steps=2), model)
    counting = nn.Embedding(3, 4, scale_grad_by_freq=True)
    with pytest.warns(BatchNormWarning, match="scale_grad_by_freq=True its counts"):
        accumulate_ones(
            GradAccumulator(sgd(counting), counting, steps=2), lambda x: counting(x.int())
        )


class Moving(nn.Module):
    """A codebook, a teacher and a queue, which a forward moves, or a buffer that it replaces."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.student = how, nn.Linear(3, 3)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("codes", torch.zeros(5, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.codes[0] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "codebook":
            self.codes.data[0] *= 0.9  # no version shows it
        elif self.how == "teacher":
            self.teacher.weight.data.lerp_(self.student.weight.data, 0.1)
        elif self.how == "queue":
            self.place += len(x)
        elif self.how == "replaced":
            self.codes = torch.ones(len(x), 3)
        return self.student(x)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("codebook", r"changes Moving\.codes"),
        ("teacher", r"changes Linear\.weight"),
        ("queue", r"changes Moving\.place"),
        ("replaced", ""),
        ("nothing", ""),
    ],
)
def test_state_that_the_forward_moves_is_named_once(how: str, name: str) -> None:
    """It moves once a micro-batch, and not once a step, as in the large batch."""
    model = Moving(how)
    for steps in (1, 2):
        accumulator = GradAccumulator(sgd(model.student), model, steps=steps)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                accumulate_ones(accumulator, model)
        expected = [MovingStateWarning] if name and steps == 2 else []
        assert [one.category for one in seen] == expected
        assert all(re.search(name, str(one.message)) for one in seen)
