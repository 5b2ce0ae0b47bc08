"""A cost that is run on CUDA: reserved bytes of shapes in turn, and what appears late.

Here is no GPU. The step's tensors are on the CPU, and it allocates blocks, as a decoder would,
through the model of torch's allocator, whose figures stand in for the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.gpu.epoch import errors_of
from tests.support.fake_device import ModelledDevice, put_in_place
from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    load_cost,
    measure_cost,
    peak_memory,
    trace_peak_bytes,
)
from torchbudget.cost.measuring import measure as measure_module
from torchbudget.cost.measuring.describe_step import describe_step
from torchbudget.cost.measuring.fragmentation import note_device
from torchbudget.cost.measuring.step_checks import StepChecks
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.device import DeviceMemory
from torchbudget.restoring import TrainingState
from torchbudget.units import MiB, format_bytes

BUDGET = MiB(3000)
LAYERS, UNIT, PAIR, FIXED = 6, 4000, 8, MiB(150)
SIZES = np.clip(512 * np.random.default_rng(0).lognormal(-1.5, 0.8, 4000), 4, 512).astype(int)


def decoder(device: ModelledDevice, late: Callable[[], object] = int) -> Callable[[Any], None]:
    """A step whose activations are L and L² bytes a sample in each layer."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = device.malloc(FIXED)

    def step(batch: torch.Tensor) -> None:
        n, size = batch.shape
        late()
        kept = []
        try:
            for layer in range(LAYERS):
                kept.append(device.malloc(n * size * UNIT))
                device.model.free(device.malloc(3 * n * size * UNIT // 2 + layer))
                kept.append(device.malloc(n * size * size * PAIR))
            while kept:
                gradient = device.malloc(n * size * UNIT)
                device.model.free(kept.pop())
                device.model.free(gradient)
        finally:
            for block in kept:
                device.model.free(block)
        model(batch[..., None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert weights.state == "allocated"

    return step


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.zeros(n, size)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelledDevice]:
    """A device, which the parameters of every step seem to be on."""

    def make(*, expandable: bool) -> ModelledDevice:
        found = property(lambda _: torch.device("cuda", 0))
        monkeypatch.setattr(TrainingState, "device", found)
        monkeypatch.setattr(StepChecks, "check_parameters", lambda *_, **__: None)
        return put_in_place(monkeypatch, ModelledDevice(expandable=expandable))

    return make


def run(step: Callable[[Any], None]) -> MeasuredCost:
    return measure_cost(step, make_batch, max_size=512, method="run", budget=BUDGET)


@pytest.mark.slow
@pytest.mark.parametrize(("expandable", "least"), [(True, 0.93), (False, 0.5)])
def test_an_epoch_of_mixed_shapes_stays_within_the_budget(
    on_cuda: Callable[..., ModelledDevice], expandable: bool, least: float
) -> None:
    """Reserved and outside, without a limit, over 150 batches in the sampler's order.

    With segments of fixed sizes much of the budget is left to gaps.
    """
    device = on_cuda(expandable=expandable)
    step = decoder(device)
    cost = run(step)
    assert device.model.reserved_bytes <= FIXED + MiB(20)  # the cache was emptied
    assert device.figures().fraction == 1
    assert device.model.num_ooms == 0 or not expandable
    failed = device.model.num_ooms
    device.reset_peaks()
    share = 0.0
    for batch in list(MemoryBudgetBatchSampler(SIZES, cost, BUDGET))[:150]:
        n, size = len(batch), int(SIZES[batch].max())
        with peak_memory("cuda") as peak:
            step(make_batch(n, size))
        cost.observe(n, size, peak)  # warnings are errors: no step needs more than is predicted
        share = max(share, peak.bytes / BUDGET)
    assert least <= share <= 1
    assert device.model.num_ooms == failed
    kind = "expandable segments" if expandable else "segments of fixed sizes"
    assert f"shapes that take turns: native, {kind}" in cost.report()
    assert "outside torch's allocator this process uses 600 MiB: as NVML counts" in cost.report()
    assert cost.measured_on["allocator"] == f"native, {kind}"


@pytest.mark.slow
def test_half_of_the_planned_batches_are_predicted_to_two_percent(
    on_cuda: Callable[..., ModelledDevice],
) -> None:
    """By the lines that run on a real device, with the same sizes.

    Nothing is traced here. Pages of 20 MiB are 0.7 % of the budget, above which a fit to runs lies.
    """
    step = decoder(on_cuda(expandable=True))
    case: Any = SimpleNamespace(step=step, make_batch=make_batch, max_size=512)
    errors = np.abs(errors_of(case, run(step), BUDGET))
    assert len(errors) == 40
    assert np.median(errors) <= 0.02
    assert errors.max() <= 0.03


@pytest.mark.slow
def test_what_a_failed_probe_had_reached_is_aimed_at(
    on_cuda: Callable[..., ModelledDevice],
) -> None:
    """A budget of 3,000 MiB where there are 2,400: nearly all of them are measured."""
    device = on_cuda(expandable=True)
    device.model.device_bytes = MiB(2400) - device.outside_bytes
    cost = run(decoder(device))
    assert any("out of memory at" in note for note in cost.notes)
    assert 0.9 <= max(probe.peak_bytes for probe in cost.probes) / MiB(2400) <= 1.01
    assert int(cost.capacity(512, BUDGET)) == int(cost.capacity(512, 2 * BUDGET))


@pytest.mark.slow
def test_after_a_failure_that_reached_nothing_half_of_the_budget_is_aimed_at(
    on_cuda: Callable[..., ModelledDevice],
) -> None:
    """Where all is asked for at once it fails before there is anything: half of it is tried."""
    device = on_cuda(expandable=True)
    inner = decoder(device)

    def step(batch: torch.Tensor) -> None:
        n, size = batch.shape
        device.model.free(device.malloc(n * size * LAYERS * (UNIT + size * PAIR)))
        inner(batch)

    device.model.device_bytes = MiB(2400) - device.outside_bytes
    cost = run(step)
    assert any("out of memory at" in note for note in cost.notes)
    assert max(probe.peak_bytes for probe in cost.probes) >= 0.45 * BUDGET


@pytest.mark.slow
def test_what_is_loaded_late_counts_from_the_start(on_cuda: Callable[..., ModelledDevice]) -> None:
    """Kernels of 200 MiB that only the ninth step loads are in what the first one needs."""
    device, steps = on_cuda(expandable=True), []

    def late() -> None:
        steps.append(1)
        if len(steps) == 9:
            device.load(MiB(200))

    step = decoder(device, late)
    cost = run(step)
    device.model.empty_cache()
    n, size = cost.probes[0].n, cost.probes[0].size[0]
    with peak_memory("cuda") as peak:
        step(make_batch(n, size))
    assert peak.outside_bytes == MiB(800)
    assert peak.bytes <= cost.probes[0].peak_bytes <= peak.bytes + MiB(20)


@pytest.mark.slow
def test_shapes_that_do_not_fit_in_turn_leave_half_of_the_budget(
    on_cuda: Callable[..., ModelledDevice],
) -> None:
    """A neighbour takes the card when the probes are over, and gives it back."""
    device = on_cuda(expandable=True)
    whole = device.model.device_bytes

    def late() -> None:
        in_turn = device.figures().fraction < 1
        device.model.device_bytes = FIXED + MiB(50) if in_turn else whole

    with pytest.warns(MeasureWarning, match="in turn do not fit the budget, although each of them"):
        cost = run(decoder(device, late))
    assert f"{format_bytes(BUDGET // 2)} are added for shapes that take turns" in cost.report()
    assert device.figures().fraction == 1
    device.model.device_bytes = whole
    assert cost.capacity(512, BUDGET) < run(decoder(device)).capacity(512, BUDGET)


def test_other_settings_of_the_allocator_are_named(
    on_cuda: Callable[..., ModelledDevice], tmp_path: Path
) -> None:
    """A cost is loaded where segments are of another kind than where it was measured."""
    device = on_cuda(expandable=True)
    step = decoder(device)
    form = Form(terms=(Term(1.0, 1, (1,)),))
    MeasuredCost(forms=(form,), margin=0, measured_on=describe_step(step)).save(tmp_path / "c.json")
    load_cost(tmp_path / "c.json", describe_step(step))
    device.settings = "native, segments of fixed sizes"
    with pytest.warns(MeasureWarning, match="allocator: 'native, expandable segments' then"):
        load_cost(tmp_path / "c.json", describe_step(step))


def test_what_keeps_memory_for_each_shape_is_warned_of(
    on_cuda: Callable[..., ModelledDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuDNN's search for the best algorithm, and CUDA graphs."""
    device = on_cuda(expandable=True)
    device.graphs = MiB(64)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    texts: list[str] = []
    subject: Any = SimpleNamespace(notes=[], warn=texts.append)
    note_device(subject, DeviceMemory(device))
    assert len(subject.notes) == 1
    assert "cudnn.benchmark is on: cuDNN tries its algorithms on every new shape" in texts[0]
    assert "CUDA graphs, or other memory pools, keep 64 MiB reserved" in texts[1]


def test_a_trace_on_a_device_warns_of_what_keeps_memory_there(
    on_cuda: Callable[..., ModelledDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace itself stands aside: its tensors would have to be on the device."""
    on_cuda(expandable=True).graphs = MiB(64)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(measure_module, "trace_probes", lambda *_: "bytes of tensors")
    monkeypatch.setattr(measure_module, "reserved", lambda *_: "reserved bytes")
    texts: list[str] = []
    cuda = torch.device("cuda", 0)
    state = SimpleNamespace(device=cuda)
    subject: Any = SimpleNamespace(notes=[], warn=texts.append, target=cuda, state=state)
    assert measure_module._traced_on_target(subject, None) == "reserved bytes"
    assert "cudnn.benchmark is on" in texts[0]
    assert "CUDA graphs, or other memory pools, keep 64 MiB reserved" in texts[1]


def test_recurrent_layers_on_cuda_are_run_not_traced(
    on_cuda: Callable[..., ModelledDevice],
) -> None:
    on_cuda(expandable=True)
    lstm = nn.LSTM(4, 4)

    def step(batch: torch.Tensor) -> None:
        lstm(batch)[0].sum().backward()

    with pytest.raises(CostError, match=r"a LSTM is run by cuDNN .* method='run'"):
        trace_peak_bytes(step, torch.zeros(2, 3, 4))
