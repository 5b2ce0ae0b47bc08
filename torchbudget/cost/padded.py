"""Costs that are stated: formulas of padded and of padding-free batches, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.checks import at_least_one, is_int
from torchbudget.cost.protocol import AdditiveCost, ArrayLike, IntArray, axes_last
from torchbudget.errors import CostError, CostOverflowError
from torchbudget.units import MAX_BYTES

# Below 2**53 every whole number of bytes is a float64, so a sample's bytes are exact as computed.
_EXACT: Final = float(2**53)


def _coefficient(name: str, value: object) -> float:
    """`value` as a finite, non-negative float."""
    if not (is_int(value) or isinstance(value, (float, np.floating))):
        raise CostError(f"{name} must be a number of bytes, got {value!r}")
    # Compared before it is converted, since an int may be past every float; NaN is no less.
    if not 0 <= value < _EXACT:
        raise CostError(f"{name} must be at least 0 and below 2**53, got {value!r}")
    return float(value)


def whole_bytes(name: str, value: object) -> int:
    """`value` rounded up to whole bytes."""
    return math.ceil(_coefficient(name, value))


def _integers(name: str, values: ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.max() > MAX_BYTES):
        raise CostError(f"{name} must be ints of at most 2**63 - 1, got {values!r}")
    return array.astype(np.int64)


def _entries(value: Any) -> Sequence[Any] | None:
    """The entries of a list, a tuple or an array, unchanged; `None` for anything else."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    return entries if isinstance(entries, Sequence) and not isinstance(entries, str) else None


