"""`sizes_of`: the sizes of a dataset's samples, measured once, checked and kept in a file.

The key of a size is a field of a sample, several of them, a callable, or the sample itself.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from torchbudget.checks import is_int, is_number
from torchbudget.cost.protocol import Sizes
from torchbudget.data.indexed import check_indexed
from torchbudget.display import counting
from torchbudget.errors import OptionError, OtherSizesWarning, SizesError, warn
from torchbudget.files import write_whole
from torchbudget.protocols import MapStyle

_CHUNK: Final = 64  # samples per message of a worker, which sends a kilobyte of sizes instead
_PROBES: Final = 64  # samples that stand for all
# Columns whose values are stored as samples have them; others, such as images, are decoded.
_STORED: Final = ("Value", "List", "LargeList", "Sequence", "list")

logger = logging.getLogger(__name__)
FieldName: TypeAlias = str | int
Size: TypeAlias = int | tuple[int, ...]
SizeKey: TypeAlias = FieldName | tuple[FieldName, ...] | Callable[[Any], Size] | None


_AN_INT: Final = "an int: of seconds, the number of frames, such as round(100 * seconds)"


def sizes_of(
    dataset: MapStyle,
    key: SizeKey = None,
    *,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sizes:
    """Read the sizes of all samples of a map-style dataset into one array.

    The length of a tensor or an array is its `shape[0]`, of anything else its `len()`. A mapping
    raises an error, since its length counts fields. An integer in a field is the size itself.
    Integer, text and list columns of a Hugging Face `datasets.Dataset` are read without reading
    samples, unless a transform is applied to the column. Parquet, Arrow, polars and pandas are
    for `sizes_of_columns`. If arrays are also ragged in another axis than the first, there is an
    `OtherSizesWarning`, unless the key is a function.

    Args:
        dataset: N samples; the size of a sample must depend on its index alone.
        key: the ragged part of a sample:
            `None`: the sample itself;
            a str or an int: the field of that name or position;
            a tuple of these: several fields, each of which is one ragged axis;
            a function: `key(sample)` returns the size, an int or a tuple of one int for each axis.
        num_workers: number of processes that read samples, as in `DataLoader`.
        cache: file that keeps the sizes for the next call (`.npz`). It is used if the dataset's
            type and length and `key` are the same, and also the `datasets` fingerprint or else
            the sizes of up to 64 evenly spread samples, which are measured again. A callable key
            is compared by its qualified name and these 64 sizes only: delete the file after you
            change the function.
        progress: show a progress bar while samples are read, if tqdm is installed.

    Returns:
        Shape `(N,)`, or `(N, d)` for a tuple of d keys and for a callable that returns tuples;
        int32 if every size fits into that, else int64.

    Raises:
        SizesError: a sample cannot be read or has no size, or the dataset is not map-style; or
            `key` names a field that is equally long in all samples and differs in another axis.
        OptionError: `key` is none of the above; or `cache` is a directory.

    Complexity:
        O(N) reads. For columns only lengths are read: 100,000 rows of an Arrow list column take
        0.6 ms instead of 2.1 s, of a text column 8 ms instead of 1.7 s.

    >>> sizes_of([[5, 3, 8], [1], []])
    array([3, 1, 0], dtype=int32)
    >>> pairs = [{"source": "abc", "target": "ab"}, {"source": "a", "target": "abcd"}]
    >>> sizes_of(pairs, ("source", "target"))
    array([[3, 2],
           [1, 4]], dtype=int32)
    >>> sizes_of([torch.zeros(3, 32, 48)], lambda image: image.shape[-2:], progress=False)
    array([[32, 48]], dtype=int32)
    """
    check_indexed(dataset, SizesError)
    measured = SizeDataset(dataset, key)

    def measure() -> Sizes:
        sizes = _stored_sizes(dataset, key)
        if sizes is None:
            sizes = _one_pass(measured, num_workers, progress)
        check_first_axis(lambda few: [one for _, one in measured.samples(few)], key, sizes, "key")
        return narrowed(sizes)

    return kept_in(cache, lambda: _fingerprint_of(dataset, measured), measure)


class SizeDataset(Dataset[npt.NDArray[np.int64]]):
    """Maps a list of indices to the sizes of those samples, `(n,)` or `(n, d)`.

    Raises:
        OptionError: the key is none.
    """

    def __init__(self, dataset: MapStyle, key: SizeKey) -> None:
        check_key(key)
        self.dataset = dataset
        self.key = key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        return sizes_one_by_one(self.samples(list(indices)), self.key)

    def samples(self, indices: list[int]) -> Iterable[tuple[int, Any]]:
        """Samples with their indices."""
        rows: Any = self.dataset
        if hasattr(rows, "__getitems__"):  # many at once, as DataLoader reads them
            with suppress(Exception):  # the sample is found one by one, below
                samples = list(rows.__getitems__(indices))
                if len(samples) == len(indices):
                    return zip(indices, samples, strict=True)

        def read(index: int) -> Any:
            try:
                return rows[index]
            except Exception as error:
                raise SizesError(
                    f"sample {index} cannot be read: {type(error).__name__}: {error}"
                ) from error

        return ((index, read(index)) for index in indices)


def _one_pass(measured: SizeDataset, num_workers: int, progress: bool) -> Sizes:
    loader = DataLoader(
        measured,
        batch_size=None,
        sampler=BatchSampler(SequentialSampler(measured), _CHUNK, drop_last=False),
        num_workers=num_workers,
        collate_fn=np.asarray,  # torch's own would make a tensor in shared memory of each
        generator=torch.Generator(),  # without it the loader draws from the global generator
    )
    chunks: list[Sizes] = []
    shown = counting(unit="samples", total=len(measured), description="sizes", shown=progress)
    with shown as advance:
        for chunk in loader:
            chunks.append(chunk)
            check_axes(chunk.shape[1:], (len(chunks) - 1) * _CHUNK, chunks[0].shape[1:], 0)
            advance(len(chunk))
    if not chunks:
        axes = (len(measured.key),) if isinstance(measured.key, tuple) else ()
        return np.empty((0, *axes), dtype=np.int64)
    return np.concatenate(chunks)


def narrowed(sizes: Sizes) -> Sizes:
    """The sizes as int32, if every one fits into that."""
    return sizes.astype(np.int32) if sizes.max(initial=0) < 2**31 else sizes


def spread(length: int) -> list[int]:
    """Up to 64 evenly spread indices of so many samples."""
    few: list[int] = np.linspace(0, length - 1, min(_PROBES, length)).astype(np.int64).tolist()
    return few


# ------------------------------------------------------------------------------ axes


def check_first_axis(
    read: Callable[[list[int]], Sequence[Any]], key: SizeKey, sizes: Sizes, option: str
) -> None:
    """Check that sizes are those of the axis in which samples differ, unless a function says so.

    A tokenizer with `return_tensors="pt"` makes ids of shape `(1, L)`, and audio is often
    `(channels, T)`: the first axis is the same for all, and batches of any length would fit.

    Args:
        read: returns samples of these indices; up to 64 of them are compared.
        key: key of the sizes.
        sizes: sizes of the samples, `(n,)` or `(n, d)`.
        option: name of the option that gives the key, for messages; for "key", arrays that are
            ragged in the first axis and in another one issue an `OtherSizesWarning`.

    Raises:
        SizesError: the sizes are the same and the samples differ in another axis.
    """
    if callable(key) or len(sizes) < 2:
        return
    fields = key if isinstance(key, tuple) else (key,)
    few = spread(len(sizes))
    if all(len(shape_of(_part(one, field))) < 2 for one in read(few[:1]) for field in fields):
        return  # without reading the other samples
    samples = read(few)
    for field, lengths in zip(fields, sizes.reshape(len(sizes), -1).T, strict=True):
        parts = [_part(sample, field) for sample in samples]
        shapes = list(map(shape_of, parts))
        axis = _uncounted_axis(shapes)
        is_same = (lengths == lengths[0]).all()
        if axis is None or not (is_same or (option == "key" and hasattr(parts[0], "shape"))):
            continue
        where = "sample" if field is None else f"sample[{field!r}]"
        others = [shape[axis] for shape in shapes]
        message = (
            "the sizes are the lengths of the first axis of "
            f"{where}{f', {lengths[0]} for every sample' if is_same else ''}; but axis {axis} is "
            f"{min(others)} to {max(others)} long, and the budget does not count it. Pass the "
            f"ragged axes as a key, such as {option}=lambda sample: {where}.shape[{axis}], or a "
            'tuple of both; or tokenize without return_tensors="pt", which makes a batch of each '
            "text"
        )
        if is_same:
            raise SizesError(message)
        warn(message, OtherSizesWarning)
        return


def _part(sample: Any, field: Any) -> Any:
    return sample if field is None else sample[field]


def ragged_axes(shapes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Return each axis along which arrays differ, by their lengths there, of shape `(n,)`.

    Of axes that have the same length in each array, it is the first one.

    >>> ragged_axes([(1, 5, 5), (1, 7, 7)])
    {(5, 7): 1}
    """
    found: dict[tuple[int, ...], int] = {}
    for axis, lengths in enumerate(zip(*shapes, strict=False)):
        if len({*lengths}) > 1:
            found.setdefault(lengths, axis)
    return found


