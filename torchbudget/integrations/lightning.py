"""Lightning: a data module's loader that it neither rebuilds, nor cuts short, nor forgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader

from torchbudget.errors import OptionError, StateError
from torchbudget.integrations.positioned import (
    Position,
    PositionedLoader,
    check_dealt,
    of_each_rank,
    of_this_rank,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule as _DataModule
else:
    _DataModule = object

_KEY: Final = "torchbudget"  # in the data module's part of a checkpoint


class BudgetDataMixin(_DataModule):  # type: ignore[misc]  # the data module comes after it
    """Goes before `LightningDataModule`: override `budget_loader`, not `train_dataloader`.

    Lightning sees no `DataLoader`, so that it rebuilds none, whatever `use_distributed_sampler`
    says; and no `len`, since it would read it once and cut longer epochs short. Where the loader
    stands is in Lightning's checkpoints, of each rank, within an epoch too.

    >>> class Data(BudgetDataMixin):  # and LightningDataModule
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    _loader: _Loader | None = None
    _loaded: list[Position] | None = None

    def budget_loader(self) -> DataLoader[Any]:
        """A loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`."""
        raise NotImplementedError(f"{type(self).__name__} must override budget_loader")

    def train_dataloader(self) -> Any:
        """That loader, at the position of the checkpoint.

        Raises:
            OptionError: `overfit_batches` is set; or the batches are dealt to other ranks than the
                strategy's data-parallel ones.
            StateError: the checkpoint is from within an epoch, and has no position.
        """
        if self.trainer.overfit_batches:
            raise OptionError(
                "overfit_batches would train on the first batches of each epoch, and they are "
                "others in every epoch here: leave it out, and have budget_loader make a loader "
                "over a few samples"
            )
        budget_loader = self.budget_loader()
        of_one = {"num_replicas": 1, "rank": 0}
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", of_one)
        check_dealt(budget_loader, **ranks)
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        self._loader = loader = _Loader(budget_loader, lambda: progress.total.processed)
        loaded, self._loaded = self._loaded, None
        position = None if loaded is None else of_this_rank(loaded)
        loop = self.trainer.fit_loop
        epoch = loop.epoch_progress.current.processed
        # An epoch that a limit has ended is not gone on with: Lightning chooses the next one.
        if position is not None and position["epoch"] >= epoch:
            loader.go_to(position)
        elif position is None and loop.restarting and progress.current.processed:
            raise StateError(
                f"the checkpoint has no position of a {type(self).__name__} to go on from within "
                "an epoch: resume from one that was saved with this data module, or load the "
                "weights alone"
            )
        else:
            loader.set_epoch(epoch)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The state of the data module and the position of each rank; a collective."""
        others: dict[str, Any] = super().state_dict()
        if self._loader is None:
            return others if self._loaded is None else {**others, _KEY: self._loaded}
        limit = self.trainer.fit_loop.max_batches
        return {**others, _KEY: of_each_rank(self._loader.position_of_loop(limit))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the data module; the loader is made later."""
        state = dict(state_dict)
        self._loaded = state.pop(_KEY, None)
        super().load_state_dict(state)


class _Loader(PositionedLoader):
    """What Lightning iterates over.

    Args:
        loader: see `PositionedLoader`.
        processed: how many batches Lightning has trained on, in all epochs. It counts those of an
            epoch, too, but goes on with that count after a checkpoint from an epoch's last batch.
    """

    def __init__(self, loader: DataLoader[Any], processed: Callable[[], int]) -> None:
        super().__init__(loader)
        self._processed = processed
        self._first = 0  # that number where the epoch began

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches."""
        self._first = self._processed() - self._before
        yield from super().__iter__()

    def position_of_loop(self, limit: float) -> Position:
        """After the last batch that was trained on: Lightning reads one ahead.

        Args:
            limit: batches after which Lightning begins the next epoch.
        """
        position = self.position(self._processed() - self._first)
        if position["batches"] < limit:
            return position
        return {"epoch": position["epoch"] + 1, "batches": 0, "state": {}}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module saves the position. Lightning warns of loaders without it."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing."""
