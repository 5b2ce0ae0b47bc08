"""The accumulated step is the large batch's, whatever the cut."""

from __future__ import annotations

import copy
import json
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.large_steps import (
    EXACT,
    MODELS,
    OPTIMIZERS,
    Data,
    accumulate,
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
    trace_peak_bytes,
)
from torchbudget.errors import OptionError, StateError, StepError


@st.composite
def cuts(draw: st.DrawFn, *, most: int = 24) -> list[list[int]]:
    """Rows of a large batch, in any order, in micro-batches of any sizes."""
    n = draw(st.integers(1, most))
    rows = draw(st.permutations(range(n)))
    ends = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return [rows[a:b] for a, b in zip([0, *ends], [*ends, n], strict=True)]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    cut=cuts(),
    clipped=st.booleans(),
    mean=st.booleans(),
    divisor=st.sampled_from([1, 64, 3]),
)
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


def test_what_a_step_reports() -> None:
    """Loss, weight, norm and numbers are those of the large batch; a step may end by hand."""
    model, large = make_model("CNN"), make_model("CNN")
    data = Data.make(12)
    accumulator = GradAccumulator(sgd(model), model, max_norm=math.inf)
    accumulate(accumulator, model, parts_of(data, 4))
    assert not accumulator.stepped
    accumulator.step()
    loss = loss_sum(large, data) / data.weight
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in large.parameters()])
    step = accumulator.last
    assert step.loss == pytest.approx(loss.item(), rel=EXACT)
    assert step.gradient_norm == pytest.approx(norm.item(), rel=EXACT)
    numbers = (step.number, step.weight, step.micro_batches, step.skipped)
    assert numbers == (1, data.weight, 3, False)
    with accumulator.micro_batch(weight=data.weight, last=True):
        accumulator.backward(loss_sum(model, data))
    assert accumulator.last.number == 2


def test_a_state_is_plain_and_between_steps() -> None:
    """Resumed equals uninterrupted; the middle of a step is refused, and says where to save."""
    model, pieces = make_model("CNN"), parts_of(Data.make(32), 4)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    accumulator = GradAccumulator(optimizer, model, steps=2)
    accumulate(accumulator, model, pieces[:4])
    state = accumulator.state_dict()
    assert json.loads(json.dumps(state)) == state
    kept = copy.deepcopy([model.state_dict(), accumulator.training_state()])
    accumulate(accumulator, model, pieces[4:])
    again = make_model("CNN")
    resumed = GradAccumulator(OPTIMIZERS["AdamW"](again.parameters()), again, steps=2)
    again.load_state_dict(kept[0])
    resumed.load_training_state(kept[1])
    accumulate(resumed, again, pieces[4:7])
    with pytest.raises(StepError, match=r"after 1 of its micro-batches.*accumulator\.stepped"):
        resumed.state_dict()
    accumulate(resumed, again, pieces[7:])
    assert difference(again, model) == 0
    assert resumed.last == accumulator.last
    for other in ({}, {"version": 9}, 3):
        with pytest.raises(StateError, match="expected what GradAccumulator"):
            resumed.load_state_dict(other)
    two = GradAccumulator([sgd(model), sgd(make_model("CNN"))], model)
    with pytest.raises(StateError, match="1 optimizers, there are 2"):
        two.load_training_state(kept[1])


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


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "steps must be an int of at least 1"),
        ({"steps": True}, "steps must be an int of at least 1"),
        ({"steps": 2, "samples": 3}, "one of steps, samples and weight"),
        ({"samples": 0.5}, "samples must be an int of at least 1"),
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
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    with pytest.raises(OptionError, match="weight must be"), accumulator.micro_batch(weight=weight):
        pass
    with pytest.raises(OptionError, match="weight must be"):
        evaluate(model, [torch.ones(2, 3)], lambda *_: torch.ones(()), weight=lambda _: weight)


@pytest.mark.parametrize("loss", [1.5, (torch.ones(()),), {"loss": torch.ones(())}, None])
def test_losses_that_are_no_tensors(loss: Any) -> None:
    """As of `item()`, or of a model that returns its loss among others."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    with pytest.raises(OptionError, match="scalar tensor"), accumulator.micro_batch(weight=1):
        accumulator.backward(loss)
    with pytest.raises(OptionError, match="scalar tensor"):
        evaluate(model, [torch.ones(2, 3)], lambda *_: loss)
