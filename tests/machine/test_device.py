"""The memory of a GPU, whatever torch and NVML answer.

Here is no GPU: what the functions below compute is checked on figures that stand in for its own,
and how torch and NVML are asked, on other functions in their places.
"""

import os
from ctypes import c_uint64
from types import SimpleNamespace

import pytest
import torch

from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget.errors import MachineError, OptionError
from torchbudget.machine import nvml
from torchbudget.machine.device import DeviceMemory, TorchSource, device_in_use, device_memory
from torchbudget.machine.host import MemoryPool
from torchbudget.machine.peaks import peak_memory
from torchbudget.units import GiB, MiB

OTHERS, CONTEXT = GiB(40), MiB(600)


@pytest.mark.parametrize(
    ("known", "outside", "how"),
    [
        ({"process_bytes": GiB(20) + CONTEXT}, CONTEXT, "as NVML counts this process"),
        ({"free_before_bytes": GiB(40)}, CONTEXT, "all that is in use, except 40 GiB"),
        # NVML counts no managed memory: less than is reserved is no count.
        ({"process_bytes": CONTEXT, "free_before_bytes": GiB(40)}, CONTEXT, "except 40 GiB"),
        ({}, CONTEXT + OTHERS, "all that is in use, except 0 B"),  # doubtful bytes are its own
    ],
)
def test_bytes_of_others_do_not_count(known, outside, how):
    """20 GiB reserved, and 600 MiB outside the allocator, on a card where others have 40 GiB."""
    used = OTHERS + CONTEXT + GiB(20)
    fake = FakeDevice(free_bytes=GiB(80) - used, reserved_bytes=GiB(20), **known)
    memory = DeviceMemory(fake)
    assert memory.outside_bytes(fake.figures()) == outside
    assert how in memory.told_apart_by(fake.figures())
    own = GiB(20) + outside
    assert memory.pool() == MemoryPool(
        name="cuda:1", limit_bytes=GiB(80), used_bytes=used, own_bytes=own
    )
    fake.load(MiB(300))  # kernels that are loaded later
    assert memory.outside_bytes(fake.figures()) == outside + MiB(300)


def test_a_peak_leaves_out_what_others_have(monkeypatch):
    """Counts that are reset inside are no negative numbers of failures."""
    free = GiB(80) - OTHERS - CONTEXT
    fake = FakeDevice(free_bytes=free, process_bytes=CONTEXT, retries=5, ooms=2)
    put_in_place(monkeypatch, fake)
    with peak_memory("cuda") as peak:
        fake.take(GiB(5), reserving=MiB(100))
        fake.free(GiB(5))
        fake.load(MiB(50))
        fake.set(retries=0, ooms=0)
    assert peak.bytes == GiB(5) + MiB(100) + CONTEXT + MiB(50)
    assert (peak.reserved_bytes, peak.allocated_bytes) == (GiB(5) + MiB(100), GiB(5))
    assert (peak.reserved_before_bytes, peak.outside_bytes) == (0, CONTEXT + MiB(50))
    assert (peak.retries, peak.failures) == (0, 0)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "no device"])
def test_a_peak_on_another_device_is_refused(device):
    """The host's figures say nothing about it."""
    with pytest.raises(OptionError, match="expected a CUDA device"), peak_memory(device):
        pass


@pytest.mark.parametrize(("fraction", "usable_gib"), [(0.875, 70), (0.5, 40), (0.125, 20)])
def test_a_bound_allocator_cannot_use_more(fraction, usable_gib):
    """The process's own fraction counts, but what is reserved already is not taken back."""
    own = GiB(20)
    fake = FakeDevice(free_bytes=GiB(50), reserved_bytes=own, process_bytes=own, fraction=fraction)
    assert DeviceMemory(fake).pool().usable_bytes == GiB(usable_gib)


# --- how torch and NVML are asked -----------------------------------------------------------------


class FakeNvml:
    """NVML's functions as they are called: two cards, the first of which does not answer."""

    def __init__(self, own=3 * 2**30, pid=None, fails_with=0):
        pid = os.getpid() if pid is None else pid
        self.processes = [(2**32 + pid + 1, GiB(40), 0), (2**32 + pid, own, 0)]
        self.free = GiB(40)
        self.nvmlInit_v2 = lambda: fails_with

    def nvmlDeviceGetCount_v2(self, number):
        number._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, gpu):
        return 0 if index else 15  # NVML_ERROR_GPU_IS_LOST

    def nvmlDeviceGetHandleByUUID(self, uuid, gpu):
        return 0 if uuid == b"GPU-abc" else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetUUID(self, gpu, text, length):
        text.value = b"GPU-abc"
        return 0

    def nvmlDeviceGetMemoryInfo(self, gpu, memory):
        memory._obj[:] = GiB(80), self.free, GiB(40)
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, gpu, number, words):
        for at, one in enumerate(self.processes):
            words[at] = (c_uint64 * 3)(*one)
        return 0


@pytest.fixture
def answers(monkeypatch):
    """Put a library in place of NVML."""
    monkeypatch.setattr(nvml, "_free_before", {})

    def put(library):
        monkeypatch.setattr(nvml, "CDLL", lambda _: library)
        return library

    return put


