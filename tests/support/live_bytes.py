"""The bytes of real tensors, counted for as long as they live: the truth of traces."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# torch leaves the dispatch mode's class and constructor without types.
class LiveBytes(TorchDispatchMode):
    """The bytes of living storages, each counted once, after each operation inside the context.

    Args:
        device: the type of the device that tensors are counted on.
        block_bytes: a storage takes a multiple of it.
        kind: of the tensors that are counted.

    Attributes:
        num_bytes: living now.
        history: living after each operation.
        living: bytes of each living storage by its number, in the order of allocation.
        events: the number of each storage that was allocated, with its bytes, or freed, with minus
            its bytes.
    """

    def __init__(
        self, device: str, *, block_bytes: int = 1, kind: type[torch.Tensor] = torch.Tensor
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not
        self.num_bytes = 0
        self.history: list[int] = []
        self.living: dict[int, int] = {}
        self.events: list[tuple[int, int]] = []
        self._numbers = count()
        self._device = device
        self._block_bytes = block_bytes
        self._kind = kind
        self._ids: set[int] = set()

    def count(self, tensor: torch.Tensor) -> int:
        """Count a tensor's storage until it is freed.

        Returns:
            Its bytes; 0 if it is counted already, or on another device.
        """
        if tensor.device.type != self._device:
            return 0
        blocks = -(-tensor.untyped_storage().nbytes() // self._block_bytes)
        return self.add(tensor, blocks * self._block_bytes)

    def add(self, tensor: torch.Tensor, num_bytes: int) -> int:
        """Count a tensor's storage as so many bytes; see `count`."""
        storage = tensor.untyped_storage()
        if id(storage) in self._ids:
            return 0
        self._ids.add(id(storage))
        number = next(self._numbers)
        self.num_bytes += num_bytes
        if num_bytes:
            self.living[number] = num_bytes
            self.events.append((number, num_bytes))
        # By a weak reference: what is counted must not keep the counter, which may refer to it.
        weakref.finalize(storage, _forget, weakref.ref(self), id(storage), number)
        return num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, self._kind):
                self.count(leaf)
        self.history.append(self.num_bytes)
        return result


def _forget(reference: Callable[[], LiveBytes | None], key: int, number: int) -> None:
    live = reference()
    if live is not None:
        live._ids.remove(key)
        num_bytes = live.living.pop(number, 0)
        live.num_bytes -= num_bytes
        if num_bytes:
            live.events.append((number, -num_bytes))
