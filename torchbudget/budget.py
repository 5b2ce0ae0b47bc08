"""`MemoryBudget`: how many bytes may be used, as stated by the user or as found on the machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction

import torch

from torchbudget.distributed import ranks_on_this_machine
from torchbudget.errors import BudgetError, OptionError
from torchbudget.machine.device import device_memory, is_cpu
from torchbudget.machine.host import MemoryPool, host_memory, shared_memory
from torchbudget.units import Amount, exact, format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class MemoryBudget:
    """The most bytes that a job may use at any moment.

    Each amount includes the memory that is in use already: parameters, optimizer state, loaded
    data.

    Attributes:
        device: bytes on the device that the training step runs on.
        host: bytes of main memory, over all processes of the job: this one and its workers.
        shared: bytes in `/dev/shm`, through which workers hand over batches.

    Args:
        device: bytes as an int, or text such as `"8GiB"` (see `parse_bytes`); None: not limited.
        host: the same for main memory.
        shared: the same for `/dev/shm`.

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
                "a budget must state at least one of device, host and shared, for example "
                "MemoryBudget(device='8GiB')"
            )

    @classmethod
    def of(cls, value: MemoryBudget | Amount) -> MemoryBudget:
        """Return a budget as it is, or make one of an amount of the device's bytes.

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
        """Detect the memory that this job can use on this machine now, and take a part of it.

        *This job* is the calling process and its descendants, such as the workers of a
        `DataLoader`. Each amount of the result is `fraction` of these bytes:

        - `device`, on a GPU: all of its memory minus the memory of other processes. So the result
          includes the memory that this process already uses: reserved by torch's allocator, and
          outside it (context, libraries, buffers of collectives). Compare it with the sum of both,
          as `peak_memory` measures it and `nvidia-smi` shows it. The bytes are read from NVML. If
          NVML does not know the process, bytes that may be its own count as its own: see
          `torchbudget.machine.device`.
        - `device`, on `"cpu"`: the same bytes as `host`.
        - `host`: the limit of the machine, or of a control group of this process, minus the memory
          that other jobs use under it; the smallest of these differences. Page cache that the
          kernel can reclaim counts as free. Files in tmpfs count as used by other jobs, unless this
          job has mapped them. Compare the result with a peak of the job's memory that counts shared
          pages once.
        - `shared`: the free bytes of `/dev/shm`; None if there is no `/dev/shm`, or it has no limit
          of its own. Files in `/dev/shm` count towards `host`, too.

        You may build the model before or after the call. On `"cpu"`, `device` and `host` are the
        same memory: the training step and the loading of data share it, and cannot both use all of
        it.

        Args:
            device: `"cuda:0"`, `"cuda"` (the current device), `"cpu"`, or None to leave the device
                out.
            fraction: the part to take, above 0 and at most 1.
            ranks_per_machine: the number of ranks that share the machine's memory (`host`, `shared`
                and `device="cpu"`), by which it is divided. GPUs are not divided, since each rank
                has its own. Default: torchrun's `LOCAL_WORLD_SIZE`; 1 for a single process.

        Raises:
            OptionError: `fraction` or `ranks_per_machine` is out of range; `device` is not a
                device; or there are several ranks, `LOCAL_WORLD_SIZE` is not set, and
                `ranks_per_machine` is not given.
            MachineError: the memory cannot be read, or there is no such GPU.
            BudgetError: no memory is left.

        >>> budget = MemoryBudget.detect("cpu", fraction=0.5)
        >>> budget.device == budget.host
        True
        """
        share = exact(fraction)
        if share is None or not 0 < share <= 1:
            raise OptionError(f"fraction must be above 0 and at most 1, got {fraction!r}")
        rank_share = share / ranks_on_this_machine(ranks_per_machine)
        on_host = device is not None and is_cpu(device)
        gpu = None if device is None or on_host else device_memory(device).pool()
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
        device: name of the device.
        budget_bytes: bytes of the device that this process may use.
        reserved_bytes: bytes that torch's allocator may reserve; None: not limited.
        outside_bytes: bytes that this process uses outside the allocator now; not limited.
    """

    device: str
    budget_bytes: int
    reserved_bytes: int | None = None
    outside_bytes: int = 0

    def __str__(self) -> str:
        if self.reserved_bytes is None:
            return f"{self.device}: not limited: torch's allocator has no limit on this device"
        return (
            f"{self.device}: torch's allocator may reserve {format_bytes(self.reserved_bytes)}: "
            f"the budget of {format_bytes(self.budget_bytes)} less "
            f"{format_bytes(self.outside_bytes)} in use outside it; later allocations of libraries "
            "and collectives are not limited"
        )


def limit_device_memory(
    budget: MemoryBudget | Amount, device: torch.device | str | None = None
) -> DeviceLimit:
    """Make a budget a hard limit of torch's allocator on a GPU, for the rest of the process.

    The allocator may then reserve the budget minus the bytes that this process uses outside the
    allocator: CUDA context, libraries, buffers of collectives. At the limit it returns free blocks
    to the device and, if that does not suffice, raises `torch.OutOfMemoryError`. Bytes that are
    allocated outside later are not limited: call the function after the model has run and
    collectives are set up, or call it again. A later call replaces the limit.

    On a CPU it limits nothing, and the result says so, so the same script runs on both.

    Args:
        budget: its device's bytes are the limit.
        device: `"cuda:0"`, `"cpu"` or the like; None: the current CUDA device, if there is one.

    Returns:
        The limit; print it.

    Raises:
        BudgetError: the budget does not state the device's bytes, or the process uses all of them
            outside the allocator.
        OptionError: the device is neither a CPU nor a CUDA device.
        MachineError: there is no such device.

    >>> print(limit_device_memory("8GiB", "cpu"))
    cpu: not limited: torch's allocator has no limit on this device
    """
    budget_bytes = MemoryBudget.of(budget).device
    if budget_bytes is None:
        raise BudgetError("to limit the device, state its bytes: MemoryBudget(device=…)")
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
            f"which leaves nothing of a budget of {format_bytes(budget_bytes)}; raise it"
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
        raise BudgetError(f"{name} must be above 0 bytes, or None for no limit, got {amount!r}")
    return num_bytes


def _part(pool: MemoryPool, share: Fraction) -> int:
    """`share` of what this job can use of `pool`, in bytes."""
    part_bytes = math.floor(pool.usable_bytes * share)
    if part_bytes == 0:
        raise BudgetError(
            f"no memory is left of {pool.name}: {format_bytes(pool.used_bytes)} of its "
            f"{format_bytes(pool.limit_bytes)} are in use; free some, or state the budget's bytes"
        )
    return part_bytes
