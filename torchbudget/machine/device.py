"""The memory of a GPU."""

from __future__ import annotations

import torch

from torchbudget.errors import MachineError, OptionError
from torchbudget.machine.pools import MemoryPool


def cuda_memory(device: str | torch.device = "cuda") -> MemoryPool:
    """The memory of one GPU.

    This job's own is what this process's caching allocator has reserved. Its CUDA context, about
    half a GiB that tensors cannot use, is not, nor are libraries that allocate by themselves; both
    count as used. Where `torch.cuda.set_per_process_memory_fraction` limits the allocator, what it
    may not take counts as used, too.

    The first call in a process initialises CUDA, which it cannot share with forked children.

    Args:
        device: `"cuda"` means the current device.

    Raises:
        OptionError: `device` is no CUDA device.
        MachineError: there is no such device, or CUDA does not answer.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type != "cuda":
        raise OptionError(
            f"expected a CUDA device such as 'cuda:0', got {str(device)!r}; "
            "for another device, state the budget's bytes"
        )
    if not torch.cuda.is_available():
        reason = (
            f"torch {torch.__version__} is built without CUDA"
            if torch.version.cuda is None and torch.version.hip is None
            else "torch finds no driver or no device"
        )
        raise MachineError(f"cannot read the memory of {wanted}: {reason}")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise MachineError(
            f"cannot read the memory of {wanted}: there are {torch.cuda.device_count()} CUDA "
            "devices, counted from 0"
        )
    try:
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        reserved_bytes = torch.cuda.memory_reserved(index)
    except RuntimeError as error:
        raise MachineError(f"cannot read the memory of {wanted}: {error}") from error
    # The oldest versions of torch that are supported can set the fraction, but not return it.
    get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if get_fraction is not None:
        cap_bytes = int(total_bytes * get_fraction(index))
        free_bytes = min(free_bytes, max(0, cap_bytes - reserved_bytes))
    return MemoryPool(
        name=f"cuda:{index}",
        limit_bytes=total_bytes,
        used_bytes=total_bytes - free_bytes,
        own_bytes=reserved_bytes,
    )
