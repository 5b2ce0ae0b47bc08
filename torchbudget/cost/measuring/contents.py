"""What containers and names refer to: noticed where it is another than before, and put back."""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import torch

from torchbudget.cost.measuring.reachable import CONTAINERS, UNBOUND, values_of

# How deep containers inside an object's own are restored, such as an optimizer's state.
_NESTED: Final = 4

TENSORS: Final[tuple[type, ...]] = (torch.Tensor,)
# Not None: what is made when it is first needed may be a file, a thread or a library's handle.
VALUES: Final[tuple[type, ...]] = (*TENSORS, int, float, complex, str, bytes, np.generic)


def nested(container: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """A container, and the containers in it, each with a shallow copy."""
    yield container, copy.copy(container)
    if depth == _NESTED:
        return
    for value in values_of(container):
        if isinstance(value, CONTAINERS):
            yield from nested(value, depth + 1)


def changed(container: Any, items: Any, kinds: tuple[type, ...] = VALUES) -> bool:
    """Whether something of these kinds is in the container, or was in its copy, but not in both."""
    if len(container) == len(items) and _all_same(container, items):
        return False  # of millions of items, too, this is known soon
    pairs: Any
    if isinstance(items, dict):
        keys = {**items, **container}
        pairs = ((container.get(key, UNBOUND), items.get(key, UNBOUND)) for key in keys)
    elif isinstance(items, set):
        pairs = ((one, UNBOUND) for one in container ^ items)
    else:
        pairs = zip_longest(container, items, fillvalue=UNBOUND)
    return any(differ(now, before, kinds) for now, before in pairs)


def differ(now: Any, before: Any, kinds: tuple[type, ...] = VALUES) -> bool:
    """Whether it is another object than before, and one of both is of these kinds."""
    return now is not before and (_is_one(now, kinds) or _is_one(before, kinds))


def refill(container: Any, items: Any) -> None:
    """Restore the items of a container in place, since others may refer to it."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


def _all_same(container: Any, items: Any) -> bool:
    # Of a dictionary the keys, too, come in their order.
    same = all(map(operator.is_, values_of(container), values_of(items)))
    return same and all(map(operator.is_, container, items))


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, tuple):
        return any(_is_one(one, kinds) for one in value)
    return isinstance(value, kinds)
