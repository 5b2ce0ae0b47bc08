"""What a micro-batch may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, optional
from torchbudget.cost.models.protocol import AdditiveCost, ArrayLike, CostModel, IntArray
from torchbudget.errors import BudgetError, OptionError
from torchbudget.units import MAX_BYTES, parse_bytes

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
        host_batch_bytes: what a micro-batch needs on the host, and what that may not exceed;
            `None`: anything.

    Raises:
        OptionError: one is none of its kind, or a pair of them cannot hold.
    """

    cost: CostModel
    budget_bytes: int
    size_multiple: int = 1
    max_batch_size: int | None = None
    batch_size_multiple: int = 1
    balance: CostModel | None = None
    host_batch_bytes: tuple[CostModel, int] | None = None
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
        if self.packing is not None and self.host_batch_bytes is not None:
            raise OptionError(
                "packed batches take as many bytes on the host as the budget lets them: lower it, "
                "and leave host_batch_bytes out"
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
        """Name, cost model and bytes of all that no micro-batch may exceed."""
        found = [("cost", self.cost, self.budget_bytes)]
        if self.host_batch_bytes is not None:
            found.append(("host_batch_bytes", *self.host_batch_bytes))
        return found

    @classmethod
    def of(
        cls,
        cost: CostModel,
        budget: MemoryBudget | int | str,
        *,
        host_batch_bytes: Any = None,
        **options: Any,
    ) -> BatchRules:
        """The rules with a budget and options as users give them.

        Raises:
            BudgetError: the budget does not limit the device; or the limit of `host_batch_bytes`
                is no amount of bytes.
        """
        device_bytes = MemoryBudget.of(budget).device
        if device_bytes is None:
            raise BudgetError(f"the budget must limit the device, got {budget!r}")
        on_host = None if host_batch_bytes is None else _on_host(host_batch_bytes)
        return cls(cost=cost, budget_bytes=device_bytes, host_batch_bytes=on_host, **options)

    @property
    def packing(self) -> AdditiveCost | None:
        """The cost, if it is one of batches without padding."""
        return self.cost if isinstance(self.cost, AdditiveCost) else None

    @property
    def work(self) -> CostModel:
        """What ranks are balanced by."""
        return self.cost if self.balance is None else self.balance

    def costs(self, model: CostModel, n: ArrayLike, padded_sizes: ArrayLike) -> IntArray:
        """What `cost` or `work` says of micro-batches, shape `(…)`.

        Just above the budget where it says nothing, `MAX_BYTES`, of which sums would wrap.
        """
        found = model.batch_bytes(n, padded_sizes)
        return np.where(found == MAX_BYTES, self.budget_bytes + 1, found)

    def model_bytes(self, size: npt.NDArray[Any]) -> int:
        """What a batch needs without any sample; 0 where the cost cannot say that.

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
        """How many samples a micro-batch holds whose largest sample has the size; at least 1.

        A sample that alone is over the budget was dealt with before planning, and with a budget
        that is lowered to even out the ranks it stands alone: hence never 0.

        Args:
            sizes: before rounding, shape `(…)` or `(…, d)`.
            budget_bytes: shape `(…)`, broadcast.
        """
        padded = self.padded(sizes)
        n = np.maximum(self.cost.capacity(padded, budget_bytes), 1)
        if self.host_batch_bytes is not None:
            model, limit = self.host_batch_bytes
            n = np.minimum(n, np.maximum(model.capacity(padded, limit), 1))
        return n if self.max_batch_size is None else np.minimum(n, self.max_batch_size)

    def exceeded_alone(self, sizes: npt.NDArray[Any]) -> IntArray:
        """Which of `limits` a sample alone exceeds, the first one, −1: none; shape `(…)`."""
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


def _on_host(given: Any) -> tuple[CostModel, int]:
    """What `host_batch_bytes` says, checked."""
    pair = isinstance(given, tuple) and len(given) == 2
    if not pair or isinstance(given[0], type) or not isinstance(given[0], CostModel):
        raise OptionError(
            "host_batch_bytes must be the cost of a batch on the host and its limit, such as "
            f"(PaddedCost(unit_bytes=16), '64MiB'), got {given!r}"
        )
    return given[0], parse_bytes(given[1])
