"""Pipelines of webdataset."""

from __future__ import annotations

from typing import Any

from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.data.stream.source import Source
from torchbudget.errors import OptionError


class WebdatasetSource(Source):
    """It splits itself by rank and worker, as its pipeline says."""

    default_split: Split = "ranks"

    def samples(self, slot: WorkerSlot, epoch: int) -> Any:
        """The samples of a pass.

        Stages that draw other numbers in each epoch, as `detshuffle` does, count their own passes:
        from 0 in each new process, so that a pass that is gone on with would have another order.

        Raises:
            OptionError: it splits itself by other ranks than the stream's.
        """
        from webdataset.shardlists import single_node_only, split_by_node
        from webdataset.utils import pytorch_worker_info

        stages = getattr(self.data, "pipeline", ())
        rank, ranks, *_ = pytorch_worker_info()  # it asks the environment, then torch
        asks = self.split == "ranks" and any(s in (single_node_only, split_by_node) for s in stages)
        if asks and (rank, ranks) != (slot.rank, slot.ranks):
            raise OptionError(
                f"webdataset takes this process for rank {rank} of {ranks}, and to the stream it "
                f"is rank {slot.rank} of {slot.ranks}, so that samples would come twice, or never: "
                "set RANK and WORLD_SIZE in the environment, which spawned workers need, or give "
                "it a nodesplitter= of your own"
            )
        for stage in stages:
            if isinstance(getattr(stage, "epoch", None), int):
                stage.epoch = epoch - 1  # it adds 1 where its pass begins
        return super().samples(slot, epoch)
