"""The accumulated step is the large batch's, whatever the cut."""

from __future__ import annotations

import copy
import gc
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from tests.support.large_steps import (
    MODELS,
    OPTIMIZERS,
    Data,
    difference,
    large_step,
    loss_sum,
    make_model,
)
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, PaddedCost, trace_peak_bytes
from torchbudget.errors import (
    BatchNormWarning,
    ChangedParametersWarning,
    ForeignStepWarning,
    ForgottenStepWarning,
    OptionError,
    ReductionWarning,
    StateError,
    StepError,
)

EXACT = 1e-12


@st.composite
def cuts(draw: st.DrawFn, *, most: int = 24) -> list[list[int]]:
    """Rows of a large batch, in any order, in micro-batches of any sizes."""
    n = draw(st.integers(1, most))
    rows = draw(st.permutations(range(n)))
    ends = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return [rows[a:b] for a, b in zip([0, *ends], [*ends, n], strict=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12)
@given(cut=cuts(), clipped=st.booleans(), mean=st.booleans(), divisor=st.sampled_from([1, 64, 3]))
def test_five_steps_are_those_of_the_large_batch(
    name: str, optimizer: str, cut: list[list[int]], clipped: bool, mean: bool, divisor: float
) -> None:
    """Law 6: parameters after five steps differ by at most 1e-12, clipped or not, of any cut."""
    rows = sum(map(len, cut))
    model, large = make_model(name), make_model(name)
    max_norm = 0.1 if clipped else None
    mine, theirs = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, large))
    accumulator = GradAccumulator(
        mine, model, steps=len(cut), max_norm=max_norm, mean=mean, divisor=divisor
    )
    for number in range(5):
        data = Data.make(rows, seed=number)
        large_step(large, theirs, data, max_norm)
        for part in cut:
            piece = data[part]
            with accumulator.micro_batch(weight=piece.weight):
                loss = loss_sum(model, piece)
                accumulator.backward(loss / piece.weight if mean else loss)
        assert accumulator.stepped
        assert accumulator.last.weight == data.weight
    assert difference(model, large) <= EXACT


def parts_of(data: Data, size: int) -> list[Data]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def accumulate(accumulator: GradAccumulator, model: nn.Module, pieces: list[Data]) -> None:
    for piece in pieces:
        with accumulator.micro_batch(weight=piece.weight, samples=len(piece)):
            accumulator.backward(loss_sum(model, piece))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["SGD"](model.parameters())


# ---------------------------------------------------------------------- when a step ends


def test_the_samplers_plan_says_when_a_step_ends() -> None:
    """Steps are those of the plan, in every epoch, and `flush` finds nothing left."""
    data = Data.make(50)
    lengths = (data.y != -100).sum(1).numpy()
    sampler = MemoryBudgetBatchSampler(
        lengths, PaddedCost(unit_bytes=1), 20, samples_per_step=16, seed=3
    )
    loader = DataLoader(range(50), batch_sampler=sampler, collate_fn=list)
    model, large = make_model("CNN"), make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=sampler)
    theirs, held, numbers = sgd(large), [], []
    for _ in range(3):
        for rows in loader:
            held += rows
            accumulate(accumulator, model, [data[rows]])
            if accumulator.stepped:
                large_step(large, theirs, data[held])
                numbers.append(len(held))
                held = []
        accumulator.flush()
        assert not accumulator.stepped
    assert numbers == 3 * [16, 16, 16, 2]
    assert accumulator.last.number == 12
    assert difference(model, large) <= EXACT


@pytest.mark.parametrize(
    ("rule", "expected"), [({"samples": 10}, [12, 12, 6]), ({"steps": 3}, [9, 9, 9, 3])]
)
def test_steps_of_samples_and_of_micro_batches(rule: dict[str, int], expected: list[int]) -> None:
    data = Data.make(30)
    size = 4 if "samples" in rule else 3
    model = make_model("tied")
    accumulator = GradAccumulator(sgd(model), model, **rule)
    found, held = [], 0
    for piece in parts_of(data, size):
        held += len(piece)
        accumulate(accumulator, model, [piece])
        if accumulator.stepped:
            found.append(held)
            held = 0
    accumulator.flush()
    assert accumulator.stepped == bool(held)
    assert [*found, held] if held else found == expected


def test_steps_of_a_weight() -> None:
    """A step ends with the micro-batch that reaches the weight."""
    data = Data.make(30)
    model = make_model("tied")
    accumulator = GradAccumulator(sgd(model), model, weight=20)
    for piece in parts_of(data, 2):
        accumulate(accumulator, model, [piece])
        if accumulator.stepped:
            assert 20 <= accumulator.last.weight < 20 + piece.weight + 1


