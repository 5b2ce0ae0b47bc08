"""NVML, NVIDIA's management library: what a GPU has in use, and what of it is this process's.

It is read through the package `nvidia-ml-py` (extra `nvml`), which is imported when it is needed.
Without the package, the library or the right to read it, every function says so with None.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from torchbudget.machine.kernel_files import ROOT

# The inode of the kernel's first process namespace, PROC_PID_INIT_INO of include/linux/proc_ns.h.
_FIRST_NAMESPACE: Final = "pid:[4026531836]"
# Free bytes of each GPU by UUID, before this process had a context on it; by process, since a
# forked one begins without contexts.
_free_before: dict[int, dict[str, int]] = {}


def process_bytes(uuid: str, *, root: Path = ROOT) -> int | None:
    """The bytes that this process uses on a GPU, context and libraries included.

    It is what `nvidia-smi` shows for the process. NVML numbers processes as the machine does: in a
    container with numbers of its own the same number may be another process, so there it is None.

    Args:
        uuid: of the GPU, as `torch.cuda.get_device_properties` has it.
        root: the folder that `/proc` is looked up in.
    """
    nvml = _nvml()
    if nvml is None or not _numbers_agree(root):
        return None
    for prefix in ("GPU-", "MIG-"):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
    return None


def remember_free_bytes() -> None:
    """Note what is free on every GPU now; the first call in a process counts.

    What is in use before the process initialises CUDA is others'. Later on some of it is the
    process's own, so that nothing is noted.
    """
    if os.getpid() not in _free_before and not torch.cuda.is_initialized():
        _free_before[os.getpid()] = _free_bytes()


def free_bytes_before(uuid: str) -> int | None:
    """The bytes that were free on a GPU before this process initialised CUDA; None: unknown."""
    return _free_before.get(os.getpid(), {}).get(uuid)


def _free_bytes() -> dict[str, int]:
    nvml = _nvml()
    free: dict[str, int] = {}
    if nvml is None:
        return free
    number = 0
    with suppress(nvml.NVMLError):
        number = nvml.nvmlDeviceGetCount()
    for index in range(number):
        with suppress(nvml.NVMLError):  # of one that is lost, shared out, or another user's
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
            free[uuid] = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    return free


def _nvml() -> Any:
    """The module, initialised; None where it is not installed, or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    return pynvml


def _numbers_agree(root: Path) -> bool:
    """Whether this process has the machine's own numbers of processes."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        return False
