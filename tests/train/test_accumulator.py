"""An accumulated step: what it reports, saves, leaves out and refuses.

That it is the large batch's, whatever the cut, is the law of `tests/fuzzing/steps.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

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
from tests.support.live_bytes import LiveBytes
from torchbudget import (
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PaddedCost,
    evaluate,
    measure_cost,
    trace_peak_bytes,
)
from torchbudget.errors import OptionError, StateError, StepError


def test_a_state_is_plain_and_between_steps() -> None:
    """The middle of a step is refused, and says where to save; fuzzed steps go on from states."""
    model, pieces = make_model("CNN"), parts_of(Data.make(12), 4)
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, pieces[:2])
    state = accumulator.state_dict()
    assert json.loads(json.dumps(state)) == state
    for other in ({}, {"version": 9}, 3):
        with pytest.raises(StateError, match="expected the result of GradAccumulator"):
            accumulator.load_state_dict(other)
    two = GradAccumulator([sgd(model), sgd(make_model("CNN"))], model)
    with pytest.raises(StateError, match="1 optimizers, but 2 are given"):
        two.load_training_state(accumulator.training_state())
    accumulate(accumulator, model, pieces[2:])
    with pytest.raises(StepError, match=r"after 1 of its micro-batches.*accumulator\.stepped"):
        accumulator.state_dict()
    accumulator.load_state_dict(state)
    assert accumulator.pending == 0


@pytest.mark.parametrize("mean", [False, True])
def test_nothing_that_weighs(mean: bool) -> None:
    """A micro-batch without labels changes neither gradient nor loss, though its mean is NaN.

    A step of such micro-batches changes nothing, momentum included, and says so.
    """
    model, large = make_model("CNN"), make_model("CNN")
    data = Data.make(6)
    empty = Data(data.x, torch.full_like(data.y, -100))
    accumulator = GradAccumulator(sgd(model), model, steps=2, mean=mean)
    for piece in (empty, data, empty, empty):
        with accumulator.micro_batch(weight=piece.weight):
            logits = model(piece.x).flatten(0, 1)
            reduction = "mean" if mean else "sum"
            loss = nn.functional.cross_entropy(logits, piece.y.flatten(), reduction=reduction)
            accumulator.backward(loss)
        if piece is data:
            loss = loss_sum(large, data).item() / data.weight
            assert accumulator.last.loss == pytest.approx(loss, rel=EXACT)
    large_step(large, sgd(large), data)
    assert difference(model, large) <= EXACT
    assert accumulator.last.skipped
    assert math.isnan(accumulator.last.loss)


@pytest.mark.parametrize("is_around", [False, True])
def test_autocast_is_the_loops_own(is_around: bool) -> None:
    """Under bfloat16 autocast an accumulated step is that of the same micro-batches by hand.

    An autocast around steps keeps its casts of parameters as long as it is open.
    """
    model, by_hand = make_model("CNN").float(), make_model("CNN").float()
    theirs = sgd(by_hand)
    accumulator = GradAccumulator(sgd(model), model, steps=3, divisor=16)
    inner = partial(torch.autocast, "cpu", torch.bfloat16)
    with inner() if is_around else nullcontext():
        for data in (Data.make(12), Data.make(12, 1)):
            for piece in parts_of(data, 4):
                with accumulator.micro_batch(weight=piece.weight), inner():
                    accumulator.backward(loss_sum(model, piece))
    for data in (Data.make(12), Data.make(12, 1)):
        for piece in parts_of(data, 4):
            with inner():
                loss = loss_sum(by_hand, piece)
            (loss / 16).backward()
        for parameter in by_hand.parameters():
            parameter.grad *= 16 / data.weight
        theirs.step()
        theirs.zero_grad()
    assert difference(model, by_hand) == 0


def test_measuring_and_warming_up_do_not_count() -> None:
    """A step that accumulates is measured as single steps; the accumulator goes on as before."""
    accumulator, model = accumulating(steps=3)
    accumulate(accumulator, model, [Data.make(4)])

    def step(data: Any) -> None:
        with accumulator.micro_batch(weight=len(data[0])):
            accumulator.backward(loss_sum(model, Data(*data)))

    data = Data.make(50)
    assert trace_peak_bytes(step, (data.x, data.y)) > data.x.nbytes
    assert accumulator.pending == 1
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    assert accumulator.last.number == 1
    assert accumulator.last.micro_batches == 3


TOKENS = PaddedCost(unit_bytes=1)


@pytest.mark.parametrize(
    "ends",
    [
        {"steps": 1},
        {"steps": 3},
        {"samples": 900},
        {"weight": 900},
        {},
        {"steps": MemoryBudgetBatchSampler([1] * 9, TOKENS, 1, samples_per_step=3)},
        {"steps": MemoryBudgetBatchSampler([1] * 9, TOKENS, 1, window=3)},
    ],
    ids=["one", "three", "samples", "weight", "by hand", "planned", "planned, one"],
)
def test_a_measured_step_takes_what_the_costliest_micro_batch_does(ends: Any) -> None:
    """The gradients of earlier micro-batches are there throughout the next forward."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    accumulator = GradAccumulator(optimizer, model, **ends)

    def step(batch: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(batch), samples=len(batch)):
            accumulator.backward(model(batch).sum())

    predicted = trace_peak_bytes(step, torch.zeros(300, 256))
    if isinstance(ends.get("steps"), MemoryBudgetBatchSampler):
        list(ends["steps"])
    live = LiveBytes("cpu", block_bytes=64)
    for parameter in model.parameters():
        live.count(parameter)
    for _ in range(3):
        batch = torch.zeros(300, 256)
        live.count(batch)
        with live:
            step(batch)
        del batch
    accumulator.flush()
    assert predicted == pytest.approx(max(live.history), rel=1e-3)


