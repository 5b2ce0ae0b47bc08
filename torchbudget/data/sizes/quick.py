"""The sizes of columns and lists, from their lengths, without reading a sample."""

from __future__ import annotations

import sys
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.data.sizes.key import SIZED, FieldName, SizeKey, lengths_of, quick_lengths
from torchbudget.errors import SizesError

Lengths: TypeAlias = npt.NDArray[np.int64]

# Columns whose values are stored as samples have them; others, such as images, are decoded.
_STORED: Final = frozenset({"Value", "List", "LargeList", "Sequence", "list"})


def is_exactly(dataset: object, library: str, name: str) -> bool:
    """True if the dataset is of that very class; a subclass may read its samples differently."""
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and type(dataset) is kind


def quick_sizes(dataset: Any, key: SizeKey) -> Lengths | None:
    """The sizes that reading all samples would give, `(N,)` or `(N, d)`; `None` if not certain.

    Raises:
        SizesError: a column has a null, or none is named.
    """
    if callable(key):
        return None
    try:
        fields = key if isinstance(key, tuple) else (key,)
        sizes = np.stack([_axis(dataset, field) for field in fields], axis=-1)
    except (KeyError, IndexError, TypeError):
        return None
    if (nulls := np.argwhere(sizes < 0)).size:
        raise SizesError(f"sample {nulls[0, 0]} has no size for key {key!r}: it is null")
    return sizes if isinstance(key, tuple) else sizes[:, 0]


def _axis(dataset: Any, field: FieldName | None) -> Lengths:
    """The sizes on one axis, −1 for a null; a `KeyError`, `IndexError` or `TypeError` if unsure."""
    if is_exactly(dataset, "datasets", "Dataset"):
        return _arrow(dataset, field)
    if is_exactly(dataset, "pandas", "DataFrame"):
        if field is None:
            raise SizesError(
                "the length of a DataFrame's row is its number of columns; name the one that is "
                "ragged, as in key='text'"
            )
        if list(dataset.columns).count(field) != 1:
            raise KeyError(field)
        return np.array(lengths_of(dataset[field].tolist()), np.int64)
    samples = dataset.tolist() if is_exactly(dataset, "pandas", "Series") else dataset
    kinds = set(map(type, samples)) if type(samples) in (list, tuple) else {object}
    if not kinds <= (SIZED if field is None else {dict, list, tuple}):
        raise TypeError("samples of other types may be read in ways of their own")
    return np.array(quick_lengths(samples, field), np.int64)


def _arrow(dataset: Any, field: FieldName | None) -> Lengths:
    import pyarrow as pa
    import pyarrow.compute as pc

    layout = dataset.format
    if field not in layout["columns"] or field not in dataset.features:
        raise KeyError(field)
    if type(dataset.features[field]).__name__ not in _STORED:
        raise TypeError("the column's values are decoded")
    column, rows = dataset.data.column(field), dataset._indices
    kind = column.type
    formats: set[str | None] = {None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(column)
        if pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type):
            formats |= {"numpy", "torch"}
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.utf8_length(column)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        lengths = pc.binary_length(column)
    else:
        formats = set()
    if layout["type"] not in formats:
        raise TypeError("the column's values may be converted")
    sizes: Lengths = pc.fill_null(lengths, -1).to_numpy().astype(np.int64)
    return sizes if rows is None else sizes[rows.column(0).to_numpy()]
