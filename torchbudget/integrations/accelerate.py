"""Hugging Face Accelerate: loaders that its `prepare` must not deal to its processes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from torchbudget.errors import OptionError, StateError
from torchbudget.integrations.hosted import HostedLoader, check_dealt, of_each_rank, of_this_rank


def prepare(accelerator: Any, loader: DataLoader[Any]) -> Any:
    """Prepare a loader as `accelerator.prepare(loader)` does, except that ranks keep their batches.

    `even_batches` and `split_batches` do not touch it. Batches come on the accelerator's device.
    `accelerator.save_state` and `load_state` save its position, within an epoch too, and
    `accelerator.prepare` leaves the result as it is.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`.

    Returns:
        An `accelerate.data_loader.DataLoaderShard`.

    Raises:
        OptionError: the accelerator dispatches batches, or it is another loader; or its batches
            are dealt to other ranks than the accelerator's data-parallel ones.
    """
    from accelerate.data_loader import prepare_data_loader

    if accelerator.dispatch_batches:
        raise OptionError(
            "dispatch_batches=True has the first process read the batches of all, but each rank "
            "reads its own here: leave dispatch_batches out of DataLoaderConfiguration"
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    shared_by = 1 if parallel is None else parallel.non_data_parallel_size
    check_dealt(
        loader,
        num_replicas=accelerator.num_processes // shared_by,
        rank=accelerator.process_index // shared_by,
    )
    base = _BaseLoader(loader)
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
    shard.base_dataloader = base
    shard.dl_state_dict = {}
    shard._is_accelerate_prepared = True
    accelerator.register_for_checkpointing(_Checkpoint(accelerator, shard, base))
    return accelerator.prepare_data_loader(shard)


class _BaseLoader(HostedLoader):
    """The loader that a `DataLoaderShard` reads, one batch ahead of the loop.

    All else is the `DataLoader`'s own: `skip_first_batches` makes another loader of it.
    """

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Checkpoint:
    """The position of a prepared loader, in the accelerator's checkpoint."""

    def __init__(self, accelerator: Any, shard: Any, base: _BaseLoader) -> None:
        self._accelerator = accelerator
        self._shard = shard
        self._base = base

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each rank, since the first one writes; a collective.

        Raises:
            StateError: the loop is one over what `skip_first_batches` returned.
        """
        source, run, position = self._base.source, self._base.run, None
        for loader in reversed(self._accelerator.gradient_state.dataloader_references):
            if loader is self._shard and run is not None:  # a loop over it is open
                position = run.position(int(not loader.end_of_dataloader))
                break
            sampler = getattr(loader, "batch_sampler", None)
            of_others = getattr(sampler, "batch_sampler", None), getattr(loader, "dataset", None)
            if loader is not self._shard and any(one is source for one in of_others):
                raise StateError(
                    "skip_first_batches returned another loader, which reads ahead of its loop "
                    "and keeps no position: save in a loop over the prepared loader, or resume by "
                    "accelerator.load_state, which needs no skip_first_batches"
                )
        return {"ranks": of_each_rank(source.state_dict() if position is None else position)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from this rank's position, in its epoch."""
        self._base.go_to(of_this_rank(state_dict["ranks"]))
        self._shard.iteration = self._base.source.epoch
