"""Hugging Face Accelerate: loaders that its `prepare` must not deal to its processes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from torchbudget.distributed import Ranks
from torchbudget.integrations.hosted import HostedLoader, of_this_rank


def prepare(accelerator: Any, loader: DataLoader[Any]) -> Any:
    """Prepare a loader as `accelerator.prepare(loader)` does, except that ranks keep their batches.

    `even_batches`, `split_batches` and `dispatch_batches` have no effect on it. It moves batches to
    the accelerator's device. `accelerator.save_state` and `load_state` save and load its position,
    within an epoch too. `accelerator.prepare` does not change the result.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: a loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`.

    Returns:
        An `accelerate.data_loader.DataLoaderShard`.

    Raises:
        OptionError: it is another loader, or its ranks are not the accelerator's data-parallel
            ranks.
    """
    from accelerate.data_loader import prepare_data_loader

    parallel = getattr(accelerator, "parallelism_config", None)
    shared_by = 1 if parallel is None else parallel.non_data_parallel_size
    base = _BaseLoader(
        loader,
        num_replicas=accelerator.num_processes // shared_by,
        rank=accelerator.process_index // shared_by,
    )
    shard = prepare_data_loader(
        base.loader,
        accelerator.device,
        num_processes=1,  # of one process, Accelerate deals nothing
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=[*accelerator.rng_types],
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
    shard.base_dataloader, base.shard = base, shard
    shard._is_accelerate_prepared = True
    accelerator.register_for_checkpointing(base)
    return accelerator.prepare_data_loader(shard)


class _BaseLoader(HostedLoader):
    """The loader that a `DataLoaderShard` reads one batch ahead, and its position in checkpoints.

    Attributes:
        shard: the `DataLoaderShard`.
    """

    shard: Any

    def __init__(self, loader: DataLoader[Any], **ranks: int) -> None:
        super().__init__(loader, **ranks)
        self.batch_sampler, self.dataset = self.loader.batch_sampler, self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each rank, since the first one writes; a collective."""
        position = self.source.state_dict() if self.reads is None else self.position(1)
        return {"ranks": Ranks().gather_objects(position)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from this rank's position, in its epoch."""
        self.go_to(of_this_rank(state_dict["ranks"]))
        self.shard.iteration = self.source.epoch
