"""The few questions that we ask `torch.distributed`; safe before it is initialised.

And tensors made of tensors: DTensors, of which this rank has a part, wrappers, sparse tensors.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import get_worker_info

from torchbudget.checks import at_least_one, natural
from torchbudget.errors import OptionError, RankError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

# More numbers are gradients, which their parameters keep: see `keep`.
_FEW: Final = 64
# Bytes that a rank sends in one collective: a few of them for many small items, while their copies
# take little memory beside the items.
_PIECE_BYTES: Final = 64 * 2**20
# Layouts of tensors that consist of indices and values, and the methods that return these.
SPARSE: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_distributed() -> bool:
    """Whether this process is one of several that `torch.distributed` has joined."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def ranks_on_this_machine(given: int | None) -> int:
    """How many ranks share this machine: the number that is given, else torchrun's.

    Raises:
        OptionError: it is no such number; or none is given, and this is one of several ranks whose
            launcher does not say it.
    """
    if given is not None:
        return at_least_one("ranks_per_machine", given)
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if said.isdecimal() and int(said):
        return int(said)
    ranks = len(Ranks())
    if ranks > 1:
        raise OptionError(
            f"this is one of {ranks} ranks, and its launcher does not say how many of them share "
            "this machine (torchrun does, in LOCAL_WORLD_SIZE): pass ranks_per_machine="
        )
    return 1


class AskedRanks:
    """The rank of this process and the number of ranks: as given, or by `torch.distributed` now.

    The last answer stays after the process group has ended. A `DataLoader`'s worker has no process
    group: a copy in a worker gives the answer of its parent. Any other copy asks again.

    Args:
        num_replicas: number of ranks; `None`: as many as `torch.distributed` has joined, else 1.
        rank: of this process; `None`: its rank in `torch.distributed`, else 0.

    Raises:
        OptionError: there is no such rank.
    """

    def __init__(self, num_replicas: int | None = None, rank: int | None = None) -> None:
        self._given = num_replicas, rank
        self._parent: tuple[int, int] | None = None
        self._compared: dict[str, Any] = {}  # the process group that compared facts, by their name
        self._seen = self._ask()

    def _ask(self) -> tuple[int, int]:
        joined, (number, rank) = Ranks(), self._given
        number = at_least_one("num_replicas", len(joined) if number is None else number)
        rank = joined.rank if rank is None else rank
        if natural("rank", rank) >= number:
            raise OptionError(f"rank must be below num_replicas={number}, got {rank}")
        return number, rank

    def now(self) -> tuple[int, int]:
        """The number of ranks, and this one's."""
        if self._parent is not None and get_worker_info() is not None:
            self._seen = self._parent
        elif self._parent is not None or is_distributed():
            self._seen = self._ask()
        self._parent = None
        return self._seen

    @property
    def joined(self) -> bool:
        """True for several ranks that are all ranks of the default process group.

        Ranks that were given by hand may be other ranks than those of the group.
        """
        return self._given == (None, None) and self.now()[0] > 1 and is_distributed()

    def have_compared(self, facts: str) -> bool:
        """True once the ranks of this process group compared facts, or if no group joins them."""
        return not self.joined or self._compared.get(facts) is torch.distributed.group.WORLD

    def note_comparison(self, facts: str) -> None:
        """Note that the ranks of the process group have compared facts."""
        self._compared[facts] = torch.distributed.group.WORLD

    def __getstate__(self) -> dict[str, Any]:
        seen = self.now()
        return {"_given": self._given, "_parent": seen, "_compared": {}, "_seen": seen}


_host_groups: dict[Any, Any] = {}  # by the group whose ranks they join


def host_group(group: Any = None) -> Any:
    """A group of the same ranks whose collectives run on the host, over gloo.

    A collective of the group's ranks when it is called first. Made once for each group.

    Args:
        group: of processes; `None`: all.
    """
    distributed = torch.distributed
    group = distributed.group.WORLD if group is None else group
    if distributed.get_backend(group) == "gloo":
        return group
    if group not in _host_groups:
        _host_groups[group] = distributed.new_group(
            distributed.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend="gloo",
            use_local_synchronization=True,
        )
    return _host_groups[group]


