"""Whether sizes are of the axis that is ragged, and not of channels or of a batch of one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from torchbudget.cost.models.protocol import Sizes
from torchbudget.data.sizes.key import FieldName, SizeDataset
from torchbudget.errors import SizesError

_PROBES: Final = 64


def check_first_axis(measured: SizeDataset, sizes: Sizes) -> None:
    """Check fields whose sizes are all the same, on up to 64 samples.

    A tokenizer with `return_tensors="pt"` makes ids of shape `(1, L)`, and audio is often
    `(channels, T)`: all are of the size 1, and batches of any length would fit.

    Raises:
        SizesError: the samples differ in a later axis.
    """
    key = measured.key
    if callable(key) or len(sizes) < 2:
        return
    columns = sizes.reshape(len(sizes), -1)
    alike = (columns == columns[0]).all(axis=0)
    fields = key if isinstance(key, tuple) else (key,)
    constant = [field for field, same in zip(fields, alike, strict=True) if same]
    if not constant:
        return
    spread = np.linspace(0, len(sizes) - 1, min(_PROBES, len(sizes))).astype(np.int64)
    samples = [sample for _, sample in measured.samples(spread.tolist())]
    for field in constant:
        _check(field, [_shape(s if field is None else s[field]) for s in samples])


def _check(field: FieldName | None, shapes: list[tuple[int, ...]]) -> None:
    if len(set(map(len, shapes))) > 1:
        return
    for axis, lengths in enumerate(zip(*shapes, strict=True)):
        if axis and len(set(lengths)) > 1:
            what, sample = (
                ("", "the sample") if field is None else (f"[{field!r}]", f"field {field!r}")
            )
            raise SizesError(
                f"the size of every sample is {shapes[0][0]}, the length of the first axis of "
                f"{sample}, but samples differ in axis {axis}, which is {min(lengths)} to "
                f"{max(lengths)} long: give a key of the axes that are ragged, as in "
                f"key=lambda sample: sample{what}.shape[{axis}]; or tokenize without "
                'return_tensors="pt", which makes a batch of each text'
            )


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; of a list the lengths of it and of its first list."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return shape
    nested = isinstance(value, list) and value and isinstance(value[0], list)
    return (len(value), len(value[0])) if nested else (len(value),)
