"""Streams of the library `datasets`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info

from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.data.stream.source import Source


class DatasetsSource(Source):
    """A `datasets.IterableDataset`: it splits itself by worker, and by node if it was told to."""

    @property
    def default_split(self) -> Split:  # type: ignore[override]  # of its data
        """By rank after `split_dataset_by_node`."""
        return "workers" if getattr(self.data, "_distributed", None) is None else "ranks"

    @property
    def stages(self) -> list[Any]:
        """See `Source.stages`: what `map` or `take` returns shares those of its data set."""
        stages = [getattr(self.data, "_ex_iterable", None)]
        for stage in stages:  # it grows meanwhile
            one = getattr(stage, "ex_iterable", None)
            stages += getattr(stage, "ex_iterables", []) if one is None else [one]
        return stages

    @property
    def has_states(self) -> bool:
        """Whether its state is exact.

        It does not contain a shuffle buffer, and may be a batch off where tables are mapped in
        batches, as its documentation says.
        """
        is_table = getattr(getattr(self.data, "_formatting", None), "is_table", False)
        is_exact = all(stage and "Buffer" not in type(stage).__name__ for stage in self.stages)
        return is_exact and not is_table

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """The samples of a pass.

        Its `set_epoch` adds the difference to a number that all workers share. Of two that do so at
        once each may add it, and they would split another order of the shards than each other: in
        a worker the number is its own.
        """
        shared = getattr(self.data, "_epoch", None)
        if get_worker_info() is not None and isinstance(shared, Tensor):
            self.data._epoch = shared.clone()
        return super().samples(slot, epoch)

    def beginning(self) -> Any:
        """Its `state_dict` is up to date only after it is read; epoch -1 makes it start over."""
        return {**super().beginning(), "epoch": -1}