def _uncounted_axis(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The first later axis along which arrays differ, unless it only grows with the first one."""
    if len({*map(len, shapes)}) == 1:
        for lengths, axis in ragged_axes(shapes).items():
            every = zip(shapes, lengths, strict=True)
            pairs = sorted({(shape[0], length) for shape, length in every if shape[0]})
            if axis and not all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(pairs)):
                return axis
    return None


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an array; the length of a list, before the shape of its first value."""
    if isinstance(value, (list, tuple)):
        return (len(value), *(shape_of(value[0]) if value else ()))
    shape = getattr(value, "shape", None)
    return shape if isinstance(shape, tuple) else ()


# ------------------------------------------------------------------------------ columns


def _is_hugging_face(dataset: object) -> bool:
    """True if it is that very class; a subclass may read its samples differently."""
    kind = getattr(sys.modules.get("datasets"), "Dataset", None)
    return kind is not None and type(dataset) is kind


def _stored_sizes(dataset: Any, key: SizeKey) -> Sizes | None:
    """The sizes in columns of a `datasets.Dataset`, `(N,)` or `(N, d)`, without reading a sample.

    `None` if they are not certain to be those of the samples.

    Raises:
        SizesError: a column has a null or a negative integer.
    """
    if callable(key) or not _is_hugging_face(dataset):
        return None
    columns = [_lengths(dataset, one) for one in (key if isinstance(key, tuple) else (key,))]
    if any(column is None for column in columns):
        return None
    sizes = np.stack(columns, axis=-1)
    if (bad := np.argwhere(sizes < 0)).size:
        raise SizesError(f"sample {bad[0, 0]} has no size for key {key!r}: it is null or negative")
    return sizes if isinstance(key, tuple) else sizes[:, 0]


def _lengths(dataset: Any, field: Any) -> Any:
    """The sizes in a column, negative if invalid; `None` if values are converted or decoded."""
    import pyarrow as pa

    layout, feature = dataset.format, type(dataset.features.get(field)).__name__
    if field not in layout["columns"] or feature not in _STORED:
        return None
    column, rows = dataset.data.column(field), dataset._indices
    values = getattr(column.type, "value_type", column.type)
    numbers = pa.types.is_integer(values) or pa.types.is_floating(values)
    is_plain = layout["type"] is None or (numbers and layout["type"] in ("numpy", "torch"))
    sizes = column_sizes(column) if is_plain else None
    return sizes if rows is None or sizes is None else sizes[rows.column(0).to_numpy()]


def column_sizes(column: Any) -> Sizes | None:
    """The sizes in an Arrow array, int64 `(n,)`; `None` if values of its type have no size.

    Invalid sizes are negative: −1 for a null, and integers beyond int64.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = str(column.type)
    if kind in ("string", "large_string", "string_view"):
        column = pc.utf8_length(column.cast(pa.large_string()))  # views have no kernel
    elif kind in ("binary", "large_binary", "binary_view"):
        column = pc.binary_length(column.cast(pa.large_binary()))
    elif kind.startswith(("list<", "large_list<")):
        column = pc.list_value_length(column)
    elif not pa.types.is_integer(column.type):
        return None
    sizes: Sizes = pc.fill_null(column.cast(pa.int64(), safe=False), -1).to_numpy()
    return sizes


# ------------------------------------------------------------------------------ the file


def kept_in(cache: Any, fingerprint: Callable[[], Any], measure: Callable[[], Sizes]) -> Sizes:
    """The sizes in a file with this fingerprint; otherwise measured, and written to the file.

    Raises:
        OptionError: the cache is a directory.
    """
    if cache is None:
        return measure()
    path = Path(cache)
    if path.is_dir():
        raise OptionError(f"expected a file for the cache of sizes, got the directory {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = fingerprint()
    sizes = _load_sizes(path, found)
    if sizes is None:
        sizes = measure()
        write = partial(np.savez, sizes=sizes, fingerprint=np.array(json.dumps(found)))
        try:
            write_whole(path, write, by_several=True)  # other processes never see half of it
        except OSError as error:  # a full disk must not cost hours of measuring
            logger.warning("the sizes are not cached: %s cannot be written: %s", path, error)
    return sizes


def _fingerprint_of(dataset: Any, measured: SizeDataset) -> dict[str, Any]:
    """The dataset's type, length and content, and the key; all must match for a file to be used.

    The content is the sizes of up to 64 evenly spread samples, which are read here.

    Raises:
        SizesError: one of those samples has no size.
    """
    key = measured.key
    # Only a `datasets.Dataset` itself: a wrapper may pass on the fingerprint of a dataset whose
    # samples it changes. And it says nothing of the size that a callable computes.
    if _is_hugging_face(dataset) and not callable(key):
        content = dataset._fingerprint
    else:
        content = measured[spread(len(dataset))].tolist()
    return {
        "dataset": _name(type(dataset)),
        "length": len(dataset),
        "key": _name(key) if callable(key) else repr(key),
        "content": content,
    }


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _load_sizes(path: Path, fingerprint: dict[str, Any]) -> Sizes | None:
    """The sizes in the file; `None`, with a logged warning, if it is broken or of others."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            found = dict(json.loads(str(file["fingerprint"])))
            sizes: Sizes = file["sizes"]
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  (a broken file may raise anything)
        logger.warning("reading all sizes again: the cache %s is unreadable: %s", path, error)
        return None
    differs = [name for name, value in fingerprint.items() if found.get(name) != value]
    if differs:
        logger.warning(
            "reading all sizes again: the cache %s is of another %s", path, ", ".join(differs)
        )
        return None
    return sizes


# ------------------------------------------------------------------------------ keys of sizes


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
            return tuple(_length(_field(sample, field), is_field=True) for field in key)
        if key is not None:
            return _length(_field(sample, key), is_field=True)
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


def _length(value: Any, *, is_field: bool = False) -> int:
    if isinstance(value, Mapping):
        raise TypeError(
            "a mapping's length is its number of fields; name the one that is ragged, "
            "as in key='input_ids'"
        )
    shape = getattr(value, "shape", None)
    if is_field and (is_int(value) or shape == ()):
        return _count(value)
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
