"""Every text that says that memory ran out, in the exception that it comes in.

The texts of CUDA, its libraries, HIP, Triton and MPS are raised by hand, as there are none of them
here; those of torch's allocator on the CPU and of oneDNN are raised by them.
"""

from __future__ import annotations

import resource

import pytest
import torch

from tests.support.commands import printed_by
from tests.support.out_of_memory_texts import AMBIGUOUS, CERTAIN, NEVER, ids
from torchbudget.machine import out_of_memory
from torchbudget.machine.out_of_memory import failed_allocations, is_out_of_memory

TEXTS = CERTAIN + AMBIGUOUS + NEVER


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a device would say: allocations that failed, and bytes that are left."""
    device = {"failed": 3, "left": 2**33}
    monkeypatch.setattr(out_of_memory, "failed_allocations", lambda: device["failed"])
    monkeypatch.setattr(out_of_memory, "_left", lambda: [(device["left"], 2**28)])
    return device


@pytest.mark.parametrize(("kind", "text"), TEXTS, ids=ids(TEXTS))
def test_a_text_counts_always_with_evidence_or_never(
    kind: type, text: str, short: dict[str, int]
) -> None:
    """Evidence is an allocation that has failed since, or next to nothing that is left."""
    error, always, never = kind(text), (kind, text) in CERTAIN, (kind, text) in NEVER
    assert is_out_of_memory(error) == always
    assert is_out_of_memory(error, failed_before=3) == always
    assert is_out_of_memory(error, failed_before=2) != never
    short["left"] = 2**27
    assert is_out_of_memory(error) != never


def train_under_limits() -> None:
    """Train an LSTM under limits of the data segment, and print who failed."""
    lstm = torch.nn.LSTM(64, 256, batch_first=True)

    def step(n: int) -> None:
        lstm(torch.randn(n, 200, 64))[0].square().sum().backward()

    step(1)
    seen = set()
    for room in range(120, 260, 20):
        status = open("/proc/self/status").read()  # noqa: SIM115, PTH123  (takes least)
        limit = int(status.partition("VmData:")[2].split()[0]) * 1024 + room * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        try:
            for n in (8, 12, 17, 25, 36, 52, 75, 110):
                step(n)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            seen.add("oneDNN" if "primitive" in str(error) else "torch")
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    print(*sorted(seen))  # noqa: T201


@pytest.mark.slow
def test_what_onednn_says_under_a_limit() -> None:
    """An LSTM under limits of the data segment: whoever fails, it is recognised."""
    code = f"from {__name__} import train_under_limits; train_under_limits()"
    assert printed_by(["-c", code]).split()


def test_failures_are_counted_over_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to nothing that is free on one counts, too."""
    assert failed_allocations() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda at: {"num_ooms": 2 + at})
    assert failed_allocations() == 5
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda at: at)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {1: (2**27, 2**36)}.__getitem__)
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"))
