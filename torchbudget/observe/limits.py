"""What a job's memory is limited by, and what to change where it comes near one of its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from torchbudget.budget import MemoryBudget
from torchbudget.machine.pools import MemoryPool
from torchbudget.observe.sample import MemorySample
from torchbudget.units import format_bytes

_LOADING: Final = (
    "start fewer workers, or lower prefetch_factor: each worker has as many batches under way"
)
_ADVICE: Final = {
    "host": _LOADING,
    "shared": f"{_LOADING}; or mount a larger /dev/shm (docker run --shm-size)",
    "device": "lower the sampler's budget, or call its replan() after steps were observed, as "
    "MemoryMonitor(…, replan=sampler) does",
    "cgroup": f"the kernel kills a process of this group when it is full: {_LOADING}, or lower the "
    "sampler's budget where training runs on the CPU",
    "machine": f"the kernel kills a process when memory is full: {_LOADING}, or leave more to the "
    "other jobs on this machine",
}
_WHAT: Final = {
    "host": "this job's memory (budget.host)",
    "shared": "/dev/shm",
    "device": "the device's memory (budget.device)",
    "cgroup": "the memory of this control group",
    "machine": "the machine's memory",
}
# A limit counts as left again when use has fallen this far below the share that is warned at.
_HYSTERESIS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """One of a job's limits, and what is used of it; as text, what to change.

    Attributes:
        name: `"host"`, `"device"` or `"shared"`, as in a `MemoryBudget` (`"shared"` also without
            one, or with a larger one, by the size of `/dev/shm`); `"cgroup"` or `"machine"`.
        used_bytes: of it.
        limit_bytes: that may be used.
    """

    name: str
    used_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        """Used / limit."""
        return self.used_bytes / self.limit_bytes

    def __str__(self) -> str:
        used, limit = format_bytes(self.used_bytes), format_bytes(self.limit_bytes)
        return f"{_WHAT[self.name]}: {used} of {limit} are used; {_ADVICE[self.name]}"


def limits_of(
    sample: MemorySample,
    budget: MemoryBudget | None,
    pools: Mapping[str, MemoryPool],
    *,
    on_cpu: bool,
) -> tuple[MemoryLimit, ...]:
    """The limits that a sample can be compared with.

    Args:
        sample: any.
        budget: the job's.
        pools: of the machine, by their names.
        on_cpu: whether the budget's device is the CPU.
    """
    limits = {name: pool.limit_bytes for name, pool in pools.items()}
    used = {name: getattr(sample, f"{name}_bytes") for name in limits}
    used["host"] = sample.host_bytes
    used["device"] = sample.process_bytes if on_cpu else sample.device_bytes
    if budget is not None:
        for name, amount in asdict(budget).items():
            if amount is not None:  # a budget makes no memory: `/dev/shm` may be smaller
                limits[name] = min(amount, limits.get(name, amount))
    return tuple(
        MemoryLimit(name=name, used_bytes=used[name], limit_bytes=limits[name])
        for name in ("device", "host", "shared", "cgroup", "machine")
        if name in limits and used.get(name) is not None
    )


class LimitWatch:
    """Notices when use comes near a limit.

    Args:
        warn_at: the share of a limit from which on it is near.

    Attributes:
        most: each limit where the largest share of it was used, by its name. A limit may change:
            of several control groups, it is that of the one that has the least left.
    """

    def __init__(self, warn_at: float) -> None:
        self._warn_at = warn_at
        self._near: set[str] = set()
        self.most: dict[str, MemoryLimit] = {}

    def reached(self, limits: Sequence[MemoryLimit]) -> Iterator[MemoryLimit]:
        """Those that have come near since the last call."""
        for limit in limits:
            if limit.share >= self.most.setdefault(limit.name, limit).share:
                self.most[limit.name] = limit
            if limit.share >= self._warn_at:
                if limit.name not in self._near:
                    self._near.add(limit.name)
                    yield limit
            elif limit.share < self._warn_at - _HYSTERESIS:
                self._near.discard(limit.name)
