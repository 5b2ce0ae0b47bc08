"""The memory of a GPU, whatever torch and NVML answer.

Here is no GPU: what the functions below compute is checked on figures that stand in for its own,
and how torch and NVML are asked, on their own modules with other functions in them.
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget.errors import MachineError, OptionError
from torchbudget.machine import cuda as cuda_module
from torchbudget.machine import nvml
from torchbudget.machine.cuda import TorchSource, device_in_use
from torchbudget.machine.device import DeviceMemory, cuda_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.pools import MemoryPool
from torchbudget.units import GiB, MiB

OTHERS, CONTEXT = GiB(40), MiB(600)


def figures(**known):
    """20 GiB reserved, and 600 MiB outside the allocator, on a card where others have 40 GiB."""
    used = OTHERS + CONTEXT + GiB(20)
    return {"free_bytes": GiB(80) - used, "reserved_bytes": GiB(20), **known}


@pytest.mark.parametrize(
    ("known", "how"),
    [
        ({"process_bytes": GiB(20) + CONTEXT}, "as NVML counts this process"),
        ({"free_before_bytes": GiB(80) - OTHERS}, "before this process had a context"),
    ],
)
def test_only_this_processs_bytes_count(known, how):
    """Reserved, and what it uses outside the allocator: others' 40 GiB are neither."""
    fake = FakeDevice(**figures(**known))
    memory = DeviceMemory(fake)
    assert memory.outside_bytes(fake.figures()) == CONTEXT
    assert how in memory.told_apart_by(fake.figures())
    assert memory.pool() == MemoryPool(
        name="cuda:1",
        limit_bytes=GiB(80),
        used_bytes=OTHERS + CONTEXT + GiB(20),
        own_bytes=GiB(20) + CONTEXT,
    )
    assert memory.pool().usable_bytes == GiB(40)
    fake.load(MiB(300))  # kernels that are loaded later
    assert memory.outside_bytes(fake.figures()) == CONTEXT + MiB(300)


def test_nvml_cannot_count_less_than_is_reserved():
    """It counts no managed memory: then it is not asked, or nothing would be outside."""
    before = GiB(80) - OTHERS
    fake = FakeDevice(**figures(process_bytes=CONTEXT, free_before_bytes=before))
    memory = DeviceMemory(fake)
    assert memory.outside_bytes(fake.figures()) == CONTEXT
    assert "before this process had a context" in memory.told_apart_by(fake.figures())


def test_what_is_assumed_where_nothing_is_known():
    """At most a GiB of what is in use at first, and all that is added, is this process's."""
    fake = FakeDevice(**figures())
    memory = DeviceMemory(fake)
    assert memory.outside_bytes(fake.figures()) == GiB(1)
    assert "an assumption, 39.6 GiB in use being others'" in memory.told_apart_by(fake.figures())
    fake.load(MiB(300))
    assert memory.outside_bytes(fake.figures()) == GiB(1) + MiB(300)
    alone = FakeDevice(free_bytes=GiB(60) - CONTEXT, reserved_bytes=GiB(20))
    assert DeviceMemory(alone).outside_bytes(alone.figures()) == CONTEXT


def test_a_peak_leaves_out_what_others_have(monkeypatch):
    """A step of 5 GiB on a card where others have 40 GiB peaks at 5 GiB and the context."""
    used = OTHERS + CONTEXT
    fake = put_in_place(monkeypatch, FakeDevice(free_bytes=GiB(80) - used, process_bytes=CONTEXT))
    with peak_memory("cuda") as peak:
        fake.take(GiB(5), reserving=MiB(100))
        fake.free(GiB(5))
        fake.load(MiB(50))
    assert peak.bytes == GiB(5) + MiB(100) + CONTEXT + MiB(50)
    assert (peak.reserved_bytes, peak.allocated_bytes) == (GiB(5) + MiB(100), GiB(5))
    assert (peak.reserved_before_bytes, peak.outside_bytes) == (0, CONTEXT + MiB(50))


def test_counts_that_were_reset_inside_are_no_failures(monkeypatch):
    """A negative number of them would be taken for one."""
    fake = put_in_place(monkeypatch, FakeDevice(process_bytes=CONTEXT, retries=5, ooms=2))
    with peak_memory("cuda") as peak:
        fake.set(retries=0, ooms=0)
    assert (peak.retries, peak.failures) == (0, 0)


@pytest.mark.parametrize("kind", ["CUDA", "HIP"])
def test_no_peak_is_measured_where_nothing_is_counted(monkeypatch, kind):
    """Without its cache, torch's allocator says that nothing was reserved."""
    put_in_place(monkeypatch, FakeDevice(process_bytes=CONTEXT))
    name = f"PYTORCH_NO_{kind}_MEMORY_CACHING"
    monkeypatch.setenv(name, "1")
    with pytest.raises(MachineError, match=f"{name}=1 .* counts nothing"), peak_memory("cuda"):
        pass
    monkeypatch.setenv(name, "0")
    with peak_memory("cuda") as peak:
        pass
    assert peak.bytes == CONTEXT


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "no device"])
def test_a_peak_on_another_device_is_refused(device):
    """The host's figures say nothing about it."""
    with pytest.raises(OptionError, match="expected a CUDA device"), peak_memory(device):
        pass


