"""Bytes on a CUDA device that is not at hand: predicted from a trace on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.training_cases import ADAMW, CASES, Training, recurrent, training
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, measure_cost
from torchbudget.cost.measuring import reserving
from torchbudget.cost.measuring.assumed_device import AssumedDevice
from torchbudget.cost.measuring.caching_allocator import AllocatorSettings
from torchbudget.cost.measuring.requests import Requests
from torchbudget.cost.measuring.reserving import requests_at, reserved_in_epoch
from torchbudget.cost.measuring.tracing import Trace, tracing
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.restoring import TrainingState
from torchbudget.units import MiB

CUDA = torch.device("cuda")
ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
FITTED = [(n, (length,)) for n in (2, 20, 64) for length in (32, 100, 256)]


def traced(case: Training, shapes: list[tuple[int, tuple[int, ...]]]) -> dict[Any, Requests]:
    """What steps on batches of these shapes ask of an allocator on CUDA."""
    with tracing(case.step, TrainingState(case.step), CUDA) as trace:
        return {(n, size): trace(case.make_batch(n, size[0])).requests for n, size in shapes}


def test_a_step_without_requests_has_no_peak() -> None:
    nothing = np.zeros(0, np.int64)
    assert Requests((), (), nothing, nothing).peak_bytes == 0
    assert Requests((), (), np.array([512, 256]), np.array([0, 1, 0, 1])).peak_bytes == 768


def traced_on(device: torch.device | None, case: Training, batch: Any) -> Trace:
    with tracing(case.step, TrainingState(case.step), device) as trace:
        return trace(batch)


def perceptron(dropout: float = 0.0) -> Training:
    model = nn.Sequential(nn.Linear(100, 1000), nn.Dropout(dropout), nn.Linear(1000, 10))

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def make_batch(n: int, length: int) -> Any:
        return {"x": torch.randn(n, length, 100), "y": torch.randint(10, (n, length))}

    return training(model, loss_of, make_batch, 256, ADAMW)


def predict(case: Training, budget: int | None, **options: Any) -> MeasuredCost:
    return measure_cost(
        case.step,
        case.make_batch,
        max_size=case.max_size,
        budget=budget,
        method="trace",
        device="cuda",
        **options,
    )


@pytest.mark.slow
def test_requests_of_other_shapes_are_those_that_a_trace_shows() -> None:
    """Each storage is a polynomial of the shape, to a thousandth of all that the step allocates."""
    case = CASES["decoder, scores kept"]()
    others = [(7, (61,)), (100, (200,))]
    real = traced(case, FITTED + others)
    computed = requests_at({shape: real[shape] for shape in FITTED}, others)
    assert computed is not None
    for one, shape in zip(computed, others, strict=True):
        assert np.array_equal(one.order, real[shape].order)
        total = int(real[shape].sizes.sum())
        assert np.abs(one.sizes - real[shape].sizes).sum() < 1e-3 * total


def test_what_a_step_asks_for_adds_up_to_its_living_bytes() -> None:
    """Replayed without rounding to segments, the peak is that of the trace."""
    case = CASES["encoder and decoder"]()
    trace = traced_on(CUDA, case, case.make_batch(20, (50, 60)))
    requests = trace.requests
    live = sum(requests.loaded) + sum(requests.made)
    peak, seen = live, set()
    for index in requests.order.tolist():
        live += int(requests.sizes[index]) * (-1 if index in seen else 1)
        seen.add(index)
        peak = max(peak, live)
    assert peak == trace.peak_bytes
    assert peak == sum(requests.loaded) + sum(requests.made) + requests.peak_bytes
    allocator_peak = reserved_in_epoch([requests], AssumedDevice.of((8, 0), AllocatorSettings()))
    assert allocator_peak >= peak


def test_the_first_traced_step_asks_for_its_batch_too() -> None:
    """Though it has been stepped on before, to make the optimizer's state."""
    case = perceptron()
    with tracing(case.step, TrainingState(case.step), CUDA) as trace:
        first, second = (trace(case.make_batch(20, 50)).requests for _ in range(2))
    assert first.sizes.tolist() == second.sizes.tolist()
    assert first.made == second.made


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["expandable_segments:True", ""])
def test_an_epoch_through_the_allocator_stays_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    """Batches planned under the predicted cost, and traced: full where segments grow."""
    monkeypatch.setenv(ALLOC_CONF, settings)
    case, budget = perceptron(), MiB(1500)
    cost = predict(case, budget)
    assert cost.predicted_for == budget
    sizes = np.random.default_rng(1).integers(4, 257, 4000)
    order = [
        (len(indices), (int(sizes[indices].max()),))
        for indices in MemoryBudgetBatchSampler(sizes, cost, budget)
    ]
    steps = traced(case, order)
    peak = reserved_in_epoch([steps[shape] for shape in order], AssumedDevice.detect())
    assert peak <= budget
    if settings:
        assert peak >= 0.9 * budget


