"""Bytes that samples keep in memory."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from functools import partial
from mmap import mmap
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_map

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_NUMBER_BYTES: Final = 28
_OBJECT_BYTES: Final = 100
_MUCH_LARGER: Final = 2
_SHARED_BYTES: Final = 256  # an entry in a set takes a quarter of that at the most
# Objects of these types refer to parts of the program, not of the sample.
_OF_PROGRAM: Final = (type, ModuleType, FunctionType, MethodType, TracebackType, partial)


class KeptBytes:
    """Counts bytes of everything that samples keep alive: tensors, arrays, text, nested in any way.

    A tensor or an array counts the whole storage that it is a part of. An object of 256 bytes or
    more, or a storage, that several samples share counts once. O(objects in a sample).

    >>> kept, noise = KeptBytes(), np.zeros(1000)
    >>> kept.add([noise]) >= 8000 > kept.add([noise])
    True
    """

    def __init__(self) -> None:
        self._counted: set[int] = set()  # of objects and storages that these samples keep alive

    def add(self, sample: Any) -> int:
        """Return the bytes that a sample adds to those before it."""
        held, _, shared = self._count(sample)
        self._counted |= shared
        return held

    def without_rest(self, sample: Any) -> tuple[Any, int]:
        """Return a sample without what it keeps alive but does not use, and the bytes it adds.

        Tensors and arrays that are a part of something twice as large are copied, such as a crop.

        >>> crop = torch.zeros(1_000_000)[:10]
        >>> KeptBytes().add(crop) > 4_000_000 > 1000 > KeptBytes().without_rest(crop)[1]
        True
        """
        held, parts, shared = self._count(sample)
        if parts:
            sample = tree_map(lambda value: _copied(value) if id(value) in parts else value, sample)
            return sample, self.add(sample)
        self._counted |= shared
        return sample, held

    def _count(self, sample: Any) -> tuple[int, set[int], set[int]]:
        """Bytes that a sample adds; identities of parts of something larger, of what may recur."""
        total, parts, shared = 0, set[int](), set[int]()
        # The objects are kept, since another object may get the identity of a deleted one.
        seen: dict[int, Any] = {}
        waiting = [sample]
        while waiting:
            value = waiting.pop()
            number = id(value)
            if number in seen or number in self._counted or isinstance(value, _OF_PROGRAM):
                continue
            seen[number] = value
            referents: Any = ()
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                referents = [value.__reduce_ex__(2)]  # of a sparse or nested one, its parts
            elif isinstance(value, (torch.Tensor, np.ndarray)):
                storage, kept_bytes = _whole(value)
                if kept_bytes >= _MUCH_LARGER * value.nbytes + _OBJECT_BYTES:
                    parts.add(number)
                if storage not in shared and storage not in self._counted:
                    shared.add(storage)
                    total += kept_bytes
                total += _OBJECT_BYTES
                if value.dtype == object:
                    referents = value.ravel().tolist()
            else:
                own = sys.getsizeof(value, _OBJECT_BYTES)
                if isinstance(value, dict):
                    waiting += value  # its keys: those that are text are no referents
                elif hasattr(type(value), "getbands"):  # Pillow's pixels are no Python objects
                    own += 4 * value.width * value.height
                total += own
                if own >= _SHARED_BYTES:
                    shared.add(number)
                if not hasattr(type(value), "__next__"):  # iterators read objects of others
                    referents = gc.get_referents(value)
            if _NUMBERS.issuperset(map(type, referents)):  # a text's tokens: not one by one
                total += _NUMBER_BYTES * len(referents)
            else:
                waiting += referents
        return total, parts, shared


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value.clone()


def _whole(value: Any) -> tuple[int, int]:
    """Identity and bytes of the storage that a strided tensor or an array is a part of."""
    whole: Any = value
    while isinstance(getattr(whole, "base", None), (np.ndarray, torch.Tensor)):
        whole = whole.base
    if isinstance(whole, torch.Tensor):
        storage = whole.untyped_storage()
        return -storage._cdata, storage.nbytes()  # no other object has an identity below 0
    if isinstance(whole.base, mmap):  # a file's pages can be given back
        return id(value), value.nbytes
    if whole.base is not None:
        with suppress(TypeError):  # it may have no buffer
            return id(whole.base), max(memoryview(whole.base).nbytes, whole.nbytes)
    return id(whole), whole.nbytes
