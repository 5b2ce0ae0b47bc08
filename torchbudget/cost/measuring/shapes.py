"""What is measured: a step, on batches of which shapes, and whether `make_batch` makes them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from torchbudget.checks import is_int
from torchbudget.cost.measuring.step_checks import StepChecks
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.out_of_memory import is_out_of_memory
from torchbudget.restoring import TrainingState, reachable
from torchbudget.warn import warn

Size: TypeAlias = tuple[int, ...]

# Short sizes of probes are one more than a multiple of the largest of these that is at most half of
# them: layers with strides of 2, 4, …, 32 round such sizes up most, so that the fit includes the
# most that rounding adds to a sample.
_STRIDES: Final = (32, 16, 8, 4)
_MOST_AXES: Final = 8
# The smallest size of probes, as a share of the largest one.
_SMALLEST: Final = 1 / 64
# A batch of a probe takes at most this.
_BATCH_BYTES: Final = 2**28
_MOST_SAMPLES: Final = 2**16
_ARRAYS: Final = (torch.Tensor, np.ndarray)
# Of a batch's leaves, what has no tensor in it; texts may be many.
_WITHOUT: Final = (str, bytes, int, float, type(None))
# Fractions of the range of sizes, on a logarithmic scale, at which a fit is judged.
_JUDGED: Final = (0.0, 0.35, 0.65, 1.0)
# And another one where sizes are multiples, so that layers round no short one up.
_LONG: Final = 0.85
# Up to so many axes, probes may be of any mix of sizes.
_MOST_MIXED: Final = 3


class BatchError(CostError):
    """`make_batch` ignores its arguments, so that the step cannot be measured in any way."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The sizes that probes may have.

    Attributes:
        smallest: the smallest size on every axis.
        largest: the largest size on every axis.
        multiple: sizes are multiples of it.
        judged: sizes at which a fit is judged, from short to long.
    """

    smallest: Size
    largest: Size
    multiple: int
    judged: tuple[Size, ...] = ()

    @classmethod
    def of(
        cls,
        max_size: int | Sequence[int] | None,
        multiple: int,
        *,
        min_size: int | Sequence[int] | None = None,
        sizes: npt.ArrayLike | None = None,
    ) -> Domain:
        """The domain from `min_size` to `max_size`, rounded up to a multiple.

        Raises:
            CostError: a size is not an int of at least 1, or several; they differ in their axes;
                or neither the largest size nor sizes are given.
        """
        known = None if sizes is None else _sizes_array(sizes)
        if max_size is None:
            if known is None:
                raise CostError("give max_size, or the data set's sizes")
            max_size = known.max(axis=0).tolist()
        largest = _rounded(_size_of("max_size", max_size), multiple)
        if min_size is not None:
            smallest = _size_of("min_size", min_size)
        elif known is not None:
            smallest = tuple(np.maximum(known.min(axis=0), 1).tolist())
        else:
            smallest = tuple(max(round(_SMALLEST * one), 1) for one in largest)
        smallest = _rounded(smallest, multiple)
        if len(smallest) != len(largest) or (known is not None and known.shape[1] != len(largest)):
            raise CostError("max_size, min_size and sizes must have the same number of axes")
        if any(low > high for low, high in zip(smallest, largest, strict=True)):
            raise CostError(f"the smallest size, {smallest}, is above the largest one, {largest}")
        domain = cls(smallest, largest, multiple)
        if known is None:
            judged = [domain.between(fraction) for fraction in _JUDGED]
            judged.append(domain.between(_LONG) if multiple > 1 else domain.short)
            if len(largest) > 1:  # sizes of any shape
                judged[1:1] = [domain.between((1.0, 0.0)), domain.between((0.0, 1.0))]
        else:
            known = np.clip(-(-known // multiple) * multiple, smallest, largest)
            judged = _quantiles(known)
            if len(set(judged)) < len(judged):  # many samples have one size
                judged = _quantiles(np.unique(known, axis=0))
        judged = sorted(set(judged), key=lambda size: (math.prod(size), size))
        return replace(domain, judged=tuple(judged))

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.largest)

    @property
    def short(self) -> Size:
        """The first size that layers with strides round up most; short ones are rounded up most."""
        if self.multiple > 1:
            return self.smallest
        strides = [min(2 ** (low.bit_length() - 1), _STRIDES[0]) for low in self.smallest]
        ends = zip(self.smallest, self.largest, strides, strict=True)
        return tuple(min(low + (1 - low) % stride, high) for low, high, stride in ends)

    def at(self, fractions: float | Sequence[float]) -> Size:
        """The size at a fraction of the largest one, at least the smallest; axes take turns."""
        each = np.resize(fractions, self.axes).tolist()
        ends = zip(each, self.smallest, self.largest, strict=True)
        return tuple(self._snap(fraction * high, low, high) for fraction, low, high in ends)

    def between(self, fractions: npt.ArrayLike) -> Size:
        """The size so far from the smallest to the largest one, on a logarithmic scale."""
        each = np.resize(np.asarray(fractions), self.axes).tolist()
        ends = zip(each, self.smallest, self.largest, strict=True)
        return tuple(
            self._snap(low * (high / low) ** share, low, high) for share, low, high in ends
        )

    def spread(self) -> list[Size]:
        """Sizes all over the domain: every mix of short and long axes, unless there are many."""
        if self.axes > _MOST_MIXED:
            return list(self.judged)
        return list(dict.fromkeys(map(self.between, product(_JUDGED, repeat=self.axes))))

    def above(self, size: int) -> Domain:
        """The part of the domain with at least this size on every axis."""
        ends = zip(self.smallest, self.largest, strict=True)
        return replace(self, smallest=tuple(min(max(low, size), high) for low, high in ends))

    def up_to(self, largest: Size) -> Domain:
        """The part of the domain up to a size."""
        judged = tuple(s for s in self.judged if all(map(operator.le, s, largest)))
        return replace(self, largest=largest, judged=judged)

    def _snap(self, wanted: float, smallest: int, largest: int) -> int:
        size = min(max(round(wanted), smallest), largest)
        if self.multiple > 1:
            return min(-(-size // self.multiple) * self.multiple, largest)
        stride = next((one for one in _STRIDES if 2 * one < size <= largest / 4), 1)
        return max(size - (size - 1) % stride, smallest)


@dataclass(slots=True, eq=False)
class Subject:
    """A training step and the batches to measure it on.

    Attributes:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        domain: the range of sizes.
        state: what the step trains.
        target: the device that the step is to run on.
        notes: what the user should know; appended to while measuring.
        depends_on_values: whether the step's memory depends on the values in its batch.
        advance: is called with 1 after each shape, to show progress.
        checks: of the step.
    """

    step: Callable[[Any], object]
    make_batch: Callable[[int, Any], Any]
    domain: Domain
    state: TrainingState
    target: torch.device
    notes: list[str] = field(default_factory=list)
    depends_on_values: bool = False
    advance: Callable[[int], object] = lambda _: None
    checks: StepChecks = field(init=False)

    def __post_init__(self) -> None:
        self.checks = StepChecks(self.state)

    def batch(self, n: int, size: Size) -> Any:
        """A batch of n samples of a size, which is an int for `make_batch` if it has one axis."""
        try:
            return self.make_batch(n, size if len(size) > 1 else size[0])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BatchError(
                f"make_batch({n}, {size if len(size) > 1 else size[0]}) raised {error!r}; if there "
                "are no samples this short, pass min_size"
            ) from error

    def warn(self, text: str) -> None:
        """Note it, and warn of it."""
        self.notes.append(text)
        warn(text, MeasureWarning)


def check_shape(batch: Any, n: int, size: Size, seen: dict[Any, tuple[int, Size]]) -> None:
    """Raise a `BatchError` if two shapes that were asked for gave tensors of the same shapes."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, _ARRAYS))
    if not shapes:
        return  # a batch type of the user's own
    before = seen.setdefault(shapes, (n, size))
    if before != (n, size):
        raise BatchError(
            f"make_batch ignores what it is asked for: n={before[0]}, size={before[1]} and n={n}, "
            f"size={size} both gave tensors of the shapes {list(shapes)}"
        )


