"""What one batch needs on its way from a worker to the loop."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBytes:
    """The bytes of one batch.

    Attributes:
        storages: of the storage of each tensor, which a worker hands over in a file of `/dev/shm`
            of its own; one that several tensors share counts once.
        plain: of everything else (text, NumPy arrays, objects), which is sent through a pipe.
    """

    storages: tuple[int, ...]
    plain: int

    @property
    def total(self) -> int:
        """Of all of it."""
        return sum(self.storages) + self.plain


class _Weigher(pickle.Pickler):
    """Pickles a batch without the contents of its tensors, whose storages it notes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        for tensor in _parts(obj):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage.nbytes()
        return id(obj)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that one is made of."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.values()]


def batch_bytes(batch: Any) -> BatchBytes:
    """The bytes of a batch that came from a worker, whatever its structure.

    O(bytes that are not in tensors).

    >>> batch_bytes({"ids": torch.zeros(3, 5), "labels": torch.zeros(3)}).storages
    (60, 12)
    """
    file = io.BytesIO()
    weigher = _Weigher(file)
    weigher.dump(batch)
    # An empty storage has no file.
    storages = tuple(size for size in weigher.storages.values() if size)
    return BatchBytes(storages=storages, plain=len(file.getbuffer()))


def whole_pages(num_bytes: Any) -> Any:
    """Bytes as files of `/dev/shm` take them: whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def pinned_block(num_bytes: Any) -> Any:
    """Bytes as torch's allocator of pinned memory takes them: a power of two, kept when it is free.

    `CachingHostAllocator` rounds up to reuse blocks (`ATen/core/CachingHostAllocator.h`; pytorch
    #95823), unless `pinned_max_round_threshold_mb` is set.

    Args:
        num_bytes: shape `(…)`.

    >>> pinned_block(np.array([0, 1, 5, 1024, 1025])).tolist()
    [0, 1, 8, 1024, 2048]
    """
    sizes = np.asarray(num_bytes, np.float64)
    powers = np.exp2(np.ceil(np.log2(np.maximum(sizes, 1))))
    return np.where(sizes > 0, powers, 0).astype(np.int64)
