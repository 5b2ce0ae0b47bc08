"""Outputs of samples, sent from the ranks that computed them."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchbudget.train.process_group import Ranks

# What a rank sends in one collective: a few of them for many small outputs, while what they take
# beside the outputs stays below so much for each rank.
_CHUNK_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a tensor of an output was."""

    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parcel:
    """Outputs of a few samples: few large tensors, which are pickled faster than many small ones.

    Attributes:
        indices: of the samples.
        structures: the outputs, pickled, with a `_Place` for each tensor.
        values: of the tensors, one after another, by dtype.
    """

    indices: list[int]
    structures: bytes
    values: dict[torch.dtype, Tensor]

    @classmethod
    def of(cls, indices: list[int], outputs: Sequence[Any]) -> Parcel:
        """Pack outputs, copying their tensors to the host."""
        parts: dict[torch.dtype, list[Tensor]] = defaultdict(list)

        def take(tensor: Tensor) -> _Place | Tensor:
            tensor = tensor.detach().cpu()
            if tensor.layout is not torch.strided or tensor.is_quantized:
                return tensor
            parts[tensor.dtype].append(tensor.reshape(-1))
            return _Place(dtype=tensor.dtype, shape=tensor.shape)

        structures = pickle.dumps(tree_map_only(Tensor, take, list(outputs)))
        values = {dtype: torch.cat(flat) for dtype, flat in parts.items()}
        return cls(indices=indices, structures=structures, values=values)

    def outputs(self) -> list[Any]:
        """The outputs, each in memory of its own."""
        done = dict.fromkeys(self.values, 0)

        def put(place: _Place) -> Tensor:
            start = done[place.dtype]
            done[place.dtype] = stop = start + place.shape.numel()
            return self.values[place.dtype][start:stop].clone().view(place.shape)

        structures: list[Any] = pickle.loads(self.structures)  # noqa: S301  (of a rank of this job)
        outputs: list[Any] = tree_map_only(_Place, put, structures)
        return outputs

    @property
    def nbytes(self) -> int:
        """Bytes to be sent."""
        return len(self.structures) + sum(values.nbytes for values in self.values.values())


def gathered(parcels: list[Parcel], ranks: Ranks, *, first_only: bool) -> Iterator[Parcel]:
    """The parcels of all ranks, on every rank or on the first one only.

    Collectives, each of at most 64 MiB of every rank, or of one parcel. Exhaust the iterator.

    Args:
        parcels: of this rank; emptied.
        ranks: joined by a process group on the host.
        first_only: the other ranks get none.
    """
    while any(ranks.gather_objects(bool(parcels))):
        chunk: list[Parcel] = []
        room = _CHUNK_BYTES
        while parcels and (not chunk or parcels[-1].nbytes <= room):
            chunk.append(parcels.pop())
            room -= chunk[-1].nbytes
        for received in _gathered(chunk, ranks, first_only=first_only):
            yield from received


def _gathered(chunk: list[Parcel], ranks: Ranks, *, first_only: bool) -> list[list[Parcel]]:
    if not first_only:
        return ranks.gather_objects(chunk)
    received: list[Any] | None = [None] * len(ranks) if ranks.rank == 0 else None
    dist.gather_object(chunk, received, group_dst=0, group=ranks.group)
    return received or []
