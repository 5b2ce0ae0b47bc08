"""The options of a stream, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, check_flags, natural, optional
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.collate.pad_collate import PadCollate
from torchbudget.data.sizes.key import SizeKey, check_key
from torchbudget.data.stream.source import Source, Split, is_indexed
from torchbudget.data.stream.transforms import Transform
from torchbudget.errors import BudgetError, OptionError
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.fingerprint import cost_fingerprint, fingerprint
from torchbudget.plan.grouping import ByCost, ByPredicate, Grouping
from torchbudget.plan.oversize import Oversize, check_oversize
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import default_window

_LARGEST: Final = 2**16  # the largest size at which the fingerprint of a cost asks it
_AXES: Final = 4

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
        sized: whether sizes are taken.
        window: items that are read, sorted and cut together.
        size_multiple: padded sizes are rounded up to a multiple of it.
        shuffle: shards, and the micro-batches of a window.
        seed: of all randomness.
        drop_last: drop the last micro-batch of a pass if it is incomplete.
        skip_failed: skip samples that raise.
        batches_per_epoch: on each rank; `None`: as many as one pass yields.
        collate_fn: makes a batch of a list of samples.
        identity: what a state must agree with.
    """

    source: Source
    transforms: tuple[Transform, ...]
    threads: int
    grouping: Grouping
    size: SizeKey
    sized: bool
    window: int
    size_multiple: int
    shuffle: bool
    seed: int
    drop_last: bool
    skip_failed: bool
    batches_per_epoch: int | None
    collate_fn: Callable[[list[Any]], Any]
    identity: dict[str, Any]


def make_settings(
    source: Any,
    cost: CostModel | ShouldAdd,
    budget: MemoryBudget | None,
    *,
    size: SizeKey,
    transforms: Sequence[Transform],
    threads: int,
    window: int | None,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    batches_per_epoch: int | None,
    uneven: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    max_batch_size: int | None,
    batch_size_multiple: int,
    size_multiple: int,
    oversize: Oversize,
    on_error: str,
    split: Split | None,
    num_replicas: int,
) -> Settings:
    """Check the options of `BudgetedIterableDataset`; see there.

    Raises:
        OptionError: an option, or a pair of options, that cannot hold.
        BudgetError: there is a cost, and the budget does not limit the device.
    """
    check_flags(shuffle=shuffle, drop_last=drop_last, uneven=uneven)
    check_oversize(oversize)
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    check_key(size)
    checked = Source.of(source, split, shuffle=shuffle, seed=natural("seed", seed))
    known = batches_per_epoch is not None or uneven
    ranks = _sharing_ranks(checked.split, num_replicas, known=known)
    options: dict[str, Any] = {
        "window": _checked_window(window, ranks),
        "seed": checked.seed,
        "shuffle": shuffle,
        "sized": isinstance(cost, CostModel) or size is not None,
        "drop_last": drop_last,
        "batches_per_epoch": optional("batches_per_epoch", batches_per_epoch),
    }
    rules = _checked_rules(size_multiple, max_batch_size, batch_size_multiple)
    if is_indexed(source):
        transforms = (source.__getitem__, *transforms)  # reading, in threads too
    return Settings(
        source=checked,
        transforms=tuple(transforms),
        threads=natural("threads", threads),
        grouping=_grouping(cost, budget, rules, oversize, Ranks(number=ranks)),
        size=size,
        size_multiple=size_multiple,
        skip_failed=on_error == "skip",
        collate_fn=PadCollate(size_multiple=size_multiple) if collate_fn is None else collate_fn,
        identity=options
        | rules
        | {"split": checked.split, "oversize": oversize, "on_error": on_error}
        | _cost_identity(cost, budget),
        **options,
    )


def _sharing_ranks(split: Split, num_replicas: int, *, known: bool) -> int:
    """How many ranks share a window; `known`: their numbers of batches may differ, or are set."""
    if split != "ranks":
        return num_replicas
    if num_replicas > 1 and not known:
        raise OptionError(
            f"each of {num_replicas} ranks reads its own part, so their numbers of batches differ, "
            "and a rank would wait for the others forever: give batches_per_epoch=…; or "
            "uneven=True, and end the loop with stop_together(loader)"
        )
    return 1


def _checked_window(window: int | None, ranks: int) -> int:
    window = optional("window", window) or default_window(ranks)
    if window < ranks:
        raise OptionError(f"window={window} is below the number of ranks, {ranks}")
    return window


def _checked_rules(
    size_multiple: int, max_batch_size: int | None, batch_size_multiple: int
) -> dict[str, Any]:
    return {
        "size_multiple": at_least_one("size_multiple", size_multiple),
        "max_batch_size": optional("max_batch_size", max_batch_size),
        "batch_size_multiple": at_least_one("batch_size_multiple", batch_size_multiple),
    }


def _grouping(
    cost: CostModel | ShouldAdd,
    budget: MemoryBudget | None,
    rules: dict[str, Any],
    oversize: Oversize,
    ranks: Ranks,
) -> Grouping:
    if not isinstance(cost, type) and isinstance(cost, CostModel):
        if budget is None:
            raise BudgetError("with a cost, the budget must limit the device, got None")
        return ByCost(BatchRules.of(cost, budget, **rules), oversize, ranks)
    if isinstance(cost, type) or not callable(cost):
        raise OptionError(f"expected a cost model such as PaddedCost, or a predicate, got {cost!r}")
    if rules != {"size_multiple": 1, "max_batch_size": None, "batch_size_multiple": 1}:
        raise OptionError(f"a predicate alone decides what a batch contains; leave out {rules}")
    return ByPredicate(cost, ranks)


def _cost_identity(cost: CostModel | ShouldAdd, budget: MemoryBudget | None) -> dict[str, Any]:
    """The fingerprint of a cost on 1 to 4 axes: the sizes of a stream are not known yet."""
    found = "a predicate"
    if isinstance(cost, CostModel):
        largest = [np.array(_LARGEST), *(np.full(axes, _LARGEST) for axes in range(2, _AXES + 1))]
        found = fingerprint(*[cost_fingerprint(cost, one) for one in largest])
    return {"cost": found, "budget": None if budget is None else budget.device}