@pytest.mark.slow
def test_fixed_segments_leave_less_room_than_expandable_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are named in the cost, so that a run with the others is noticed."""
    case = CASES["heavy"]()
    costs = {}
    for settings in ("expandable_segments:True", "expandable_segments:False"):
        monkeypatch.setenv(ALLOC_CONF, settings)
        costs[settings] = predict(case, MiB(1500))
    expandable, fixed = costs.values()
    assert expandable.capacity(100, MiB(1500)) > fixed.capacity(100, MiB(1500))
    assert expandable.measured_on["allocator"] == "native, expandable segments"
    assert fixed.measured_on["allocator"] == "native, segments of fixed sizes"
    assert expandable.measured_on["device"] == "cuda, predicted"


def test_an_epoch_that_never_fits_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """With segments of fixed sizes one round does not do: the first plan knows of no gaps."""
    monkeypatch.setenv(ALLOC_CONF, "expandable_segments:False")
    monkeypatch.setattr(reserving, "_ROUNDS", 1)
    with pytest.warns(MeasureWarning, match="no plan was found whose epoch reserves less than"):
        cost = predict(perceptron(), MiB(1500))
    # What the last plan showed is kept: a smaller batch than that of the first one.
    assert cost.batch_bytes(1, 256) > MiB(600)
    monkeypatch.undo()
    monkeypatch.setenv(ALLOC_CONF, "expandable_segments:False")
    assert cost.capacity(256, MiB(1500)) >= predict(perceptron(), MiB(1500)).capacity(
        256, MiB(1500)
    )


def test_the_report_says_what_is_assumed_and_what_no_trace_sees() -> None:
    """The context, workspaces by architecture, and temporaries inside kernels."""
    report = predict(perceptron(), None).report()
    for text in (
        "600 MiB for the context",
        "66 MiB for the workspaces of cuBLAS",
        "no trace sees temporaries inside kernels",
        "mixed shapes reserve",
    ):
        assert text in report


def test_settings_that_the_model_does_not_know_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They change what the device reserves, but not what was predicted."""
    settings = "roundup_power2_divisions:4,backend:cudaMallocAsync,expandable_segments:True"
    monkeypatch.setenv(ALLOC_CONF, settings)
    with pytest.warns(MeasureWarning, match="sets roundup_power2_divisions, backend, without"):
        predict(perceptron(), None)


def test_a_search_for_algorithms_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model on the CPU, too: the device that its step is predicted for is not asked."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr("torchbudget.cost.measuring.measure.device_memory", pytest.fail)
    with pytest.warns(MeasureWarning, match=r"cudnn.benchmark is on: cuDNN tries its algorithms"):
        predict(perceptron(), None)


