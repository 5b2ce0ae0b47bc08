"""Whether sizes are of the axis that is ragged, and not of channels or of a batch of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from torchbudget.cost.models.protocol import Sizes
from torchbudget.data.sizes.key import FieldName, SizeDataset, SizeKey
from torchbudget.errors import SizesError

_PROBES: Final = 64


def check_first_axis(measured: SizeDataset, sizes: Sizes) -> None:
    """Check fields whose sizes are all the same, on up to 64 samples.

    A tokenizer with `return_tensors="pt"` makes ids of shape `(1, L)`, and audio is often
    `(channels, T)`: all are of the size 1, and batches of any length would fit.

    Raises:
        SizesError: the samples differ in a later axis.
    """
    fields = _constant(measured.key, sizes)
    if fields:
        samples = [sample for _, sample in measured.samples(_spread(len(sizes)))]
        _check_fields(samples, fields, "key")


def check_first_axis_of(samples: Sequence[Any], key: SizeKey, sizes: Sizes, option: str) -> None:
    """The same for samples that are there, by a key that an option gives.

    Raises:
        SizesError: the samples differ in a later axis.
    """
    fields = _constant(key, sizes)
    if fields:
        _check_fields([samples[index] for index in _spread(len(sizes))], fields, option)


def _constant(key: SizeKey, sizes: Sizes) -> list[FieldName | None]:
    """The fields of a key whose sizes are all the same; `None` is the sample itself."""
    if callable(key) or len(sizes) < 2:
        return []
    columns = sizes.reshape(len(sizes), -1)
    alike = (columns == columns[0]).all(axis=0)
    fields = key if isinstance(key, tuple) else (key,)
    return [field for field, same in zip(fields, alike, strict=True) if same]


def _spread(number: int) -> list[int]:
    spread: list[int] = np.linspace(0, number - 1, min(_PROBES, number)).astype(np.int64).tolist()
    return spread


def _check_fields(samples: list[Any], fields: list[FieldName | None], option: str) -> None:
    for field in fields:
        _check(field, [s if field is None else s[field] for s in samples], option)
        if isinstance(field, int):
            _check_rows(field, samples, option)


def _check(field: FieldName | None, values: list[Any], option: str) -> None:
    shapes = [_shape(value) for value in values]
    axis = next((axis for axis in _differing(shapes) if axis), None)
    if axis is None:
        return
    of, whole = ("", "the sample") if field is None else (f"[{field!r}]", f"field {field!r}")
    is_array = isinstance(getattr(values[0], "shape", None), tuple)
    length = f"sample{of}.shape[{axis}]" if is_array else f"len(sample{of}{'[0]' * axis})"
    raise SizesError(
        f"the size of every sample is {shapes[0][0]}, the length of the first axis of {whole}, but "
        f"samples differ in axis {axis}, which is {_range(shapes, axis)} long: give a key of the "
        f"axes that are ragged, as in {option}=lambda sample: {length}; or tokenize without "
        'return_tensors="pt", which makes a batch of each text'
    )


def _check_rows(field: int, samples: list[Any], option: str) -> None:
    """An array has no fields: an int that is meant as an axis picks a row of fixed length."""
    shapes = [getattr(sample, "shape", None) for sample in samples]
    arrays = [shape for shape in shapes if isinstance(shape, tuple)]
    axis = next(iter(_differing(arrays)), None) if len(arrays) == len(shapes) else None
    if axis is not None:
        raise SizesError(
            f"{option}={field} is row {field} of each sample, all of one length, but samples "
            f"differ in axis {axis}, which is {_range(arrays, axis)} long: a key names fields, not "
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


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; of a list or tuple the length, and the shape of what is first."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return shape
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    if isinstance(first, (list, tuple)):
        return len(value), len(first)
    shape = getattr(first, "shape", None)
    return (len(value), *shape) if isinstance(shape, tuple) else (len(value),)
