"""The options of a stream, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from torchbudget.budget import MemoryBudget
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.callables import callable_fingerprint
from torchbudget.data.sizes.key import SizeKey, check_key
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.data.stream.source import Source, is_indexed
from torchbudget.data.stream.transforms import Transform
from torchbudget.errors import BudgetError, OptionError, StateMismatchError
from torchbudget.plan.fingerprint import Plain, cost_fingerprint, fingerprint
from torchbudget.plan.grouping import ByCost, ByPredicate, Grouping
from torchbudget.plan.oversize import Oversize, check_oversize
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import default_window

_LARGEST: Final = 2**16  # the largest size at which the fingerprint of a cost asks it
_AXES: Final = 4
_HOST_SHARE: Final = 4  # a quarter of the host's bytes is for samples that wait

ShouldAdd: TypeAlias = Callable[[list[Any], Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options that all processes that read a stream have in common.

    Attributes:
        source: of the samples.
        transforms: of each sample.
        threads: that apply them in each process.
        grouping: how a window is cut and dealt to the ranks.
        size: where the size of a sample is found.
        look_ahead: bytes of the samples that wait in a worker; `None`: not stated.
        host_bytes: of the budget; `None`: no limit.
        given_window: items that are read, sorted and cut together; `None`: as many as by default.
        num_replicas: number of ranks.
        uneven: they may have unequal numbers of batches.
        drop_last: drop the last micro-batch of a pass if it is incomplete.
        on_error: what becomes of samples that raise.
        batches_per_epoch: on each rank; `None`: as many as one pass yields.
        collate_fn: makes a batch of a list of samples.
        size_multiple: padded sizes are rounded up to a multiple of it.
        rules: what else must be the same for samples to be cut the same way.

    Raises:
        OptionError: an option is invalid.
    """

    source: Source
    transforms: tuple[Transform, ...]
    threads: int
    grouping: Grouping
    size: SizeKey
    look_ahead: int | None
    host_bytes: int | None
    given_window: int | None
    num_replicas: int
    uneven: bool
    drop_last: bool
    on_error: str
    batches_per_epoch: int | None
    collate_fn: Callable[[list[Any]], Any]
    size_multiple: int
    rules: Plain

    def __post_init__(self) -> None:
        check_key(self.size)
        known = self.uneven or self.batches_per_epoch is not None
        if self.source.split == "ranks" and self.num_replicas > 1 and not known:
            raise OptionError(
                f"each of {self.num_replicas} ranks reads its own part, so their numbers of "
                "batches differ, and a rank would wait for the others forever: give "
                "batches_per_epoch=…; or uneven=True, and end the loop with stop_together(loader)"
            )
        ranks = self.ranks
        if self.window < ranks:
            raise OptionError(f"window={self.window} is below the number of ranks, {ranks}")
        if self.on_error not in ("raise", "skip"):
            raise OptionError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")
        if self.skip_failed and ranks > 1:
            raise OptionError(
                f"on_error='skip' with {ranks} ranks that plan from one source: a sample that "
                "fails on one of them alone would be lost or come twice; use split='ranks', or "
                "drop such samples in a transform that fails alike everywhere"
            )

    @property
    def ranks(self) -> int:
        """How many of them share each window."""
        return 1 if self.source.split == "ranks" else self.num_replicas

    @property
    def window(self) -> int:
        """Items that are read, sorted and cut together."""
        return self.given_window or default_window(self.ranks)

    @property
    def sized(self) -> bool:
        """Whether sizes are taken."""
        return isinstance(self.grouping, ByCost) or self.size is not None

    @property
    def skip_failed(self) -> bool:
        """Skip samples that raise."""
        return self.on_error == "skip"

    @property
    def order(self) -> Plain:
        """What must be the same for positions to mean the same samples."""
        return {
            "window": self.window,
            "seed": self.source.seed,
            "shuffle": self.source.shuffle,
            "split": self.source.split,
            "sized": self.sized,
            "batches_per_epoch": self.batches_per_epoch,
        }

    @property
    def shared(self) -> Plain:
        """What must be the same on all ranks that plan from one source; not: the source itself."""
        host_bytes = self.host_bytes if self.look_ahead is None else None
        return (
            self.order
            | self.rules
            | {"drop_last": self.drop_last, "on_error": self.on_error}
            | {"look_ahead": self.look_ahead, "budget.host": host_bytes}
        )

    def for_ranks(self, num_replicas: int, *, begun: bool, loaded: bool) -> Settings:
        """The same options, for the ranks that there are now.

        Args:
            num_replicas: number of ranks.
            begun: an iteration has begun on those of before.
            loaded: a state was loaded under them.

        Raises:
            OptionError: there are others, and an iteration has begun; or an option does not go with
                them.
            StateMismatchError: there are others, so that the loaded position means other samples.
        """
        if num_replicas == self.num_replicas:
            return self
        settings = replace(self, num_replicas=num_replicas)
        if begun:
            raise OptionError(
                f"a loop over this stream began on num_replicas={self.num_replicas}, and "
                f"torch.distributed has {num_replicas} ranks now, which would take other samples: "
                "start it before the first loop, or choose another epoch by set_epoch() after it"
            )
        if loaded and settings.order != self.order:
            raise StateMismatchError(
                f"the state was loaded on {self.num_replicas} ranks, where windows are "
                f"{self.window} samples by default, but {settings.window} on {num_replicas} "
                "ranks: give window=…, or load it after torch.distributed started"
            )
        return settings

    def look_ahead_of(self, slot: WorkerSlot) -> int | None:
        """Bytes of the samples that wait in one process; `None`: no limit."""
        if self.look_ahead is None and self.host_bytes is not None:
            return max(self.host_bytes // _HOST_SHARE // slot.workers, 1)
        return self.look_ahead

    def dealing(self, slot: WorkerSlot) -> Plain:
        """What must be the same for the samples in memory to be cut and dealt the same way."""
        split = self.source.split
        return self.rules | {
            "drop_last": self.drop_last,
            "on_error": self.on_error,
            "look_ahead": self.look_ahead_of(slot),
            "split": split,
            "worker": slot.worker,
            "workers": slot.workers,
            "rank": slot.rank if split == "ranks" else None,  # all ranks stand in one place
            "ranks": slot.ranks,
        }


def reading(source: Source) -> tuple[Transform, ...]:
    """The transforms that come first: of an index, what reads its sample, in threads too."""
    return (source.data.__getitem__,) if is_indexed(source.data) else ()


def callables_of(size: SizeKey, transforms: Sequence[Transform]) -> Plain:
    """What must be the same for a window's items to become the same samples of the same sizes.

    It is found once, before anything is read: a transform may change itself.
    """
    return {
        "size": callable_fingerprint(size) if callable(size) else repr(size),
        "transforms": callable_fingerprint(tuple(transforms)) if transforms else None,
    }


def grouping_of(
    cost: CostModel | ShouldAdd,
    budget: MemoryBudget | None,
    oversize: Oversize,
    **rules: Any,
) -> tuple[Grouping, Plain]:
    """How windows are cut, and what must be the same for that.

    Args:
        cost: a cost, or a predicate.
        budget: of the device.
        oversize: what becomes of a sample that alone is over the budget.
        rules: of `BatchRules`.

    Raises:
        OptionError: an option is invalid, or does not go with a predicate.
        BudgetError: there is a cost, and the budget does not limit the device.
    """
    check_oversize(oversize)
    plain: Plain = rules | {
        "oversize": oversize,
        "budget": None if budget is None else budget.device,
        "cost": _cost_fingerprint(cost),
    }
    if not isinstance(cost, type) and isinstance(cost, CostModel):
        if budget is None:
            raise BudgetError("with a cost, the budget must limit the device, got None")
        return ByCost(BatchRules.of(cost, budget, **rules), oversize), plain
    if isinstance(cost, type) or not callable(cost):
        raise OptionError(f"expected a cost model such as PaddedCost, or a predicate, got {cost!r}")
    if rules != {"size_multiple": 1, "max_batch_size": None, "batch_size_multiple": 1}:
        raise OptionError(f"a predicate alone decides what a batch contains; leave out {rules}")
    if plain["budget"] is not None or oversize != "raise":
        raise OptionError(
            "a predicate alone decides what a batch contains, and no batch would be compared with "
            f"the device's bytes: give None as the budget, or MemoryBudget(host=…) for the "
            f"look-ahead, and leave out oversize; got {budget!r}, oversize={oversize!r}"
        )
    return ByPredicate(cost), plain


def _cost_fingerprint(cost: CostModel | ShouldAdd) -> str:
    """That of a predicate, or of a cost on 1 to 4 axes: the sizes are not known yet."""
    if isinstance(cost, type) or not isinstance(cost, CostModel):
        return callable_fingerprint(cost)
    largest = [np.array(_LARGEST), *(np.full(axes, _LARGEST) for axes in range(2, _AXES + 1))]
    return fingerprint(*[cost_fingerprint(cost, one) for one in largest])
