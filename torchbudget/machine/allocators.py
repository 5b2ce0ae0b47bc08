"""Memory allocators: how to make them keep little of freed memory."""

from __future__ import annotations

import ctypes
import os
from typing import ClassVar, Final

import torch

from torchbudget.errors import MeasureWarning
from torchbudget.machine.nvml import remember_free_bytes
from torchbudget.warn import warn

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD: Final = -3
# oneDNN keeps the last 1,024 compiled kernels by default: 13 MiB after 200 shapes, and growing. So
# does the layer between it and torch, beside oneDNN's own, in each thread.
_KERNELS: Final = "32"
_KERNEL_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_CUDA_SEGMENTS: Final = "expandable_segments:True"
# In torch's order: the first one that is set counts, even if it is empty.
_CUDA_NAMES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def configure_allocators() -> None:
    """Make this process keep little memory beyond its tensors; call it first in a training script.

    Batches of ragged samples ask for ever new shapes, and what is kept for the old ones adds up. A
    measured cost and a budget of resident or reserved bytes hold best where this is bounded:

    - malloc: `trim_malloc()`, at once;
    - oneDNN, which runs convolutions and more on the CPU: 32 compiled kernels are cached instead of
      1,024, by `ONEDNN_PRIMITIVE_CACHE_CAPACITY` and, between it and torch, `LRU_CACHE_CAPACITY`.
      They are read when the process first uses oneDNN; from then on they cannot be changed;
    - CUDA: segments that grow instead of being replaced, by `PYTORCH_CUDA_ALLOC_CONF`, which is
      read when the process first uses CUDA. Before that, the bytes that other processes use on
      each GPU are noted, if NVML can be read.

    Variables that the environment has already stay as they are; CUDA's is set unless the
    environment has one of its three names. Processes that are started later inherit the variables,
    but must call `trim_malloc()` themselves unless they are forked.

    Warns:
        MeasureWarning: CUDA is in use already, with segments of fixed sizes, which stay.
    """
    trim_malloc()
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS)
    if not any(name in os.environ for name in _CUDA_NAMES):
        os.environ[_CUDA_NAMES[0]] = _CUDA_SEGMENTS
        if not has_expandable_segments():
            warn(
                "CUDA is in use already, so that its allocator keeps the segments of fixed sizes "
                "that it has; call configure_allocators() first in the script",
                MeasureWarning,
            )
    remember_free_bytes()


def kernel_caches_are_stated() -> bool:
    """Return whether the environment says how many kernels oneDNN and torch cache on the CPU."""
    return all(name in os.environ for name in _KERNEL_CACHES)


def has_expandable_segments() -> bool:
    """Return whether the segments of CUDA's allocator grow instead of being replaced.

    Once the process uses CUDA, the setting in force counts; before, the environment's, which torch
    reads then.
    """
    if torch.cuda.is_initialized() and torch.cuda.get_allocator_backend() == "native":
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return bool(settings.get("expandable_segments", False))
    stated = next((os.environ[name] for name in _CUDA_NAMES if name in os.environ), "")
    return _CUDA_SEGMENTS in stated.replace(" ", "")


def map_large_blocks(threshold_bytes: int = 2**17) -> bool:
    """Make glibc return each block of at least this size when it is freed; false elsewhere."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, threshold_bytes))


def return_free_pages() -> None:
    """Make glibc return the pages that are free now, without another setting."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def trim_malloc(threshold_bytes: int = 2**17) -> bool:
    """Make glibc return freed memory: what is free now, and each large block when it is freed.

    By default glibc raises the threshold from which blocks are mapped, and so returned, up to
    32 MiB as blocks are freed, and keeps what is smaller. Under ragged shapes free blocks do not
    fit the next ones: a process was seen to take 2.3 times the bytes of its tensors. Mapped blocks
    cost page faults instead. The setting lasts as long as the process;
    `MALLOC_MMAP_THRESHOLD_` in the environment does the same from its start.

    Large blocks that were freed before in the thread that calls are taken out of use: they have
    addresses, but no memory. Others would be put there, and not be returned.

    Args:
        threshold_bytes: blocks of at least this size are returned when they are freed.

    Returns:
        Whether it was done, which takes glibc.
    """
    done = map_large_blocks(threshold_bytes)
    return_free_pages()
    library = ctypes.CDLL(None)
    if done and hasattr(library, "mallinfo2"):
        _take_free_blocks(library, threshold_bytes)
    return done


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, whose field `fordblks` is the bytes of the free blocks."""

    _fields_: ClassVar = [
        *((f"_{number}", ctypes.c_size_t) for number in range(8)),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def _take_free_blocks(library: ctypes.CDLL, least_bytes: int) -> None:
    """Allocate the free blocks of the heap that have at least this size, and never use them.

    After `malloc_trim` their pages are the system's again, and stay so.
    """
    library.mallinfo2.restype = _MallocInfo
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    # Those of another allocator, and of other threads' arenas, are not seen, or not to be had.
    left = library.mallinfo2().fordblks
    size = 1 << max(left.bit_length() - 1, 0)
    while size >= least_bytes:
        block = library.malloc(size) if left >= size else None
        if block is not None and not _is_mapped(block):
            left -= size
            continue
        library.free(block)
        size //= 2


def _is_mapped(block: int) -> bool:
    """Return whether glibc has mapped a block by itself, by the flag `IS_MMAPPED` before it."""
    return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)
