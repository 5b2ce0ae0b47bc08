"""The accumulated step is the large batch's, whatever the cut."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
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
    trace_peak_bytes,
)
from torchbudget.errors import OptionError, StepError


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


def test_what_a_step_reports() -> None:
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


def test_an_autocast_around_steps_sees_the_weights_that_they_have_changed() -> None:
    """It keeps its casts of parameters as long as it is open."""
    models = [make_model("CNN").float() for _ in range(2)]
    for model, is_around in zip(models, (False, True), strict=True):
        accumulator = GradAccumulator(sgd(model), model, steps=1)
        with torch.autocast("cpu", torch.bfloat16) if is_around else nullcontext():
            for piece in parts_of(Data.make(12), 4):
                with (
                    accumulator.micro_batch(weight=piece.weight),
                    torch.autocast("cpu", torch.bfloat16),
                ):
                    accumulator.backward(loss_sum(model, piece))
    assert difference(*models) == 0


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
    assert accumulator.state_dict()["micro_batches"] == 1
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
