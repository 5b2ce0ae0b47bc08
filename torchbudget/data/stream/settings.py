"""The options of a stream, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from torchbudget.data.sizes.key import SizeKey, check_key
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.data.stream.source import Source
from torchbudget.data.stream.transforms import Transform
from torchbudget.errors import OptionError
from torchbudget.plan.fingerprint import Plain
from torchbudget.plan.grouping import ByCost, Grouping
from torchbudget.plan.solver import default_window

_HOST_SHARE: Final = 4  # a quarter of the host's bytes is for samples that wait


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
        host_bytes: of the budget, that limit them instead; `None`: no limit.
        given_window: items that are read, sorted and cut together; `None`: as many as by default.
        num_replicas: number of ranks.
        uneven: they may have unequal numbers of batches.
        drop_last: drop the last micro-batch of a pass if it is incomplete.
        skip_failed: skip samples that raise.
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
    skip_failed: bool
    batches_per_epoch: int | None
    collate_fn: Callable[[list[Any]], Any]
    size_multiple: int
    rules: Plain

    def __post_init__(self) -> None:
        check_key(self.size)
        ranks, known = self.ranks, self.uneven or self.batches_per_epoch is not None
        if ranks < self.num_replicas and not known:
            raise OptionError(
                f"each of {self.num_replicas} ranks reads its own part, so their numbers of "
                "batches differ, and a rank would wait for the others forever: give "
                "batches_per_epoch=…; or uneven=True, and end the loop with stop_together(loader)"
            )
        if self.window < ranks:
            raise OptionError(f"window={self.window} is below the number of ranks, {ranks}")
        if self.skip_failed and ranks > 1:
            raise OptionError(
                f"on_error='skip' with {ranks} ranks that plan from one source: what fails on one "
                "of them alone would be lost or come twice; use split='ranks', or drop such "
                "samples in a transform that fails alike everywhere"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks that share each window."""
        return 1 if self.source.split == "ranks" else self.num_replicas

    @property
    def window(self) -> int:
        """Items that are read, sorted and cut together."""
        return self.given_window or default_window(self.ranks)

    @property
    def sized(self) -> bool:
        """True if sizes are taken."""
        return isinstance(self.grouping, ByCost) or self.size is not None

    @property
    def order(self) -> Plain:
        """The options that must be the same for positions to mean the same samples."""
        source = self.source
        read: Plain = {"split": source.split, "shuffle": source.shuffle, "seed": source.seed}
        number = self.batches_per_epoch
        return read | {"window": self.window, "sized": self.sized, "batches_per_epoch": number}

    @property
    def shared(self) -> Plain:
        """The options that must be the same on all ranks that plan from one source."""
        waiting: Plain = {"look_ahead": self.look_ahead, "budget.host": self.host_bytes}
        return self.order | self.rules | waiting

    def for_ranks(self, num_replicas: int, *, begun: bool, loaded: bool) -> Settings:
        """Return the same options for the ranks that there are now.

        Args:
            num_replicas: number of ranks.
            begun: an iteration has begun on those of before.
            loaded: a state was loaded under them.

        Raises:
            OptionError: there are others, so that the position means other samples; or an option
                does not go with them.
        """
        if num_replicas == self.num_replicas:
            return self
        settings = replace(self, num_replicas=num_replicas)
        if begun or (loaded and settings.order != self.order):
            raise OptionError(
                "a state was loaded or a loop over this stream began on num_replicas="
                f"{self.num_replicas}, and torch.distributed has {num_replicas} ranks now, which "
                f"take other samples (window={self.window}, now {settings.window}): start it "
                "before, or choose another epoch by set_epoch() after it"
            )
        return settings

    def look_ahead_of(self, slot: WorkerSlot) -> int | None:
        """Bytes of the samples that wait in one process; `None`: no limit."""
        if self.host_bytes is None:
            return self.look_ahead
        return max(self.host_bytes // _HOST_SHARE // slot.workers, 1)

    def dealing(self, slot: WorkerSlot) -> Plain:
        """The options that must be the same for samples to be cut and dealt the same way."""
        split = self.source.split
        place: Plain = asdict(slot)
        if split != "ranks":
            place["rank"] = None  # all ranks stand in one place
        return self.rules | place | {"split": split, "look_ahead": self.look_ahead_of(slot)}
