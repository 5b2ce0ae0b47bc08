"""Collectives over the ranks that share a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from torchbudget.distributed import gathered, host_group, is_distributed, keep

# More numbers are gradients, which their parameters keep.
_FEW: Final = 64


class Ranks:
    """The ranks that share a step; a single one where `torch.distributed` is not initialized.

    Args:
        group: of processes. Default: that of all, where `torch.distributed` is initialized.

    Attributes:
        group: as given.
        rank: the number of this rank.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._number = dist.get_world_size(group) if is_distributed() else 1
        self.rank = dist.get_rank(group) if is_distributed() else 0

    def __len__(self) -> int:
        return self._number

    def device(self, near: torch.device) -> torch.device:
        """The device that numbers must be on to be summed: the CPU, but with NCCL the GPU.

        Args:
            near: the device of the parameters.
        """
        if self._number > 1 and "gloo" not in dist.get_backend(self.group):
            return near
        return torch.device("cpu")

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, written into `numbers` on each; one collective."""
        if self._number > 1:
            if numbers.numel() <= _FEW:
                keep(numbers)
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def sum_on_host(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks; one collective on the host, which waits for no device."""
        if self._number == 1:
            return list(numbers)
        with torch.inference_mode(False):  # see `keep`
            summed = torch.tensor(numbers, dtype=torch.float64)
        keep(summed)
        dist.all_reduce(summed, group=host_group(self.group))
        sums: list[float] = summed.tolist()
        return sums

    def collectives(self) -> int:
        """How many collectives this rank has begun in the group."""
        if self._number == 1:
            return 0
        group: Any = dist.group.WORLD if self.group is None else self.group
        return int(group._get_sequence_number_for_group())

    def gather_objects(self, mine: Any) -> list[Any]:
        """The object of each rank, on every rank; one collective of pickled objects."""
        return gathered(mine, self.group) if self._number > 1 else [mine]

    def gather_rows(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Concatenate the tensors of all ranks, whose numbers of rows may differ.

        Returns:
            The tensors of all ranks, in the order of the ranks; and for each, at which row the one
            of this rank starts.
        """
        if self._number == 1:
            return list(tensors), [0] * len(tensors)
        mine = torch.tensor([len(t) for t in tensors], device=self.device(tensors[0].device))
        rows_of_rank = [torch.empty_like(mine) for _ in range(self._number)]
        dist.all_gather(rows_of_rank, mine, group=self.group)
        whole, starts = [], []
        for tensor, rows in zip(tensors, torch.stack(rows_of_rank, 1).tolist(), strict=True):
            # all_gather needs equal shapes: each rank pads to the most rows of any.
            padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in rows]
            dist.all_gather(parts, padded, group=self.group)
            whole.append(torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)]))
            starts.append(sum(rows[: self.rank]))
        return whole, starts
