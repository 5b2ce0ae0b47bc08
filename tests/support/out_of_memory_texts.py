"""The texts of memory that runs out, as errors: those that the docs list, and some in full."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.distributed import DistBackendError

ACCELERATOR = getattr(torch, "AcceleratorError", RuntimeError)  # since torch 2.8
PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")


def listed(column: int) -> list[tuple[type, str]]:
    """The texts of a column of the table in the docs."""
    rows = PAGE.split("| raised by |")[1].partition("\n\n")[0].splitlines()[2:]
    texts = [text for row in rows for text in re.findall("`([^`]+)`", row.split("|")[column])]
    return [(RuntimeError, f"Error: {text}") for text in texts if "MemoryError" not in text]


CERTAIN = [
    *listed(2),
    (MemoryError, ""),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    (ACCELERATOR, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    (RuntimeError, "Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (RuntimeError, "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"),
    (DistBackendError, "NCCL error:\nLast error:\nFailed to CUDA calloc async 608 bytes"),
]
AMBIGUOUS = [
    *listed(3),
    (RuntimeError, "GET was unable to find an engine to execute this computation"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (RuntimeError, "HIP error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasSgemm(handle)`"),
    (RuntimeError, "rocblas_status_internal_error"),
]
NEVER = [
    (ValueError, "CUDA out of memory."),
    (RuntimeError, "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    (ACCELERATOR, "CUDA error: an illegal memory access was encountered"),
    (ACCELERATOR, "CUDA error: device-side assert triggered"),
    (RuntimeError, "could not create a primitive descriptor for the matmul primitive."),
    (RuntimeError, "out of resource: shared memory, Required: 180224, Hardware limit: 101376."),
    (RuntimeError, "Bus error. It is possible that workers are out of shared memory."),
    (RuntimeError, "NCCL error: unhandled system error, NCCL version 2.21.5"),
    (RuntimeError, "NCCL error: internal error, NCCL version 2.21.5"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_BAD_PARAM_NULL_POINTER"),
    (RuntimeError, "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
]


def ids(rows: list[tuple[type, str]]) -> list[str]:
    return [f"{kind.__name__}: {text[:40]}" for kind, text in rows]
