"""`BudgetedIterableDataset`: micro-batches that fit the budget, of data without an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, check_flags, natural, optional
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.callables import callable_fingerprint
from torchbudget.data.collate.fields import sized_by
from torchbudget.data.collate.pad_collate import PadCollate
from torchbudget.data.frameworks import Caller
from torchbudget.data.sizes.key import SizeKey, field_of
from torchbudget.data.stream.resumable import ResumableStream
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.slot import Split
from torchbudget.data.stream.source_of import source_of
from torchbudget.data.stream.transforms import Transform
from torchbudget.distributed import AskedRanks
from torchbudget.errors import BudgetError, OptionError
from torchbudget.plan.fingerprint import Plain, cost_fingerprint, fingerprint
from torchbudget.plan.grouping import ByCost, ByPredicate, Grouping
from torchbudget.plan.oversize import Oversize, check_oversize
from torchbudget.plan.rules import BatchRules
from torchbudget.units import parse_bytes

# Up to where the fingerprint of a cost asks it, on 1 to 4 axes: sizes are not known yet.
_LARGEST: Final[Sequence[Any]] = (2**16, *([2**16] * axes for axes in (2, 3, 4)))

ShouldAdd: TypeAlias = Callable[[list[Any], Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSamples:
    """Samples that are in no micro-batch, over all workers of this rank, since `set_epoch`.

    Attributes:
        oversize: alone over the budget, with `oversize="skip"`.
        failed: their transform or size raised, with `on_error="skip"`.
    """

    oversize: int
    failed: int


class BudgetedIterableDataset(ResumableStream):
    """Batches of a stream of ragged samples that fit a budget of bytes and fill it.

    Windows of consecutive samples are read, sorted by size and cut into micro-batches, each the
    longest run whose predicted cost is within the budget. The stream yields whole batches: pass it
    to a `DataLoader` with `batch_size=None`, and any number of workers.

    Every sample comes exactly once an epoch, over all ranks and workers, and every rank has the
    same number of batches. `split` names how the processes share the source:

    - `"none"`: all workers of all ranks read the whole source. The windows go to the workers in
      turn, and the micro-batches of a window are dealt to the ranks. A worker transforms the
      samples of its own windows only. The default for an iterable, and for a map-style data set,
      which is shuffled as a whole, and of which each worker reads its own samples only.
    - `"workers"`: each worker reads its own part, the same on every rank, and the micro-batches of
      its windows are dealt to the ranks. The default for a list of shards, and for a source that
      splits itself by worker (a streaming `datasets` dataset).
    - `"ranks"`: each worker of each rank reads its own part. The number of batches per rank is
      unknown in advance: with several ranks, give `batches_per_epoch`, or `uneven=True` if the loop
      ends all ranks together, by `stop_together` or by `GradAccumulator.flush`. The default for a
      function, a webdataset pipeline, a Ray Data iterator, and a `datasets` dataset split by node.

    Args:
        source: an iterable that can be iterated again (an `IterableDataset`, a file reader); a
            map-style data set whose sizes are unknown until its samples are read; a function
            `(shard, num_shards)` that returns an iterator; or a list of shards, each an iterable or
            a function without arguments that returns one.
        cost: bytes of a micro-batch, such as `PaddedCost`; or a predicate
            `should_add(batch, sample)`, of a list of at least one sample and the next one.
        budget: a `MemoryBudget`, or the device's bytes; with a predicate `None`, or the
            host's bytes alone.
        size: what makes a sample ragged: a field, several, or a function of the sample, as in
            `sizes_of`. With a predicate, what windows are sorted by, if it is given.
        transforms: of each sample, before its size is taken: see `torchbudget.transforms`.
        threads: that apply the transforms in each worker; 0: the worker itself does.
        window: samples that are read, sorted and cut together, over all ranks that share them.
            Default: 4,096 for each of them. A larger one pads less.
        look_ahead: bytes of the samples that wait for their micro-batch in a worker; a window of
            more is cut in parts. Not counted: the sample that overflowed, two per thread, items
            that are read together (a 32nd of it), one prefetched per rank and, with several
            ranks, the last micro-batch. Default: a quarter of
            the budget's `host`, divided among the workers; without one, no limit.
        shuffle: shards, and the micro-batches of a window. Otherwise they come longest first.
        seed: of all randomness, which is a function of (seed, epoch, shard, place within it).
        drop_last: drop the last micro-batch that could still have taken a sample, in each part.
        batches_per_epoch: batches on each rank; a source that ends earlier starts over.
        uneven: ranks may have unequal numbers of batches.
        collate_fn: makes a batch of a list of samples. Default: `PadCollate` with the same
            `size_multiple`. The batches of `PadCollate` and `PackCollate` report the lengths of the
            field that `size` names, unless their `length_field` names another. One of another
            library that rounds padded sizes up needs the same `size_multiple`.
        max_batch_size: as in `MemoryBudgetBatchSampler`.
        batch_size_multiple: likewise.
        size_multiple: likewise.
        oversize: what becomes of a sample that alone is over the budget: `"raise"`, `"skip"`
            (counted in `skipped_samples`, logged) or `"alone"`.
        on_error: what becomes of a sample whose transform or size raises: `"raise"` an error that
            names it, or `"skip"` it (counted, logged once). A source that raises ends the epoch.
        split: how the processes share the source; see above.
        num_replicas: ranks. Default: those of `torch.distributed`, asked whenever they are needed,
            where it is initialized, else 1. A worker takes what its parent saw.
        rank: of this process.

    Raises:
        OptionError: an option, or a pair of options, that cannot hold.
        BudgetError: the budget does not limit the device, or not the host where it must.

    While it is iterated:

    Raises:
        SampleError: a sample cannot be read or transformed.
        SizesError: a sample has no size, or sizes are of another axis than the ragged one, as in
            `sizes_of`.
        CostError: a cost that is no vectorised one, or whose capacity does not fit the budget; at
            the first window.
        OversizeError: a sample alone is over the budget and `oversize="raise"`.
        UnevenRanksError: the remaining samples cannot be dealt evenly to the ranks.

    After an epoch's last batch the stream goes on to the next epoch by itself; `set_epoch` chooses
    one. Both reach persistent workers, too.

    Attributes:
        cost: that batches are planned by.
        size_multiple: `PadCollate(size_multiple=stream)` reads it.

    >>> texts = [["a", "bcd", "ef"], ["ghijk"]]  # two shards
    >>> stream = BudgetedIterableDataset(
    ...     texts, PaddedCost(unit_bytes=1), 6, size=len, collate_fn=list, shuffle=False)
    >>> list(stream)
    [['ghijk'], ['bcd', 'ef'], ['a']]
    """

    def __init__(
        self,
        source: Any,
        cost: CostModel | ShouldAdd,
        budget: MemoryBudget | int | str | None,
        *,
        size: SizeKey = None,
        transforms: Sequence[Transform] = (),
        threads: int = 0,
        window: int | None = None,
        look_ahead: int | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batches_per_epoch: int | None = None,
        uneven: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_batch_size: int | None = None,
        batch_size_multiple: int = 1,
        size_multiple: int = 1,
        oversize: Oversize = "raise",
        on_error: str = "raise",
        split: Split | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_flags(shuffle=shuffle, drop_last=drop_last, uneven=uneven)
        asked = AskedRanks(num_replicas, rank)
        self.budget = None if budget is None else MemoryBudget.of(budget)
        if on_error not in ("raise", "skip"):
            raise OptionError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.cost = cost
        self.size_multiple = at_least_one("size_multiple", size_multiple)
        rules: Plain = {
            "max_batch_size": optional("max_batch_size", max_batch_size),
            "batch_size_multiple": at_least_one("batch_size_multiple", batch_size_multiple),
            "size_multiple": self.size_multiple,
        }
        grouping = _grouping_of(cost, self.budget, oversize, rules)
        # Found once, before anything is read: a transform may change itself.
        rules |= {
            "budget": getattr(self.budget, "device", None),
            "cost": _fingerprint_of(cost),
            "oversize": oversize,
            "size": callable_fingerprint(size) if callable(size) else repr(size),
            "transforms": callable_fingerprint(tuple(transforms)) if transforms else None,
            "drop_last": drop_last,
            "on_error": on_error,
        }
        checked = source_of(source, split, shuffle=shuffle, seed=natural("seed", seed))
        collate = collate_fn or PadCollate(size_multiple=self.size_multiple)
        settings = Settings(
            source=checked,
            transforms=(*checked.first_transforms, *transforms),
            threads=natural("threads", threads),
            grouping=grouping,
            size=size,
            look_ahead=None if look_ahead is None else parse_bytes(look_ahead),
            host_bytes=getattr(self.budget, "host", None) if look_ahead is None else None,
            given_window=optional("window", window),
            num_replicas=asked.now()[0],
            uneven=uneven,
            drop_last=drop_last,
            skip_failed=on_error == "skip",
            batches_per_epoch=optional("batches_per_epoch", batches_per_epoch),
            collate_fn=sized_by(collate, field_of(size)),
            size_multiple=self.size_multiple,
            rules=rules,
        )
        super().__init__(settings, asked)

    def __len__(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: it is known with `batches_per_epoch` only.
            StateError: a framework reads it that goes on from a checkpoint without a position.
        """
        Caller.find().check_not_resumed()
        batches = self._settings.batches_per_epoch
        if batches is None:
            raise TypeError("the length of a stream is known with batches_per_epoch only")
        return batches

    @property
    def skipped_samples(self) -> SkippedSamples:
        """How many samples were skipped."""
        oversize, failed = self._progress.skipped()
        return SkippedSamples(oversize=oversize, failed=failed)


