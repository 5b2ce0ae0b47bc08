"""A budget on a real GPU: epochs within it, a hard limit, and a neighbour on the card."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.gpu.epoch import epoch, measured, on_card, printed_json, run
from torchbudget import MemoryBudget, limit_device_memory
from torchbudget.cost.as_on_cuda import CONTEXT_BYTES, WORKSPACE_BYTES
from torchbudget.machine.device import device_memory
from torchbudget.machine.peaks import peak_memory

pytestmark = pytest.mark.gpu
MIB, GIB = 2**20, 2**30
# A case, and the least share that is filled; less of it where nothing could be traced.
LEAST = {
    "decoder, scores kept": 0.9,
    "encoder, bfloat16": 0.9,
    "encoder and decoder": 0.9,
    "images": 0.9,
    "LSTM": 0.7,
}


@pytest.mark.parametrize("budget_mib", [1500, 4000])
@pytest.mark.parametrize("name", LEAST)
def test_an_epoch_fills_the_budget_and_stays_within_it(name: str, budget_mib: int) -> None:
    """Reserved and outside are 0.9 to 1.0 of it; under the hard limit nothing fails.

    Half of the planned batches are predicted to 1 %.
    """
    figures = epoch(name, budget_mib * MIB)
    assert LEAST[name] <= figures["free"]["share"] <= 1, figures
    assert figures["free"]["failures"] == figures["limited"]["failures"] == 0, figures
    assert figures["limited"]["share"] <= 1, figures
    assert figures["error"] <= 0.01, figures


@pytest.mark.parametrize("budget_mib", ["1500", "4000"])
@pytest.mark.parametrize("name", LEAST)
def test_segments_of_fixed_sizes_fill_less_but_stay_within_it(name: str, budget_mib: str) -> None:
    """In a process of its own, since the kind of segments is fixed when CUDA is first used."""
    figures = printed_json("-m", "tests.gpu.epoch", name, budget_mib, expandable="False")
    assert figures["free"]["share"] <= 1, figures
    assert figures["free"]["failures"] == figures["limited"]["failures"] == 0, figures


@pytest.mark.parametrize("fraction", [0.85, 0.9, 0.94, 0.98])
def test_an_epoch_at_a_part_of_the_card(
    fraction: float, record_property: Callable[[str, object], None]
) -> None:
    """Nothing fails; samples a second, by which 0.9 is the default, are in `--junit-xml`."""
    budget = MemoryBudget.detect("cuda", fraction=fraction).device or 0
    training = on_card("decoder, scores kept")
    cost = measured(training, budget)
    limit_device_memory(budget, "cuda")
    run(training, cost, budget, batches=5)
    figures = run(training, cost, budget, batches=30)
    record_property("figures", figures)
    assert figures["failures"] == 0
    assert figures["share"] <= 1


def test_a_detected_budget_can_be_allocated() -> None:
    """Less what the process uses outside the allocator, and it stays the same budget."""
    before = MemoryBudget.detect("cuda:0", fraction=0.9)
    memory = device_memory("cuda:0")
    room = before.device - memory.outside_bytes(memory.source.figures())
    tensor = torch.empty(room, dtype=torch.uint8, device="cuda:0")
    after = MemoryBudget.detect("cuda:0", fraction=0.9)
    del tensor
    assert after.device == pytest.approx(before.device, abs=64 * MIB)


def test_the_hard_limit() -> None:
    """What fits beside the context can be allocated, and 64 MiB more cannot."""
    torch.ones(8, device="cuda") @ torch.ones(8, device="cuda")
    limit = limit_device_memory("3GiB", "cuda")
    assert limit.reserved_bytes is not None
    free = limit.reserved_bytes - torch.cuda.memory_reserved()
    with peak_memory("cuda") as peak:
        kept = torch.empty(free - 64 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        del kept
    assert peak.bytes <= 3 * GIB + 64 * MIB  # kernels that were loaded meanwhile
    assert peak.failures == 1


def test_nvml_shows_what_is_counted() -> None:
    """Where NVML counts this process, an allocation is in its figure, to the segment."""
    memory = device_memory("cuda")
    before = memory.source.figures()
    if before.process_bytes is None:
        pytest.skip(f"NVML does not count this process: {memory.told_apart_by(before)}")
    tensor = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    after = memory.source.figures()
    del tensor
    assert after.process_bytes is not None
    assert after.process_bytes - before.process_bytes == pytest.approx(512 * MIB, abs=32 * MIB)
    assert memory.outside_bytes(after) == pytest.approx(memory.outside_bytes(before), abs=32 * MIB)


FACTS = """
import json
import torch
import torchbudget as tb
tb.configure_allocators()
from tests.gpu.epoch import outside_bytes

torch.zeros(1, device="cuda")
context = outside_bytes()
a = torch.randn(512, 512, device="cuda", requires_grad=True)
before = torch.cuda.memory_allocated()
product = a @ a
forward = torch.cuda.memory_allocated() - before - product.nbytes
before = torch.cuda.memory_allocated()
product.sum().backward()
torch.cuda.synchronize()
backward = torch.cuda.memory_allocated() - before - a.grad.nbytes
print(json.dumps([context, outside_bytes(), forward, backward]))
"""


def test_what_is_assumed_where_no_device_is_at_hand(
    record_property: Callable[[str, object], None],
) -> None:
    """Context and workspaces of cuBLAS: no more than a prediction for this device counts."""
    context, with_kernels, forward, backward = printed_json("-c", FACTS)
    found = {"context": context, "with kernels": with_kernels, "forward": forward}
    record_property("found", found | {"backward": backward})
    assert with_kernels <= CONTEXT_BYTES, found
    assert forward + backward <= WORKSPACE_BYTES + MIB


NEIGHBOUR = """
import sys
import torch
taken = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("up", flush=True)
sys.stdin.read()
"""


def test_two_processes_on_one_card() -> None:
    """Another process holds half of what is free: it is not in the budget, nor in the cost."""
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        detected = MemoryBudget.detect("cuda", fraction=1.0).device or 0
        cost = measured(on_card("decoder, scores kept"), 3 * GIB)
    assert 0 < detected <= 0.6 * torch.cuda.mem_get_info()[1]
    assert 0.8 * 3 * GIB <= max(probe.peak_bytes for probe in cost.probes) <= 1.02 * 3 * GIB
