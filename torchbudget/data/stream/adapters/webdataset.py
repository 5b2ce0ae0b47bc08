"""Pipelines of webdataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import OptionError


class WebdatasetSource(PlainSource):
    """It splits itself by rank and worker, as its pipeline says."""

    split = "ranks"

    def check_ranks(self, slot: WorkerSlot) -> None:
        """See `PlainSource.check_ranks`; its own functions ask the environment, then torch."""
        from webdataset.shardlists import single_node_only, split_by_node
        from webdataset.utils import pytorch_worker_info

        rank, ranks, *_ = pytorch_worker_info()
        asks = any(stage in (single_node_only, split_by_node) for stage in self._stages)
        if asks and (rank, ranks) != (slot.rank, slot.ranks):
            raise OptionError(
                f"webdataset takes this process for rank {rank} of {ranks}, and to the stream it "
                f"is rank {slot.rank} of {slot.ranks}, so that samples would come twice, or never. "
                "It asks for RANK and WORLD_SIZE in the environment, then torch.distributed, which "
                "spawned workers do not have: set both variables, or give it a nodesplitter= of "
                "your own"
            )

    def open(self, slot: WorkerSlot, *, epoch: int) -> Iterable[Any]:
        """The samples of a pass.

        Stages that draw other numbers in each epoch, as `detshuffle` does, count their own passes:
        from 0 in each new process, so that a pass that is gone on with would have another order.
        """
        for stage in self._stages:
            if isinstance(getattr(stage, "epoch", None), int):
                stage.epoch = epoch - 1  # it adds 1 where its pass begins
        return super().open(slot, epoch=epoch)

    @property
    def _stages(self) -> Iterable[Any]:
        stages: Iterable[Any] = getattr(self.data, "pipeline", ())
        return stages
