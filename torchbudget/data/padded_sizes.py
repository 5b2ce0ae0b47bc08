"""Whether batches have the samples and the padded size that were planned, or other ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, strided

from torchbudget.data.other_samples import attention_mask_of
from torchbudget.errors import OtherNumbersWarning, OtherSizesWarning, PaddedSizeWarning
from torchbudget.warn import warn

Path: TypeAlias = tuple[Any, ...]

_MOST_FIELDS: Final = 16  # a longer list is one of samples, whose types take time to look at
_BATCHES: Final = 4  # of padding alone beyond the planned size, until a foreign batch is reported


@runtime_checkable
class KnowsPadding(Protocol):
    """A batch that knows how it was padded: `PaddedBatch`, `PackedBatch`."""

    def known_samples(self) -> int | None:
        """How many it has; `None` of a batch that was rebuilt."""

    def has_at_most(self, amount: int, num_samples: int, /) -> bool:
        """Whether it has so many samples, and no field more in an axis, or in all if packed."""

    def more_than_planned(
        self, planned: Sequence[int], size_multiple: int, /
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """The padded size, and the one that was planned, if that is less; else `None`."""

    def axes_elsewhere(self, planned: Sequence[int], /) -> Sequence[int]:
        """The axes that are as long as planned, where those of its lengths are not; else none."""


class PaddedSizes:
    """Compares the padded sizes of batches with the planned ones, and warns once of each finding.

    Of a batch that knows its samples their number is compared, too: a data set's `__getitems__`, or
    a collate, may leave samples out, or make several of one. And so are the axes of its lengths: of
    audio, `(1, T)`, whose sizes are T, the first axis is the channels'.

    A collate may round up to a multiple that the sampler or stream does not know. Of a batch that
    knows its lengths that is seen at once. Of any other, a tensor that is longer than planned is
    suspected if it is padding alone beyond the planned size: a field of one fixed shape, or one
    that is longer for a reason of its own, has something there.

    Args:
        size_multiple: that was planned with.
    """

    def __init__(self, size_multiple: int) -> None:
        self._size_multiple = size_multiple
        self._suspected: dict[Path, int] = {}  # in how many batches; -1: never more
        self._warned = False
        self._has_warned_of_number = False
        self._elsewhere: set[tuple[int, ...]] | None = set()  # planned sizes; `None`: not any more

    def compare(self, batch: Any, planned: Sequence[int], num_samples: int) -> None:
        """Look at a batch of samples whose planned padded size is known; O(its tensors).

        A packed batch has none, and its samples are at most rounded.
        """
        if _knows_padding(type(batch)):  # type: ignore[arg-type]  # types are hashable
            self._compare_number(batch.known_samples(), num_samples)
            self._compare_axes(batch, planned)
            self._compare_own(batch, planned)
            return
        if self._warned:
            return
        if isinstance(batch, (tuple, list)) and not _may_hold_tensors(batch):
            return  # most often, and in a third of the time
        longest = max(planned, default=2**63)  # nothing is padded: nothing is too long
        mask = attention_mask_of(batch)
        for path, tensor in _tensors(batch):
            for axis, length in enumerate(tensor.shape):
                if length > longest and length != num_samples:
                    is_masked = mask is not None and mask.shape == tensor.shape[:2] and axis == 1
                    self._suspect((*path, axis), tensor, axis, longest, mask if is_masked else None)

    def _compare_number(self, came: int | None, planned: int) -> None:
        if came in (None, planned) or self._has_warned_of_number:
            return
        self._has_warned_of_number = True
        warn(
            f"a batch came with {came} samples, where {planned} were planned: the data set's "
            "__getitems__, or the collate_fn, leaves samples out, which are lost to this epoch, or "
            "adds some, which the budget does not count. Leave them out, or add them, before sizes "
            "are taken",
            OtherNumbersWarning,
        )

    def _compare_axes(self, batch: Any, planned: Sequence[int]) -> None:
        seen = self._elsewhere
        if seen is None:
            return
        axes = batch.axes_elsewhere(planned)
        if not axes:  # by chance, then, those before
            seen.clear()
            return
        seen.add(tuple(planned))
        if len(seen) < _BATCHES:
            return
        self._elsewhere = None
        named = axes[0] if len(axes) == 1 else tuple(axes)
        warn(
            f"samples are as long as planned along axis {named} of the field whose lengths are the "
            "batch's, but its lengths, mask and num_tokens are those of other axes: give the "
            f"collate length_axes={named}",
            OtherSizesWarning,
        )

    def _compare_own(self, batch: Any, planned: Sequence[int]) -> None:
        if self._warned:
            return
        more = batch.more_than_planned(planned, self._size_multiple)
        if more is not None:
            self._warn("a batch", *more)

    def _suspect(
        self, path: Path, tensor: Tensor, axis: int, longest: int, mask: Tensor | None
    ) -> None:
        times = self._suspected.get(path, 0)
        if times < 0 or self._warned:
            return
        is_padding = (
            _is_padding_beyond(tensor, axis, longest)
            if mask is None
            else _is_masked_beyond(mask, longest)
        )
        self._suspected[path] = times + 1 if is_padding else -1
        if self._suspected[path] == _BATCHES:
            name = ", ".join(repr(key) for key in path[:-1])
            field = f"field {name} of a batch" if name else "a batch"
            self._warn(field, [tensor.shape[axis]], [longest])

    def _warn(self, what: str, came: Sequence[int], planned: Sequence[int]) -> None:
        self._warned = True
        sizes = " × ".join(map(str, came)), " × ".join(map(str, planned))
        warn(
            f"{what} is padded to {sizes[0]}, where {sizes[1]} was planned: the budget does not "
            "count the rest. Give the sampler or stream the multiple that its collate rounds up "
            f"to, now size_multiple={self._size_multiple}, or let the collate pad to the longest "
            "sample",
            PaddedSizeWarning,
        )


@lru_cache(maxsize=64)  # the check of a protocol takes as long as all the rest
def _knows_padding(kind: type[Any]) -> bool:
    return issubclass(kind, KnowsPadding)


def _tensors(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The dense tensors of a batch of any structure, and where they are."""
    if isinstance(batch, Tensor):
        if batch.layout is strided and not batch.is_nested:
            yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, (*path, key))
    elif isinstance(batch, (tuple, list)) and _may_hold_tensors(batch):
        for position, value in enumerate(batch):
            yield from _tensors(value, (*path, position))


