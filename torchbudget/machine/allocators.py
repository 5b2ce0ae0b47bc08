"""Memory allocators: how to make them keep little of freed memory."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Final

from torchbudget.machine.nvml import remember_free_bytes

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD: Final = -3
# oneDNN keeps the last 1,024 compiled kernels by default: 13 MiB after 200 shapes, and growing.
_ONEDNN_KERNELS: Final = "32"
_CUDA_SEGMENTS: Final = "expandable_segments:True"
# Torch 2.6 knows the second name only; where the first is known it is read first.
_CUDA_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def configure_allocators() -> None:
    """Make this process keep little memory beyond its tensors; call it first in a training script.

    Batches of ragged samples ask for ever new shapes, and what is kept for the old ones adds up. A
    measured cost and a budget of resident or reserved bytes hold best where this is bounded:

    - malloc: `trim_malloc()`, at once;
    - oneDNN, which runs convolutions and more on the CPU: 32 compiled kernels are cached instead of
      1,024, by `ONEDNN_PRIMITIVE_CACHE_CAPACITY`. It is read when the process first uses oneDNN;
      from then on it cannot be changed;
    - CUDA: segments that grow instead of being replaced, by `PYTORCH_ALLOC_CONF`, which is read
      when the process first uses CUDA. Before that, what other processes have on each GPU is
      noted, if NVML can be read (extra `nvml`).

    Variables that the environment has already stay as they are; of the two names for CUDA, which
    not every torch knows, the missing one gets the other's value. Processes that are started later
    inherit the variables, but must call `trim_malloc()` themselves unless they are forked.
    """
    trim_malloc()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_KERNELS)
    stated = next((os.environ[name] for name in _CUDA_NAMES if name in os.environ), _CUDA_SEGMENTS)
    for name in _CUDA_NAMES:
        os.environ.setdefault(name, stated)
    remember_free_bytes()


def cuda_allocator_settings() -> dict[str, str]:
    """What the environment sets for CUDA's caching allocator, by name.

    torch reads it when the process first uses CUDA; later changes have no effect.

    Such as `{"expandable_segments": "True"}` after `configure_allocators()`.
    """
    text = next((os.environ[name] for name in _CUDA_NAMES if name in os.environ), "")
    pairs = re.findall(r"(\w+):(\[[^]]*\]|[^,]*)", re.sub(r"\s", "", text))
    return dict(pairs)


def trim_malloc(threshold_bytes: int = 2**17) -> bool:
    """Make glibc return freed memory: what is free now, and each large block when it is freed.

    By default glibc raises the threshold from which blocks are mapped, and so returned, up to
    32 MiB as blocks are freed, and keeps what is smaller. Under ragged shapes free blocks do not
    fit the next ones: a process was seen to take 2.3 times the bytes of its tensors. Mapped blocks
    cost page faults instead. The setting lasts as long as the process;
    `MALLOC_MMAP_THRESHOLD_` in the environment does the same from its start.

    Args:
        threshold_bytes: blocks of at least this size are returned when they are freed.

    Returns:
        Whether it was done, which takes glibc.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError):
        return False
    done = bool(mallopt(_M_MMAP_THRESHOLD, threshold_bytes))
    malloc_trim(ctypes.c_size_t(0))
    return done
