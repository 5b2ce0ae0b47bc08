"""The traced peak of one step."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from tests.support.live_bytes import LiveBytes, allocated
from tests.support.model_classes import CLASSES
from tests.support.steps import SGD, of_shape, step_of
from tests.support.training_cases import CASES, ON_A_CARD
from tests.support.training_cases import Training as Case
from torchbudget import trace_peak_bytes
from torchbudget.cost.tracing import Tracer, ValueDependentError
from torchbudget.restoring import TrainingState


def test_a_traced_peak_counts_what_lives() -> None:
    """Two layers by hand: parameters, gradients, momenta, the batch, activations."""
    model, momentum = nn.Linear(64, 128, bias=False), partial(SGD, momentum=0.9)
    step = step_of(lambda batch: model(batch).square().sum(), model, optimizer=momentum)
    weight, n = 4 * 64 * 128, 1000
    # In the backward of the square: weight, momentum, batch, the output, twice that, the gradient
    # that arrives, and the one that leaves; the loss and its gradient, a block of 64 bytes each.
    outputs = 4 * n * 128
    peak = trace_peak_bytes(step, torch.zeros(n, 64))
    two_scalars = 2 * 64
    assert peak == 2 * weight + 4 * n * 64 + 4 * outputs + two_scalars


def test_a_logged_loss_can_be_traced() -> None:
    """`loss.item()` has a value, if no true one."""
    training = CASES["heavy"]()
    losses: SimpleQueue[float] = SimpleQueue()  # no container, which would be restored

    def step(batch: Any) -> None:
        losses.put(training.step(batch).item())

    assert trace_peak_bytes(step, training.make_batch(2, 10)) > 0
    assert losses.get() == losses.get() == 1.0


@pytest.mark.parametrize(
    "half_of",
    [
        lambda shape: torch.div(shape[0], 2, rounding_mode="trunc"),
        lambda shape: torch.tensor(shape).min() // 2,
        lambda shape: int(torch.tensor([shape[0], 10**6]).sort().values[0]) // 2,
    ],
    ids=["of one number", "of several", "of an int"],
)
def test_what_is_computed_of_pythons_numbers_is_known(half_of: Any) -> None:
    """A number of windows, as Longformer and Swin compute it, is a function of the shape."""
    model = nn.Linear(256, 1)
    train = step_of(lambda parts: model(parts.exp()).sum(), model)

    def step(batch: torch.Tensor) -> None:
        train(batch.view(half_of(batch.shape), 2, 256))

    def by_hand(batch: torch.Tensor) -> None:
        train(batch.view(len(batch) // 2, 2, 256))

    batch = torch.zeros(100, 256)
    peak, expected = trace_peak_bytes(step, batch), trace_peak_bytes(by_hand, batch)
    assert abs(peak - expected) <= 4 * 64


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("of", [torch.tensor, list])
def test_a_ctc_loss_is_traced_of_padded_targets_alone(padded: bool, of: Any) -> None:
    """The mean length says nothing of the longest one, which the loss's own tensor grows with."""
    turns, classes, lengths = 80, 20, [35, 1, 2, 2]
    model = nn.Sequential(nn.Linear(8, classes), nn.LogSoftmax(-1))
    names = "y", "turns", "lengths"
    step = stepped(model, lambda b: F.ctc_loss(model(b["x"]), *map(b.get, names)))
    batch = {
        "x": torch.zeros(turns, len(lengths), 8),
        "y": torch.ones((len(lengths), max(lengths)) if padded else sum(lengths), dtype=torch.int),
        "turns": of([turns] * len(lengths)),
        "lengths": of(lengths),
    }
    if padded and of is torch.tensor:
        assert trace_peak_bytes(step, batch) == pytest.approx(
            profiled(model, step, batch), rel=0.01
        )
        return
    with pytest.raises(ValueDependentError, match=r"targets of shape \(n, S\).* not lists"):
        trace_peak_bytes(step, batch)


