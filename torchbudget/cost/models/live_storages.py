"""Counting the bytes of tensors' storages for as long as they live."""

from __future__ import annotations

import weakref

import torch


class LiveStorages:
    """The bytes of living storages, each counted once.

    Attributes:
        num_bytes: their sum now.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ids: set[int] = set()

    def add(self, storage: torch.UntypedStorage, num_bytes: int) -> int:
        """Count a storage until it is freed.

        Returns:
            `num_bytes`; 0 if it is counted already.
        """
        if id(storage) in self._ids:
            return 0
        self._ids.add(id(storage))
        self.num_bytes += num_bytes
        weakref.finalize(storage, self._remove, id(storage), num_bytes)
        return num_bytes

    def _remove(self, key: int, num_bytes: int) -> None:
        self._ids.remove(key)
        self.num_bytes -= num_bytes
