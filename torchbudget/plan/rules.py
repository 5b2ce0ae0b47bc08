"""The rules of a micro-batch: its cost, its budget, and the options that shape it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, optional
from torchbudget.cost.protocol import AdditiveCost, ArrayLike, CostModel, IntArray
from torchbudget.errors import BudgetError, OptionError
from torchbudget.units import MAX_BYTES, Amount, parse_bytes

# A table of capacities is kept for sizes below this: 8 MiB at most.
_TABLE_SIZES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRules:
    """The budget of a micro-batch, and the options that shape it.

    Attributes:
        cost: bytes of a micro-batch.
        budget_bytes: what no micro-batch may exceed.
        size_multiple: padded sizes are rounded up to a multiple of it.
        max_batch_size: samples in a micro-batch at the most; `None`: as many as fit.
        batch_size_multiple: the number of samples in a micro-batch is a multiple of it wherever
            that many fit and are left.
        balance: what ranks are to have equal sums of, such as time; `None`: the cost.
        further_limits: costs beside the first one, each with the amount that no micro-batch may
            exceed of it.

    Raises:
        OptionError: one is none of its kind, or a pair of them cannot hold.
    """

    cost: CostModel
    budget_bytes: int
    size_multiple: int = 1
    max_batch_size: int | None = None
    batch_size_multiple: int = 1
    balance: CostModel | None = None
    further_limits: tuple[tuple[CostModel, int], ...] = ()
    _table: list[IntArray] = field(default_factory=list, init=False, repr=False)
    _fitting: list[int] = field(default_factory=lambda: [-1], init=False, repr=False)

    def __post_init__(self) -> None:
        for name, model in (("cost", self.cost), ("balance", self.work)):
            if isinstance(model, type) or not isinstance(model, CostModel):
                raise OptionError(f"{name} must be a cost model such as PaddedCost, got {model!r}")
        for name in ("size_multiple", "batch_size_multiple"):
            object.__setattr__(self, name, at_least_one(name, getattr(self, name)))
        object.__setattr__(self, "max_batch_size", optional("max_batch_size", self.max_batch_size))
        if self.packing is not None and self.balance is not None:
            raise OptionError("packed batches are balanced by their cost; leave balance as it is")
        if self.packing is not None and self.further_limits:
            raise OptionError(
                "packed batches have one limit, the budget: lower it, and leave limits out"
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

    @property
    def limits(self) -> list[tuple[str, CostModel, int]]:
        """Name, cost model and amount of everything that no micro-batch may exceed."""
        further = enumerate(self.further_limits)
        named = [(f"limits[{number}]", model, amount) for number, (model, amount) in further]
        return [("cost", self.cost, self.budget_bytes), *named]

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
        device_bytes = MemoryBudget.of(budget).device
        if device_bytes is None:
            raise BudgetError(f"the budget must limit the device, got {budget!r}")
        further = tuple(map(_limit, limits))
        return cls(cost=cost, budget_bytes=device_bytes, further_limits=further, **options)

    @property
    def packing(self) -> AdditiveCost | None:
        """The cost, if it is one of batches without padding."""
        return self.cost if isinstance(self.cost, AdditiveCost) else None

    @property
    def work(self) -> CostModel:
        """The cost model that ranks are balanced by."""
        return self.cost if self.balance is None else self.balance

    def costs(self, model: CostModel, n: ArrayLike, padded_sizes: ArrayLike) -> IntArray:
        """The costs of micro-batches by `cost` or `work`, shape `(…)`.

        Unknown costs (`MAX_BYTES`, of which sums would wrap) are just above the budget.
        """
        found = model.batch_bytes(n, padded_sizes)
        return np.where(found == MAX_BYTES, self.budget_bytes + 1, found)

    def model_bytes(self, size: npt.NDArray[Any]) -> int:
        """Bytes of a batch without any sample; 0 where the cost cannot say that.

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

    def capacity(self, sizes: npt.NDArray[Any], budget_bytes: ArrayLike) -> IntArray:
        """The largest number of samples, if the largest of them has the size; at least 1.

        A sample over the budget was dealt with before planning. Under a budget that is lowered to
        even out the ranks it stands alone. So the number is never 0.

        Args:
            sizes: before rounding, shape `(…)` or `(…, d)`.
            budget_bytes: shape `(…)`, broadcast.
        """
        padded = self.padded(sizes)
        n = np.maximum(self.cost.capacity(padded, budget_bytes), 1)
        for model, amount in self.further_limits:
            n = np.minimum(n, np.maximum(model.capacity(padded, amount), 1))
        return n if self.max_batch_size is None else np.minimum(n, self.max_batch_size)

    def exceeded_alone(self, sizes: npt.NDArray[Any]) -> IntArray:
        """The first of `limits` that a sample alone exceeds, −1: none; shape `(…)`."""
        padded = self.padded(sizes)
        fits = [model.capacity(padded, limit) >= 1 for _, model, limit in self.limits]
        return np.where(np.all(fits, axis=0), -1, np.argmin(fits, axis=0))

    def fits_alone(self, size: int) -> bool:
        """Whether a sample of the size on its one axis exceeds no limit, and so no shorter one.

        The largest that does not is kept: windows of a stream ask, and to compute it takes as long
        as to sort half of one.
        """
        if size > self._fitting[0] and self.exceeded_alone(np.array(size)) < 0:
            self._fitting[0] = size
        return size <= self._fitting[0]

    def rounded(self, n: IntArray) -> IntArray:
        """Numbers of samples, rounded down to `batch_size_multiple` where they reach it."""
        if self.batch_size_multiple == 1:
            return n
        return np.where(n >= self.batch_size_multiple, n - n % self.batch_size_multiple, n)

    def table(self, largest: int) -> IntArray | None:
        """Rounded capacities under the whole budget for the sizes 0 … largest of one axis.

        `None` where the sizes are too large for a table. Evaluated once: O(largest).
        """
        if largest >= _TABLE_SIZES:
            return None
        if not self._table or len(self._table[0]) <= largest:
            capacities = self.capacity(np.arange(largest + 1), self.budget_bytes)
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
