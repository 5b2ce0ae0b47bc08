"""Runs that repeat bit for bit, and networks that are compared."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import nn


def determinize(seed: int) -> None:
    """Seed every generator, and let torch use deterministic kernels only.

    Seeds Python's, NumPy's and torch's generators, on all devices; sets
    `torch.use_deterministic_algorithms(True)`, cuDNN to deterministic kernels without a search, and
    `CUBLAS_WORKSPACE_CONFIG` where it is not set, as cuBLAS asks for (call it before the first use
    of CUDA). Kernels that have no deterministic form then raise. Workers of a `DataLoader` are
    seeded from torch's generator by themselves. What was set before is not put back.

    Args:
        seed: from 0 to 2³² − 1, as NumPy takes it.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (for those who draw from it)
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """How far two networks are apart: the largest `|a − b| / max|b|` of any tensor they hold.

    0 if they are equal, bit for bit but for signs of zero; infinite if they do not hold tensors of
    the same names, shapes and dtypes, or differ where one is not finite. NaN equals NaN.

    >>> largest_difference(nn.Linear(2, 3), nn.Linear(3, 2))
    inf
    """
    held, others = one.state_dict(), other.state_dict()
    if held.keys() != others.keys():
        return float("inf")
    worst = 0.0
    for name, tensor in held.items():
        compared = others[name].to(tensor.device)
        if (tensor.shape, tensor.dtype) != (compared.shape, compared.dtype):
            return float("inf")
        if torch.equal(tensor, compared) or not tensor.numel():
            continue
        kind = torch.complex128 if tensor.is_complex() else torch.float64
        a, b = tensor.to(kind), compared.to(kind)
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs())
        if not apart.any():
            continue
        scale = b.abs().nan_to_num(0, 0, 0).max()
        worst = max(worst, float((apart / scale).nan_to_num(float("inf")).max()))
    return worst
