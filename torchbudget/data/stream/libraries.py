"""Data sets of other libraries that differ from other iterables."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info

from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.data.stream.source import Source
from torchbudget.errors import OptionError


class DatasetsSource(Source):
    """A `datasets.IterableDataset`: it splits itself by worker, and by node if it was told to."""

    @property
    def default_split(self) -> Split:  # type: ignore[override]  # of its data
        """By rank after `split_dataset_by_node`."""
        return "workers" if getattr(self.data, "_distributed", None) is None else "ranks"

    @property
    def has_states(self) -> bool:
        """Whether its state is exact.

        It does not contain a shuffle buffer, and may be a batch off where tables are mapped in
        batches, as its documentation says.
        """
        stages = [getattr(self.data, "_ex_iterable", None)]
        for stage in stages:  # it grows meanwhile
            one = getattr(stage, "ex_iterable", None)
            stages += getattr(stage, "ex_iterables", []) if one is None else [one]
        is_table = getattr(getattr(self.data, "_formatting", None), "is_table", False)
        is_exact = all(stage and "Buffer" not in type(stage).__name__ for stage in stages)
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

    @cached_property
    def first_state(self) -> Any:
        """Its `state_dict` is up to date only after it is read; epoch -1 makes it start over."""
        return {**super().first_state, "epoch": -1}


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