def test_a_step_can_be_ended_by_hand() -> None:
    model, large = make_model("CNN"), make_model("CNN")
    data = Data.make(12)
    accumulator = GradAccumulator(sgd(model), model)
    accumulate(accumulator, model, parts_of(data, 5))
    assert not accumulator.stepped
    accumulator.step()
    assert accumulator.stepped
    large_step(large, sgd(large), data)
    assert difference(model, large) <= EXACT
    with accumulator.micro_batch(weight=data.weight, last=True):
        accumulator.backward(loss_sum(model, data))
    assert accumulator.last.number == 2


def test_what_happened_is_told() -> None:
    """Loss, weight, norm and numbers are those of the large batch."""
    model, large = make_model("CNN"), make_model("CNN")
    data = Data.make(12)
    accumulator = GradAccumulator(sgd(model), model, steps=3, max_norm=math.inf)
    accumulate(accumulator, model, parts_of(data, 4))
    loss = loss_sum(large, data) / data.weight
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in large.parameters()])
    step = accumulator.last
    assert step.loss == pytest.approx(loss.item(), rel=EXACT)
    assert step.gradient_norm == pytest.approx(norm.item(), rel=EXACT)
    assert (step.number, step.weight, step.micro_batches, step.skipped) == (
        1,
        data.weight,
        3,
        False,
    )


class Plan:
    """Steps of unequal numbers of micro-batches, in one drawing."""

    drawings = 1

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps


@pytest.mark.parametrize("failing", [[0], [4], [0, 3, 4, 9]])
def test_a_micro_batch_that_is_tried_again_leaves_the_plan_alone(failing: list[int]) -> None:
    """Memory that runs out, or an error of the user's, takes no step's number."""
    planned = [4, 1, 5, 2, 3]
    model, data = make_model("CNN"), Data.make(2)
    accumulator = GradAccumulator(sgd(model), model, steps=Plan(planned))
    left, found, number = list(failing), [], 0
    while number < sum(planned):
        fails = bool(left) and left[0] == number

        def step(data: Data, fails: bool = fails) -> None:
            with accumulator.micro_batch(weight=data.weight):
                if fails and len(data) == 2:
                    raise MemoryError
                accumulator.backward(loss_sum(model, data))

        if fails and left.pop(0) % 2:
            with pytest.raises(MemoryError):
                step(data)
            continue
        accumulator.run_or_split(step, Pair(data.x, data.y))
        number += 1
        if accumulator.stepped:
            found.append((accumulator.last.weight / data.weight, number))
    expected = np.cumsum(planned).tolist()
    assert found == list(zip(planned, expected, strict=True))


class Pair(Data):
    """Data that says how many samples it has, and splits."""

    @property
    def num_samples(self) -> int:
        return len(self)

    def split(self, n: int) -> list[Pair]:
        return [Pair(x, y) for x, y in zip(self.x.chunk(n), self.y.chunk(n), strict=True)]


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


# ---------------------------------------------------------------------- beside real optimizers


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


def test_a_mean_over_nothing_is_left_out() -> None:
    """A micro-batch without labels, whose mean is no number, changes neither gradient nor loss."""
    model, large = make_model("CNN"), make_model("CNN")
    data = Data.make(6)
    empty = Data(data.x, torch.full_like(data.y, -100))
    accumulator = GradAccumulator(sgd(model), model, steps=2, mean=True)
    for piece in (empty, data):
        with accumulator.micro_batch(weight=piece.weight):
            logits = model(piece.x).flatten(0, 1)
            accumulator.backward(nn.functional.cross_entropy(logits, piece.y.flatten()))
    large_step(large, sgd(large), data)
    assert difference(model, large) <= EXACT
    assert math.isfinite(accumulator.last.loss)


def test_autocast_is_the_loops_own() -> None:
    """Under bfloat16 autocast an accumulated step is that of the same micro-batches by hand."""
    model, by_hand = make_model("CNN").float(), make_model("CNN").float()
    theirs = sgd(by_hand)
    accumulator = GradAccumulator(sgd(model), model, steps=3, divisor=16)
    data = Data.make(12)
    for piece in parts_of(data, 4):
        with accumulator.micro_batch(weight=piece.weight), torch.autocast("cpu", torch.bfloat16):
            accumulator.backward(loss_sum(model, piece))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_sum(by_hand, piece)
        (loss / 16).backward()
    for parameter in by_hand.parameters():
        parameter.grad *= 16 / data.weight
    theirs.step()
    assert difference(model, by_hand) == 0


