"""Streams of the library `datasets`."""

from __future__ import annotations

from typing import Any

from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.slot import Split


class DatasetsSource(PlainSource):
    """A `datasets.IterableDataset`: it splits itself by worker, and by node if it was told to."""

    @property
    def split(self) -> Split:  # type: ignore[override]
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

    def first_state(self) -> Any:
        """Its `state_dict` is up to date only after it is read; epoch -1 makes it start over."""
        return {**self.data.state_dict(), "epoch": -1}