def test_bad_calls() -> None:
    accumulator, model = accumulating(steps=1)
    with pytest.raises(OptionError, match=r"inside accumulator\.micro_batch"):
        accumulator.backward(torch.zeros(1, requires_grad=True))
    with (
        pytest.raises(OptionError, match="inside another"),
        accumulator.micro_batch(1),
        accumulator.micro_batch(1),
    ):
        pass
    accumulate(accumulator, model, [Data.make(3)])
    assert accumulator.last.number == 1
    by_samples = GradAccumulator(sgd(model), model, samples=np.int64(3), scheduler=None)
    with pytest.raises(OptionError, match="say micro_batch"), by_samples.micro_batch(1):
        pass
    accumulator.step()
    assert not accumulator.stepped


class StepsAlone:
    """It does not say whether steps have several micro-batches."""

    steps = (2, 3)


ZERO = torch.zeros(1)
TWICE = {"optimizer": [torch.optim.SGD([ZERO], lr=0.1) for _ in range(2)]}
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([ZERO], lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            ({"steps": one}, "steps must be an int of at least 1, or .*`steps` and `accumulates`")
            for one in (0, True, 2.0, "2", StepsAlone())
        ),
        ({"steps": 2, "samples": 3}, "one of steps, samples and weight"),
        ({"samples": 0.5}, "samples must be an int of at least 1"),
        ({"weight": -1}, "weight must be a positive"),
        ({"max_norm": 0}, "max_norm must be"),
        *(({"divisor": one}, "divisor must be") for one in (0, math.inf, math.nan, 10**400)),
        ({"optimizer": []}, "needs an optimizer"),
        ({"optimizer": 3}, "optimizer must be one Optimizer"),
        ({"module": [3]}, "module must be one Module"),
        ({"optimizer": torch.optim.LBFGS([ZERO])}, "LBFGS"),
        ({"scheduler": PLATEAU}, "needs a metric"),
        (TWICE | {"scaler": torch.amp.GradScaler("cpu")}, "in one optimizer"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    model = make_model("CNN")
    with pytest.raises(OptionError, match=said):
        GradAccumulator(**{"optimizer": sgd(model), "module": model} | arguments)


HALF = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"mean": True}, "mean=True"), ({"divisor": 3}, "no power of 2"), ({"divisor": 8}, "")],
)
def test_a_loss_of_half_precision_carries_its_factor_exactly(
    options: dict[str, Any], said: str
) -> None:
    """Or it is refused at the first backward: its gradient would be rounded by up to 0.4 %."""
    accumulator = GradAccumulator(torch.optim.SGD([HALF], lr=0.1), **options)
    refused = pytest.raises(OptionError, match=said) if said else nullcontext()
    with refused, accumulator.micro_batch(weight=2, last=True):
        accumulator.backward(HALF * 1)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", True, torch.ones(2)])
def test_bad_weights(weight: Any) -> None:
    accumulator, model = accumulating(steps=2)
    with pytest.raises(OptionError, match="weight must be"), accumulator.micro_batch(weight=weight):
        pass
    with pytest.raises(OptionError, match="samples"), accumulator.micro_batch(1, samples=weight):
        pass
    with pytest.raises(OptionError, match="weight must be"):
        evaluate(model, [torch.ones(2, 3)], lambda *_: torch.ones(()), weight=lambda _: weight)


@pytest.mark.parametrize("loss", [1.5, {"loss": torch.ones(())}, torch.ones(2)])
def test_losses_that_are_no_scalars(loss: Any) -> None:
    """As of `item()`, or of a model that returns its loss among others."""
    accumulator, model = accumulating(steps=2)
    with pytest.raises(OptionError, match="a scalar"), accumulator.micro_batch(weight=1):
        accumulator.backward(loss)
    with pytest.raises(OptionError, match="a scalar"):
        evaluate(model, [torch.ones(2, 3)], lambda *_: loss)