def _grouping_of(
    cost: CostModel | ShouldAdd, budget: MemoryBudget | None, oversize: Oversize, options: Plain
) -> Grouping:
    """How windows are cut.

    Args:
        cost: a cost, or a predicate.
        budget: of the device.
        oversize: what becomes of a sample that alone is over the budget.
        options: of `BatchRules`.

    Raises:
        OptionError: an option is invalid, or does not go with a predicate.
        BudgetError: there is a cost, and the budget does not limit the device.
    """
    check_oversize(oversize)
    if isinstance(cost, type) or not (isinstance(cost, CostModel) or callable(cost)):
        raise OptionError(f"expected a cost model such as PaddedCost, or a predicate, got {cost!r}")
    if isinstance(cost, CostModel):
        if budget is None:
            raise BudgetError("with a cost, the budget must limit the device, got None")
        return ByCost(BatchRules.of(cost, budget, **options), oversize)
    shapes = options != {"max_batch_size": None, "batch_size_multiple": 1, "size_multiple": 1}
    if shapes or oversize != "raise" or getattr(budget, "device", None) is not None:
        raise OptionError(
            "a predicate alone decides what a batch contains: give None as the budget, or "
            "MemoryBudget(host=…) for the look-ahead, and leave out oversize and what shapes "
            f"batches otherwise, got {options}, {budget!r}, oversize={oversize!r}"
        )
    return ByPredicate(cost)


def _fingerprint_of(cost: CostModel | ShouldAdd) -> str:
    if not isinstance(cost, CostModel):
        return callable_fingerprint(cost)
    return fingerprint(*(cost_fingerprint(cost, largest) for largest in _LARGEST))