def test_nothing_that_weighs() -> None:
    """A step without weight changes nothing, momentum included, and says so."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    before = copy.deepcopy(model)
    for _ in range(2):
        with accumulator.micro_batch(weight=0):
            accumulator.backward(0 * loss_sum(model, Data.make(4)))
    assert accumulator.last.skipped
    assert math.isnan(accumulator.last.loss)
    assert difference(model, before) == 0


# ---------------------------------------------------------------------- keeping it


@pytest.mark.parametrize("done", range(9))
def test_resumed_equals_uninterrupted(done: int) -> None:
    """Anywhere, in the middle of a step too, bit for bit."""
    pieces = parts_of(Data.make(32), 4)
    model = make_model("transformer")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    accumulator = GradAccumulator(optimizer, model, steps=3)
    accumulate(accumulator, model, pieces[:done])
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict(), accumulator.state_dict()])
    accumulate(accumulator, model, pieces[done:])
    accumulator.flush()
    again = make_model("transformer")
    its = OPTIMIZERS["AdamW"](again.parameters())
    resumed = GradAccumulator(its, again, steps=3)
    for one, state in zip((again, its, resumed), kept, strict=True):
        one.load_state_dict(state)
    accumulate(resumed, again, pieces[done:])
    resumed.flush()
    assert difference(again, model) == 0
    assert resumed.last == accumulator.last


def test_the_state_between_steps_is_plain() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    state = accumulator.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state["steps"] == 1


@pytest.mark.parametrize("state", [{}, {"version": 2}, 3])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    model = make_model("CNN")
    with pytest.raises(StateError):
        GradAccumulator(sgd(model), model).load_state_dict(state)


def test_gradients_of_other_parameters_are_refused() -> None:
    model, other = make_model("CNN"), make_model("tied")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, [Data.make(4)])
    state = accumulator.state_dict()
    accumulator.step()
    with pytest.raises(StateError, match="other parameters"):
        GradAccumulator(sgd(other), other).load_state_dict(state)


# ---------------------------------------------------------------------- misuse


def test_flush_forgotten_at_the_end() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=3)
    accumulate(accumulator, model, [Data.make(4)])
    held = [accumulator]
    del accumulator
    with pytest.warns(ForgottenStepWarning, match="1 micro-batches that no step took"):
        held.clear()


def test_what_a_state_holds_is_not_forgotten() -> None:
    """An accumulator may go in the middle of a step, where another one loads its state."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, [Data.make(4)])
    state = accumulator.state_dict()
    accumulator = GradAccumulator(sgd(model), model, steps=2)  # the first one is gone, silently
    accumulator.load_state_dict(state)
    accumulate(accumulator, model, [Data.make(4)])
    assert accumulator.last is not None
    assert accumulator.last.micro_batches == 2


def test_flush_forgotten_between_epochs() -> None:
    data = Data.make(20)
    sampler = MemoryBudgetBatchSampler(
        np.full(20, 7), PaddedCost(unit_bytes=1), 28, samples_per_step=10
    )
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=sampler)
    accumulate(accumulator, model, [data[next(iter(sampler))]])
    with pytest.warns(ForgottenStepWarning, match="epoch gone by"):
        accumulate(accumulator, model, [data[next(iter(sampler))]])
    accumulator.flush()


HANDS: dict[str, Any] = {
    "step": lambda held: held["optimizer"].step(),
    "zero_grad": lambda held: held["optimizer"].zero_grad(),
    "zero_grad in place": lambda held: held["optimizer"].zero_grad(set_to_none=False),
    "clip": lambda held: nn.utils.clip_grad_norm_(held["model"].parameters(), 1e-3),
    "backward": lambda held: loss_sum(held["model"], Data.make(2)).backward(),
}


@pytest.mark.parametrize("how", HANDS)
def test_a_hand_in_the_gradients_is_noticed(how: str) -> None:
    model = make_model("CNN")
    optimizer = sgd(model)
    accumulator = GradAccumulator(optimizer, model, steps=3)
    accumulate(accumulator, model, [Data.make(4)])

    def go_on() -> None:
        HANDS[how]({"model": model, "optimizer": optimizer})
        accumulate(accumulator, model, [Data.make(4)])

    with pytest.warns(ForeignStepWarning):
        go_on()
    accumulator.flush()


