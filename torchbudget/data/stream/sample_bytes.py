"""How many bytes a sample keeps in memory."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Mapping
from itertools import chain
from mmap import mmap
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_map

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_NUMBER_BYTES: Final = 28
_OBJECT_BYTES: Final = 100
_MUCH_LARGER: Final = 2


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
    held, is_part = _counted(sample)
    if is_part:
        sample = tree_map(_copied_part, sample)
        held = held_bytes(sample)
    return sample, held


def _copied_part(value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, np.ndarray)) or not _is_part(value, _kept_by(value)[1]):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    copied = value.clone()
    copied.__dict__.update(value.__dict__)  # what a user has noted on it
    return copied


def _is_part(value: torch.Tensor | np.ndarray[Any, Any], kept_bytes: int) -> bool:
    return kept_bytes >= _MUCH_LARGER * value.nbytes + _OBJECT_BYTES


def _kept_by(value: torch.Tensor | np.ndarray[Any, Any]) -> tuple[int, int]:
    """The identity of what a strided tensor or an array is a part of, and the bytes of that."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return storage._cdata, storage.nbytes()
    whole: Any = value
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    owner = whole.base
    if isinstance(owner, mmap):  # a file's pages can be given back
        return id(value), value.nbytes
    if owner is None:
        return id(whole), whole.nbytes
    try:
        return id(owner), max(memoryview(owner).nbytes, whole.nbytes)
    except TypeError:  # it has no buffer
        return id(owner), whole.nbytes


def _counted(sample: Any) -> tuple[int, bool]:
    """Bytes that are kept alive, and whether an array is a part of something much larger."""
    total, is_part = 0, False
    # With the objects: parts are made here, and another may have the identity of one that is gone.
    seen: dict[int, Any] = {}
    owners: set[int] = set()
    waiting = [sample]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
            waiting += [value._indices(), value._values()]
        elif isinstance(value, torch.Tensor) and value.layout is torch.jagged:
            waiting += [value.values(), value.__dict__]
        elif isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            waiting += [value.values(), value.detach().to_sparse_coo()._indices()]
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            total += _OBJECT_BYTES
            owner, kept_bytes = _kept_by(value)
            is_part = is_part or _is_part(value, kept_bytes)
            if owner not in owners:
                owners.add(owner)
                total += kept_bytes
            if value.dtype == object:
                waiting.append(value.tolist())
        else:
            total += sys.getsizeof(value, _OBJECT_BYTES)
            if isinstance(value, Mapping):
                waiting.extend(value)
                waiting.extend(value.values())
            elif isinstance(value, (list, tuple, set, frozenset, deque)):
                if _NUMBERS.issuperset(map(type, value)):  # a text's tokens: not one by one
                    total += _NUMBER_BYTES * len(value)
                else:
                    waiting.extend(value)
            elif dataclasses.is_dataclass(value):
                waiting.extend(getattr(value, one.name) for one in dataclasses.fields(value))
            elif isinstance(value, memoryview):
                waiting.append(value.obj)
            elif callable(getattr(value, "getbands", None)):
                total += value.width * value.height * _pixel_bytes(value)
            elif not isinstance(value, (type, type(sys))):
                waiting.extend(getattr(value, "__dict__", {}).values())
                slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
                names = chain.from_iterable([one] if isinstance(one, str) else one for one in slots)
                waiting.extend(getattr(value, name, None) for name in names)
    return total, is_part


def _pixel_bytes(image: Any) -> int:
    """Of an image of Pillow, which stores several bands, and wide ones, in 4 bytes."""
    mode = getattr(image, "mode", "")
    if len(image.getbands()) > 1 or mode in ("F", "I"):
        return 4
    return 2 if mode.startswith("I;16") else 1
