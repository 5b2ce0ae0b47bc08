"""Steps without a backward, as for evaluation: they are measured, and the report says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training_cases import CASES, Training
from torchbudget import PadCollate, measure_cost, trace_peak_bytes
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.process_tree import process_memory

NOTE = "forward only"


def evaluation(name: str, context: Callable[[], Any] = torch.no_grad) -> tuple[Training, Any]:
    """A training case, and the step that only calls its model."""
    training = CASES[name]()
    model = training.model.eval()

    def step(batch: Any) -> Tensor:
        with context():
            return model(batch["x"])

    return training, step


def room(mib: int = 200) -> int:
    return process_memory().resident_bytes + mib * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "context"),
    [("trace", torch.no_grad), ("run", torch.no_grad), ("auto", torch.inference_mode)],
)
def test_each_method_measures_it(method: Any, context: Callable[[], Any]) -> None:
    """The report says that it was forward only; nothing is changed."""
    training, step = evaluation("encoder, fused attention", context)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    cost = measure_cost(step, training.make_batch, max_size=256, method=method, budget=room(80))
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


def half_step(name: str) -> Callable[[Tensor], object]:
    """A training step that lacks a part of itself."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def cleared(batch: Tensor) -> None:
        model(batch).sum().backward()
        optimizer.zero_grad()

    def not_accumulated(batch: Tensor) -> None:
        torch.autograd.grad(model(batch).sum(), list(model.parameters()))

    return {"cleared": cleared, "not accumulated": not_accumulated}[name]


@pytest.mark.parametrize("method", ["trace", "run"])
@pytest.mark.parametrize("name", ["cleared", "not accumulated"])
def test_a_part_of_a_training_step_is_refused(name: str, method: Any) -> None:
    """It makes gradients, so that it is not forward only; but no optimizer steps."""
    with pytest.raises(CostError, match=r"gradients were made, but none is left.*forward only"):
        measure_cost(
            half_step(name), lambda n, _: torch.zeros(n, 3), max_size=1, method=method,
            budget=room(),
        )  # fmt: skip


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
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