def timeout_of(group: Any) -> timedelta:
    """How long the collectives of a group wait: torch's own functions take a default instead."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


_recent: deque[list[torch.Tensor]] = deque(maxlen=8)


def keep(*tensors: torch.Tensor) -> None:
    """Keep the tensors of a coming collective on the host for the next few ones.

    Where gloo's own thread is the last in C++ to let a tensor go, it gives up Python's part of it,
    for which it makes itself a thread state of the interpreter. If the process forks just then, as
    a `DataLoader` does that starts its workers, the child waits for ever: CPython 3.11 takes a lock
    in it that the thread held in the parent (`_PyThreadState_DeleteExcept`). Views refer to their
    tensor in C++, too, unless both were made in inference mode.
    """
    _recent.append([tensor.view(-1) for tensor in tensors])


@torch.inference_mode(False)  # see `keep`
def gathered(value: T, group: Any = None) -> list[T]:
    """The object of each rank of a group, in the order of ranks; a collective.

    Args:
        value: may be pickled.
        group: of processes; `None`: all.
    """
    group = host_group(group)
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = _gathered(torch.tensor([len(mine)]), group)
    most = max(map(int, lengths))
    parts = _gathered(torch.nn.functional.pad(mine, (0, most - len(mine))), group)
    return [
        pickle.loads(part[:size].numpy().tobytes())  # noqa: S301  (of the same job)
        for part, size in zip(parts, map(int, lengths), strict=True)
    ]


def _gathered(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
    number = torch.distributed.get_world_size(group)
    parts = [torch.empty_like(mine) for _ in range(number)]
    keep(mine, *parts)
    torch.distributed.all_gather(parts, mine, group=group)
    return parts


@contextmanager
def failing_together(gather: Callable[[object], list[Any]]) -> Iterator[None]:
    """Code inside succeeds on all ranks, or raises on all of them; one small collective.

    A rank that fails waits here for the others, which are at work still.

    Args:
        gather: returns what each rank has passed, as `gathered`, over a group on the host.

    Raises:
        RankError: it failed on another rank.
    """
    try:
        yield
    except Exception as error:
        gather(f"{type(error).__name__}: {error}")
        raise
    for rank, failure in enumerate(gather(None)):
        if failure is not None:
            raise RankError(f"rank {rank} failed, see its traceback: {failure}")


def largest_of_all_ranks(ranks: int, *values: Any) -> list[Any]:
    """The largest of each value over all ranks of the default group; a collective.

    Args:
        ranks: how many must be joined.
        values: of this rank, comparable and pickled.

    Raises:
        OptionError: the default process group does not join that many.
    """
    if not is_distributed() or torch.distributed.get_world_size() != ranks:
        raise OptionError(
            f"the {ranks} ranks must agree on a margin, but no process group joins them"
        )
    return [max(column) for column in zip(*gathered(values), strict=True)]


def gathered_of_all(value: T) -> list[T]:
    """Return the value of each rank of the default group, once all have come; a collective.

    Raises:
        RankError: one did not come within the group's timeout; torch's message names it.
    """
    try:
        group = host_group()
        torch.distributed.monitored_barrier(group, timeout_of(group), wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(
            "not all ranks have started to read: each must loop over the same sampler or stream. "
            f"To read on one rank alone, pass num_replicas=1, rank=0. {error}"
        ) from error
    return gathered(value)


class Ranks:
    """The ranks that share a step; a single one where `torch.distributed` is not initialized.

    Args:
        group: of processes. Default: that of all, where `torch.distributed` is initialized.
        alone: this process is the only one, whatever `torch.distributed` has joined.

    Attributes:
        group: as given.
        rank: the number of this rank.
    """

    def __init__(self, group: Any = None, *, alone: bool = False) -> None:
        joined = is_distributed() and not alone
        self.group = group
        self._number = torch.distributed.get_world_size(group) if joined else 1
        self.rank = torch.distributed.get_rank(group) if joined else 0

    def __len__(self) -> int:
        return self._number

    def device(self, near: torch.device) -> torch.device:
        """The device that numbers must be on to be summed: the CPU, but with NCCL the GPU.

        Args:
            near: the device of the parameters.
        """
        if self._number > 1 and "gloo" not in torch.distributed.get_backend(self.group):
            return near
        return torch.device("cpu")

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, written into `numbers` on each; one collective."""
        if self._number > 1:
            if numbers.numel() <= _FEW:
                keep(numbers)
            torch.distributed.all_reduce(numbers, group=self.group)
        return numbers

    def max(self, number: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks, written into `number` on each; one collective."""
        if self._number > 1:
            keep(number)
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return number

    def sum_on_host(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks; one collective on the host, which waits for no device."""
        if self._number == 1:
            return list(numbers)
        with torch.inference_mode(False):  # see `keep`
            summed = torch.tensor(numbers, dtype=torch.float64)
        keep(summed)
        torch.distributed.all_reduce(summed, group=host_group(self.group))
        sums: list[float] = summed.tolist()
        return sums

    def gather_objects(self, mine: Any) -> list[Any]:
        """The object of each rank, on every rank; one collective of pickled objects."""
        return gathered(mine, self.group) if self._number > 1 else [mine]

    def gather_in_pieces(self, mine: list[bytes]) -> Iterator[bytes]:
        """Yield the items of all ranks, in collectives of at most 64 MiB of each, or of one item.

        Exhaust the iterator.

        Args:
            mine: items of this rank; emptied.
        """
        while any(self.gather_objects(bool(mine))):
            piece: list[bytes] = []
            room = _PIECE_BYTES
            while mine and (not piece or len(mine[-1]) <= room):
                piece.append(mine.pop())
                room -= len(piece[-1])
            for received in self.gather_objects(piece):
                yield from received

    def together(self) -> AbstractContextManager[None]:
        """Let the code inside succeed on all ranks or raise on all: see `failing_together`."""
        return failing_together(self.gather_objects)

    def each(self, work: Callable[[], T]) -> list[T]:
        """Return the result of `work` on each rank, or raise on all ranks."""
        with self.together():
            mine = work()
        return self.gather_objects(mine)

    def any(self, work: Callable[[], bool]) -> bool:
        """Return whether `work` returns true on any rank, or raise on all ranks.

        Without a failure it takes one collective of two numbers, cheap enough for every step.
        """
        mine, failure = False, None
        try:
            mine = work()
        except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
            failure = error
        found, failures = self.sum_on_host([mine, failure is not None])
        if failures:
            with self.together():
                if failure is not None:
                    raise failure
        return bool(found)


# ---------------------------------------------------------------------- tensors made of tensors


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of a module's own parameters that FSDP2 shards and reduces together."""
    state = module._get_fsdp_state()
    # A single one, or none, in older versions of torch.
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    # Not imported here, which takes time and reads the environment: none exists without it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the memory of a tensor, on this rank; of a plain tensor, itself.

    They are those that a wrapper names in `__tensor_flatten__`, as DTensors, jagged and quantized
    tensors do, and the indices and values of a sparse tensor.
    """
    one: Any = tensor
    if tensor.layout in SPARSE:
        parts = [getattr(one, name)() for name in SPARSE[tensor.layout]]
    elif is_traceable_wrapper_subclass(one):
        parts = [getattr(one, name) for name in one.__tensor_flatten__()[0]]
    else:
        return [tensor]
    # A DTensor names its mesh of devices as well.
    parts = [part for part in parts if isinstance(part, Tensor)]
    return [plain for part in parts for plain in plain_parts(part)]


def part_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements on this rank."""
    return sum(part.nbytes for part in plain_parts(tensor))


def mesh_ranks(tensor: Tensor) -> set[int]:
    """The ranks that a DTensor is spread over; none of a plain tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_dtensor(tensor) else set()
