"""Every text that says that memory ran out, in the exception that it comes in.

The texts of CUDA, its libraries, HIP, Triton and MPS are raised by hand, as there are none of them
here; those of torch's allocator on the CPU and of oneDNN are raised by them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.out_of_memory_texts import AMBIGUOUS, CERTAIN, NEVER, ids
from torchbudget.machine import out_of_memory
from torchbudget.machine.out_of_memory import failed_allocations, is_out_of_memory


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a device would say: allocations that failed, and bytes that are left."""
    device = {"failed": 3, "left": 2**33}
    monkeypatch.setattr(out_of_memory, "failed_allocations", lambda: device["failed"])
    monkeypatch.setattr(out_of_memory, "_left", lambda: [(device["left"], 2**28)])
    return device


@pytest.mark.parametrize(("kind", "text"), CERTAIN, ids=ids(CERTAIN))
def test_what_is_said_for_no_other_reason(kind: type, text: str, short: dict[str, int]) -> None:
    """It counts however much is free."""
    assert is_out_of_memory(kind(text))
    assert is_out_of_memory(kind(text), failed_before=3)


@pytest.mark.parametrize(("kind", "text"), AMBIGUOUS, ids=ids(AMBIGUOUS))
def test_what_is_said_for_other_reasons_too(kind: type, text: str, short: dict[str, int]) -> None:
    """It counts if an allocation has failed since, or if next to nothing is left."""
    assert not is_out_of_memory(kind(text))
    assert not is_out_of_memory(kind(text), failed_before=3)
    assert is_out_of_memory(kind(text), failed_before=2)
    short["left"] = 2**27
    assert is_out_of_memory(kind(text))


def test_the_table_of_the_docs(short: dict[str, int]) -> None:
    """Each text of its second column always counts, each of its third only with evidence."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    rows = page.split("| who says it |")[1].splitlines()[2:]
    certain, ambiguous = (
        [text for row in rows for text in re.findall("`([^`]+)`", row.split("|")[column])]
        for column in (2, 3)
    )
    assert len(certain) > 20
    assert len(ambiguous) > 10
    classes = {"torch.OutOfMemoryError": torch.OutOfMemoryError(), "MemoryError": MemoryError()}
    for text in certain:
        assert is_out_of_memory(classes.get(text, RuntimeError(text))), text
    for text in ambiguous:
        assert not is_out_of_memory(RuntimeError(text)), text
        assert is_out_of_memory(RuntimeError(text), failed_before=2), text


@pytest.mark.parametrize(("kind", "text"), NEVER, ids=ids(NEVER))
def test_what_says_something_else(kind: type, text: str, short: dict[str, int]) -> None:
    """It never counts, even where memory is short."""
    short["left"] = 0
    assert not is_out_of_memory(kind(text), failed_before=2)


ONEDNN = """
import resource
import torch
from torchbudget.machine.out_of_memory import failed_allocations, is_out_of_memory

lstm = torch.nn.LSTM(64, 256, batch_first=True)

def step(n):
    lstm(torch.randn(n, 200, 64))[0].square().sum().backward()

def data():
    return int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024

step(1)
seen = set()
for room in range(120, 260, 20):
    limit = data() + room * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        for n in (8, 12, 17, 25, 36, 52, 75, 110):
            step(n)
    except RuntimeError as error:
        assert is_out_of_memory(error), error
        seen.add("oneDNN" if "primitive" in str(error) else "torch")
    if len(seen) == 2:
        break
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
print(*sorted(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
@pytest.mark.slow
def test_what_onednn_says_under_a_limit() -> None:
    """An LSTM under limits of the data segment: whoever fails, it is recognised."""
    done = subprocess.run(
        [sys.executable, "-c", ONEDNN], capture_output=True, text=True, check=False, timeout=280
    )
    assert not done.returncode, done.stderr
    seen = done.stdout.split()
    assert seen
    if "oneDNN" not in seen:
        pytest.skip("oneDNN got all that it asked for, or is not used on this machine")


def test_failures_are_counted_over_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to nothing that is free on one counts, too; a pluggable allocator does not count."""
    assert failed_allocations() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda at: {"num_ooms": 2 + at})
    assert failed_allocations() == 5
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda at: at)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {1: (2**27, 2**36)}.__getitem__)
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"))

    def fail(_: int) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fail)
    monkeypatch.setattr(torch.cuda, "memory_reserved", fail)
    assert failed_allocations() == 0
    assert not is_out_of_memory(RuntimeError("Unable to find an engine"), failed_before=0)
