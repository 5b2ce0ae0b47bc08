"""What is said where memory runs out, by whom, and what is said elsewhere: exception and text."""

from __future__ import annotations

import torch
from torch.distributed import DistBackendError

ACCELERATOR = getattr(torch, "AcceleratorError", RuntimeError)  # since torch 2.8

# Exception, and what it says.
CERTAIN = [
    (MemoryError, ""),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    (torch.OutOfMemoryError, "HIP out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total"),
    (torch.OutOfMemoryError, "XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    (ACCELERATOR, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    (ACCELERATOR, "HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
    (RuntimeError, "CUDA driver error: out of memory"),
    (RuntimeError, "Triton Error [CUDA]: out of memory"),
    (RuntimeError, "Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    (RuntimeError, "MPS backend out of memory (MPS allocated: 7.64 GiB, max allowed: 18.13 GiB)."),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (RuntimeError, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    (RuntimeError, "cuFFT error: CUFFT_ALLOC_FAILED"),
    (RuntimeError, "miopenStatusAllocFailed"),
    (RuntimeError, "rocblas_status_memory_error"),
    (RuntimeError, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    (RuntimeError, "cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"),
    (RuntimeError, "cudaErrorMemoryAllocation"),
    (RuntimeError, "hipErrorOutOfMemory"),
    (RuntimeError, "level_zero backend failed: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    (RuntimeError, "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"),
    (DistBackendError, "NCCL error:\nLast error:\nFailed to CUDA calloc async 608 bytes"),
    (DistBackendError, "NCCL error:\nLast error:\nCuda failure 2 'out of memory'"),
    (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    (RuntimeError, "DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
    (RuntimeError, "std::bad_alloc"),
]
AMBIGUOUS = [
    (RuntimeError, "Unable to find an engine to execute this computation"),
    (RuntimeError, "GET was unable to find an engine to execute this computation"),
    (RuntimeError, "FIND was unable to find an engine to execute this computation"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    (RuntimeError, "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm(handle)`"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART"),
    (RuntimeError, "cuFFT error: CUFFT_INTERNAL_ERROR"),
    (RuntimeError, "cuFFT error: CUFFT_EXEC_FAILED"),
    (RuntimeError, "cuFFT error: CUFFT_SETUP_FAILED"),
    (RuntimeError, "HIP error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasSgemm(handle)`"),
    (RuntimeError, "miopenStatusInternalError"),
    (RuntimeError, "miopenStatusUnknownError"),
    (RuntimeError, "rocblas_status_internal_error"),
    (RuntimeError, "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    (RuntimeError, "could not create a primitive"),
    (RuntimeError, "could not execute a primitive"),
    (RuntimeError, "could not create a memory object"),
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
