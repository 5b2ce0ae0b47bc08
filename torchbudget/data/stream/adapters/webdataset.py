"""Pipelines of webdataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.slot import WorkerSlot


class WebdatasetSource(PlainSource):
    """It splits itself by rank and worker, as its pipeline says."""

    split = "ranks"

    def open(self, slot: WorkerSlot, *, epoch: int) -> Iterable[Any]:
        """The samples of a pass.

        Stages that draw other numbers in each epoch, as `detshuffle` does, count their own passes:
        from 0 in each new process, so that a pass that is gone on with would have another order.
        """
        for stage in getattr(self.data, "pipeline", ()):
            if isinstance(getattr(stage, "epoch", None), int):
                stage.epoch = epoch - 1  # it adds 1 where its pass begins
        return super().open(slot, epoch=epoch)
