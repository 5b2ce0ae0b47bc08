"""Streams of the library `datasets`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info

from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.slot import Split, WorkerSlot


class DatasetsSource(PlainSource):
    """A `datasets.IterableDataset`: it splits itself by worker, and by node if it was told to."""

    @property
    def split(self) -> Split:  # type: ignore[override]  # computed here, a class attribute there
        """By rank after `split_dataset_by_node`."""
        return "workers" if getattr(self.data, "_distributed", None) is None else "ranks"

    @property
    def seeks(self) -> bool:
        """Whether its state is exact.

        It does not contain a shuffle buffer, and may be a batch off where tables are mapped in
        batches, as its documentation says.
        """
        if getattr(getattr(self.data, "_formatting", None), "is_table", False):
            return False
        waiting = [getattr(self.data, "_ex_iterable", None)]
        while waiting:
            stage = waiting.pop()
            if stage is None or "Buffer" in type(stage).__name__:
                return False
            if hasattr(stage, "ex_iterable"):
                waiting.append(stage.ex_iterable)
            waiting += getattr(stage, "ex_iterables", [])
        return True

    def open(self, slot: WorkerSlot, *, epoch: int) -> Iterable[Any]:
        """The samples of a pass.

        Its `set_epoch` adds the difference to a number that all workers share. Of two that do so at
        once each may add it, and they would split another order of the shards than each other: in
        a worker the number is its own.
        """
        shared = getattr(self.data, "_epoch", None)
        if get_worker_info() is not None and isinstance(shared, Tensor):
            self.data._epoch = shared.clone()
        return super().open(slot, epoch=epoch)

    def first_state(self) -> Any:
        """Its `state_dict` is up to date only after it is read; epoch -1 makes it start over."""
        return {**self.data.state_dict(), "epoch": -1}
