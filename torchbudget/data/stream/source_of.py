"""How data is read that a user passes: its kind of source, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from torchbudget.data.stream.adapters.datasets import DatasetsSource
from torchbudget.data.stream.adapters.ray import RaySource
from torchbudget.data.stream.adapters.webdataset import WebdatasetSource
from torchbudget.data.stream.slot import Split
from torchbudget.data.stream.source import Indexed, ShardFunction, ShardList, Source
from torchbudget.errors import OptionError
from torchbudget.protocols import MapStyle

_MODULES: Final = {
    "datasets.iterable_dataset.": DatasetsSource,
    "webdataset.": WebdatasetSource,
    "ray.data.": RaySource,
}


def source_of(data: Any, split: Split | None, *, shuffle: bool, seed: int) -> Source:
    """The source of a stream, checked.

    Raises:
        OptionError: it cannot be iterated more than once, or not sample by sample.
    """
    if split not in (None, *get_args(Split)):
        raise OptionError(f"split must be 'none', 'workers' or 'ranks', got {split!r}")
    kind = _kind_of("the source", data)
    if kind is ShardList:
        if not data:
            raise OptionError("the list of shards is empty")
        for number, shard in enumerate(data):
            _kind_of(f"shard {number}", shard, is_shard=True)
    if kind is Indexed and split not in (None, "none"):
        raise OptionError(
            f"split={split!r} says that each process gets a part of the source, but a map-style "
            "data set is the same in all: leave it out, and each sample is read once"
        )
    return kind(data, split, shuffle=shuffle, seed=seed)


def _kind_of(name: str, data: Any, *, is_shard: bool = False) -> type[Source]:
    """How data is read.

    Raises:
        OptionError: it cannot be, or yields other things than samples.
    """
    if isinstance(data, Iterator):
        raise OptionError(
            f"{name} is an iterator, which is used up after one epoch, and cannot be shared by "
            "workers: pass what it iterates over, or a function that returns one"
        )
    can_open = isinstance(data, Iterable) or callable(data)
    is_sample = is_shard and (isinstance(data, (torch.Tensor, np.ndarray)) or not can_open)
    is_table = hasattr(data, "columns") and hasattr(data, "shape") and not isinstance(data, Dataset)
    if isinstance(data, (list, tuple)):
        return ShardList
    if not (is_sample or is_table or isinstance(data, (str, bytes, bytearray, Mapping))):
        if isinstance(data, MapStyle) and not isinstance(data, (IterableDataset, type)):
            return Indexed
        for base in type(data).__mro__:
            for module, kind in _MODULES.items():
                if f"{base.__module__}.".startswith(module):
                    return kind
        if can_open:
            return Source if isinstance(data, Iterable) else ShardFunction
    if is_shard:
        raise OptionError(
            f"{name} is a {type(data).__name__}: a list is read as shards, each an iterable of "
            "samples or a function without arguments that returns one. Samples in a list have an "
            "index: use MemoryBudgetBatchSampler"
        )
    raise OptionError(
        f"{name} is a {type(data).__name__}: expected an iterable of samples, a map-style data "
        "set, a function (shard, num_shards) that returns an iterator, or a list of shards, each "
        "an iterable or a function without arguments. What iterates over characters, keys or "
        "columns is none: pass what reads a file, one value of a mapping, such as one split of a "
        "data set, or the rows of a table, such as to_dict('records') of pandas. Samples in a "
        "list have an index: use MemoryBudgetBatchSampler"
    )
