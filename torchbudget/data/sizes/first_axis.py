"""Whether sizes are of the axis that is ragged, and not of channels or of a batch of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from torchbudget.cost.models.protocol import Sizes
from torchbudget.data.sizes.key import FieldName, SizeDataset, SizeKey
from torchbudget.errors import OtherSizesWarning, SizesError
from torchbudget.warn import warn

_PROBES: Final = 64
_FEWEST: Final = 8  # samples of one size by a function: fewer may be alike by chance


def check_first_axis(measured: SizeDataset, sizes: Sizes) -> None:
    """Check fields whose sizes are all the same, and arrays of several axes, on up to 64 samples.

    A tokenizer with `return_tensors="pt"` makes ids of shape `(1, L)`, and audio is often
    `(channels, T)`: all are of the size 1, and batches of any length would fit. Images `(H, W, C)`
    are of different heights, and a batch is as wide as any.

    Raises:
        SizesError: the samples differ in a later axis, and not in the first.
    """
    fields = _constant(measured.key, sizes)
    if fields:
        samples = [sample for _, sample in measured.samples(_spread(len(sizes)))]
        _check_fields(samples, fields, "key")
    elif _is_constant_function(measured.key, sizes):
        samples = [sample for _, sample in measured.samples(_spread(len(sizes)))]
        _check_function(samples, sizes, "key")
    elif not callable(measured.key) and len(sizes) > 1:
        _check_other_axes(measured)


def check_first_axis_of(samples: Sequence[Any], key: SizeKey, sizes: Sizes, option: str) -> None:
    """The same for samples that are there, by a key that an option gives.

    Raises:
        SizesError: the samples differ in a later axis.
    """
    fields = _constant(key, sizes)
    probes = [samples[index] for index in _spread(len(sizes))]
    if fields:
        _check_fields(probes, fields, option)
    elif _is_constant_function(key, sizes):
        _check_function(probes, sizes, option)


def _constant(key: SizeKey, sizes: Sizes) -> list[FieldName | None]:
    """The fields of a key whose sizes are all the same; `None` is the sample itself."""
    if callable(key) or len(sizes) < 2:
        return []
    columns = sizes.reshape(len(sizes), -1)
    alike = (columns == columns[0]).all(axis=0)
    fields = key if isinstance(key, tuple) else (key,)
    return [field for field, same in zip(fields, alike, strict=True) if same]


def _is_constant_function(key: SizeKey, sizes: Sizes) -> bool:
    return callable(key) and len(sizes) >= _FEWEST and bool((sizes == sizes[0]).all(axis=0).any())


def _spread(number: int) -> list[int]:
    spread: list[int] = np.linspace(0, number - 1, min(_PROBES, number)).astype(np.int64).tolist()
    return spread


def _check_fields(samples: list[Any], fields: list[FieldName | None], option: str) -> None:
    for field in fields:
        _check(field, [_field(sample, field) for sample in samples], option)
        if isinstance(field, int):
            _check_rows(field, samples, option)


def _check(field: FieldName | None, values: list[Any], option: str) -> None:
    shapes = [_shape(value) for value in values]
    axis = next((axis for axis in _differing(shapes) if axis), None)
    if axis is None or not shapes[0][0]:  # none has elements
        return
    of, whole = ("", "the sample") if field is None else (f"[{field!r}]", f"field {field!r}")
    length = (
        f"sample{of}.shape[{axis}]" if _array_shape(values[0]) else f"len(sample{of}{'[0]' * axis})"
    )
    raise SizesError(
        f"the size of every sample is {shapes[0][0]}, the length of the first axis of {whole}, but "
        f"samples differ in axis {axis}, which is {_range(shapes, axis)} long: give a key of the "
        f"axes that are ragged, as in {option}=lambda sample: {length}; or tokenize without "
        'return_tensors="pt", which makes a batch of each text'
    )


def _check_function(samples: list[Any], sizes: Sizes, option: str) -> None:
    """Warn where a function seems to take the length of a field's first axis, as `len` does."""
    rows = sizes.reshape(len(sizes), -1)
    taken = rows[0][(rows == rows[0]).all(axis=0)].tolist()
    arrays = [dict(_arrays(sample)) for sample in samples]
    for where in arrays[0]:
        shapes = [found.get(where, ()) for found in arrays]
        axis = next((axis for axis in _differing(shapes) if axis), None)
        firsts = {shape[0] for shape in shapes} if axis else set()
        if axis and len(firsts) == 1 and firsts <= set(taken):
            warn(
                f"the size of every sample is {shapes[0][0]}, as is the first axis of "
                f"sample{where}, whose axis {axis} is {_range(shapes, axis)} long: if {option} "
                f"takes its length, batches of any length fit the budget. Take that of axis {axis}",
                OtherSizesWarning,
            )
            return


