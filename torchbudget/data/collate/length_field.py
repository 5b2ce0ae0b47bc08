"""The field whose lengths are a batch's: never one that depends on which samples are in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.structure import FieldPath, find_path, show
from torchbudget.errors import CollateError

Lengths: TypeAlias = Sequence[IntArray | None]
"""Of each field, `(n, k)` for k length axes; None of texts."""


def choose_length_field(
    name: Any | None, sized: Any | None, paths: Sequence[FieldPath], lengths: Lengths
) -> int:
    """The index of the field whose lengths are the batch's.

    It is the named one; else the one that sizes are taken of; else the first with a length axis, if
    all of those are equally long in each sample. Without such a field: the first that is not text.

    Args:
        name: names a field.
        sized: names the field that sizes are taken of, if it is one.
        paths: one per field.
        lengths: likewise.

    Raises:
        CollateError: there is no field of that name, or it has no length axis; or the fields'
            lengths differ, and nothing says which of them are the batch's.
    """
    axes = [-1 if one is None else one.shape[1] for one in lengths]
    if name is not None:
        index = find_path(name, paths, "length_field")
        if axes[index] <= 0:
            raise CollateError(
                f"length_field names {show(paths[index])}, which has no ragged axis; name one that "
                "has"
            )
        return index
    if (sized,) in paths and axes[paths.index((sized,))] > 0:
        return paths.index((sized,))
    ragged = [index for index, number in enumerate(axes) if number > 0]
    for index in ragged[1:]:
        _check_equal(paths, lengths, ragged[0], index)
    return ragged[0] if ragged else axes.index(max(axes))


def _check_equal(paths: Sequence[FieldPath], lengths: Lengths, first: int, other: int) -> None:
    a, b = lengths[first], lengths[other]
    if a is b or a is None or b is None:
        return
    axes = min(a.shape[1], b.shape[1])  # those that both have
    differs = (a[:, :axes] != b[:, :axes]).any(axis=1)
    if differs.any():
        position = int(np.argmax(differs))
        found = [(paths[index], one[position].tolist()) for index, one in ((first, a), (other, b))]
        _fail(position, *found)


def _fail(
    position: int, one: tuple[FieldPath, list[int]], other: tuple[FieldPath, list[int]]
) -> NoReturn:
    (path, length), (other_path, other_length) = (
        (p, " by ".join(map(str, n))) for p, n in (one, other)
    )
    name = other_path[0] if len(other_path) == 1 else other_path
    fixed = path[0] if len(path) == 1 else path
    raise CollateError(
        f"sample {position} of the batch: {show(path)} has the length {length}, and "
        f"{show(other_path)} {other_length}: name the field whose lengths are the batch's, as in "
        f"length_field={name!r}; a field of one fixed shape has no length, which "
        f"length_axes={{{fixed!r}: ()}} says"
    )
