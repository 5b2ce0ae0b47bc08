"""Lightning: a data module's loader that it neither rebuilds, nor cuts short, nor forgets."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from math import inf
from typing import Any, Final

from torch.utils.data import DataLoader

from torchbudget.errors import OptionError, StateError
from torchbudget.integrations.hosted import HostedLoader, of_each_rank, of_this_rank

_DataModule: Any = object  # the data module comes after the mixin
_KEY: Final = "torchbudget"  # in the data module's part of a checkpoint


class BudgetDataMixin(_DataModule):  # type: ignore[misc]
    """A base class to put before `LightningDataModule`: override `budget_loader`.

    Lightning sees no `DataLoader`, so that it rebuilds none, whatever `use_distributed_sampler`
    says; and no `len`, since it would read it once and cut longer epochs short. The position of
    each rank is in Lightning's checkpoints, within an epoch too.

    An epoch that `max_steps` or a callback has ended goes on in the resumed run; one that
    `limit_train_batches` has ended does not.

    >>> class Data(BudgetDataMixin):  # and LightningDataModule
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    _loader: _Loader | None = None
    _loaded: list[Any] | None = None  # the position of each rank
    _began = 0  # Lightning's count of batches when the loader was made

    def budget_loader(self) -> DataLoader[Any]:
        """Return a loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`."""
        raise NotImplementedError(f"{type(self).__name__} must override budget_loader")

    def train_dataloader(self) -> Any:
        """Make the loader, at the position of the checkpoint.

        Raises:
            OptionError: `overfit_batches` is set; `training_step` takes a `dataloader_iter`; or the
                batches are dealt to other ranks than the strategy's data-parallel ones.
            StateError: the checkpoint is from within an epoch, and has no position.
        """
        trainer = self.trainer
        if trainer.overfit_batches:
            raise OptionError(
                "overfit_batches would train on the first batches of each epoch, others in every "
                "epoch: have budget_loader make a loader over a few samples instead"
            )
        if "dataloader_iter" in signature(trainer.lightning_module.training_step).parameters:
            raise OptionError(
                "a training_step with dataloader_iter reads batches ahead by itself, so that it is "
                "unknown which of them were trained on: take batch instead"
            )
        of_one = {"num_replicas": 1, "rank": 0}
        ranks = getattr(trainer.strategy, "distributed_sampler_kwargs", of_one)
        self._loader = loader = _Loader(self.budget_loader(), **ranks)
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        self._began, saved, self._loaded = progress.total.ready, self._loaded, None
        if saved is not None:
            loader.go_to(of_this_rank(saved))
        elif loop.restarting and progress.current.processed:
            raise StateError(
                f"the checkpoint has no position of a {type(self).__name__} to go on from within "
                "an epoch: resume from one that was saved with this data module, or load the "
                "weights alone"
            )
        else:
            loader.choose(loop.epoch_progress.current.processed)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data module and the positions of each rank; a collective."""
        others: dict[str, Any] = super().state_dict()
        loader = self._loader
        if loader is None:
            return others if self._loaded is None else {**others, _KEY: self._loaded}
        loop = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        in_step = progress.current.ready - progress.current.processed
        is_over = progress.is_last_batch and not in_step and progress.total.ready > self._began
        if is_over and loader.reads is not None:  # limit_train_batches has ended the epoch
            loader.choose(loader.reads + 1)
        # Without a limit Lightning reads one batch ahead, to find the end.
        ahead = loop.max_batches == inf and loader.reads is not None
        return {**others, _KEY: of_each_rank(loader.position(in_step + ahead))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the data module; the loader is made later."""
        state = dict(state_dict)
        self._loaded, self._loader = state.pop(_KEY, None), None
        super().load_state_dict(state)


class _Loader(HostedLoader):
    """A loader that Lightning iterates over."""

    _epoch: int | None = None  # Lightning's number, which may be ahead of the source's

    @property
    def sampler(self) -> _Loader:
        """The object itself: Lightning calls `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin one of Lightning's epochs, unless the loader is in it."""
        if self._epoch not in (None, epoch) and self.reads is not None:  # the last was cut short
            self.choose(self.reads + 1)
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning warns of a loader without it, and the mixin saves."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load nothing."""