@pytest.mark.parametrize("shape", [(1, 96, 12), (20, 50, 12)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_the_workspace_of_a_recurrent_layer_is_counted(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """OneDNN's layer keeps more for its backward than all that torch's fake kernels know of."""
    model = nn.LSTM(12, 24, batch_first=True, **options)
    step = stepped(model, lambda b: model(b["x"])[0].square().sum())
    batch = {"x": torch.ones(shape)}
    assert trace_peak_bytes(step, batch) == pytest.approx(peak_of(model, step, batch), rel=0.002)


LOSSES = "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "huber_loss"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_the_storage_of_its_elements(name: str) -> None:
    """Torch resizes what it has computed: the mean of 4,800 bytes took 4."""
    model, loss = nn.Sequential(nn.Linear(12, 12), nn.Sigmoid()), getattr(F, name)
    step = stepped(model, lambda b: loss(model(b["x"]), b["x"]))
    batch = {"x": torch.ones(20, 50, 12)}
    assert trace_peak_bytes(step, batch) == peak_of(model, step, batch)


LAYERS: dict[str, tuple[nn.Module, Any]] = {
    "batch normalisation": (nn.Sequential(nn.PReLU(40), nn.BatchNorm1d(40)), lambda y: 2 * y),
    "and evaluated": (nn.Sequential(nn.PReLU(40), nn.BatchNorm1d(40).eval()), lambda y: 2 * y),
    "the largest": (nn.PReLU(40), lambda y: y.amax(1)),
    "a count": (nn.PReLU(40), lambda y: y.mean(1) * (y > 0).sum(1)),
}


@pytest.mark.parametrize(("layer", "loss_of"), LAYERS.values(), ids=LAYERS)
def test_what_kernels_allocate_while_they_run_is_counted(layer: nn.Module, loss_of: Any) -> None:
    """As torch's profiler sees it: a copy of the gradient, or of what is summed, in int64."""
    step = stepped(layer, lambda b: loss_of(layer(b["x"])).sum())
    batch = {"x": torch.randn(20, 40, 500)}
    assert trace_peak_bytes(step, batch) == pytest.approx(profiled(layer, step, batch), rel=0.01)


def stepped(model: nn.Module, loss_of: Any) -> Any:
    """A step whose gradients are made inside `optimizer.step`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Any]) -> None:
        def closure() -> Any:
            loss = loss_of(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()

    return step


def peak_of(model: nn.Module, step: Any, batch: dict[str, torch.Tensor]) -> int:
    live = LiveBytes("cpu", block_bytes=64)
    for tensor in (*model.parameters(), *batch.values()):
        live.count(tensor)
    with live:
        step(batch)
    return max(live.history)


def profiled(model: nn.Module, step: Any, batch: dict[str, torch.Tensor]) -> int:
    own = sum(tensor.nbytes for tensor in (*model.parameters(), *batch.values()))
    return own + allocated(lambda: step(batch))


def histories(case: Case) -> list[Any]:
    """Of one shape, another one, and the first again."""
    smallest = np.broadcast_to(case.min_size, np.atleast_1d(case.max_size).shape)
    size = tuple(np.maximum(np.atleast_1d(case.max_size) // 16, smallest).tolist())
    tracer = Tracer(case.step, partial(of_shape, case.make_batch), TrainingState(case.step))
    return [tracer.concrete((n, *size)).living([(n, *size)]) for n in (3, 5, 3)]


FEW = "LSTM", "contrastive", "decoder, checkpoints, autocast", "U-Net"


@pytest.mark.parametrize(
    "name",
    [
        *FEW[:2],
        *(pytest.param(name, marks=pytest.mark.slow) for name in FEW[2:]),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in CLASSES if name not in FEW),
    ],
)
def test_what_is_cached_of_a_trace_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shape has one peak, that of a trace in which each operation's own kernel ran."""
    known = dict(FakeTensorMode.cache)
    try:
        first, *others = histories(CLASSES[name]())
    except ValueDependentError:
        return
    finally:
        assert FakeTensorMode.cache == known
    off = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(FakeTensorMode, "cache_enabled", off, raising=False)
    for cached, computed in zip([first, *others], histories(CLASSES[name]()), strict=True):
        assert cached.max() == computed.max()
    assert others[-1].max() == first.max()


class Projected(torch.optim.Optimizer):
    """Recomputes a projection of each parameter in every other step, the first one included."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if self.steps % 2 == 0:
                self.state[parameter]["by"] = torch.eye(len(parameter)).repeat(8, 1)[:8]
            parameter.sub_(parameter.grad)
        self.steps += 1


def test_the_larger_of_two_steps_counts() -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = Projected(model.parameters())

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    peak = trace_peak_bytes(step, torch.zeros(2, 256))
    assert peak >= 4 * 256 * 256 * (2 + 1 + 8)  # weight, gradient, the identity, eight of it
    assert optimizer.steps == 0


def test_a_scaler_skips_no_step() -> None:
    """Gradients are taken to be finite: the optimizer steps, and has its state."""
    model = nn.Linear(128, 128, bias=False)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    def step(batch: torch.Tensor) -> None:
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert trace_peak_bytes(step, torch.zeros(1, 128)) >= 4 * 4 * 128 * 128


FAST = ("decoder, scores kept", "encoder, bfloat16")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in ON_A_CARD]
)
def test_a_trace_for_cuda_is_what_a_card_allocated(name: str) -> None:
    """Of a model on the CPU, to 0.1 %; kernels of graphs and convolutions took up to 0.4 % more."""
    training = CASES[name]()
    state, make = TrainingState(training.step), partial(of_shape, training.make_batch)
    tracer = Tracer(training.step, make, state, target=torch.device("cuda"))
    for n, size, allocated_mib in ON_A_CARD[name]:
        shape = (n, *size) if isinstance(size, tuple) else (n, size)
        traced = tracer.concrete(shape).peak(shape)
        assert 0.999 <= (allocated_mib - 65) * 2**20 / traced <= 1.004
