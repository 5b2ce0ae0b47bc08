"""How many bytes a sample keeps in memory."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from functools import lru_cache, partial
from mmap import mmap
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_map

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_LISTS: Final = frozenset({list, tuple})
_NUMBER_BYTES: Final = 28
_OBJECT_BYTES: Final = 100
_MUCH_LARGER: Final = 2
# Pillow's pixels are no Python objects. Several bands, and wide ones, are stored in 4 bytes.
_BYTES_OF_PIXELS: Final = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
# What these refer to is the program's, not the sample's.
_OF_PROGRAM: Final = (type, ModuleType, FunctionType, MethodType, TracebackType)


def held_bytes(sample: Any) -> int:
    """Bytes of everything that a sample keeps alive: tensors, arrays, text, nested in any way.

    A tensor or an array counts the whole storage that it is a part of; an object or a storage that
    occurs twice counts once. O(objects in the sample).

    >>> held_bytes(np.zeros(1000)) >= 8000
    True
    """
    return _counted(sample)[0]


def without_rest(sample: Any) -> tuple[Any, int]:
    """The sample, and the bytes that it keeps alive, without those that it does not use.

    Tensors and arrays that are a part of something twice as large are copied, such as a crop.

    >>> crop = torch.zeros(1_000_000)[:10]
    >>> held_bytes(crop) > 4_000_000 > 1000 > without_rest(crop)[1]
    True
    """
    held, parts = _counted(sample)
    if parts:
        sample = tree_map(lambda value: _copied(value) if id(value) in parts else value, sample)
        held = held_bytes(sample)
    return sample, held


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    copied = value.clone()
    copied.__dict__.update(value.__dict__)  # what a user has noted on it
    return copied


@lru_cache(maxsize=256)
def _is_closed(kind: type[Any]) -> bool:
    """Whether nothing else counts: pandas' own size says all; others read what is not theirs."""
    return issubclass(kind, partial) or hasattr(kind, "memory_usage") or hasattr(kind, "__next__")


def _whole(value: torch.Tensor | np.ndarray[Any, Any]) -> tuple[Any, int]:
    """What a strided tensor or an array is a part of, and the bytes of that."""
    whole: Any = value
    while isinstance(getattr(whole, "base", None), (np.ndarray, torch.Tensor)):
        whole = whole.base
    if isinstance(whole, torch.Tensor):
        storage = whole.untyped_storage()
        return storage, storage.nbytes()
    if isinstance(whole.base, mmap):  # a file's pages can be given back
        return value, value.nbytes
    if whole.base is not None:
        with suppress(TypeError):  # it may have no buffer
            return whole.base, max(memoryview(whole.base).nbytes, whole.nbytes)
    return whole, whole.nbytes


def _counted(sample: Any) -> tuple[int, set[int]]:
    """Bytes that are kept alive, and the identities of parts of something much larger."""
    total, parts = 0, set()
    # With the objects: some are made here, and another may have the identity of one that is gone.
    seen: dict[int, Any] = {}
    wholes: dict[int, tuple[Any, int]] = {}
    waiting = [sample]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _OF_PROGRAM):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            referents: Any = [value.__reduce_ex__(2)]  # of a sparse or a nested one, its parts
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            whole, kept_bytes = _whole(value)
            wholes[id(whole)] = whole, kept_bytes
            if kept_bytes >= _MUCH_LARGER * value.nbytes + _OBJECT_BYTES:
                parts.add(id(value))
            total += _OBJECT_BYTES
            referents = [value.tolist()] if value.dtype == object else ()
        else:
            total += sys.getsizeof(value, _OBJECT_BYTES)
            kind = type(value)
            if isinstance(value, dict):
                waiting += value  # its keys: those that are text are no referents
            elif hasattr(kind, "getbands"):
                total += value.width * value.height * _BYTES_OF_PIXELS.get(value.mode, 4)
            if kind in _LISTS:
                referents = value
            else:
                is_closed = _is_closed(kind)  # type: ignore[arg-type]  # types are hashable
                referents = () if is_closed else gc.get_referents(value)
        if _NUMBERS.issuperset(map(type, referents)):  # a text's tokens: not one by one
            total += _NUMBER_BYTES * len(referents)
        else:
            waiting += referents
    return total + sum(kept_bytes for _, kept_bytes in wholes.values()), parts
