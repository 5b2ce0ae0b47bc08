"""NVML, NVIDIA's management library: the memory in use on a GPU, and this process's part of it.

The driver brings the library, `libnvidia-ml.so.1`, which is called through ctypes. Without it, or
without the right to read it, every function returns None or nothing.
"""

from __future__ import annotations

import os
from ctypes import CDLL, byref, c_uint, c_uint64, c_void_p, create_string_buffer
from pathlib import Path
from typing import Final

import torch

from torchbudget.machine.process_tree import ROOT

# The inode of the kernel's first process namespace, PROC_PID_INIT_INO of include/linux/proc_ns.h.
_FIRST_NAMESPACE: Final = "pid:[4026531836]"
_NOT_AVAILABLE: Final = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE of nvml.h
_MOST_PROCESSES: Final = 1024  # more are an error, as any other: this process is not counted
# Free bytes of each GPU by UUID, before this process had a context on it; by process, since a
# forked one begins without contexts.
_free_before: dict[int, dict[str, int]] = {}


def process_bytes(uuid: str, *, root: Path = ROOT) -> int | None:
    """Return the bytes that this process uses on a GPU, context and libraries included.

    It is what `nvidia-smi` shows for the process. NVML numbers processes as the machine does: in a
    container with numbers of its own the same number may be another process, so there it is None.

    Args:
        uuid: the GPU's, as `torch.cuda.get_device_properties` has it.
        root: the folder that `/proc` is looked up in.
    """
    nvml = _library()
    if nvml is None or not _numbers_agree(root):
        return None
    # An nvmlProcessInfo_t is three words: the number (32 bits), the bytes, and instances.
    gpu, number, words = c_void_p(), c_uint(_MOST_PROCESSES), (c_uint64 * 3 * _MOST_PROCESSES)()
    for prefix in (b"GPU-", b"MIG-"):
        if not nvml.nvmlDeviceGetHandleByUUID(prefix + uuid.encode(), byref(gpu)):
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, byref(number), words)
            for process, used_bytes, _ in words:
                if process % 2**32 == os.getpid() and used_bytes != _NOT_AVAILABLE:
                    return int(used_bytes)
    return None


def remember_free_bytes() -> None:
    """Note what is free on every GPU now; the first call in a process counts.

    What is in use before the process initialises CUDA is others'. Later on some of it is the
    process's own, so that nothing is noted.
    """
    if os.getpid() not in _free_before and not torch.cuda.is_initialized():
        _free_before[os.getpid()] = _free_bytes()


def free_bytes_before(uuid: str) -> int | None:
    """Return the bytes that were free on a GPU before this process initialised CUDA, if known."""
    return _free_before.get(os.getpid(), {}).get(uuid)


def _free_bytes() -> dict[str, int]:
    nvml, number = _library(), c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(byref(number)):
        return {}
    free = {}
    for index in range(number.value):
        # An nvmlMemory_t is three words: total, free and used bytes.
        gpu, memory, uuid = c_void_p(), (c_uint64 * 3)(), create_string_buffer(96)
        if not (  # of one that is lost, shared out, or another user's
            nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(gpu))
            or nvml.nvmlDeviceGetUUID(gpu, uuid, len(uuid))
            or nvml.nvmlDeviceGetMemoryInfo(gpu, byref(memory))
        ):
            free[uuid.value.decode().removeprefix("GPU-")] = memory[1]
    return free


def _library() -> CDLL | None:
    """Return the library, initialised; None where there is none, or it finds no driver."""
    try:
        library = CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def _numbers_agree(root: Path) -> bool:
    """Return whether this process has the machine's own numbers of processes."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        return False