def test_gradients_of_before_are_noticed() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=1)
    loss_sum(model, Data.make(4)).backward()
    with pytest.warns(ForeignStepWarning, match="were there before"):
        accumulate(accumulator, model, [Data.make(4)])


def test_gradients_of_a_micro_batch_that_raised_are_noticed() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)

    def raising() -> None:
        with accumulator.micro_batch(weight=1):
            accumulator.backward(loss_sum(model, Data.make(2)))
            raise KeyError

    with (
        pytest.warns(ForeignStepWarning, match="raised behind its backward"),
        pytest.raises(KeyError),
    ):
        raising()
    assert not accumulator.stepped


def test_measuring_and_warming_up_do_not_count() -> None:
    """A step that accumulates is measured as single steps; the accumulator goes on as before."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=3)
    accumulate(accumulator, model, [Data.make(4)])

    def step(data: Any) -> None:
        with accumulator.micro_batch(weight=len(data[0])):
            accumulator.backward(loss_sum(model, Data(*data)))

    data = Data.make(50)
    assert trace_peak_bytes(step, (data.x, data.y)) > data.x.nbytes
    assert accumulator.state_dict()["micro_batches"] == 1
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    assert accumulator.last.number == 1
    assert accumulator.last.micro_batches == 3


def test_steps_between_are_nobodys_business() -> None:
    """Where no step is in progress, and when the accumulator is gone, nothing is said."""
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
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("mean", [False, True])
def test_the_wrong_reduction_is_noticed(mean: bool) -> None:
    model = make_model("CNN")
    data = Data.make(4)
    accumulator = GradAccumulator(sgd(model), model, steps=1, mean=mean)
    logits = model(data.x).flatten(0, 1)
    loss = nn.functional.cross_entropy(
        logits, data.y.flatten(), reduction="sum" if mean else "mean"
    )
    with pytest.warns(ReductionWarning), accumulator.micro_batch(weight=data.weight):
        accumulator.backward(loss)
    with accumulator.micro_batch(weight=1):
        accumulator.backward(logits.detach().requires_grad_().mean())


def test_batch_normalisation_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for steps, warned in ((1, False), (2, True)):
        accumulator = GradAccumulator(sgd(model), model, steps=steps)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                with accumulator.micro_batch(weight=4):
                    accumulator.backward(model(torch.ones(4, 3)).square().sum())
        assert [w.category for w in seen] == [BatchNormWarning] * warned
    model.eval()
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    for _ in range(2):
        with accumulator.micro_batch(weight=4):
            accumulator.backward(model(torch.ones(4, 3)).square().sum())


def test_changed_parameters_are_noticed() -> None:
    model = make_model("CNN")
    optimizer = torch.optim.SGD(model.outer.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, model, steps=1)
    accumulate(accumulator, model, [Data.make(4)])
    optimizer.add_param_group({"params": list(model.inner.parameters())})
    model.zero_grad()
    with pytest.warns(ChangedParametersWarning):
        accumulate(accumulator, model, [Data.make(4)])


# ---------------------------------------------------------------------- bad input

PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "steps must be a positive"),
        ({"steps": True}, "steps must be a positive"),
        ({"steps": 2, "samples": 3}, "one of steps, samples and weight"),
        ({"samples": 0.5}, "samples must be a positive"),
        ({"weight": -1}, "weight must be a positive"),
        ({"max_norm": 0}, "max_norm must be"),
        ({"divisor": 0}, "divisor must be"),
        ({"optimizer": []}, "needs an optimizer"),
        ({"optimizer": 3}, "optimizer must be of Optimizer"),
        ({"module": [3]}, "module must be of Module"),
        ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "LBFGS"),
        ({"scheduler": PLATEAU}, "needs a metric"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    model = make_model("CNN")
    with pytest.raises(OptionError, match=said):
        GradAccumulator(**{"optimizer": sgd(model), "module": model} | arguments)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", True, torch.ones(2)])
def test_bad_weights(weight: Any) -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    with pytest.raises(OptionError, match="weight must be"), accumulator.micro_batch(weight=weight):
        pass


def test_bad_calls() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=1)
    with pytest.raises(OptionError, match=r"inside accumulator\.micro_batch"):
        accumulator.backward(torch.zeros(1, requires_grad=True))
    with pytest.raises(StepError, match=r"no accumulator.backward"), accumulator.micro_batch(1):
        pass
    with pytest.raises(OptionError, match="scalar"), accumulator.micro_batch(1):
        accumulator.backward(torch.zeros(2, requires_grad=True))
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