def test_nvml_counts_this_process(answers, tmp_path):
    """Nothing is known of another card, without a number or a driver, or of other numbers."""
    namespace = tmp_path / "proc/self/ns/pid"
    namespace.parent.mkdir(parents=True)
    namespace.symlink_to("pid:[4026531836]")  # the machine's own numbers of processes
    answers(FakeNvml())
    assert nvml.process_bytes("abc", root=tmp_path) == GiB(3)
    assert nvml.process_bytes("another card", root=tmp_path) is None
    without_driver = FakeNvml(fails_with=9)  # NVML_ERROR_DRIVER_NOT_LOADED
    for unknown in (FakeNvml(own=2**64 - 1), FakeNvml(pid=1), without_driver, SimpleNamespace()):
        answers(unknown)
        assert nvml.process_bytes("abc", root=tmp_path) is None
    answers(FakeNvml())
    assert nvml.process_bytes("abc", root=tmp_path / "of a container") is None


def test_what_was_free_before_is_remembered_once(answers, monkeypatch):
    """Later notes would see this process's own context; so would one once CUDA is in use."""
    fake = answers(FakeNvml())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        nvml.remember_free_bytes()
        assert nvml.free_bytes_before("abc") is None
    nvml.remember_free_bytes()
    fake.free = GiB(1)
    nvml.remember_free_bytes()
    assert nvml.free_bytes_before("abc") == GiB(40)


@pytest.fixture
def gpus(monkeypatch):
    """`torch.cuda` with two GPUs of 80 GiB that answer as torch does."""
    gpus = SimpleNamespace(current=1, backend="native", limits=[])
    gpus.reserved = [0, GiB(20)]

    def exchange_device(index):
        before, gpus.current = gpus.current, index
        return before

    def set_fraction(fraction, index):
        gpus.current = index  # as torch does
        gpus.limits.append((fraction, index))

    properties = SimpleNamespace(uuid="abc", is_integrated=False)
    segment = {"device": 1, "total_size": 7, "segment_pool_id": (0, 0)}
    stats = {"reserved_bytes.all.current": GiB(20), "allocated_bytes.all.peak": GiB(19)}
    stats |= {"reserved_bytes.all.peak": GiB(21), "num_alloc_retries": 3, "num_ooms": 2}
    gpus.properties = properties
    for name, function in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: gpus.current,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "mem_get_info": lambda _: (GiB(50), GiB(80)),
        "memory_stats": lambda _: stats,
        "memory_reserved": lambda index: gpus.reserved[index],
        "get_device_properties": lambda _: properties,
        "get_per_process_memory_fraction": lambda _: 0.5,
        "set_per_process_memory_fraction": set_fraction,
        "get_allocator_backend": lambda: gpus.backend,
        "memory_snapshot": lambda: [segment, segment | {"segment_pool_id": (0, 3)}],
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpus


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), (torch.device("cuda:0"), 0)])
def test_a_gpu_by_name(gpus, device, index):
    """The current device stays: torch makes the device current whose limit is set."""
    source = TorchSource(device)
    read = source.figures()
    assert source.index == index
    assert (read.total_bytes, read.free_bytes, read.reserved_bytes) == (GiB(80), GiB(50), GiB(20))
    assert (read.peak_reserved_bytes, read.peak_allocated_bytes) == (GiB(21), GiB(19))
    assert (read.retries, read.ooms, read.fraction) == (3, 2, 0.5)
    assert source.graph_bytes() == 7 * index
    source.set_fraction(0.5)
    assert (gpus.limits, torch.cuda.current_device()) == ([(0.5, index)], 1)


def test_a_gpu_that_does_not_exist_or_answer(gpus, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    with pytest.raises(MachineError, match="finds 2 CUDA devices, counted from 0"):
        device_memory("cuda:2").pool()
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(MachineError, match="memory of cuda:0: CUDA error: out of memory"):
        device_memory("cuda:0").pool()


@pytest.mark.parametrize("named", ["PYTORCH_NO_CUDA_MEMORY_CACHING=1", "backend:cudaMallocAsync"])
def test_a_device_is_not_read_where_torch_counts_nothing(gpus, monkeypatch, named):
    """Without its own allocator, torch says that nothing was reserved."""
    name, is_set, value = named.partition("=")
    if is_set:
        monkeypatch.setenv(name, value)
    else:
        gpus.backend = "cudaMallocAsync"
    for read in (TorchSource, lambda _: device_in_use(prefers_current=True)):
        with pytest.raises(MachineError, match=f"with {named} torch bypasses .* unset it"):
            read("cuda")


def test_a_gpu_that_shares_the_hosts_memory(gpus, monkeypatch):
    """What the kernel can drop is free; the driver says that it is used, and files come and go."""
    gpus.properties.is_integrated = True
    host = MemoryPool(name="machine", limit_bytes=GiB(80), used_bytes=GiB(10))
    monkeypatch.setattr("torchbudget.machine.device.machine_memory", lambda: host)
    assert TorchSource("cuda").figures().free_bytes == GiB(70)


def test_the_device_in_use_is_the_one_that_has_most(gpus):
    """Or the current one, if anything is reserved there."""
    gpus.reserved, gpus.current = [GiB(1), GiB(2)], 0
    assert device_in_use(prefers_current=True) == 0
    assert device_in_use(prefers_current=False) == 1
    gpus.reserved = [0, 0]
    assert device_in_use(prefers_current=True) is None
