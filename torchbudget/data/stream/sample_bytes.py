"""How many bytes a sample takes in memory."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import torch

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_NUMBER_BYTES: Final = 28
_OBJECT_BYTES: Final = 100


def held_bytes(sample: Any) -> int:
    """Bytes of everything in a sample: tensors, arrays, text, numbers, nested in any way.

    A tensor or an array counts its own elements, not the rest of a storage that it shares with
    others. An object that occurs twice counts once. O(objects in the sample).

    >>> held_bytes(np.zeros(1000)) >= 8000
    True
    """
    total = 0
    seen: set[int] = set()
    waiting = [sample]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            total += _OBJECT_BYTES
            if value.layout is torch.sparse_coo:
                waiting += [value._indices(), value._values()]
            elif value.layout in {torch.strided, torch.jagged}:
                total += value.nbytes
            else:  # compressed rows or columns
                waiting += [value.values(), value.detach().to_sparse_coo()._indices()]
        elif isinstance(value, np.ndarray):
            total += value.nbytes + _OBJECT_BYTES
            if value.dtype.hasobject:
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
                total += value.nbytes
            elif callable(getattr(value, "getbands", None)):  # an image of Pillow
                total += value.width * value.height * len(value.getbands())
            elif not isinstance(value, (type, type(sys))):
                waiting.extend(getattr(value, "__dict__", {}).values())
                slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
                names = chain.from_iterable([one] if isinstance(one, str) else one for one in slots)
                waiting.extend(getattr(value, name, None) for name in names)
    return total
