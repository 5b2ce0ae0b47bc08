"""What a measured step is: its mode, its draws, what it leaves behind, and forward-only ones."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbudget
from tests.support.commands import printed_by
from tests.support.steps import SGD, Step, measured_with, ones, step_of
from tests.support.training_cases import CASES, Training
from torchbudget import (
    GradAccumulator,
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    measure_cost,
    plan_step,
    trace_peak_bytes,
)
from torchbudget.errors import CostError, MeasureWarning

# ---------------------------------------------------------------------- forward only


NOTE = "forward only"


def evaluation(name: str, context: Callable[[], Any] = torch.no_grad) -> tuple[Training, Any]:
    """A training case, and the step that only calls its model."""
    training = CASES[name]()
    model = training.model.eval()

    def step(batch: Any) -> Tensor:
        with context():
            return model(batch["x"])

    return training, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "context"),
    [("trace", torch.no_grad), ("run", torch.no_grad), ("auto", torch.inference_mode)],
)
def test_each_method_measures_it(method: Any, context: Callable[[], Any]) -> None:
    """The report says that it was forward only; nothing is changed."""
    training, step = evaluation("encoder, fused attention", context)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    cost = measured_with(80, step, training.make_batch, max_size=256, method=method)
    assert sum(NOTE in note for note in cost.notes) == 1
    assert NOTE in cost.report()
    assert cost.margin < 0.1
    assert all(before[name].equal(t) for name, t in training.model.state_dict().items())
    assert all(p.grad is None and p._backward_hooks is None for p in training.model.parameters())


def test_a_trace_is_that_of_the_forward() -> None:
    """By hand: the parameters, the batch, and two tensors of a sequence's at once."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    with torch.no_grad():  # one kernel, which makes scores of 2 heads, and their softmax
        assert trace_peak_bytes(layer, torch.zeros(3, 500, 16)) > 4 * 2 * 2 * 3 * 500 * 500

    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()).eval()

    @torch.no_grad()
    def step(batch: Tensor) -> None:
        model(batch)

    batch = torch.zeros(100, 16)
    assert trace_peak_bytes(step, batch) == 16 * 16 * 4 + 3 * batch.nbytes
    cost = measure_cost(step, lambda n, size: torch.zeros(n, size, 16), max_size=99, method="trace")
    assert cost.batch_bytes(10, 10) == pytest.approx(16 * 16 * 4 + 3 * batch.nbytes, rel=1e-3)


@pytest.mark.parametrize("kind", [list, PadCollate()], ids=["list", "padded batch"])
def test_what_is_used_late_is_there_from_the_beginning(kind: Any) -> None:
    """The batch's second tensor counts at the peak, before the step has used it."""
    model = nn.Sequential(nn.Linear(16, 160, bias=False), nn.Linear(160, 16, bias=False)).eval()

    @torch.no_grad()
    def step(batch: Any) -> Tensor:
        first, late = batch
        return model(first).mean((1, 2)) + late.mean((1, 2))

    samples = [(torch.zeros(50, 16), torch.zeros(50, 32)) for _ in range(10)]
    batch = [torch.stack(column) for column in zip(*samples, strict=True)]
    if kind is not list:
        batch = kind(samples)
    tokens = 10 * 50 * 4
    expected = 2 * 16 * 160 * 4 + tokens * (16 + 32 + 160 + 16)
    assert trace_peak_bytes(step, batch) == pytest.approx(expected, abs=1000)


def test_a_module_in_training_mode_is_warned_of() -> None:
    """It may be a training step that forgot its backward."""
    model = nn.Linear(3, 3)
    with pytest.warns(MeasureWarning, match=r"forward only.*training mode: to train.*backward"):
        trace_peak_bytes(lambda batch: model(batch).sum(), torch.zeros(2, 3))

    def make_batch(n: int, size: int) -> torch.Tensor:
        return torch.zeros(n, size, 3)

    with pytest.raises(CostError, match=r"step must be a function .* got Linear in training mode"):
        measure_cost(model, make_batch, max_size=50, method="trace")
    with pytest.warns(MeasureWarning, match="training mode"):
        measure_cost(model.forward, make_batch, max_size=50, method="trace")