@pytest.mark.parametrize(
    ("capability", "workspace"),
    [((8, 0), 8_519_680), ((9, 0), 2**25), ((10, 0), 2**25), ((12, 0), 2**25), (None, 2**25)],
)
@pytest.mark.parametrize(
    ("stated", "stated_bytes"), [("", None), (":4096:8", 2**25), (":16:8", 2**17)]
)
def test_workspaces_by_architecture(
    capability: tuple[int, int] | None,
    workspace: int,
    stated: str,
    stated_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`parseChosenWorkspaceSize`, for each of two threads: 32 MiB from Hopper on, else 8.125 MiB.

    What the environment states comes first, as for deterministic products.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", stated)
    workspace = stated_bytes or workspace
    device = AssumedDevice.of(capability, AllocatorSettings())
    assert device.workspaces == (workspace, 2**20) * 2


def test_a_device_that_is_not_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction makes no context, beside which forked workers could not use CUDA.

    No GPU is at hand: torch is made to say that there is one.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", pytest.fail)
    assert "the largest" in AssumedDevice.detect().architecture
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert AssumedDevice.detect().architecture == "(8, 0)"


def test_what_lives_before_the_first_step_is_told_from_what_it_leaves() -> None:
    """Parameters are there; the moments of Adam and its counts come with the first step."""
    case = perceptron()
    requests = traced_on(CUDA, case, case.make_batch(2, 32)).requests
    elements = [parameter.numel() for parameter in case.model.parameters()]
    rounded = sorted(-(-4 * one // 512) * 512 for one in elements)
    assert sorted(requests.loaded) == rounded
    assert sorted(requests.made)[-len(rounded) * 2 :] == sorted(rounded * 2)


def test_the_step_takes_the_ways_of_cuda() -> None:
    """`foreach` steps hold copies of all parameters, and a mask of dropout takes a byte."""
    case = perceptron(dropout=0.5)
    batch = case.make_batch(200, 100)
    on_cpu, on_cuda = traced_on(None, case, batch), traced_on(CUDA, case, batch)
    names = {str(operation) for operation in on_cuda.operations}
    assert "aten.native_dropout.default" in names
    assert any("_foreach" in name for name in names)
    elements = 200 * 100 * 1000
    assert on_cpu.peak_bytes - on_cuda.peak_bytes >= 3 * elements - MiB(1)


@pytest.mark.parametrize(
    "options", [{"training": False}, {"p": 0.0}, {"p": 1.0}, {"inplace": True}]
)
def test_dropout_that_drops_nothing_keeps_no_mask_on_cuda(options: dict[str, Any]) -> None:
    """Nor does one that drops all, or in place: these take the same kernels on every device."""
    weight = nn.Parameter(torch.zeros(300, 300))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(_: Any) -> None:
        F.dropout(weight * 2, **{"p": 0.5} | options).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with tracing(step, TrainingState(step), CUDA) as trace:
        names = [str(operation) for operation in trace({}).operations]
    assert "aten.native_dropout.default" not in names
    assert any("_foreach" in name for name in names)


def test_attention_with_dropout_keeps_no_scores() -> None:
    """As CUDA's fused kernels, which the CPU has only without dropout."""
    query = nn.Parameter(torch.zeros(2, 4, 300, 16))
    optimizer = torch.optim.SGD([query], lr=0.1)

    def step(_: Any) -> None:
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    scores = 4 * 2 * 4 * 300**2
    peaks = []
    for device in (None, CUDA):
        with tracing(step, TrainingState(step), device) as trace:
            peaks.append(trace({}).peak_bytes)
    assert peaks[1] < scores < peaks[0]


def test_nothing_is_changed() -> None:
    """Options of optimizers, values and random numbers are as they were."""
    case = perceptron(dropout=0.5)
    case.step(case.make_batch(2, 5))
    before = copy.deepcopy((case.model.state_dict(), case.optimizer.state_dict()))
    drawn = torch.get_rng_state()
    predict(case, None)
    assert torch.equal(torch.get_rng_state(), drawn)
    after = case.model.state_dict(), case.optimizer.state_dict()
    assert before[1]["param_groups"] == after[1]["param_groups"]
    assert all(torch.equal(before[0][name], tensor) for name, tensor in after[0].items())


def test_recurrent_modules_are_refused() -> None:
    """Their kernels of cuDNN keep a reserve for the backward that no trace on the CPU has."""
    with pytest.raises(CostError, match="LSTM is run by cuDNN"):
        predict(recurrent(nn.LSTM), None)


def test_tensors_have_what_the_context_and_workspaces_leave() -> None:
    device = AssumedDevice.detect()
    assert device.room_for_tensors(MiB(4000)) == MiB(4000) - device.fixed_bytes
    assert device.room_for_tensors(None) is None


def test_a_budget_below_the_context_is_refused() -> None:
    """The context and workspaces alone take 666 MiB."""
    with pytest.raises(CostError, match="666 MiB, which leaves nothing of a budget of 500 MiB"):
        predict(perceptron(), MiB(500))