def _coefficients(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """A coefficient, or tuples of them in the shape of the axes, where 0 stands for all zeros."""
    if not shape:
        return _coefficient(name, value)
    entries = _entries(value)
    if entries is None and _coefficient(name, value) == 0:
        entries = [0] * shape[0]
    if entries is None or len(entries) != shape[0]:
        raise CostError(f"{name} must have the shape {shape} of the axes, got {value!r}")
    return tuple(_coefficients(name, entry, shape[1:]) for entry in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quadratic:
    """Coefficients of a sample's bytes, `sample + Σᵢ unitᵢ·Lᵢ + Σᵢⱼ pairᵢⱼ·Lᵢ·Lⱼ`, rounded up.

    Every step is monotone, in floating point too (correctly rounded sums and products of
    non-negative numbers are), so a longer sample never costs less.
    """

    fixed_bytes: float = 0
    sample_bytes: float = 0
    unit_bytes: float | Sequence[float] | npt.NDArray[Any] = 0
    pair_bytes: float | Sequence[Sequence[float]] | npt.NDArray[Any] = 0
    unit: str = "bytes"

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or not self.unit:
            raise CostError(f"unit must be a word such as 'bytes' or 'tokens', got {self.unit!r}")
        each = _entries(self.unit_bytes)
        if each is None and self.unit_bytes == 0:
            each = _entries(self.pair_bytes)
        shape = () if each is None or len(each) < 2 else (len(each),)  # one axis: plain numbers
        object.__setattr__(self, "fixed_bytes", whole_bytes("fixed_bytes", self.fixed_bytes))
        for name, its_shape in (("sample", ()), ("unit", shape), ("pair", shape * 2)):
            field = f"{name}_bytes"
            value = _coefficients(field, getattr(self, field), its_shape)
            object.__setattr__(self, field, value)
        if self.is_constant and not self.fixed_bytes:
            raise CostError(
                "a batch must cost something; give sample_bytes, unit_bytes or pair_bytes"
            )

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.unit_bytes) if isinstance(self.unit_bytes, tuple) else 1

    @property
    def counts(self) -> bool:
        """Whether a sample costs the same whatever its size, so that a limit counts samples."""
        return not (np.any(self.unit_bytes) or np.any(self.pair_bytes))

    @property
    def is_constant(self) -> bool:
        """Whether a batch costs the same whatever is in it: a time that asks for few batches."""
        return self.counts and not self.sample_bytes

    def item_bytes(self, sizes: ArrayLike) -> IntArray:
        """The bytes of one sample of each size, without the fixed part.

        Args:
            sizes: shape `(…)`, or `(…, d)` for d axes, non-negative.

        Returns:
            Shape `(…)`.

        Raises:
            CostError: the last axis is not d long.
            CostOverflowError: a sample costs 2⁵³ bytes or more.
        """
        lengths = axes_last(sizes, self.axes)
        units = np.reshape(self.unit_bytes, self.axes).tolist()
        pairs = np.reshape(self.pair_bytes, (self.axes, self.axes)).tolist()
        length = [lengths[..., axis].astype(np.float64) for axis in range(self.axes)]
        total: Any = self.sample_bytes
        # Horner's scheme on each axis, which is monotone like the sum it stands for.
        for axis, (slope, row) in enumerate(zip(units, pairs, strict=True)):
            for other, pair in enumerate(row):
                if pair:
                    slope = slope + pair * length[other]
            total = total + slope * length[axis]
        if total.size and not total.max() < _EXACT:
            raise CostOverflowError("a sample costs 2**53 bytes or more: check the coefficients")
        items: IntArray = np.ceil(total).astype(np.int64)
        return items

    @property
    def _floor_bytes(self) -> int:
        return int(getattr(self, "floor_bytes", 0))  # which only padded batches have

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `CostOverflowError` from 2⁶³ bytes on."""
        number = _integers("n", n)
        item = self.item_bytes(padded_size)
        if number.size and number.min() < 0:
            raise CostError(f"a batch has at least 0 samples, got {number.min()}")
        # In floating point the product cannot wrap, so it is what the range is checked on; the
        # slack is what rounding can hide there.
        largest = np.asarray(number.astype(np.float64) * item)
        if largest.size and largest.max() + self.fixed_bytes >= float(MAX_BYTES - 4096):
            raise CostOverflowError("a batch costs 2**63 bytes or more: check the coefficients")
        total: IntArray = np.maximum(number * item + int(self.fixed_bytes), self._floor_bytes)
        return total

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        item = self.item_bytes(padded_size)
        budget = _integers("budget_bytes", budget_bytes)
        room = np.where(budget < self._floor_bytes, -1, budget) - self.fixed_bytes
        n: IntArray = np.maximum(room, 0) // np.maximum(item, 1)
        if not item.all():  # samples that cost nothing
            n = np.where((item == 0) & (room >= 0), MAX_BYTES, n)
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCost(_Quadratic):
    """`max(floor, fixed + n·(sample + unit·L + pair·L²))` bytes for n samples padded to L.

    For d ragged axes, L is a vector, `unit_bytes` has shape `(d,)`, `pair_bytes` has shape
    `(d, d)`, and L² stands for all products of two axes: an image's H·W, a cross-attention's S·T.

    Attributes:
        fixed_bytes: without any sample: parameters, gradients, optimizer state.
        sample_bytes: per sample, whatever its length.
        unit_bytes: per sample and unit of padded length.
        pair_bytes: per sample and pair of units: attention that materialises its scores, H·W.
        unit: the name of what the coefficients count, for errors and reports, such as `"tokens"`.
        floor_bytes: the least bytes of a step, however small its batch: those of the optimizer's
            step.

    Raises:
        CostError: a coefficient is negative, not finite or past 2⁵³; all of them are 0; or the
            shapes of `unit_bytes` and `pair_bytes` differ.

    To state a budget in tokens, use `PaddedCost(unit_bytes=1, unit="tokens")` and the number of
    tokens as the budget:

    >>> tokens = PaddedCost(unit_bytes=1, unit="tokens")
    >>> int(tokens.capacity(100, 4096)), int(tokens.batch_bytes(40, 100))
    (40, 4000)
    >>> image = PaddedCost(unit_bytes=(0, 0), pair_bytes=((0, 12), (0, 0)))  # 12 bytes a pixel
    >>> image.capacity([[640, 480], [64, 64]], 12 * 640 * 480).tolist()
    [1, 75]
    """

    floor_bytes: float = 0

    def __post_init__(self) -> None:
        super(PaddedCost, self).__post_init__()
        object.__setattr__(self, "floor_bytes", whole_bytes("floor_bytes", self.floor_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCost(_Quadratic, AdditiveCost):
    """`fixed + Σᵢ (sample + unit·Lᵢ + pair·Lᵢ²)` bytes: batches without padding.

    `item_bytes` are the bytes that one sample adds; `batch_bytes` and `capacity` are for n samples
    of the same size.

    Attributes:
        fixed_bytes: as in `PaddedCost`; `sample_bytes`, `unit_bytes`, `pair_bytes` and `unit`, too.
        total_multiple: the sum of a batch's lengths is rounded up to a multiple of it, and each
            position of padding costs `unit_bytes`, rounded up. `PackCollate(total_multiple=…)`
            makes such batches. Only for one axis and without `pair_bytes`.

    Raises:
        CostError: a coefficient is invalid, as in `PaddedCost`; or `total_multiple` cannot be
            combined with the coefficients.
        OptionError: `total_multiple` is not an int of at least 1.

    >>> PackedCost(unit_bytes=2, fixed_bytes=10).item_bytes([3, 5]).tolist()
    [6, 10]
    >>> int(PackedCost(unit_bytes=1, total_multiple=64).batch_bytes(3, 50))
    192
    """

    total_multiple: int = 1

    def __post_init__(self) -> None:
        super(PackedCost, self).__post_init__()
        at_least_one("total_multiple", self.total_multiple)
        if self.total_multiple > 1:
            if self.axes > 1 or self.pair_bytes:
                raise CostError(
                    "total_multiple pads the total length of a packed batch: it needs sizes of one "
                    "axis, and no pair_bytes"
                )
            # Rows are compared in whole bytes, and a longer row never costs less.
            object.__setattr__(self, "unit_bytes", float(self._whole_unit))

    @property
    def _whole_unit(self) -> int:
        unit: Any = self.unit_bytes
        return int(np.ceil(unit))

    def padded_totals(self, totals: IntArray) -> IntArray:
        """See `AdditiveCost.padded_totals`."""
        return -(-totals // self.total_multiple) * self.total_multiple

    def padding_bytes(self, totals: IntArray) -> Any:
        """See `AdditiveCost.padding_bytes`."""
        if self.total_multiple == 1:
            return 0
        return (self.padded_totals(totals) - totals) * self._whole_unit

    def room_bytes(self, budget_bytes: int) -> int:
        """See `AdditiveCost.room_bytes`.

        A row of units alone fits, padded, if and only if its samples fit a room of whole multiples.
        Where samples cost bytes beside their units, there is room for the most padding.
        """
        room = budget_bytes - self.base_bytes
        if self.total_multiple == 1:
            return room
        unit = self._whole_unit
        if self.sample_bytes:
            return room - unit * (self.total_multiple - 1)
        return room - room % (unit * self.total_multiple)

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`."""
        total = super(PackedCost, self).batch_bytes(n, padded_size)
        if self.total_multiple == 1:
            return total
        padding: IntArray = self.padding_bytes(np.asarray(n, np.int64) * np.asarray(padded_size))
        return total + padding

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`."""
        most = super(PackedCost, self).capacity(padded_size, budget_bytes)
        if self.total_multiple == 1:
            return most
        size, budget = np.asarray(padded_size), np.asarray(budget_bytes)
        # Samples whose padding is not counted are too many by at most one multiple of units.
        high = np.where(most == MAX_BYTES, 0, most)
        low = np.maximum(high - -(-self.total_multiple // np.maximum(size, 1)), 0)
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = self.batch_bytes(middle, size) <= budget
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return np.where(most == MAX_BYTES, most, low)

    @property
    def base_bytes(self) -> int:
        """Bytes of a batch beside its samples."""
        return int(self.fixed_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost:
    """A table of measured batches: a batch costs as much as the cheapest one that is not smaller.

    A batch of n samples of size L costs as much as the cheapest measured batch of n' ≥ n samples of
    L' ≥ L (on every axis). A batch that is larger than all measured ones costs `MAX_BYTES`, more
    than any budget. The cost is monotone, and never below the true cost if that is monotone; with
    few measurements it is coarse.

    Attributes:
        numbers: number of samples of each measured batch.
        sizes: padded size of each measured batch, a tuple of d ints.
        peak_bytes: peak bytes of each measured batch.

    Raises:
        CostError: the three differ in length, or are empty.

    >>> table = TableCost(numbers=(8, 2), sizes=((100,), (500,)), peak_bytes=(1000, 1200))
    >>> table.batch_bytes([1, 8, 2], [50, 100, 500]).tolist()
    [1000, 1000, 1200]
    >>> table.capacity([100, 500, 501], 1400).tolist()
    [8, 2, 0]
    """

    numbers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.numbers) == len(self.sizes) == len(self.peak_bytes) > 0:
            raise CostError("numbers and sizes must be as many as peaks, and at least one")

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.sizes[0])

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `MAX_BYTES` beyond what was measured."""
        covers = self._covers(padded_size)
        covers = covers & (np.asarray(n, np.int64)[..., None] <= np.array(self.numbers))
        total: IntArray = np.where(covers, np.array(self.peak_bytes), MAX_BYTES).min(axis=-1)
        return total

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; at most as many samples as were measured."""
        fits = np.asarray(budget_bytes, np.int64)[..., None] >= np.array(self.peak_bytes)
        covers = self._covers(padded_size) & fits
        most: IntArray = np.where(covers, np.array(self.numbers), 0).max(axis=-1)
        return most

    def _covers(self, padded_size: ArrayLike) -> npt.NDArray[np.bool_]:
        """Which measured batches are at least as large on every axis, shape `(…, batches)`."""
        size = axes_last(padded_size, self.axes)
        covers: npt.NDArray[np.bool_] = np.all(size[..., None, :] <= np.array(self.sizes), axis=-1)
        return covers