def test_a_criterion_in_training_mode_is_not() -> None:
    """A module without parameters has no mode that matters."""
    model, criterion = nn.Linear(3, 3).eval(), nn.MSELoss()
    assert criterion.training
    trace_peak_bytes(lambda batch: criterion(model(batch), batch), torch.zeros(2, 3))


def test_gradients_from_before_are_no_steps() -> None:
    """An evaluation within an accumulated step leaves its gradients, and makes none."""
    training, step = evaluation("heavy")
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    cost = measure_cost(step, training.make_batch, max_size=100, method="trace")
    assert any(NOTE in note for note in cost.notes)
    assert all(parameter.grad.eq(1).all() for parameter in training.model.parameters())


@pytest.mark.parametrize("method", ["trace", "run"])
@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_part_of_a_training_step_is_refused(is_cleared: bool, method: Any) -> None:
    """It makes gradients, so that it is not forward only; but no optimizer steps."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        if is_cleared:
            model(batch).sum().backward()
            optimizer.zero_grad()
        else:
            torch.autograd.grad(model(batch).sum(), list(model.parameters()))

    with pytest.raises(CostError, match=r"gradients were made, but none is left.*forward only"):
        measured_with(200, step, lambda n, _: torch.zeros(n, 3), max_size=1, method=method)


def test_an_optimizer_that_steps_without_gradients_is_warned_of() -> None:
    model = nn.Linear(3, 3).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        model(batch)
        optimizer.step()

    with pytest.warns(MeasureWarning, match="no optimizer stepped"):
        trace_peak_bytes(step, torch.zeros(2, 3))


ALONE = """
import torch
from torchbudget import trace_peak_bytes

model = torch.nn.Linear(3, 3).eval()
with torch.no_grad():
    print(trace_peak_bytes(lambda batch: model(batch), torch.zeros(2, 3)))
"""


@pytest.mark.slow
def test_a_process_without_an_optimizer_traces() -> None:
    """Building an optimizer imports parts of torch that tracing must then not rely on."""
    assert int(printed_by(["-c", ALONE])) > 0


# ---------------------------------------------------------------------- the mode


def encoder() -> nn.Module:
    parts = [nn.Dropout(0.1) for _ in range(4)]
    return nn.Sequential(nn.Linear(32, 32), *parts, nn.Linear(32, 32))


def training(model: nn.Module, before: Callable[[], object] = lambda: None) -> Step:
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        before()
        return model(batch).square().mean()

    return step_of(loss_of, model)


def warned(step: Step, method: Any = "trace") -> tuple[MeasuredCost, list[str]]:
    """The cost, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cost = measured_with(60, step, max_size=60, method=method)
    return cost, [str(one.message) for one in caught if one.category is MeasureWarning]


def test_a_model_as_it_is_loaded() -> None:
    """Its step is measured in training mode, with a warning; the model's mode stays."""
    model = encoder().eval()
    cost, said = warned(training(model))
    assert not any(part.training for part in model.modules())
    assert "model.train()" in said[0]
    expected, _ = warned(training(encoder()))
    assert cost.traced_bytes(9, 50) == expected.traced_bytes(9, 50)
    low, said = warned(training(model, before=model.eval))
    assert not said
    assert low.traced_bytes(9, 50) < 0.7 * expected.traced_bytes(9, 50)


def test_a_step_that_sets_its_mode() -> None:
    """Nothing is warned of, and the step decides."""
    model = encoder().eval()
    cost, said = warned(training(model, before=model.train))
    assert not said
    assert cost.traced_bytes(9, 50) == warned(training(encoder()))[0].traced_bytes(9, 50)


