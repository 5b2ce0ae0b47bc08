"""`MemoryBudget`: how many bytes may be used, as stated by the user or as found on the machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction

import torch

from torchbudget.distributed import ranks_on_this_machine
from torchbudget.errors import BudgetError, OptionError
from torchbudget.machine.device import cuda_memory, device_memory, is_cpu
from torchbudget.machine.host import MemoryPool, host_memory, shared_memory
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
    def detect(
        cls,
        device: str | torch.device | None,
        *,
        fraction: float = 0.9,
        ranks_per_machine: int | None = None,
    ) -> MemoryBudget:
        """A part of what this job can use on this machine now.

        *This job* is the calling process and its descendants, such as the workers of a
        `DataLoader`. Every amount is `fraction` of

        - `device`, on a GPU: all of its memory less what other processes use. What this process
          uses already is its own: what torch's allocator has reserved, and its context, libraries
          and buffers of collectives. Compare it with the sum of both (`peak_memory`), which is what
          `nvidia-smi` shows for the process. It is read from NVML; where NVML does not count the
          process, doubtful bytes are its own: see `torchbudget.machine.device`.
        - `device`, on `"cpu"`: the host's bytes.
        - `host`: the least of what the machine and each control group of this process, up to the
          topmost that is visible, have left for the job: the limit, less what others use. Page
          cache that the kernel can reclaim counts as free; files in tmpfs count as used by others
          unless the job has mapped them. The job's own anonymous and shared memory counts as
          usable. Compare it with a peak of the job's memory in which shared pages count once.
        - `shared`: the bytes that are free in `/dev/shm`; None where there is no `/dev/shm`, or it
          has no limit of its own. What is written there counts towards `host` as well.

        The result hardly depends on whether the model is built before or after the call. On
        `"cpu"`, `device` and `host` are one memory, of which a training step and the loading of
        data each need a part: they cannot both be used in full.

        Args:
            device: `"cuda:0"`, `"cuda"` (the current device), `"cpu"`, or None for no limit on it.
            fraction: the part to take, above 0 and at most 1.
            ranks_per_machine: by which the machine's memory is divided, `host`, `shared` and
                `device="cpu"`. A GPU is not divided, as each rank has its own. Default: torchrun's
                `LOCAL_WORLD_SIZE`, 1 for a process that is alone.

        Raises:
            OptionError: `fraction` or `ranks_per_machine` is out of range, or `device` is no such
                device; or this is one of several ranks whose launcher does not say how many share
                the machine, and `ranks_per_machine` is not given.
            MachineError: a reading is missing, or there is no such GPU.
            BudgetError: nothing is left.

        >>> budget = MemoryBudget.detect("cpu", fraction=0.5)
        >>> budget.device == budget.host
        True
        """
        share = exact(fraction)
        if share is None or not 0 < share <= 1:
            raise OptionError(f"fraction must be above 0 and at most 1, got {fraction!r}")
        rank_share = share / ranks_on_this_machine(ranks_per_machine)
        on_host = device is not None and is_cpu(device)
        gpu = None if device is None or on_host else cuda_memory(device)
        host_bytes = _part(min(host_memory(), key=lambda pool: pool.usable_bytes), rank_share)
        shm = shared_memory()
        return cls(
            device=host_bytes if on_host else None if gpu is None else _part(gpu, share),
            host=host_bytes,
            shared=None if shm is None else _part(shm, rank_share),
        )

    def __str__(self) -> str:
        amounts = asdict(self).items()
        return ", ".join(
            f"{name} {format_bytes(amount)}" for name, amount in amounts if amount is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimit:
    """The limit that `limit_device_memory` has set; as text, the devices with and without one.

    Attributes:
        device: its name.
        budget_bytes: what this process may use of it; None: nothing was stated.
        reserved_bytes: what torch's allocator may reserve; None: it is not limited.
        outside_bytes: what this process uses outside the allocator now, which is not limited.
    """

    device: str
    budget_bytes: int | None
    reserved_bytes: int | None = None
    outside_bytes: int = 0

    def __str__(self) -> str:
        if self.reserved_bytes is None or self.budget_bytes is None:
            return f"{self.device}: not limited, since torch's allocator has no limit there"
        return (
            f"{self.device}: torch's allocator may reserve {format_bytes(self.reserved_bytes)}, "
            f"which with {format_bytes(self.outside_bytes)} outside it is the budget of "
            f"{format_bytes(self.budget_bytes)}; what libraries and collectives allocate by "
            "themselves later on is not limited"
        )


def limit_device_memory(
    budget: MemoryBudget | Amount, device: torch.device | str | None = None
) -> DeviceLimit:
    """Make a budget a hard limit of torch's allocator on a GPU, for the rest of the process.

    The allocator may then reserve what the budget leaves beside what this process uses outside it:
    the CUDA context, libraries, buffers of collectives. Beyond that it returns its free blocks to
    the device and, if that does not suffice, raises `torch.OutOfMemoryError`. It cannot limit what
    is allocated outside it later on: call it once the model has run, and collectives are set up, or
    call it again. A later call replaces the limit.

    On a CPU nothing is limited, and the result says so: the same script runs on both.

    Args:
        budget: of which the device's bytes count.
        device: `"cuda:0"`, `"cpu"` or the like; None: the current CUDA device if there is any.

    Returns:
        What is limited; print it.

    Raises:
        BudgetError: the budget does not state the device's bytes, or the process uses them up
            outside the allocator.
        OptionError: the device is neither a CPU nor a CUDA device.
        MachineError: there is no such device.

    >>> print(limit_device_memory("8GiB", "cpu"))
    cpu: not limited, since torch's allocator has no limit there
    """
    budget_bytes = MemoryBudget.of(budget).device
    if budget_bytes is None:
        raise BudgetError("the budget does not state the device's bytes, which are to be limited")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if is_cpu(device):
        return DeviceLimit(device="cpu", budget_bytes=budget_bytes)
    memory = device_memory(device)
    name = f"cuda:{memory.source.index}"
    room_bytes = memory.limit(budget_bytes)
    outside_bytes = memory.outside_bytes(memory.source.figures())
    if not room_bytes:
        raise BudgetError(
            f"{name}: this process uses {format_bytes(outside_bytes)} outside torch's allocator, "
            f"which leaves nothing of a budget of {format_bytes(budget_bytes)}"
        )
    return DeviceLimit(
        device=name,
        budget_bytes=budget_bytes,
        reserved_bytes=room_bytes,
        outside_bytes=outside_bytes,
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