@pytest.mark.parametrize(
    ("fraction", "usable_gib"), [(1.0, 70), (0.875, 70), (0.5, 40), (0.25, 20), (0.125, 20)]
)
def test_a_bound_allocator_cannot_use_more(fraction, usable_gib):
    """The process's own fraction counts, but what is reserved already is not taken back."""
    fake = FakeDevice(
        free_bytes=GiB(50), reserved_bytes=GiB(20), process_bytes=GiB(20), fraction=fraction
    )
    assert DeviceMemory(fake).pool().usable_bytes == GiB(usable_gib)


# --- how torch and NVML are asked -----------------------------------------------------------------


class FakeNvml:
    """NVML's module, as far as it is used: a card where this process and another one are."""

    class NVMLError(Exception):
        """What every function of it may raise."""

    def __init__(self, own=3 * 2**30, *, pid=None):
        pid = os.getpid() if pid is None else pid
        self.processes = [
            SimpleNamespace(pid=pid + 1, usedGpuMemory=GiB(40)),
            SimpleNamespace(pid=pid, usedGpuMemory=own),
        ]

    def nvmlInit(self): ...

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"handle {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-abc":
            raise self.NVMLError
        return "handle 0"

    def nvmlDeviceGetUUID(self, _):
        return "GPU-abc"

    def nvmlDeviceGetMemoryInfo(self, _):
        return SimpleNamespace(total=GiB(80), used=GiB(41), free=GiB(40))

    def nvmlDeviceGetComputeRunningProcesses(self, _):
        return self.processes


@pytest.fixture
def first_namespace(tmp_path):
    """A `/proc` of a process that has the machine's own numbers."""
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    return tmp_path


def test_nvml_counts_this_process(monkeypatch, first_namespace):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert nvml.process_bytes("abc", root=first_namespace) == GiB(3)
    assert nvml.process_bytes("another card", root=first_namespace) is None


def test_what_nvml_does_not_say(monkeypatch, first_namespace, tmp_path):
    """Not installed; without a driver; no number; and another process of the same number."""
    modules = sys.modules
    monkeypatch.setitem(modules, "pynvml", None)
    assert nvml.process_bytes("abc", root=first_namespace) is None
    monkeypatch.setitem(modules, "pynvml", FakeNvml(own=None))
    assert nvml.process_bytes("abc", root=first_namespace) is None
    monkeypatch.setitem(modules, "pynvml", FakeNvml(pid=1))
    assert nvml.process_bytes("abc", root=first_namespace) is None
    (tmp_path / "container/proc/self/ns").mkdir(parents=True)
    (tmp_path / "container/proc/self/ns/pid").symlink_to("pid:[4026532511]")
    monkeypatch.setitem(modules, "pynvml", FakeNvml())
    assert nvml.process_bytes("abc", root=tmp_path / "container") is None

    def no_driver():
        raise FakeNvml.NVMLError

    broken = FakeNvml()
    broken.nvmlInit = no_driver
    monkeypatch.setitem(modules, "pynvml", broken)
    assert nvml.process_bytes("abc", root=first_namespace) is None


def test_what_was_free_before_is_remembered_once(monkeypatch):
    """The first note counts: later ones see this process's own context."""
    monkeypatch.setattr(nvml, "_free_before", {})
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert nvml.free_bytes_before("abc") is None
    nvml.remember_free_bytes()
    fake.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(free=GiB(1))
    nvml.remember_free_bytes()
    assert nvml.free_bytes_before("abc") == GiB(40)


def test_a_gpu_that_does_not_answer_hides_no_other_one(monkeypatch):
    """The first of two is lost, or shared out to users whom it does not answer."""
    monkeypatch.setattr(nvml, "_free_before", {})
    fake = FakeNvml()
    fake.nvmlDeviceGetCount = lambda: 2

    def memory_info(handle):
        if handle == "handle 0":
            raise fake.NVMLError
        return SimpleNamespace(free=GiB(40))

    fake.nvmlDeviceGetMemoryInfo = memory_info
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvml.remember_free_bytes()
    assert nvml.free_bytes_before("abc") == GiB(40)


def test_what_is_free_beside_an_own_context_is_not_remembered(monkeypatch):
    """What is in use then is this process's, too, and would count as others'."""
    monkeypatch.setattr(nvml, "_free_before", {})
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    nvml.remember_free_bytes()
    assert nvml.free_bytes_before("abc") is None