def test_frozen_parts_stay() -> None:
    """Parts in evaluation mode below a model in training, and a teacher without gradients."""
    model, teacher = encoder(), encoder().eval()
    model[1].eval()
    seen: list[bool] = []

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(batch)
        seen[:] = [any(seen) or teacher.training or model[1].training]
        return (model(batch) - target).square().mean()

    _, said = warned(step_of(loss_of, model))
    assert not said
    assert not any(seen)


def test_normalisation_of_one_sample() -> None:
    """A step that fails in training mode is measured as it is, with a note."""
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).eval()
    cost, said = warned(step_of(lambda batch: model(batch.mean(1)).square().mean(), model))
    assert not said
    assert any("measured in evaluation mode" in note for note in cost.notes)


@pytest.mark.slow
def test_a_step_without_a_trace() -> None:
    """It is run in training mode, with a warning; a forward stays in evaluation mode."""
    model = encoder().eval()
    modes: list[bool] = []

    def note() -> None:
        modes.append(model.training)
        torch.nonzero(torch.ones(3))

    _, said = warned(training(model, before=note), "auto")
    assert "model.train()" in said[0]
    assert modes[-1]
    assert not model.training

    def forward(batch: torch.Tensor) -> None:
        note()
        with torch.no_grad():
            model(batch)

    modes.clear()
    _, said = warned(forward, "auto")
    assert not said
    assert not any(modes)


def test_an_evaluation_before_training() -> None:
    """A note says that gradients and the optimizer's state will come."""
    model = encoder().eval()

    def forward(batch: torch.Tensor) -> None:
        with torch.no_grad():
            model(batch)

    assert any("no gradients yet" in note for note in warned(forward)[0].notes)
    training(encoder())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert not any("no gradients yet" in note for note in warned(forward)[0].notes)


# ---------------------------------------------------------------------- choices


_own, _older, _pythons = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
GENERATORS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "a Generator": lambda: float(_own.random()),
    "a RandomState": lambda: float(_older.rand()),
    "a Random": _pythons.random,
}


def dropping(keeps: Callable[[], bool], optimizer: Any = SGD) -> Step:
    """A step of several layers, each of which may be left out."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        for layer in model:
            if keeps():
                batch = layer(batch).relu()
        return batch.mean() + 0 * model[0].weight.sum()

    return step_of(loss_of, model, optimizer=optimizer)


def drawing(draw: Callable[[], float], largest: bool = False) -> Step:
    return dropping(lambda: draw() < 0.5 or (largest and torchbudget.is_measuring()))


def measured(step: Step, method: Any) -> MeasuredCost:
    return measured_with(25, step, max_size=60, method=method)


@pytest.mark.parametrize("name", GENERATORS)
def test_layers_that_are_dropped(name: str) -> None:
    """No trace is exact."""
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(CostError, match="draws from a generator outside torch"):
        trace_peak_bytes(drawing(GENERATORS[name]), ones(5, 33))


def test_the_largest_choice_while_measuring() -> None:
    """A step that makes it is traced exactly."""
    assert measured(drawing(random.random, largest=True), "trace").label(5, 33) == "exact"


def test_draws_that_change_no_bytes() -> None:
    """A factor from NumPy, for example, leaves a trace exact."""
    layer = nn.Linear(32, 32)
    step = step_of(lambda batch: (layer(batch) * np.random.rand()).mean(), layer)
    assert measured(step, "trace").label(5, 33) == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "run"])
def test_such_a_step_is_run_several_times(method: str) -> None:
    """It is warned of; the largest of several steps counts, near that of all layers."""
    with pytest.warns(MeasureWarning, match=r"is_measuring"):
        cost = measured(drawing(random.random), method)
    whole = measured(drawing(lambda: 0.0), "auto")
    for n in (50, 200):
        assert cost.batch_bytes(n, 60) > 0.8 * whole.batch_bytes(n, 60)


@pytest.mark.parametrize("read", [lambda draw: draw < 0.8, lambda draw: draw.item() < 0.8])
def test_values_that_torch_draws_count_with_what_takes_more(read: Callable[[Any], bool]) -> None:
    """As of layers that are each left out with a chance: the bytes are those of all layers."""
    some, every = (
        dropping(keeps, torch.optim.Adam) for keeps in (lambda: read(torch.rand(())), lambda: True)
    )
    found, expected = (measured(one, "trace") for one in (some, every))
    assert found.traced_bytes(50, 60) == expected.traced_bytes(50, 60)
    assert found.label(50, 60) == expected.label(50, 60) == "exact"
    assert any("reads" in note for note in found.notes)
    assert trace_peak_bytes(some, ones(50, 60)) == expected.traced_bytes(50, 60)


def test_a_step_that_guards_against_a_loss_that_is_not_finite() -> None:
    """What would skip the backward takes less, and does not count."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def made(guarded: bool) -> Callable[[torch.Tensor], None]:
        def step(batch: torch.Tensor) -> None:
            loss = model(batch).relu().mean()
            if guarded and (loss.isnan() or loss.item() > 1e9):
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    peaks = [trace_peak_bytes(made(guarded), torch.zeros(500, 32)) for guarded in (True, False)]
    assert peaks[0] == pytest.approx(peaks[1], abs=256)


