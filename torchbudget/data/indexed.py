"""Whether the samples of a data set may be read by their index."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
        return "has no index"
    if not isinstance(data, Iterable):
        return ""
    if getattr(data, "is_lazy", False) is True:
        return "says that it is lazy"
    if isinstance(data, (Dataset, Tensor, Mapping, list, tuple)) or hasattr(data, "__getitems__"):
        return ""
    with suppress(Exception), RandomState.take():  # a user's class may raise anything
        reads = [data[0], data[0]] if len(data) else []
        iterator = iter(data)
        if reads and iterator is not iter(data):  # else the sample would be lost
            reads.append(next(iterator, None))
        if len({*map(_contents_of, reads)}) < 2:
            return ""
    return "does not read the same sample at index 0, each time, as it yields first"


def check_indexed(data: Any, error: type[SizesError | OptionError]) -> None:
    """Raise an error if the samples of a data set must not be read by index."""
    if why := why_not_indexed(data):
        raise error(
            f"expected a map-style dataset, with __getitem__ and __len__; {type(data).__name__} "
            f"{why}, so an index may lose or repeat samples: use BudgetedIterableDataset(source, "
            "cost, budget, size=…), or, if only random augmentation changes samples, "
            "torch.utils.data.Subset(dataset, range(len(dataset)))"
        )


def checksum_of(item: Any) -> int:
    """Return a checksum of an item's contents, as far as it can be pickled."""
    file = io.BytesIO()
    with suppress(Exception):  # any object may refuse in its own way
        _ByContent(file).dump(item)
    return crc32(file.getvalue())


def _contents_of(item: Any) -> bytes:
    """Return an item's contents; raise whatever it raises where it cannot be pickled."""
    file = io.BytesIO()
    _ByContent(file).dump(item)
    return file.getvalue()


class _ByContent(pickle.Pickler):
    """Pickles equal tensors alike, which torch does not."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        content = value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return tuple, ([str(value.dtype), tuple(value.shape), content],)
