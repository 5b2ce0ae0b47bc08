"""The memory of a GPU, whatever torch answers."""

from types import SimpleNamespace

import pytest
import torch

from torchbudget.errors import MachineError, OptionError
from torchbudget.machine.device import cuda_memory
from torchbudget.machine.pools import MemoryPool
from torchbudget.units import GiB, MiB


@pytest.fixture
def fake_cuda(monkeypatch):
    """Two GPUs of 80 GiB that answer as torch does."""
    gpus = SimpleNamespace(free=GiB(50), reserved=GiB(20), fraction=1.0, asked=[])

    def get_info(index):
        gpus.asked.append(index)
        return gpus.free, GiB(80)

    for name, function in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "mem_get_info": get_info,
        "memory_reserved": lambda _: gpus.reserved,
        "get_per_process_memory_fraction": lambda _: gpus.fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpus


@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda", 1), ("cuda:0", 0), (torch.device("cuda", 1), 1), (torch.device("cuda"), 1)],
)
def test_a_gpu_by_name(fake_cuda, device, index):
    """The job's own is what the allocator reserved; others and the context are not usable."""
    assert cuda_memory(device) == MemoryPool(
        name=f"cuda:{index}",
        limit_bytes=GiB(80),
        used_bytes=GiB(30),
        own_bytes=GiB(20),
    )
    assert cuda_memory(device).usable_bytes == GiB(70)
    assert set(fake_cuda.asked) == {index}


@pytest.mark.parametrize(
    ("fraction", "usable_gib"), [(1.0, 70), (0.875, 70), (0.5, 40), (0.25, 20), (0.125, 20)]
)
def test_a_bound_allocator_cannot_use_more(fake_cuda, fraction, usable_gib):
    """The process's own fraction counts, but what is reserved already is not taken back."""
    fake_cuda.fraction = fraction
    assert cuda_memory().usable_bytes == GiB(usable_gib)


def test_a_torch_that_does_not_return_the_fraction(fake_cuda, monkeypatch):
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert cuda_memory().usable_bytes == GiB(70)


def test_a_gpu_that_does_not_exist(fake_cuda):
    with pytest.raises(MachineError, match="there are 2 CUDA devices, counted from 0"):
        cuda_memory("cuda:2")


def test_a_gpu_that_does_not_answer(fake_cuda, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(MachineError, match="memory of cuda:0: CUDA error: out of memory"):
        cuda_memory("cuda:0")


@pytest.mark.parametrize("device", ["cpu", "mps", "gpu", "cuda:x", "", None, torch.device("meta")])
def test_a_device_that_is_none_of_cudas(fake_cuda, device):
    with pytest.raises(OptionError, match="expected a CUDA device such as 'cuda:0'"):
        cuda_memory(device)


@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "built without CUDA"), ("12.8", "no driver or no device")]
)
def test_no_cuda(monkeypatch, cuda, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(MachineError, match=f"cannot read the memory of cuda:0: .*{reason}"):
        cuda_memory("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_real_gpu():
    """What this process reserves is no longer free, but still usable."""
    torch.cuda.empty_cache()
    before = cuda_memory("cuda:0")
    tensor = torch.empty(MiB(512), dtype=torch.uint8, device="cuda:0")
    after = cuda_memory("cuda:0")
    del tensor
    torch.cuda.empty_cache()
    assert before.limit_bytes == after.limit_bytes
    assert before.usable_bytes <= torch.cuda.get_device_properties(0).total_memory
    assert after.own_bytes - before.own_bytes >= MiB(512)
    assert before.free_bytes - after.free_bytes >= MiB(480)
    assert after.usable_bytes == pytest.approx(before.usable_bytes, abs=MiB(16))