# ---------------------------------------------------------------------- when a step ends


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


class Plan:
    """Steps of unequal numbers of micro-batches, in one iteration."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def accumulates(self) -> bool:
        return True


def taken(accumulator: GradAccumulator, model: nn.Module, number: int, **first: Any) -> list[float]:
    """Weights of the steps among micro-batches of weight 1 and of 4 samples."""
    found = []
    for place in range(number):
        with accumulator.micro_batch(weight=1, samples=4, **({} if place else first)):
            accumulator.backward(loss_sum(model, Data.make(2)))
        if accumulator.stepped:
            found.append(accumulator.last.weight)
    return found


@pytest.mark.parametrize("rule", [{"samples": 10}, {"steps": 3}, {"weight": 2.5}])
def test_steps_of_samples_micro_batches_and_a_weight(rule: dict[str, Any]) -> None:
    """A step ends with the micro-batch that reaches the number; `flush` takes the rest."""
    accumulator, model = accumulating("tied", **rule)
    assert taken(accumulator, model, 8) == [3, 3]
    accumulator.flush()
    assert (accumulator.stepped, accumulator.last.weight) == (True, 2)
    accumulator.flush()
    assert not accumulator.stepped


@pytest.mark.parametrize("failing", [[0], [4], [0, 3, 4, 9]])
def test_a_micro_batch_that_is_tried_again_leaves_the_plan_alone(failing: list[int]) -> None:
    """An error of the user's, or memory that runs out, takes no step's number."""
    planned = [4, 1, 5, 2, 3]
    accumulator, model = accumulating("tied", steps=Plan(planned))
    found = []
    for number in range(sum(planned)):
        errors: list[type[Exception]] = [MemoryError, KeyError] * (number in failing)

        def step(rows: torch.Tensor, errors: list[type[Exception]] = errors) -> None:
            with accumulator.micro_batch(weight=len(rows) / 2):
                if errors and len(rows) == 2:
                    raise errors.pop()
                accumulator.backward(model(rows).sum())

        for _ in range(1 + errors.count(KeyError)):
            with suppress(KeyError):
                accumulator.run_or_split(step, Data.make(2).x)
        if accumulator.stepped:
            found.append((accumulator.last.weight, number + 1))
    assert found == list(zip(planned, np.cumsum(planned).tolist(), strict=True))


def test_steps_are_read_anew_in_each_iteration() -> None:
    """A step that is ended early leaves the rest to its own.

    Where `steps` is another list, the plan of before is dropped, whatever is left of it.
    """
    plan = Plan([4, 3])
    accumulator, model = accumulating("tied", steps=plan)
    assert taken(accumulator, model, 7, last=True) == [1, 3, 3]
    plan.steps = [2, 3]
    assert taken(accumulator, model, 4) == [2]
    accumulator.step()
    plan.steps = [1, 2]
    assert taken(accumulator, model, 3) == [1, 2]
    with pytest.raises(OptionError, match="no further step is planned"):
        taken(accumulator, model, 1)


def labels_that_count(x: torch.Tensor) -> int:
    return int(x.ne(-100).sum())


@pytest.mark.parametrize(
    ("weight", "options", "splits"),
    [
        (len, {"samples": 1000}, True),
        (lambda x: x.shape[0] * x.shape[1], {"weight": 1000}, False),
        (labels_that_count, {"steps": 2, "mean": True}, False),
    ],
)
def test_a_weight_does_not_fix_the_shape_of_a_trace(
    weight: Callable[[torch.Tensor], float], options: dict[str, Any], splits: bool
) -> None:
    """One symbolic trace, without a grid, is exact at every shape, whatever the weight is."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
    accumulator = GradAccumulator(torch.optim.AdamW(model.parameters()), model, **options)

    def train(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight(x), samples=len(x)):
            reduction = "mean" if accumulator.mean else "sum"
            accumulator.backward(
                torch.nn.functional.cross_entropy(model(x).mT, x, reduction=reduction)
            )

    def step(x: torch.Tensor) -> None:
        if splits:
            accumulator.run_or_split(train, x)
        else:
            train(x)

    def make_batch(n: int, length: int) -> torch.Tensor:
        return torch.ones(n, length, dtype=torch.int64)

    cost = measure_cost(step, make_batch, max_size=256, method="trace")
    assert (cost.grid, len(cost.pieces)) == (None, 1)
    for shape in ((1, 9), (1, 200), (2, 5), (7, 256), (300, 64)):
        assert cost.label(*shape) in ("exact", "tested")
        assert cost.traced_bytes(*shape) == trace_peak_bytes(step, make_batch(*shape))
