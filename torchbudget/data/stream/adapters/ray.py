"""Data sets of Ray Data."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.data.stream.source import Source
from torchbudget.errors import OptionError


class RaySource(Source):
    """A Ray Data set, or one of the parts that `streaming_split` makes."""

    default_split: Split = "ranks"

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """Its rows.

        Raises:
            OptionError: samples would be read several times.
        """
        is_part = slot.ranks == 1 or "Split" in type(self.data).__name__
        if get_worker_info() is not None or not is_part:
            raise OptionError(
                "Ray reads ahead in its own processes, and each worker and rank would get all "
                f"samples: use num_workers=0, and pass data.streaming_split({slot.ranks})[rank], "
                "or Ray Train's get_dataset_shard, on several ranks"
            )
        return self.data.iter_rows()
