"""What a traced step asks of the device's allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchbudget.cost.measuring.allocator_blocks import Block
from torchbudget.cost.measuring.caching_allocator import CachingAllocator
from torchbudget.cost.models.protocol import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What a traced step asks of the device's allocator, in its order.

    Attributes:
        loaded: bytes of each storage that lived before the first step: parameters and buffers.
        made: bytes of each storage that earlier steps have left: the optimizer's state.
        sizes: bytes of each storage that the step allocates, its batch included, shape `(k,)`.
        order: indices of `sizes`: where one occurs first it is allocated, where it occurs again it
            is freed.
    """

    loaded: tuple[int, ...]
    made: tuple[int, ...]
    sizes: IntArray
    order: IntArray

    @classmethod
    def of(
        cls, loaded: Sequence[int], made: Sequence[int], events: Sequence[tuple[int, int]]
    ) -> Requests:
        """From the events that `LiveBytes` has recorded.

        What the step frees of earlier ones, as where it replaces a moving average, is taken to stay
        where it was.
        """
        sizes: dict[int, int] = {}
        order = []
        for number, num_bytes in events:
            if num_bytes > 0:
                sizes[number] = num_bytes
            if number in sizes:
                order.append(number)
        index = {number: at for at, number in enumerate(sizes)}
        return cls(
            tuple(loaded),
            tuple(made),
            np.array([*sizes.values()], np.int64),
            np.array([index[number] for number in order], np.int64),
        )

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the step itself has allocated at once."""
        events = np.zeros(len(self.order), np.int64)
        _, first = np.unique(self.order, return_index=True)
        events -= self.sizes[self.order]
        events[first] *= -1
        return int(np.cumsum(events).max(initial=0))

    def load(self, allocator: CachingAllocator) -> None:
        """Allocate what lives before the first step."""
        _allocate(allocator, self.loaded)

    def make(self, allocator: CachingAllocator) -> None:
        """Allocate what the first step leaves."""
        _allocate(allocator, self.made)

    def replay(self, allocator: CachingAllocator) -> None:
        """Make the requests of the step; at its end all is freed that it allocated."""
        blocks: dict[int, Block] = {}
        sizes = self.sizes.tolist()
        for index in self.order.tolist():
            block = blocks.pop(index, None)
            if block is not None:
                allocator.free(block)
            elif sizes[index] > 0:
                blocks[index] = allocator.malloc(sizes[index])
        for block in blocks.values():
            allocator.free(block)


def _allocate(allocator: CachingAllocator, sizes: Sequence[int]) -> None:
    for num_bytes in sizes:
        allocator.malloc(num_bytes)