def _may_hold_tensors(sequence: Sequence[Any]) -> bool:
    """Whether it may be one of fields, and not of samples, or of numbers or texts."""
    return len(sequence) <= _MOST_FIELDS and any(map(_is_nested, set(map(type, sequence))))


@lru_cache(maxsize=64)
def _is_nested(kind: type[Any]) -> bool:
    return issubclass(kind, (Tensor, Mapping, tuple, list))


def _is_padding_beyond(tensor: Tensor, axis: int, longest: int) -> bool:
    """Whether what is longer than `longest`, at the end or at the beginning, is one value."""
    more = tensor.shape[axis] - longest
    parts = [tensor.narrow(axis, longest, more)]
    if more > 1:  # one value at the beginning is that of all texts, such as [CLS]
        parts.append(tensor.narrow(axis, 0, more))
    return not _is_one_value(tensor) and any(map(_is_one_value, parts))


def _is_masked_beyond(mask: Tensor, longest: int) -> bool:
    """Whether all that is longer than `longest`, at the end or at the beginning, is masked."""
    more = mask.shape[1] - longest
    return not (mask[:, longest:].any() and mask[:, :more].any())


def _is_one_value(tensor: Tensor) -> bool:
    first = tensor[(0,) * tensor.ndim] if math.prod(tensor.shape) else 0
    return bool((tensor == first).all())
