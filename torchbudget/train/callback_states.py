"""The states of callbacks: the first rank's, or each rank's own where they are not alike."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import IO, Any, TypeAlias, cast

import torch
from torch.utils._pytree import tree_flatten

from torchbudget.errors import StateMismatchError
from torchbudget.protocols import Stateful
from torchbudget.train.agreement import on_each_rank
from torchbudget.train.process_group import Ranks

# Of one callback: a single state where all ranks have the same, else that of each rank.
States: TypeAlias = list[Any]


def states_of(callbacks: Sequence[Stateful], ranks: Ranks) -> list[States]:
    """The states of each callback; a collective.

    Averages of the model, schedules and the like are alike on all ranks, and are not exchanged:
    only their digests are. What counts a rank's own samples is not.

    Raises:
        Exception: what a callback, or pickle, raises.
        RankError: it did so on another rank.
    """
    mine: list[Any] = []

    def digests() -> list[str]:
        mine.extend(callback.state_dict() for callback in callbacks)
        return [digest_of(state) for state in mine] if len(ranks) > 1 else []

    of_ranks = on_each_rank(ranks, digests)
    unlike = [
        number for number, of_one in enumerate(zip(*of_ranks, strict=True)) if len({*of_one}) > 1
    ]
    own = ranks.gather_objects([_pickled(mine[number]) for number in unlike]) if unlike else []
    states = [[state] for state in mine]
    for number, of_one in zip(unlike, zip(*own, strict=True), strict=True):
        # On the CPU: a state on another rank's device has no place here.
        states[number] = [torch.load(io.BytesIO(one), "cpu", weights_only=False) for one in of_one]
    return states


def load_states(callbacks: Sequence[Stateful], states: Sequence[States], ranks: Ranks) -> None:
    """Load what `states_of` returned.

    Raises:
        StateMismatchError: the ranks of another number had states of their own.
    """
    for callback, of_ranks in zip(callbacks, states, strict=True):
        if len(of_ranks) not in (1, len(ranks)):
            raise StateMismatchError(
                f"each of the {len(of_ranks)} ranks of the checkpoint had another state of "
                f"{type(callback).__name__}, so that {len(ranks)} ranks cannot share them: go on "
                f"with {len(of_ranks)} ranks, or let its state_dict() return what is the same on "
                "all of them"
            )
        callback.load_state_dict(of_ranks[ranks.rank % len(of_ranks)])


class _Digest(io.RawIOBase):
    """A file that keeps only a digest of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return memoryview(data).nbytes


def digest_of(state: Any) -> str:
    """32 hexadecimal digits of what a state holds, on whatever device.

    Each rank has the average of the model on a device of its own.
    """
    file = _Digest()
    leaves, structure = tree_flatten(state)
    file.write(str(structure).encode())
    for leaf in leaves:  # one at a time is copied to the host
        on_host = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
        torch.save(on_host, cast(IO[bytes], file))
    return file.digest.hexdigest()


def _pickled(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