def _arrays(value: Any, where: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of each array and list in a sample, and how it is reached."""
    if isinstance(value, (Mapping, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _arrays(part, f"{where}[{key!r}]")
    elif isinstance(value, list) or _array_shape(value):
        yield where, _shape(value)


def _check_other_axes(measured: SizeDataset) -> None:
    """Warn of a later axis that may be long in a batch of small sizes.

    Where it only grows with the first axis, as of a mask `(L, L)`, the largest size has the most.
    """
    key = measured.key
    fields: Any = key if isinstance(key, tuple) else (key,)
    ((_, first),) = measured.samples([0])
    if not any(len(_array_shape(_field(first, field))) > 1 for field in fields):
        return
    samples = [sample for _, sample in measured.samples(_spread(len(measured)))]
    for field in fields:
        shapes = [_array_shape(_field(sample, field)) for sample in samples]
        axis = next((axis for axis in _differing(shapes) if axis and not _grows(shapes, axis)), 0)
        if axis:
            of, whole = ("", "samples") if field is None else (f"[{field!r}]", f"field {field!r}")
            warn(
                f"sizes are the lengths of the first axis of {whole}, which differs in axis {axis} "
                f"too, by itself: it is {_range(shapes, axis)} long, batches are padded there, and "
                "the budget does not count it. Give a key of all axes that are ragged, as in "
                f"key=lambda sample: (len(sample{of}), sample{of}.shape[{axis}]); if the cost "
                f"counts the longest there, key=lambda sample: len(sample{of}) says so",
                OtherSizesWarning,
            )
            return


def _field(sample: Any, field: FieldName | None) -> Any:
    return sample if field is None else sample[field]


def _grows(shapes: list[tuple[int, ...]], axis: int) -> bool:
    """Whether arrays that are no longer in the first axis are no longer in this one."""
    pairs = sorted({(shape[0], shape[axis]) for shape in shapes if shape[0]})
    return all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(pairs))


def _check_rows(field: int, samples: list[Any], option: str) -> None:
    """An array has no fields: an int that is meant as an axis picks a row of fixed length."""
    shapes = list(map(_array_shape, samples))
    axis = next(iter(_differing(shapes)), None)
    if axis is not None:
        raise SizesError(
            f"{option}={field} is row {field} of each sample, all of one length, but samples "
            f"differ in axis {axis}, which is {_range(shapes, axis)} long: a key names fields, not "
            f"axes; give {option}=lambda sample: sample.shape[{axis}]"
        )


def _differing(shapes: list[tuple[int, ...]]) -> list[int]:
    """The axes in which arrays differ, if they have as many."""
    if len(set(map(len, shapes))) > 1:
        return []
    return [axis for axis, found in enumerate(zip(*shapes, strict=True)) if len(set(found)) > 1]


def _range(shapes: list[tuple[int, ...]], axis: int) -> str:
    lengths = [shape[axis] for shape in shapes]
    return f"{min(lengths)} to {max(lengths)}"


def _array_shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; none of anything else."""
    shape = getattr(value, "shape", None)
    return shape if isinstance(shape, tuple) else ()


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; of a list or tuple the length, and the shape of what is first."""
    if shape := _array_shape(value):
        return shape
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    own = (len(first),) if isinstance(first, (list, tuple)) else _array_shape(first)
    return len(value), *own