@pytest.fixture
def torch_cuda(monkeypatch):
    """`torch.cuda` with two GPUs of 80 GiB that answer as torch does."""
    gpus = SimpleNamespace(asked=[], fraction=1.0, current=1)

    def mem_get_info(index):
        gpus.asked.append(index)
        return GiB(50), GiB(80)

    def exchange_device(index):
        before, gpus.current = gpus.current, index
        return before

    stats = {
        "reserved_bytes.all.current": GiB(20),
        "reserved_bytes.all.peak": GiB(21),
        "allocated_bytes.all.peak": GiB(19),
        "num_alloc_retries": 3,
        "num_ooms": 2,
    }
    segment = {"device": 1, "is_expandable": True, "total_size": 7, "segment_pool_id": (0, 0)}
    for name, function in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: gpus.current,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "mem_get_info": mem_get_info,
        "memory_stats": lambda _: stats,
        "get_device_properties": lambda _: SimpleNamespace(uuid="abc"),
        "get_per_process_memory_fraction": lambda _: gpus.fraction,
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": lambda: [segment, segment | {"segment_pool_id": (0, 3)}],
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpus


@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda", 1), ("cuda:0", 0), (torch.device("cuda", 1), 1), (torch.device("cuda"), 1)],
)
def test_a_gpu_by_name(torch_cuda, device, index):
    source = TorchSource(device)
    read = source.figures()
    assert source.index == index
    assert (read.total_bytes, read.free_bytes, read.reserved_bytes) == (GiB(80), GiB(50), GiB(20))
    assert (read.peak_reserved_bytes, read.peak_allocated_bytes) == (GiB(21), GiB(19))
    assert (read.retries, read.ooms, read.fraction) == (3, 2, 1.0)
    assert set(torch_cuda.asked) == {index}


def test_the_settings_in_force_are_read_off_a_segment(torch_cuda, monkeypatch):
    """What the environment says comes too late for expandable segments; other options stand."""
    text = "expandable_segments:False,max_split_size_mb:64"
    said = {"PYTORCH_CUDA_ALLOC_CONF": text, "expandable_segments": False}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": said})
    assert TorchSource("cuda:1").allocator() == "native, expandable segments, max_split_size_mb:64"
    assert TorchSource("cuda:0").allocator() == "native"  # nothing was allocated there yet
    assert TorchSource("cuda:1").graph_bytes() == 7


def test_a_torch_that_does_not_return_the_fraction(torch_cuda, monkeypatch):
    """What was set here is remembered instead."""
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    monkeypatch.setattr(cuda_module, "_fractions", {})
    assert TorchSource("cuda").figures().fraction == 1.0
    TorchSource("cuda").set_fraction(0.5)
    assert TorchSource("cuda").figures().fraction == 0.5
    assert TorchSource("cuda:0").figures().fraction == 1.0


def test_the_current_device_stays(torch_cuda, monkeypatch):
    """Of torch's calls, this one makes the device current whose limit is set; the stand-in, too."""
    limits = []

    def set_fraction(fraction, index):
        torch_cuda.current = index
        limits.append((fraction, index))

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    monkeypatch.setattr(cuda_module, "_fractions", {})
    TorchSource("cuda:0").set_fraction(0.5)
    assert limits == [(0.5, 0)]
    assert torch.cuda.current_device() == 1


def test_another_backend_has_no_snapshot(torch_cuda, monkeypatch):
    """It refuses one, as cudaMallocAsync does; and without a limit, its fraction is far above 1."""

    def refuse():
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    torch_cuda.fraction = 2**64 / GiB(80)
    source = TorchSource("cuda:1")
    assert source.allocator() == "cudaMallocAsync"
    assert source.graph_bytes() == 0
    assert source.figures().fraction == 1.0


def test_a_gpu_that_does_not_exist(torch_cuda):
    with pytest.raises(MachineError, match="there are 2 CUDA devices, counted from 0"):
        cuda_memory("cuda:2")


def test_a_gpu_that_does_not_answer(torch_cuda, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(MachineError, match="memory of cuda:0: CUDA error: out of memory"):
        cuda_memory("cuda:0")


@pytest.mark.parametrize(("integrated", "free"), [(0, 50), (1, 70)])
def test_a_gpu_that_shares_the_hosts_memory(torch_cuda, monkeypatch, integrated, free):
    """What the kernel can drop is free; the driver says that it is used, and files come and go."""
    properties = SimpleNamespace(uuid="abc", is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    host = MemoryPool(name="machine", limit_bytes=GiB(80), used_bytes=GiB(10))
    monkeypatch.setattr(cuda_module, "machine_memory", lambda: host)
    assert TorchSource("cuda").figures().free_bytes == GiB(free)


def test_an_allocator_without_statistics(torch_cuda, monkeypatch):
    """A pluggable one, such as RMM's; what it says is in the error."""

    def fail(_):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda, "memory_stats", fail)
    monkeypatch.setattr(torch.cuda, "memory_reserved", fail)
    for read in (lambda: cuda_memory("cuda:0"), lambda: device_in_use(prefers_current=True)):
        with pytest.raises(MachineError, match="CUDAPluggableAllocator does not yet support"):
            read()


@pytest.mark.parametrize("device", ["cpu", "mps", "gpu", "cuda:x", "", None, torch.device("meta")])
def test_a_device_that_is_none_of_cudas(torch_cuda, device):
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
