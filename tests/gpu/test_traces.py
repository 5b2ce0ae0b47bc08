"""Traces on a GPU: what they predict, what they take, and what they leave as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.epoch import MIB, on_card
from tests.support.steps import step_of
from tests.support.training_cases import ON_A_CARD
from torchbudget import measure_cost, trace_peak_bytes
from torchbudget.cost.as_on_cuda import WORKSPACE_BYTES
from torchbudget.errors import CostError

pytestmark = pytest.mark.gpu


def traced_and_real(name: str, n: int, size: Any) -> tuple[int, int]:
    """The traced peak and that of the second real step; the trace itself takes next to nothing."""
    made = on_card(name)
    batch = made.make_batch(n, size)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    traced = trace_peak_bytes(made.step, batch)
    assert torch.cuda.max_memory_allocated() - before < 64 * MIB
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        made.step(batch)
    torch.cuda.synchronize()
    return traced, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("name", ON_A_CARD)
def test_a_trace_is_the_allocated_peak_but_for_workspaces(name: str) -> None:
    """Those of cuBLAS stay allocated; kernels take a little, and cuDNN more for other images."""
    for n, size, _ in ON_A_CARD[name]:
        traced, real = traced_and_real(name, n, size)
        assert -0.001 * real <= real - traced <= WORKSPACE_BYTES + 0.004 * real


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_recurrent_layers_are_run(name: str) -> None:
    """CuDNN's buffers are in no trace: it is refused, and the cost says that it was run only."""
    made = on_card(name)
    with pytest.raises(CostError, match="cuDNN runs a"):
        trace_peak_bytes(made.step, made.make_batch(2, 8))
    cost = measure_cost(made.step, made.make_batch, max_size=made.max_size, budget=3 * 2**30)
    assert {probe.how for probe in cost.probes} == {"run"}
    assert any("cuDNN runs a" in note for note in cost.notes)


@pytest.mark.parametrize("warm", [False, True])
def test_a_trace_leaves_the_compiler_as_it_was(warm: bool) -> None:
    """Compiled before or not, the step is compiled after a trace, and goes on."""
    from torch._dynamo.utils import counters

    pytest.importorskip("triton", reason="torch.compile on CUDA needs Triton")
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    run, adam = torch.compile(model, dynamic=True), torch.optim.AdamW
    step = step_of(lambda x: run(x).square().sum(), model, optimizer=adam)

    def make_batch(n: int, size: Any) -> torch.Tensor:
        return torch.randn(n, size, 64, device="cuda")

    if warm:
        step(make_batch(2, 9))
        step(make_batch(3, 7))
    measure_cost(step, make_batch, max_size=128, method="trace")
    step(make_batch(5, 6))
    torch.cuda.synchronize()
    assert counters["stats"]["unique_graphs"] > 0


def test_a_kernel_of_tritons_does_not_get_a_null_pointer() -> None:
    """Called by hand, it is refused by the trace; the context lives on."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tests.gpu.triton_kernel import doubled

    model = nn.Linear(64, 64).cuda()
    step = step_of(lambda x: model(doubled(x)).sum(), model)
    x = torch.randn(8, 64, device="cuda")
    step(x)
    with pytest.raises(CostError, match="does not run on fake tensors"):
        trace_peak_bytes(step, x)
    torch.cuda.synchronize()
    step(x)
    torch.cuda.synchronize()
