"""Whether the samples of a data set may be read by their index."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from torchbudget.errors import OptionError, SizesError
from torchbudget.protocols import MapStyle
from torchbudget.random_state import RandomState


def why_not_indexed(data: Any) -> str:
    """Return why the samples of a data set must not be read by index; empty: they may be.

    An iterable that has an index, too, may read from its start for each index, or in another order
    each time. It is read by index if it does not say that it is lazy (`is_lazy`, as in lhotse), its
    index 0 is the same twice, and the iteration begins with that sample. Torch's `Dataset` and
    classes with `__getitems__` state that they have an index; they may augment samples at random.

    Reads three samples of other iterables; global random generators stay as they are.
    """
    if isinstance(data, IterableDataset) or not isinstance(data, MapStyle):
        return "is not one"
    if not isinstance(data, Iterable):
        return ""
    if getattr(data, "is_lazy", False) is True:
        return "says that it is lazy"
    if isinstance(data, (Dataset, Tensor, Mapping, list, tuple)) or hasattr(data, "__getitems__"):
        return ""
    try:
        with RandomState.take():
            reads = [data[0], data[0]] if len(data) else []
            iterator = iter(data)
            if reads and iterator is not iter(data):  # else the sample would be lost
                reads.append(next(iterator, None))
    except Exception as error:  # noqa: BLE001  (a user's class may raise anything)
        return f"cannot be read at index 0 and iterated ({type(error).__name__}: {error})"
    if len({*map(checksum_of, reads)}) > 1:
        return "has another sample at index 0 each time, or begins its iteration with another one"
    return ""


def check_indexed(data: Any, error: type[SizesError | OptionError]) -> None:
    """Raise an error if the samples of a data set must not be read by index."""
    if why := why_not_indexed(data):
        raise error(
            "expected a map-style dataset, with __getitem__ and __len__, but this "
            f"{type(data).__name__} {why}: reading it by index would fail, or lose or repeat "
            "samples. Use BudgetedIterableDataset(source, cost, budget, size=…); or, if its index "
            "is right, torch.utils.data.Subset(dataset, range(len(dataset)))"
        )


def checksum_of(item: Any) -> int:
    """Return a checksum of an item's contents; 0 if it cannot be pickled."""
    file = io.BytesIO()
    try:
        _ByContent(file).dump(item)
    except Exception:  # noqa: BLE001  (any object may refuse in its own way)
        return 0
    return crc32(file.getvalue())


class _ByContent(pickle.Pickler):
    """Pickles equal tensors alike, which torch does not."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        content = value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return tuple, ([str(value.dtype), tuple(value.shape), content],)
