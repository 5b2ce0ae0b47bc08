"""Keys of sizes: a field of a sample, several of them, a callable, or the sample itself."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torchbudget.checks import is_int, is_number
from torchbudget.errors import OptionError, SizesError

FieldName: TypeAlias = str | int
Size: TypeAlias = int | tuple[int, ...]
SizeKey: TypeAlias = FieldName | tuple[FieldName, ...] | Callable[[Any], Size] | None


_AN_INT: Final = "an int: of seconds, the number of frames, such as round(100 * seconds)"


def check_key(key: SizeKey) -> None:
    """Raise an `OptionError` if `key` is not a `SizeKey`."""
    if key is None or callable(key):
        return
    fields = key if isinstance(key, tuple) and key else (key,)
    if not all(isinstance(field, str) or is_int(field) for field in fields):
        raise OptionError(
            f"a key of sizes is None, a str, an int, a tuple of those or a callable: {key!r:.50}"
        )


def size_of(sample: Any, key: SizeKey, index: int) -> Size:
    """The size of one sample: an int, or one int per ragged axis.

    Raises:
        SizesError: it has none; the message names its `index`.
    """
    try:
        if callable(key):
            size = key(sample)
            if not isinstance(size, (tuple, list)):
                return _count(size)
            if not size:
                raise ValueError("expected an int or one int per axis, got none")
            return tuple(map(_count, size))
        if isinstance(key, tuple):
            return tuple(_length(_field(sample, field)) for field in key)
        if key is not None:
            return _length(_field(sample, key))
        if isinstance(sample, tuple):
            raise TypeError(
                "a tuple's length is its number of fields; name the one that is ragged, "
                "as in key=0, or give key=len to count them"
            )
        return _length(sample)
    except Exception as error:
        raise SizesError(
            f"sample {index} has no size for key {key!r}: {type(error).__name__}: {error}"
        ) from error


# Types whose `len` is their size; subclasses may change it.
_SIZED: Final = frozenset({str, bytes, list, tuple, torch.Tensor, np.ndarray})


def sizes_of_all(samples: Sequence[Any], key: SizeKey, first: int) -> npt.NDArray[np.int64]:
    """The sizes of many samples, shape `(n,)` or `(n, d)`.

    Args:
        samples: n ≥ 1 of them.
        key: what is ragged.
        first: the index of the first sample, for errors.

    Raises:
        SizesError: a sample has no size, or sizes differ in their number of axes.
    """
    try:
        sizes = _quick_lengths(samples, key)
        if isinstance(sizes[0], tuple):
            found, numbers = np.array(sizes, np.int64), [*chain.from_iterable(sizes)]
        else:  # in a third of the time; truth values are among the smallest
            found = np.frombuffer(struct.pack(f"{len(sizes)}q", *sizes), np.int64)
            numbers = [sizes[place] for place in np.flatnonzero(found <= 1).tolist()]
        whole = {*map(type, numbers)} <= {int, np.int64}
        if whole and len(found) == len(samples) and found.min() >= 0:
            return found
    except Exception:  # noqa: BLE001, S110  (the sample is found one by one, below)
        pass
    return sizes_one_by_one(enumerate(samples, first), key)


def sizes_one_by_one(samples: Iterable[tuple[int, Any]], key: SizeKey) -> npt.NDArray[np.int64]:
    """The sizes of samples with their indices; an error names the first sample that is wrong."""
    indices: list[int] = []
    sizes: list[Size] = []
    for index, sample in samples:
        indices.append(index)
        sizes.append(size_of(sample, key, index))
        check_axes(np.shape(sizes[-1]), index, np.shape(sizes[0]), indices[0])
    return np.array(sizes, dtype=np.int64)


def _quick_lengths(samples: Sequence[Any], key: SizeKey) -> list[Any]:
    """The sizes of many samples without the checks of `size_of`; may raise anything."""
    if callable(key):
        return list(map(key, samples))
    if isinstance(key, tuple):
        columns = (_quick_lengths(samples, field) for field in key)
        return list(zip(*columns, strict=True))
    if isinstance(key, int) and not {torch.Tensor, np.ndarray}.isdisjoint(map(type, samples)):
        raise TypeError("an array has no fields")
    values = samples if key is None else list(map(operator.itemgetter(key), samples))
    if key is None and tuple in map(type, samples):
        raise TypeError("a tuple's length is its number of fields")
    if not set(map(type, values)) <= _SIZED:
        raise TypeError("not all of these types have a plain length")
    return list(map(len, values))


def _field(sample: Any, field: FieldName) -> Any:
    if isinstance(field, int) and isinstance(sample, (torch.Tensor, np.ndarray)):
        raise TypeError(
            f"an array has no fields, and {field} is a row of it: for the length of axis {field} "
            f"give a key such as lambda sample: sample.shape[{field}]"
        )
    return sample[field]


def _length(value: Any) -> int:
    if isinstance(value, Mapping):
        raise TypeError(
            "a mapping's length is its number of fields; name the one that is ragged, "
            "as in key='input_ids'"
        )
    shape = getattr(value, "shape", None)
    if is_number(value) or shape == ():
        raise TypeError(f"{value!r:.50} has no length; give a function that returns {_AN_INT}")
    return int(shape[0]) if isinstance(shape, tuple) else len(value)


def _count(size: Any) -> int:
    if isinstance(size, (bool, float, np.bool_)) or getattr(size, "dtype", None) is torch.bool:
        raise TypeError(f"expected {_AN_INT}, got {size!r}")
    count = operator.index(size)
    if not 0 <= count < 2**63:
        raise ValueError(f"expected a size between 0 and 2**63 - 1, got {count}")
    return count


def check_axes(shape: tuple[int, ...], index: int, expected: tuple[int, ...], before: int) -> None:
    """Raise a `SizesError` if the sizes of samples `index` and `before` differ in their axes."""
    if shape != expected:
        came, first = (f"a tuple of {s[0]}" if s else "an int" for s in (shape, expected))
        raise SizesError(
            f"every sample must have the same ragged axes, but the size of sample {index} is "
            f"{came}, of sample {before} {first}"
        )