class BatchLimit:
    """How many samples a probe's batch may have: so many that it takes 256 MiB.

    Judged by two batches of two samples, as a power of the product of the sizes.
    """

    def __init__(self, subject: Subject) -> None:
        domain = subject.domain
        low, self._high = domain.smallest, domain.at(1 / 4)
        batches = [subject.batch(2, size) for size in (low, self._high)]
        less, self._bytes = (max(batch_bytes(batch), 1) / 2 for batch in batches)
        ratio = np.prod(self._high) / np.prod(low)
        power = math.log(self._bytes / less) / math.log(ratio) if ratio > 1 else 1.0
        self._power = min(max(power, 0.0), 2.0)

    def most_samples(self, size: Size) -> int:
        """The most samples of a size, at least 2."""
        each = self._bytes * (np.prod(size) / np.prod(self._high)) ** self._power
        return min(max(int(_BATCH_BYTES / each), 2), _MOST_SAMPLES)


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch, or in the attributes of what is in it."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    own = (leaf for leaf in leaves if not isinstance(leaf, (*_ARRAYS, *_WITHOUT)))
    inside = (one for leaf in own for one in reachable(leaf))
    found = {id(one): one for one in (*leaves, *inside) if isinstance(one, _ARRAYS)}
    return sum(one.nbytes for one in found.values())


def _size_of(name: str, size: int | Sequence[int]) -> Size:
    each = tuple(size) if isinstance(size, Sequence) else (size,)
    if not 1 <= len(each) <= _MOST_AXES or not all(is_int(n) and n >= 1 for n in each):
        raise CostError(
            f"{name} must be an int of at least 1, or one for each of at most {_MOST_AXES} "
            f"axes, got {size!r}"
        )
    return tuple(map(int, each))


def _rounded(size: Size, multiple: int) -> Size:
    return tuple(-(-one // multiple) * multiple for one in size)


def _quantiles(sizes: npt.NDArray[np.int64]) -> list[Size]:
    """The shortest, the longest and some between, of sizes of shape `(N, d)`."""
    ordered = sizes[np.argsort(np.log(sizes).sum(axis=1), kind="stable")]
    rows = ordered[np.linspace(0, len(ordered) - 1, len(_JUDGED) + 1).astype(int)]
    return [tuple(row) for row in rows.tolist()]


def _sizes_array(sizes: npt.ArrayLike) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(sizes)
    except ValueError as error:
        raise CostError(f"sizes must be integers of shape (N,) or (N, d): {error}") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not len(array):
        raise CostError(
            f"sizes must be integers of shape (N,) or (N, d), got {array.dtype} {array.shape}"
        )
    if array.min() < 0 or array.max() < 1 or array.max() >= 2**53:
        raise CostError(f"sizes must be from 0 to 2**53, got {array.min()} to {array.max()}")
    return array.reshape(len(array), -1).astype(np.int64)
