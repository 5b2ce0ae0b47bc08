"""`MemoryBudget`: how many bytes may be used, as stated by the user or as found on the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction

import torch

from torchbudget.errors import BudgetError, OptionError
from torchbudget.machine.device import cuda_memory
from torchbudget.machine.host import host_memory, shared_memory
from torchbudget.machine.pools import MemoryPool
from torchbudget.units import Amount, exact, format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class MemoryBudget:
    """Bytes that may be used, at most, at any moment.

    Each amount is what a peak is compared with: it includes what is in use already (parameters,
    optimizer state, loaded data).

    Attributes:
        device: bytes on the device that the training step runs on.
        host: bytes of main memory, over all processes of the job: this one and its workers.
        shared: bytes in `/dev/shm`, through which workers hand over batches.

    Args:
        device: bytes as an int, or text such as `"8GiB"` (see `parse_bytes`); None: not limited.
        host: likewise.
        shared: likewise.

    Raises:
        BudgetError: an amount cannot be read or is zero, or none is given.

    >>> budget = MemoryBudget(device="8GiB", host=2**34)
    >>> budget
    MemoryBudget(device=8589934592, host=17179869184, shared=None)
    >>> print(budget)
    device 8 GiB, host 16 GiB
    """

    device: int | None
    host: int | None
    shared: int | None

    # Written by hand, because it takes more types than the attributes have.
    def __init__(
        self,
        *,
        device: Amount | None = None,
        host: Amount | None = None,
        shared: Amount | None = None,
    ) -> None:
        for name, amount in (("device", device), ("host", host), ("shared", shared)):
            object.__setattr__(self, name, _parse(name, amount))
        if self.device is self.host is self.shared is None:
            raise BudgetError(
                "a budget states at least one of device, host and shared, "
                "for example MemoryBudget(device='8GiB')"
            )

    @classmethod
    def of(cls, value: MemoryBudget | Amount) -> MemoryBudget:
        """A budget as it is, or an amount as the device's bytes.

        Raises:
            BudgetError: `value` is neither a budget nor a readable amount.

        >>> MemoryBudget.of("8GiB") == MemoryBudget(device="8GiB")
        True
        """
        return value if isinstance(value, MemoryBudget) else cls(device=value)

    @classmethod
    def detect(cls, device: str | torch.device | None, *, fraction: float = 0.9) -> MemoryBudget:
        """A part of what this job can use on this machine now.

        *This job* is the calling process and its descendants, such as the workers of a
        `DataLoader`. Every amount is `fraction` of

        - `device`, on a GPU: all of its memory less what is used now, except that what the caching
          allocator of this process has reserved is the job's own and counts as usable. Other
          processes' memory and this process's CUDA context do not. Compare it with a peak of
          reserved bytes (`torch.cuda.max_memory_reserved`).
        - `device`, on `"cpu"`: the host's bytes.
        - `host`: the least of what the machine and each control group of this process, up to the
          topmost that is visible, have left for the job: the limit, less what others use. Page
          cache that the kernel can reclaim counts as free; files in tmpfs count as used by others
          unless the job has mapped them. The job's own anonymous and shared memory counts as
          usable. Compare it with a peak of the job's memory in which shared pages count once.
        - `shared`: the bytes that are free in `/dev/shm`; None where there is no `/dev/shm`, or it
          has no limit of its own. What is written there counts towards `host` as well.

        The result hardly depends on whether the model is built before or after the call. Two
        amounts may be the same memory, and cannot both be used in full: on `"cpu"`, `device` and
        `host` are one memory, of which a training step and the loading of data each need a part;
        and several ranks on one machine each find all of it, so give each its part:
        `fraction=0.9 / ranks_per_machine`.

        Args:
            device: `"cuda:0"`, `"cuda"` (the current device), `"cpu"`, or None for no limit on it.
            fraction: the part to take, above 0 and at most 1.

        Raises:
            OptionError: `fraction` is out of range, or `device` is no such device.
            MachineError: a reading is missing, or there is no such GPU.
            BudgetError: nothing is left.

        >>> budget = MemoryBudget.detect("cpu", fraction=0.5)
        >>> budget.device == budget.host
        True
        """
        share = exact(fraction)
        if share is None or not 0 < share <= 1:
            raise OptionError(f"fraction must be above 0 and at most 1, got {fraction!r}")

        on_host = device is not None and str(device) in {"cpu", "cpu:0"}
        gpu = None if device is None or on_host else cuda_memory(device)
        host_bytes = _part(min(host_memory(), key=lambda pool: pool.usable_bytes), share)
        shm = shared_memory()
        return cls(
            device=host_bytes if on_host else None if gpu is None else _part(gpu, share),
            host=host_bytes,
            shared=None if shm is None else _part(shm, share),
        )

    def __str__(self) -> str:
        amounts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(
            f"{name} {format_bytes(amount)}" for name, amount in amounts if amount is not None
        )


def _parse(name: str, amount: Amount | None) -> int | None:
    """The amount called `name` in bytes, more than zero."""
    if amount is None:
        return None
    try:
        num_bytes = parse_bytes(amount)
    except BudgetError as error:
        raise BudgetError(f"{name}: {error}") from None
    if num_bytes == 0:
        raise BudgetError(f"{name}: {amount!r} holds nothing; leave it out, or None, for no limit")
    return num_bytes


def _part(pool: MemoryPool, share: Fraction) -> int:
    """`share` of what this job can use of `pool`, in bytes."""
    part_bytes = math.floor(pool.usable_bytes * share)
    if part_bytes == 0:
        raise BudgetError(
            f"nothing is left of {pool.name}: others use {format_bytes(pool.used_bytes)} of its "
            f"{format_bytes(pool.limit_bytes)}; free some, or state the budget's bytes"
        )
    return part_bytes
