"""Errors that say that memory ran out, in the words of torch and of the libraries below it.

Few of these errors have a class of their own. Most say it in their text, and some texts are said
for other reasons too: those count only where memory was seen to be short.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch

from torchbudget.errors import MachineError, TorchBudgetError
from torchbudget.machine.host import ControlGroups, machine_memory, process_limits

# Said for no other reason. "out of memory": CUDA, its driver, HIP, Triton, MPS, XPU, NCCL, each in
# a sentence of its own, or as the name of an error, such as CUDA_ERROR_OUT_OF_MEMORY,
# hipErrorOutOfMemory and UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY; the second: torch's allocator on the
# CPU, on Linux and on Windows; the third: cuBLAS, cuDNN 8 and 9, cuSOLVER, cuSPARSE, cuFFT, and
# hipBLAS, MIOpen likewise; the fourth: rocBLAS, the runtimes of CUDA and HIP, NCCL.
_CERTAIN: Final = re.compile(
    r"out[ _]?of[ _]?(?:(?:device|host)_)?memory"
    r"|can(?:'|no)t allocate memory|not enough memory: you tried to allocate"
    r"|\b(?:cu|hip|miopen|rocblas)\w*alloc\w*failed\b"
    r"|rocblas_status_memory_error|(?:cuda|hip)ErrorMemoryAllocation|failed to cuda \w*alloc"
    r"|std::bad_alloc",
    re.IGNORECASE,
)
# Also said of what is not supported, or went wrong otherwise: cuDNN, whose search for a plan goes
# on without the workspace that it did not get; libraries whose handle, plan or kernel needs memory
# that they do not get from torch (cuFFT: https://github.com/pytorch/pytorch/issues/119420); Level
# Zero, of Intel's GPUs; oneDNN.
_LIBRARIES: Final = r"(?:cublas|cudnn|cusolver|cusparse|cufft|hipblas|hipfft|rocblas|miopen)"
_AMBIGUOUS: Final = re.compile(
    r"unable to find an engine"
    rf"|\b{_LIBRARIES}\w*not_?initialized\b"
    rf"|\b{_LIBRARIES}\w*internal_?error"
    rf"|\b{_LIBRARIES}\w*(?:execution_failed|exec_failed|setup_failed|unknown_?error)"
    r"|ur_result_error_out_of_resources"
    r"|could not (?:create|execute) a primitive\s*$|could not create a memory(?: object)?\s*$",
    re.IGNORECASE,
)
# With less than this left, a library's handle or workspace may not have fitted. Of a limit of this
# process's own, half counts as little: oneDNN asks for a buffer as large as a layer's, and what the
# layer had taken is free again when the error is handled.
_NOTHING_BYTES: Final = 2**28
_PART: Final = 2


def is_out_of_memory(error: BaseException, failed_before: int | None = None) -> bool:
    """Return whether an error says that memory ran out, on a device or on the CPU.

    A text that is also said for other reasons counts if an allocation has failed since
    `failed_before`, or if next to nothing is free: to be asked while the error is being handled.

    Args:
        error: any.
        failed_before: what `failed_allocations` returned before the attempt that raised it; None:
            unknown.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if _CERTAIN.search(text):
        return True
    if not _AMBIGUOUS.search(text):
        return False
    failed = failed_before is not None and failed_allocations() > failed_before
    return failed or any(left < enough for left, enough in _left())


def failed_allocations() -> int:
    """Return how many allocations have failed on all CUDA devices so far, torch's `num_ooms`.

    Some were never raised: a library that does not get a workspace goes on without. 0 where the
    allocator does not count, as a pluggable one.
    """
    if not torch.cuda.is_initialized():
        return 0
    devices = range(torch.cuda.device_count())
    try:
        return sum(torch.cuda.memory_stats_as_nested_dict(at).get("num_ooms", 0) for at in devices)
    except RuntimeError:
        return 0


def _left() -> Iterator[tuple[int, int]]:
    """Yield, for each memory that may be short, the bytes left and the bytes that are enough."""
    if torch.cuda.is_initialized():
        # Only devices in use: asking takes a context on the others. The allocator's own limit is
        # no matter here: it does not bind libraries, and an allocation that it refuses is counted.
        with suppress(RuntimeError):  # of a pluggable allocator
            for index in filter(torch.cuda.memory_reserved, range(torch.cuda.device_count())):
                yield torch.cuda.mem_get_info(index)[0], _NOTHING_BYTES
    for pool in process_limits():
        yield pool.free_bytes, max(_NOTHING_BYTES, pool.limit_bytes // _PART)
    with suppress(MachineError):
        for pool in (machine_memory(), *ControlGroups.of().pools()):
            yield pool.free_bytes, _NOTHING_BYTES


def ran_out_of_memory(function: Callable[..., object], *arguments: Any) -> bool:
    """Call it; whether memory ran out. The traceback, which refers to tensors, is then gone."""
    failed_before = failed_allocations()
    try:
        function(*arguments)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, TorchBudgetError) or not is_out_of_memory(error, failed_before):
            raise
        return True
    return False
