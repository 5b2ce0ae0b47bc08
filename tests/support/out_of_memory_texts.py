"""The texts of memory that runs out, as errors: parts of them, and some in full."""

from __future__ import annotations

import torch
from torch.distributed import DistBackendError

ACCELERATOR = getattr(torch, "AcceleratorError", RuntimeError)  # since torch 2.8

# Of torch, drivers and runtimes, cuBLAS, hipBLAS and rocBLAS, cuDNN and MIOpen, cuFFT, cuSOLVER,
# Triton, NCCL, and of torch and oneDNN on the CPU.
SAID_FOR_NOTHING_ELSE = """\
CUDA error: out of memory
HIP error: out of memory
MPS backend out of memory
CUDA driver error: out of memory
CUDA_ERROR_OUT_OF_MEMORY
cudaErrorMemoryAllocation
hipErrorOutOfMemory
UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY
CUBLAS_STATUS_ALLOC_FAILED
HIPBLAS_STATUS_ALLOC_FAILED
rocblas_status_memory_error
CUDNN_STATUS_ALLOC_FAILED
CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
miopenStatusAllocFailed
CUFFT_ALLOC_FAILED
CUSOLVER_STATUS_ALLOC_FAILED
Triton Error [CUDA]: out of memory
Cuda failure 2 'out of memory'
Failed to CUDA calloc async
can't allocate memory
not enough memory: you tried to allocate
std::bad_alloc
"""
ALSO_SAID_FOR_OTHER_REASONS = """\
UR_RESULT_ERROR_OUT_OF_RESOURCES
CUBLAS_STATUS_NOT_INITIALIZED
CUBLAS_STATUS_INTERNAL_ERROR
CUBLAS_STATUS_EXECUTION_FAILED
unable to find an engine
CUDNN_STATUS_NOT_INITIALIZED
CUDNN_STATUS_INTERNAL_ERROR
CUDNN_STATUS_EXECUTION_FAILED
miopenStatusInternalError
miopenStatusUnknownError
CUFFT_INTERNAL_ERROR
CUFFT_EXEC_FAILED
CUFFT_SETUP_FAILED
CUSOLVER_STATUS_INTERNAL_ERROR
could not create a primitive
could not execute a primitive
could not create a memory object
"""


def errors(texts: str) -> list[tuple[type, str]]:
    return [(RuntimeError, f"Error: {text}") for text in texts.splitlines()]


CERTAIN = [
    *errors(SAID_FOR_NOTHING_ELSE),
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
    *errors(ALSO_SAID_FOR_OTHER_REASONS),
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
