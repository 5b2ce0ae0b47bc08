"""The rules of a micro-batch: its cost, its budget, and the options that shape it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, is_int, natural, optional
from torchbudget.cost.measured import OfWays, WaysCost
from torchbudget.cost.padded import PackedCost, PaddedCost, TableCost
from torchbudget.cost.protocol import AdditiveCost, ArrayLike, CostModel, IntArray
from torchbudget.errors import BudgetError, CostError, OptionError
from torchbudget.units import MAX_BYTES, Amount, format_bytes, parse_bytes

NEED_STEPS: Final = (
    "alternatives need steps whose samples are given, as with samples_per_step, in plan_step and "
    "in predict: where each batch is a step, it is as full as fits, and so full it fits only in "
    "the way of the least bytes"
)
# A table of capacities is kept for sizes below this: 8 MiB at most. Without it, a plan by a
# `TableCost` took 2.2 times as long, one by a `PaddedCost` 1.1 times.
_TABLE_SIZES: Final = 2**20


@dataclass(frozen=True, eq=False)  # without slots, for the cached property
class Limit:
    """An amount of a cost that no micro-batch exceeds.

    Attributes:
        name: the argument that states it, for messages.
        cost: of a micro-batch.
        amount: in the cost's unit.
    """

    name: str
    cost: CostModel
    amount: int

    @cached_property
    def any_size(self) -> IntArray | None:
        """A size that stands for all, if the cost only counts samples; else `None`."""
        if isinstance(self.cost, (PaddedCost, PackedCost)) and self.cost.counts:
            return np.zeros(self.cost.axes if self.cost.axes > 1 else (), np.int64)
        return None

    @cached_property
    def most(self) -> int | None:
        """The most samples in a micro-batch, if the cost only counts them; else `None`."""
        size = self.any_size
        return None if size is None else int(self.cost.capacity(size, self.amount))

    @property
    def summed(self) -> AdditiveCost | None:
        """The cost, if it is a sum over the samples of a micro-batch; else `None`."""
        return self.cost if self.most is None and isinstance(self.cost, AdditiveCost) else None

    def text(self, amount: int) -> str:
        """An amount of the cost, for people: bytes in binary units, anything else as its number."""
        unit = getattr(self.cost, "unit", "bytes")
        return format_bytes(amount) if unit == "bytes" else f"{amount:,} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRules:
    """The budget of a micro-batch, and the options that shape it.

    Limits are of three kinds: padded ones bound a batch by its number of samples and its longest
    one, summed ones by the sum over its samples, counted ones by the number of its samples alone.

    Attributes:
        cost: bytes of a micro-batch.
        budget_bytes: what no micro-batch may exceed.
        size_multiple: padded sizes are rounded up to a multiple of it.
        max_batch_size: samples in a micro-batch at the most; `None`: as many as fit.
        batch_size_multiple: the number of samples in a micro-batch is a multiple of it wherever
            that many fit and are left.
        time: of a micro-batch, in any unit; ranks are to have equal sums of it. `None`: the cost.
        further_limits: costs beside the first one, each with the amount that no micro-batch may
            exceed of it.
        max_shapes: the number of shapes of padded batches, which `fitted` chooses; or those shapes,
            pairs of rows and length; `None`: any number of them.
        most_time: cap on the time of a micro-batch of several samples, beside the limits: see
            `with_least_time`. `None`: micro-batches are as full as fits.
        strips: how windows of several axes are cut, see `arrange`. `None`: the best ones for the
            first of the windows that are solved together.
        limits: everything that no micro-batch may exceed: the budget, `max_batch_size`, the
            further limits and, as rows of a shape that covers it, the shapes.
        shapes: pairs of rows and length, the fewest rows first; empty: any.
        most: samples in a micro-batch at the most, by all counted limits; `None`: as many as fit.
        summed: costs of the summed limits, each with the room for the sum over a micro-batch's
            samples; the budget of packed batches is the first of them.
        lowered: the cap that is lowered to even out micro-batches: the time's, or the budget.

    Raises:
        OptionError: one is none of its kind, or a pair of them cannot hold.
    """

    cost: CostModel
    budget_bytes: int
    size_multiple: int = 1
    max_batch_size: int | None = None
    batch_size_multiple: int = 1
    time: CostModel | None = None
    further_limits: tuple[tuple[CostModel, int], ...] = ()
    max_shapes: int | Sequence[tuple[int, int]] | None = None
    most_time: int | None = None
    strips: int | None = None
    shapes: tuple[tuple[int, int], ...] = field(init=False)
    limits: tuple[Limit, ...] = field(init=False)
    most: int | None = field(init=False)
    summed: tuple[tuple[AdditiveCost, int], ...] = field(init=False)
    lowered: Limit = field(init=False)
    _table: list[IntArray] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, model in (("cost", self.cost), ("time", self.work)):
            if isinstance(model, type) or not isinstance(model, CostModel):
                function = inspect.isroutine(model)
                hint = "; measure_cost(step, …) makes one of a training step" if function else ""
                raise OptionError(
                    f"{name} must be a cost model such as PaddedCost, got {model!r}{hint}"
                )
        for name in ("size_multiple", "batch_size_multiple"):
            object.__setattr__(self, name, at_least_one(name, getattr(self, name)))
        if isinstance(self.cost, WaysCost):
            object.__setattr__(self, "cost", replace(self.cost, room=self.budget_bytes))
        if isinstance(self.time, OfWays):  # of ways that fit another budget
            cost = replace(self.time.cost, room=self.budget_bytes)
            object.__setattr__(self, "time", replace(self.time, cost=cost))
        object.__setattr__(self, "max_batch_size", optional("max_batch_size", self.max_batch_size))
        limits = [Limit("cost", self.cost, self.budget_bytes)]
        if self.max_batch_size is not None:
            count = PackedCost(sample_bytes=1, unit="samples")
            limits.append(Limit("max_batch_size", count, self.max_batch_size))
        for number, (model, amount) in enumerate(self.further_limits):
            limits.append(Limit(f"limits[{number}]", model, amount))
        for limit in limits:
            if getattr(limit.cost, "is_constant", False):  # all samples would be one batch
                raise CostError(
                    f"{limit.name}: a sample must cost something; give sample_bytes, unit_bytes or "
                    "pair_bytes"
                )
        object.__setattr__(self, "shapes", self._checked_shapes(limits))
        if self.shapes:
            rows, lengths = zip(*self.shapes, strict=True)
            covering = TableCost(numbers=rows, sizes=tuple(zip(lengths)), peak_bytes=rows)
            limits.append(Limit("max_shapes", covering, rows[-1]))
        object.__setattr__(self, "limits", tuple(limits))
        timed = None if self.most_time is None else Limit("time", self.work, self.most_time)
        object.__setattr__(self, "lowered", limits[0] if timed is None else timed)
        counted = [one.most for one in limits if one.most is not None]
        object.__setattr__(self, "most", max(min(counted), 1) if counted else None)
        costs = [(self.packing, self.budget_bytes)]
        costs += [(limit.summed, limit.amount) for limit in limits[1:]]
        summed = [(cost, cost.room_bytes(amount)) for cost, amount in costs if cost is not None]
        object.__setattr__(self, "summed", tuple(summed))
        if self.packing is not None:
            if not isinstance(self.work, AdditiveCost):
                raise OptionError(
                    "the work of packed batches is the sum over their samples: time must be a "
                    f"PackedCost, got a {type(self.time).__name__}"
                )
            for limit in limits[1:]:
                if limit.most is None and limit.summed is None:
                    raise OptionError(
                        f"{limit.name} is a {type(limit.cost).__name__}, which bounds the padded "
                        "size of a batch, and packed batches have none: state a PackedCost, which "
                        "sums over their samples"
                    )
        if self.max_batch_size is not None and self.max_batch_size < self.batch_size_multiple:
            raise OptionError(
                f"max_batch_size={self.max_batch_size} is below "
                f"batch_size_multiple={self.batch_size_multiple}"
            )
        if self.packing is not None and self.batch_size_multiple != 1:
            raise OptionError(
                "batch_size_multiple has no meaning for packed batches, which have no batch axis; "
                f"leave it at 1, got {self.batch_size_multiple}"
            )

    def _checked_shapes(self, limits: list[Limit]) -> tuple[tuple[int, int], ...]:
        """The shapes that `max_shapes` lists, the fewest rows first.

        Raises:
            OptionError: it does not go together with the other rules, or a shape exceeds a limit.
        """
        given: Any = self.max_shapes
        if given is None:
            return ()
        others = [limit.name for limit in limits[1:] if limit.most is None]
        is_other = self.packing is not None or isinstance(self.cost, WaysCost)
        if is_other or others or self.batch_size_multiple > 1:
            raise OptionError(
                "max_shapes is for padded batches, without batch_size_multiple and without limits "
                f"other than numbers of samples, got a {type(self.cost).__name__}, {others}, "
                f"batch_size_multiple={self.batch_size_multiple}"
            )
        if is_int(given):
            at_least_one("max_shapes", given)
            return ()
        shorter = False
        with suppress(TypeError, ValueError):  # no pairs
            given = sorted((at_least_one("n", n), natural("L", length)) for n, length in given)
            shorter = all(a < b and x > y for (a, x), (b, y) in pairwise(given))
        if not given or not shorter or any(length % self.size_multiple for _, length in given):
            raise OptionError(
                "max_shapes must be an int, or pairs (n, L) such as those of best_shapes: the "
                "longer, the fewer rows, and lengths that are multiples of "
                f"size_multiple={self.size_multiple}; got {given!r}"
            )
        for (rows, length), limit in product(given, limits):
            needed = int(limit.cost.batch_bytes(rows, length))
            if needed > limit.amount:
                raise OptionError(
                    f"the shape ({rows}, {length}) of max_shapes needs {limit.text(needed)} of "
                    f"{limit.text(limit.amount)} ({limit.name}): choose others by best_shapes, in "
                    "a new process, since a process keeps its shapes"
                )
        return tuple(given)

    @classmethod
    def of(
        cls,
        cost: CostModel,
        budget: MemoryBudget | int | str,
        *,
        limits: Sequence[tuple[CostModel, Amount]] = (),
        **options: Any,
    ) -> BatchRules:
        """The rules with a budget and options as users give them.

        Raises:
            BudgetError: the budget does not limit the device; or a limit is no amount.
            OptionError: a limit is no pair of a cost model and an amount.
        """
        if isinstance(budget, CostModel):
            raise OptionError(
                f"cost and budget are swapped: expected (sizes, cost, budget), got cost={cost!r}"
            )
        device_bytes = MemoryBudget.of(budget).device
        if device_bytes is None:
            raise BudgetError(f"the budget must limit the device, got {budget!r}")
        further = tuple(map(_limit, limits if isinstance(limits, (list, tuple)) else [limits]))
        return cls(cost=cost, budget_bytes=device_bytes, further_limits=further, **options)

    @property
    def packing(self) -> AdditiveCost | None:
        """The cost, if it is one of batches without padding."""
        return self.cost if isinstance(self.cost, AdditiveCost) else None

    @property
    def work(self) -> CostModel:
        """The cost model that ranks are balanced by."""
        return self.cost if self.time is None else self.time

    @property
    def chosen(self) -> Any:
        """The model of bytes of micro-batches in their chosen way: the cost, if it has only one."""
        return getattr(self.cost, "chosen", self.cost)

    def refuse_alternatives(self) -> None:
        """Raise an `OptionError` if the cost is that of alternatives, which need given samples."""
        if isinstance(self.cost, WaysCost):
            raise OptionError(NEED_STEPS)

    def costs(self, model: CostModel, n: ArrayLike, padded_sizes: ArrayLike) -> IntArray:
        """The costs of micro-batches by a model, such as `cost` or `work`, shape `(…)`.

        Unknown costs (`MAX_BYTES`, of which sums would wrap) are just above the budget.
        """
        found = model.batch_bytes(n, padded_sizes)
        return np.where(found == MAX_BYTES, self.budget_bytes + 1, found)

    def model_bytes(self, size: npt.NDArray[Any]) -> int:
        """Bytes of a batch without any sample; 0 if the cost does not know them.

        Args:
            size: of any sample, for the number of axes.
        """
        try:
            return int(self.cost.batch_bytes(0, np.zeros_like(self.padded(size))))
        except Exception:  # noqa: BLE001  (a user's cost may refuse such a batch in its own way)
            return 0

    def padded(self, sizes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sizes rounded up to `size_multiple`, int64, of the same shape."""
        whole = sizes.astype(np.int64, copy=False)  # a user's cost may square them
        if self.size_multiple == 1:
            return whole
        return -(-whole // self.size_multiple) * self.size_multiple

    def shaped(self, n: IntArray, padded: IntArray) -> tuple[IntArray, IntArray]:
        """Rows and length of batches of n samples, padded to a size: of their shape, if any.

        It is the shape with the fewest rows that are enough. So ranks that have as many samples
        have one shape, whatever their lengths.
        """
        if not self.shapes:
            return n, padded
        rows, lengths = np.array(self.shapes).T
        place = np.minimum(np.searchsorted(rows, n), len(rows) - 1)
        return rows[place], lengths[place]

    def capacity(
        self, sizes: npt.NDArray[Any], amount: ArrayLike, *, alike: bool = False
    ) -> IntArray:
        """The largest number of samples, if the largest of them has the size; at least 1.

        A sample over the budget was dealt with before planning. Under a cap that is lowered to
        even out the ranks it stands alone. So the number is never 0. A cap on the time leaves
        `batch_size_multiple` samples together if the other limits do.

        Args:
            sizes: before rounding, shape `(…)` or `(…, d)`.
            amount: of the cap that is lowered, shape `(…)`, broadcast.
            alike: all samples have the size, so that the summed limits beside a padded budget
                count; otherwise samples may be smaller.
        """
        padded = self.padded(sizes)
        n = self.lowered.cost.capacity(padded, amount)
        if self.most_time is not None:
            n = np.maximum(n, self.batch_size_multiple)
        for limit in self.limits:
            if limit is self.lowered:
                continue
            if limit.most is None and (alike or limit.summed is None):
                n = np.minimum(n, limit.cost.capacity(padded, limit.amount))
        return np.maximum(n if self.most is None else np.minimum(n, self.most), 1)

    def alike(self, sizes: npt.NDArray[Any]) -> IntArray:
        """The number of samples of one size each that fit together, at least 1; shape `(…)`."""
        return self.capacity(sizes, self.lowered.amount, alike=True)

    def longest_summed(self, sizes: npt.NDArray[Any]) -> IntArray | None:
        """The longest runs that keep all summed limits, at least 1; `None` without such limits.

        A run that ends with the window might be longer, if there were more samples: `MAX_BYTES`.

        Args:
            sizes: of the samples of windows, in the order of the cut; `(windows, S)` or with `d`.

        Returns:
            Samples of the longest run from each sample on, shape `(windows, S)`.
        """
        if not self.summed:
            return None
        windows, length = sizes.shape[:2]
        longest = np.full((windows, length), MAX_BYTES)
        for cost, room in self.summed:
            items = np.minimum(cost.item_bytes(self.padded(sizes)), max(room, 0) + 1)
            for row, before in enumerate(np.cumsum(items, axis=1)):
                from_zero = np.append(0, before)
                stops = np.searchsorted(from_zero, from_zero[:-1] + room, side="right") - 1
                runs = np.where(stops < length, stops - np.arange(length), MAX_BYTES)
                np.minimum(longest[row], np.maximum(runs, 1), out=longest[row])
        return longest

    def exceeded_alone(self, sizes: npt.NDArray[Any], firsts: IntArray | None = None) -> IntArray:
        """The first of `limits` that a sample alone exceeds, −1: none; shape `(…)`.

        Args:
            sizes: shape `(…)` or `(…, d)`.
            firsts: starts of units in one row of sizes, which are judged as a whole, shape
                `(units,)`; `None`: samples are.
        """
        padded = longest = self.padded(sizes)
        n = np.ones((), np.int64)
        if firsts is not None:
            n = np.diff(firsts, append=len(sizes))
            longest = np.maximum.reduceat(padded, firsts, axis=0)
        fits: list[npt.NDArray[np.bool_]] = []
        for limit in self.limits:
            if limit.name != "cost" and limit.most is not None:
                fits.append(np.broadcast_to(limit.most >= n, fits[0].shape))
            elif firsts is not None and isinstance(limit.cost, AdditiveCost):
                sums = np.add.reduceat(limit.cost.item_bytes(padded), firsts)
                fits.append(sums <= limit.cost.room_bytes(limit.amount))
            else:
                fits.append(limit.cost.capacity(longest, limit.amount) >= n)
        return np.where(np.all(fits, axis=0), -1, np.argmin(fits, axis=0))

    def rounded(self, n: IntArray) -> IntArray:
        """Numbers of samples, rounded down to `batch_size_multiple` where they reach it."""
        if self.batch_size_multiple == 1:
            return n
        return np.where(n >= self.batch_size_multiple, n - n % self.batch_size_multiple, n)

    def table(self, largest: int) -> IntArray | None:
        """Rounded capacities under the whole cap for the sizes 0 … largest of one axis.

        `None` if the sizes are too large for a table. Evaluated once: O(largest).
        """
        if largest >= _TABLE_SIZES:
            return None
        if not self._table or len(self._table[0]) <= largest:
            capacities = self.capacity(np.arange(largest + 1), self.lowered.amount)
            self._table[:] = [self.rounded(capacities)]
        return self._table[0]


def _limit(given: Any) -> tuple[CostModel, int]:
    pair = isinstance(given, tuple) and len(given) == 2
    if not pair or isinstance(given[0], type) or not isinstance(given[0], CostModel):
        raise OptionError(
            "limits must be pairs of a cost model and an amount, such as "
            f"[(PaddedCost(unit_bytes=16), '64MiB')], got {given!r}"
        )
    return given[0], parse_bytes(given[1])