# ---------------------------------------------------------------------- what is left behind


KINDS = {
    "graph": "gradients that keep their graph",
    "sparse": "sparse gradients",
    "outputs": "tensors in attributes, lists or closures",
    "attribute": "tensors in attributes, lists or closures",
    "of each sample": "tensors in attributes, lists or closures",
}


class Leaving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, sparse=kind == "sparse")
        self.layer = nn.Linear(32, 32)
        self.kind = kind
        self.last: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.embedding(batch))
        if self.kind == "attribute":
            self.last = found.detach()
        return found


def accumulating(kind: str, steps: int, looks: bool = False) -> Step:
    model = Leaving(kind)
    kept: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, module=model, steps=steps)

    def step(batch: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(batch)):
            outputs = model(batch)
            if looks:
                torch.nonzero(batch)
            losses = outputs.square().sum((1, 2))
            accumulator.backward(losses.sum(), **{"create_graph": True} if kind == "graph" else {})
            if kind == "outputs":
                kept.append(outputs.detach())
            if kind == "losses":
                kept.append(losses.detach())
            if kind == "of each sample":
                model.layer.weight.grad_sample = torch.zeros(len(batch), 32, 32)  # type: ignore[assignment]
        if accumulator.stepped:
            kept.clear()

    return step


def measure(step: Step, method: Any) -> None:
    make = lambda n, size: torch.ones((n, size), dtype=torch.int64)  # noqa: E731
    measured_with(60, step, make, max_size=64, min_size=16, method=method)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_grows_is_refused(kind: str, looks: bool) -> None:
    """Each kind is named, whether the step is traced or only run; a trace alone refuses, too."""
    method = "auto" if looks or kind == "sparse" else "trace"  # which has no sparse tensors
    with pytest.raises(CostError, match=KINDS[kind]):
        measure(accumulating(kind, 4, looks), method)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("losses", 4), ("nothing", 4), ("outputs", 1), ("attribute", 1), ("of each sample", 1)],
)
def test_what_hardly_grows_is_not(kind: str, steps: int) -> None:
    """A loss for each sample, kept for a log, is within the least margin.

    Nothing waits for a step that has one micro-batch.
    """
    measure(accumulating(kind, steps), "trace")


# ---------------------------------------------------------------------- gradients of micro-batches


def _in_place(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=False)


def _by_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad()


