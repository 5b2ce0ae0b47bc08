"""`StreamOptions`: what a stream reads and how it cuts it, the same in all its processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.budget import MemoryBudget
from torchbudget.cost.protocol import CostModel
from torchbudget.data.sizes import SizeKey
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.data.stream.source import Source
from torchbudget.data.stream.transforms import Transform
from torchbudget.distributed import AskedRanks
from torchbudget.errors import OptionError
from torchbudget.plan.fingerprint import Plain
from torchbudget.plan.oversize import Oversize
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import default_window
from torchbudget.plan.step import ShouldAdd

_SHARE: Final = 4  # a quarter of the host's bytes is for the look-ahead, or else of the device's
# The least default. Audio of 350 KB a sample, under a budget of 64 MiB: 285 MiB before the first
# batch and 1.8 % padding, instead of 1,605 MiB and 0.5 % without a limit; with 64 MiB 5.1 %.
_LEAST_AHEAD: Final = 2**28


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamOptions:
    """The checked arguments of a `BudgetedIterableDataset`, which describes them.

    Attributes:
        rules: rules of a micro-batch; `None` with a predicate.
        stated: what is known of the cost and the rules before sizes are.
        given_window: the argument `window`; `None`: see `window`.
        given_look_ahead: the argument `look_ahead`; `None`: see `look_ahead_of`.
        transforms: those of the source, then the user's.
        skips_failed: samples that fail are left out.
        ranks: the number of ranks, and this one's.
    """

    source: Source
    cost: CostModel | ShouldAdd
    budget: MemoryBudget | None
    rules: BatchRules | None
    stated: Plain
    size: SizeKey
    group: Callable[[Any], Hashable] | None
    transforms: Sequence[Transform]
    threads: int
    given_window: int | None
    given_look_ahead: int | None
    oversize: Oversize
    drop_last: bool
    skips_failed: bool
    batches_per_epoch: int | None
    uneven: bool
    collate_fn: Callable[[list[Any]], Any]
    ranks: AskedRanks

    def __post_init__(self) -> None:
        if self.group is not None and (self.rules is None or not callable(self.group)):
            raise OptionError(
                "group must be a function of a sample that returns its label, and goes together "
                f"with a cost, not with a predicate; got {self.group!r}"
            )
        self.check_ranks_fit()

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return self.ranks.now()[0]

    @property
    def window_ranks(self) -> int:
        """Number of ranks that share each window."""
        return 1 if self.source.split == "ranks" else self.num_replicas

    @property
    def window(self) -> int:
        """Items that are read, sorted and cut together."""
        return self.given_window or default_window(self.window_ranks)

    @property
    def sized(self) -> bool:
        """True if sizes are taken."""
        return self.rules is not None or self.size is not None

    def look_ahead_of(self, slot: WorkerSlot) -> int | None:
        """Bytes of the look-ahead of one process; `None`: no limit."""
        host: int | None = getattr(self.budget, "host", None)
        device: int = getattr(self.budget, "device", None) or 0
        if self.given_look_ahead is not None or (host is None and self.given_window is not None):
            return self.given_look_ahead
        if host is not None:
            return max(host // _SHARE // slot.workers, 1)
        return self.window_ranks * max(device // _SHARE, _LEAST_AHEAD)

    def groups_of(self, samples: list[Any]) -> npt.NDArray[np.int64] | None:
        """The number of each sample's group, shape `(S,)`, in the order of their appearance."""
        if self.group is None:
            return None
        numbers: dict[Hashable, int] = {}
        return np.array([numbers.setdefault(self.group(one), len(numbers)) for one in samples])

    def slot(self, worker: int = 0, workers: int = 1) -> WorkerSlot:
        """One of the processes that share the source on this rank."""
        ranks, rank = self.ranks.now()
        return WorkerSlot(worker=worker, workers=workers, rank=rank, ranks=ranks)

    def dealing(self, slot: WorkerSlot) -> Plain:
        """The options that must be the same for samples to be read and planned the same way."""
        source, size = self.source, None if callable(self.size) else repr(self.size)
        return {
            **self.stated,
            **asdict(slot),
            "rank": slot.rank if source.split == "ranks" else None,  # else all stand in one place
            "oversize": self.oversize,
            "size": size,
            "drop_last": self.drop_last,
            "skip_failed": self.skips_failed,
            "split": source.split,
            "shuffle": source.shuffle,
            "seed": source.seed,
            "window": self.window,
            "sized": self.sized,
            "look_ahead": self.look_ahead_of(slot),
            "batches_per_epoch": self.batches_per_epoch,
        }

    def check_ranks_fit(self) -> None:
        """Raise an `OptionError` if the options do not go with the number of ranks."""
        ranks, known = self.window_ranks, self.uneven or self.batches_per_epoch is not None
        if ranks < self.num_replicas and not known:
            raise OptionError(
                f"each of {self.num_replicas} ranks reads its own part, so their numbers of "
                "batches differ, and the longest would wait forever: pass batches_per_epoch=…; or "
                "uneven=True, and end the loop with stop_together(loader)"
            )
        if self.window < ranks:
            raise OptionError(f"window must be at least the {ranks} ranks, got {self.window}")
        if self.skips_failed and ranks > 1:
            raise OptionError(
                f"on_error='skip' cannot be used with {ranks} ranks that plan from one source: a "
                "sample that fails on one of them alone would be lost or repeated. Drop such "
                "samples in a transform (transforms.keep_if), the same on all ranks; or pass a "
                "function (shard, num_shards) as the source, which gives each rank its own part"
            )
