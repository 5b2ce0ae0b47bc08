"""Memory allocators: how to make them keep little of freed memory."""

from __future__ import annotations

import ctypes
import os
from typing import ClassVar, Final

import torch

from torchbudget.errors import MeasureWarning, warn
from torchbudget.machine.nvml import remember_free_bytes
from torchbudget.units import format_bytes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
# The setting of every measurement and training on the CPU: examples/benchmarks/malloc_settings.py.
_MAPPED_BYTES: Final = 2**17
_KEPT_BYTES: Final = 2**17
_SEEN_BYTES: Final = 2**24  # of an empty tensor that shows whether glibc's malloc makes tensors
# oneDNN keeps the last 1,024 compiled kernels by default: 13 MiB after 200 shapes, and growing. So
# does the layer between it and torch, beside oneDNN's own, in each thread.
_KERNELS: Final = "32"
_KERNEL_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_CUDA_SEGMENTS: Final = "expandable_segments:True"
# In torch's order: the first one that is set counts, even if it is empty.
_CUDA_NAMES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def configure_allocators() -> None:
    """Make this process keep little memory beyond its tensors; call it first in a training script.

    Batches of ragged samples have new shapes all the time, and memory that allocators keep for
    earlier shapes adds up. This function limits it, so that measured costs and budgets hold better:

    - malloc: it calls `trim_malloc()`;
    - oneDNN, which runs convolutions and more on the CPU: it sets `ONEDNN_PRIMITIVE_CACHE_CAPACITY`
      and `LRU_CACHE_CAPACITY`, so that 32 compiled kernels are cached instead of 1,024. oneDNN
      reads these variables at its first use only;
    - CUDA: it sets `PYTORCH_CUDA_ALLOC_CONF` to expandable segments, which grow instead of being
      replaced. torch reads this variable at the first use of CUDA only. The function also notes the
      bytes that other processes use on each GPU, if NVML can be read.

    It does not change variables that are set already, under any of their names. Processes that are
    started later inherit the variables, but must call `trim_malloc()` themselves unless they are
    forked.

    Warns:
        MeasureWarning: CUDA is in use already, with segments of fixed sizes, which cannot be
            changed.
    """
    trim_malloc()
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS)
    if not any(name in os.environ for name in _CUDA_NAMES):
        os.environ[_CUDA_NAMES[0]] = _CUDA_SEGMENTS
        if not has_expandable_segments():
            warn(
                "CUDA is in use already, so its allocator keeps its segments of fixed sizes; call "
                "configure_allocators() first in the script",
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


def map_large_blocks(threshold_bytes: int = _MAPPED_BYTES, kept_bytes: int = _KEPT_BYTES) -> bool:
    """Make glibc return each block of at least this size when it is freed; false elsewhere."""
    glibc = _glibc()
    settings = {_M_MMAP_THRESHOLD: threshold_bytes, _M_TRIM_THRESHOLD: kept_bytes}
    return glibc is not None and all(glibc.mallopt(*one) for one in settings.items())


def return_free_pages() -> None:
    """Make glibc return the pages that are free now, without another setting."""
    glibc = _glibc()
    if glibc is not None:
        glibc.malloc_trim(ctypes.c_size_t(0))


def trim_malloc(threshold_bytes: int = _MAPPED_BYTES, kept_bytes: int = _KEPT_BYTES) -> bool:
    """Make glibc return free memory now, and each large block when it is freed.

    glibc maps large blocks, and returns them when they are freed. By default the size from which it
    does so rises up to 32 MiB, and smaller blocks are kept. With ragged shapes, free blocks do not
    fit the next tensors: one process took 2.3 times the bytes of its tensors. The price of mapped
    blocks is page faults. With larger values than the defaults, some steps exceed the budget that
    they were measured under (examples/benchmarks/malloc_settings.py). The setting lasts as long as
    the process.

    Large blocks that the calling thread has freed before are taken out of use: they keep their
    addresses, but have no memory. Otherwise new blocks would be placed there and never be returned.

    Args:
        threshold_bytes: blocks of at least this size are returned when they are freed.
        kept_bytes: free bytes at the end of the heap that are kept for smaller blocks.

    Returns:
        True if torch's tensors on the CPU are blocks of glibc's malloc. False if another allocator
        makes them: it is preloaded, or a part of torch, as mimalloc is in builds for AArch64.
    """
    glibc = _glibc()
    if glibc is None or not map_large_blocks(threshold_bytes, kept_bytes):
        return False
    return_free_pages()
    if not hasattr(glibc, "mallinfo2"):  # before glibc 2.33
        return True
    before, free = _malloc_info(glibc)
    tensor = torch.empty(_SEEN_BYTES, dtype=torch.uint8, device="cpu")
    if _malloc_info(glibc)[0] - before < tensor.nbytes // 2:  # other threads free blocks, too
        return False
    _take_free_blocks(glibc, free, threshold_bytes)
    return True


def settle_malloc() -> str:
    """Set malloc as it is wherever a cost on the CPU is found or used; return the setting.

    Warns:
        MeasureWarning: another allocator makes the tensors, and stays as it is.
    """
    if trim_malloc():
        mapped, kept = map(format_bytes, (_MAPPED_BYTES, _KEPT_BYTES))
        return f"glibc's malloc, blocks mapped from {mapped}, {kept} kept"
    warn(
        "tensors on the CPU are not made by glibc's malloc, so the freed memory that stays in this "
        "process cannot be limited, and steps may exceed a measured cost: start Python without "
        "LD_PRELOAD of jemalloc, tcmalloc or another allocator, or leave a quarter of the budget "
        "free",
        MeasureWarning,
    )
    return "not glibc's malloc"


def _glibc() -> ctypes.CDLL | None:
    # By its name: an allocator that is preloaded has functions of the same names.
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten numbers."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]


def _malloc_info(glibc: ctypes.CDLL) -> tuple[int, int]:
    """Return the bytes in use, and those of the heap's free blocks."""
    glibc.mallinfo2.restype = _MallocInfo
    _, _, _, _, mapped, _, _, used, free, _ = glibc.mallinfo2().numbers
    return mapped + used, free


def _take_free_blocks(glibc: ctypes.CDLL, left: int, least_bytes: int) -> None:
    """Allocate the free blocks of the heap that have at least this size, and never use them.

    After `malloc_trim` their pages are the system's again, and stay so.
    """
    glibc.malloc.restype, glibc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    glibc.free.argtypes = [ctypes.c_void_p]
    # Those of other threads' arenas are not to be had.
    size = 1 << max(left.bit_length() - 1, 0)
    while size >= least_bytes:
        block = glibc.malloc(size) if left >= size else None
        if block is not None and not _is_mapped(block):
            left -= size
            continue
        glibc.free(block)
        size //= 2


def _is_mapped(block: int) -> bool:
    """Return whether glibc has mapped a block by itself, by the flag `IS_MMAPPED` before it."""
    return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)