def _by_module(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def _by_hand(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


Clear = Callable[[torch.optim.Optimizer, nn.Module], None]


class OwnClearing(torch.optim.SGD):
    """Clears gradients itself, as fused optimizers of other libraries do."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class Dropping(torch.optim.SGD):
    """Leaves no gradients after its step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        _by_hand(self, nn.ParameterList(self.param_groups[0]["params"]))


def clearing(
    clear: Clear, first: bool = False, *, sparse: bool = False, kind: Any = torch.optim.SGD
) -> Step:
    """A step that clears gradients before its forward, or after the optimizer's step."""
    model = nn.Sequential(nn.Embedding(50, 256, sparse=sparse), nn.Linear(256, 256))
    optimizer = kind(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        if first:
            clear(optimizer, model)
        model(batch).square().sum().backward()
        optimizer.step()
        if not first:
            clear(optimizer, model)

    return step


def indices(n: int, size: int) -> torch.Tensor:
    return torch.ones((n, size), dtype=torch.int64)


def measured_to(accumulate: bool, step: Step, method: Any = "trace") -> MeasuredCost:
    options: Any = {"max_size": 64, "min_size": 16, "accumulate": accumulate, "method": method}
    return measured_with(90, step, indices, **options)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("clear", [_by_optimizer, _by_module])
@pytest.mark.parametrize("method", ["trace", pytest.param("run", marks=pytest.mark.slow)])
def test_gradients_of_earlier_micro_batches_are_counted(
    clear: Clear, first: bool, method: Any
) -> None:
    """As by a step that sets them to 0, whose bytes are those of micro-batches in the middle."""
    cost = measured_to(True, clearing(clear, first), method)
    expected = measured_to(True, clearing(_in_place, first), method)
    assert expected.keeps_gradients
    assert cost.keeps_gradients
    n, size = np.arange(1, 40)[:, None], np.arange(16, 65)
    found, right = (one.batch_bytes(n, size) - one.offset for one in (cost, expected))
    assert found == pytest.approx(right, abs=0 if method == "trace" else 2**23)
    if method == "trace":
        alone = measured_to(False, clearing(clear, first))
        assert (alone.traced_bytes(n, size) < right).all()


@pytest.mark.filterwarnings("ignore:the cost was traced, not run")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("clear", [_by_optimizer, _by_module, _by_hand])
@pytest.mark.parametrize("method", ["trace", pytest.param("run", marks=pytest.mark.slow)])
def test_a_cost_without_them_is_refused_where_they_accumulate(
    clear: Clear, first: bool, method: Any
) -> None:
    cost = measured_to(False, clearing(clear, first), method)
    sizes = np.arange(16, 65)
    MemoryBudgetBatchSampler(sizes, cost, "4GiB")
    for one in (cost, pickle.loads(pickle.dumps(cost)), cost.with_margin(0.1)):  # noqa: S301
        with pytest.raises(CostError, match=r"drops its gradients.*accumulate=True"):
            MemoryBudgetBatchSampler(sizes, one, "4GiB", samples_per_step=16)
        with pytest.raises(CostError, match=r"drops its gradients.*accumulate=True"):
            plan_step(sizes, one, "4GiB")
    kept = measured_to(False, clearing(_in_place, first), method)
    assert plan_step(sizes, kept, "4GiB").micro_batches


@pytest.mark.parametrize("first", [False, True])
def test_an_optimizer_with_its_own_way_to_clear(first: bool) -> None:
    cost, expected = (
        measured_to(True, clearing(_by_optimizer, first, kind=kind))
        for kind in (OwnClearing, torch.optim.SGD)
    )
    assert (cost.traced_bytes(9, [16, 64]) == expected.traced_bytes(9, [16, 64])).all()


def test_gradients_may_be_replaced_after_the_backward() -> None:
    """As by an average over ranks, or a projection, that makes new tensors."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().sum().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad / 2
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for accumulate in (False, True):
        options: Any = {"max_size": 64, "method": "trace", "accumulate": accumulate}
        assert measure_cost(step, ones, **options).keeps_gradients


@pytest.mark.parametrize(
    ("clear", "options"),
    [(_by_hand, {}), (_by_optimizer, {"sparse": True}), (_by_optimizer, {"kind": Dropping})],
)
def test_gradients_that_do_not_stay_are_refused(clear: Clear, options: Any) -> None:
    with pytest.raises(CostError, match=r"add to the same gradients.*optimizer\.zero_grad\(\)"):
        measured_to(True, clearing(clear, **options), "run")
