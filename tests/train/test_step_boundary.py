"""When a step ends: after micro-batches, samples or a weight, or as planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.large_steps import (
    EXACT,
    Data,
    accumulate,
    difference,
    large_step,
    loss_sum,
    make_model,
    parts_of,
    sgd,
)
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, PaddedCost, evaluate
from torchbudget.errors import OptionError
from torchbudget.protocols import StepSource


def test_the_samplers_plan_says_when_a_step_ends() -> None:
    """Steps are those of the plan, in every epoch, and `flush` finds nothing left.

    Also where the loader that is trained on is evaluated within the epoch.
    """
    data = Data.make(50)
    lengths = (data.y != -100).sum(1).numpy()
    sampler = MemoryBudgetBatchSampler(
        lengths, PaddedCost(unit_bytes=1), 20, samples_per_step=16, seed=3
    )
    loader = DataLoader(range(50), batch_sampler=sampler, collate_fn=list)
    model, large = make_model("CNN"), make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=sampler)
    theirs, rows_of_step, numbers = sgd(large), [], []
    for _ in range(3):
        for rows in loader:
            rows_of_step += rows
            accumulate(accumulator, model, [data[rows]])
            if accumulator.stepped:
                large_step(large, theirs, data[rows_of_step])
                numbers.append(len(rows_of_step))
                rows_of_step = []
                evaluate(model, loader, lambda model, rows: loss_sum(model, data[rows]), weight=len)
        accumulator.flush()
        assert not accumulator.stepped
    assert numbers == 3 * [16, 16, 16, 2]
    assert accumulator.last.number == 12
    assert difference(model, large) <= EXACT


@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        ({"samples": 10}, 4, [12, 12, 6]),
        ({"steps": 3}, 3, [9, 9, 9, 3]),
        ({"weight": 5}, 2, [6] * 5),
    ],
)
def test_steps_of_samples_micro_batches_and_a_weight(
    rule: dict[str, int], size: int, expected: list[int]
) -> None:
    """A step ends with the micro-batch that reaches the number; `flush` takes the rest."""
    data, model = Data.make(30), make_model("tied")
    if "weight" in rule:  # of every sample as many labels
        data = Data(data.x, data.x.new_full(data.y.shape, -100).index_fill(1, torch.tensor([0]), 1))
    accumulator = GradAccumulator(sgd(model), model, **rule)
    found, samples = [], 0
    for piece in parts_of(data, size):
        samples += len(piece)
        accumulate(accumulator, model, [piece])
        if accumulator.stepped:
            found.append(samples)
            samples = 0
    accumulator.flush()
    assert accumulator.stepped == bool(samples)
    assert ([*found, samples] if samples else found) == expected


class Plan:
    """Steps of unequal numbers of micro-batches, in one iteration."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def accumulates(self) -> bool:
        return True


@pytest.mark.parametrize("failing", [[0], [4], [0, 3, 4, 9]])
def test_a_micro_batch_that_is_tried_again_leaves_the_plan_alone(failing: list[int]) -> None:
    """Memory that runs out, or an error of the user's, takes no step's number."""
    planned = [4, 1, 5, 2, 3]
    model, data = make_model("CNN"), Data.make(2)
    accumulator = GradAccumulator(sgd(model), model, steps=Plan(planned))
    left, found, number = list(failing), [], 0
    while number < sum(planned):
        fails = bool(left) and left[0] == number

        def step(batch: Any, fails: bool = fails) -> None:
            data = Data(*batch)
            with accumulator.micro_batch(weight=data.weight):
                if fails and len(data) == 2:
                    raise MemoryError
                accumulator.backward(loss_sum(model, data))

        if fails and left.pop(0) % 2:
            with pytest.raises(MemoryError):
                step((data.x, data.y))
            continue
        accumulator.run_or_split(step, (data.x, data.y))
        number += 1
        if accumulator.stepped:
            found.append((accumulator.last.weight / data.weight, number))
    expected = np.cumsum(planned).tolist()
    assert found == list(zip(planned, expected, strict=True))


def test_a_step_that_is_ended_early_leaves_the_rest_to_its_own() -> None:
    model, data = make_model("CNN"), Data.make(2)
    accumulator = GradAccumulator(sgd(model), model, steps=Plan([4, 3]))
    found = []
    for number in range(7):
        with accumulator.micro_batch(weight=1, last=number == 0):
            accumulator.backward(loss_sum(model, data))
        if accumulator.stepped:
            found.append(accumulator.last.weight)
    assert found == [1, 3, 3]


def test_steps_are_read_anew_in_each_iteration() -> None:
    """Where `steps` is another list, the plan of before is dropped, whatever is left of it."""
    plan, model = Plan([2, 3]), make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=plan)

    def ends_of(micro_batches: int) -> list[bool]:
        found = []
        for _ in range(micro_batches):
            accumulate(accumulator, model, [Data.make(2)])
            found.append(accumulator.stepped)
        return found

    assert ends_of(4) == [False, True, False, False]
    accumulator.step()
    plan.steps = [1, 2]
    assert ends_of(3) == [True, False, True]
    with pytest.raises(OptionError, match="no further step is planned"):
        ends_of(1)


class StepsAlone:
    """It does not say whether steps have several micro-batches."""

    steps = (2, 3)


@pytest.mark.parametrize("steps", [0, True, 2.0, "2", StepsAlone()])
def test_steps_of_something_else_are_refused(steps: Any) -> None:
    with pytest.raises(OptionError, match="`steps` and `accumulates`"):
        GradAccumulator(sgd(make_model("CNN")), steps=steps)


def test_a_sampler_is_a_source_of_steps() -> None:
    sampler = MemoryBudgetBatchSampler([3, 4, 5], PaddedCost(unit_bytes=1), 9, shuffle=False)
    assert isinstance(sampler, StepSource)
    assert not isinstance(StepsAlone(), StepSource)
    assert len(sampler.steps) == 0
    batches = list(sampler)
    assert sum(sampler.steps) == len(batches)
