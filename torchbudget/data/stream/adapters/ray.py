"""Data sets of Ray Data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import get_worker_info

from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import OptionError


class RaySource(PlainSource):
    """A Ray Data set, or one of the parts that `streaming_split` makes."""

    split = "ranks"

    @property
    def is_iterable(self) -> bool:
        """By its rows."""
        return hasattr(self.data, "iter_rows")

    def open(self, slot: WorkerSlot, *, epoch: int) -> Iterable[Any]:
        """Its rows.

        Raises:
            OptionError: samples would be read several times.
        """
        if get_worker_info() is not None:
            raise OptionError(
                "Ray reads ahead in its own processes, and each worker of a DataLoader would get "
                "all samples: use num_workers=0"
            )
        if slot.ranks > 1 and "Split" not in type(self.data).__name__:
            raise OptionError(
                f"each of {slot.ranks} ranks would get all samples of a Ray data set: pass "
                f"data.streaming_split({slot.ranks})[rank], or Ray Train's get_dataset_shard"
            )
        rows: Iterable[Any] = self.data.iter_rows()
        return rows
