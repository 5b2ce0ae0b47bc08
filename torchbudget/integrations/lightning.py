"""Lightning: a data module's loaders that it neither rebuilds, nor cuts short, nor forgets."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from inspect import signature
from math import inf
from typing import Any, Final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from torchbudget.errors import OptionError, StateError
from torchbudget.integrations.hosted import HostedLoader, check_dealt, of_each_rank, of_this_rank

_DataModule: Any = object  # the data module comes after the mixin
_KEY: Final = "torchbudget"  # in the data module's part of a checkpoint


class BudgetDataMixin(_DataModule):  # type: ignore[misc]
    """Goes before `LightningDataModule`: override `budget_loader`, not `train_dataloader`.

    Lightning sees no `DataLoader`, so that it rebuilds none, whatever `use_distributed_sampler`
    says; and no `len`, since it would read it once and cut longer epochs short. The positions of
    all loaders are in Lightning's checkpoints, of each rank, within an epoch too.

    An epoch that `max_steps` or a callback has ended goes on in the resumed run; one that
    `limit_train_batches` has ended does not. Of several loaders, the shorter ones start over as
    Lightning's `CombinedLoader` has them, and all begin each of Lightning's epochs anew.

    >>> class Data(BudgetDataMixin):  # and LightningDataModule
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    _loaders: list[_Loader] | None = None
    _loaded: list[dict[str, Any]] | None = None
    _epoch = 0  # Lightning's number of the present epoch
    _offset = 0  # by which that is larger than the loaders' number
    _goes_on = False  # it is that of a checkpoint, which Lightning may number otherwise
    _began = -1  # Lightning's count of batches where that epoch began

    def budget_loader(self) -> Any:
        """A loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`.

        Or several: a dict, a list or a `CombinedLoader` of them.
        """
        raise NotImplementedError(f"{type(self).__name__} must override budget_loader")

    def train_dataloader(self) -> Any:
        """Make the loaders, at the positions of the checkpoint.

        Raises:
            OptionError: `overfit_batches` is set; `training_step` takes a `dataloader_iter`; or the
                batches are dealt to other ranks than the strategy's data-parallel ones.
            StateError: the checkpoint is from within an epoch, and has no position; or it has
                positions of another number of loaders.
        """
        if self.trainer.overfit_batches:
            raise OptionError(
                "overfit_batches would train on the first batches of each epoch, and they are "
                "others in every epoch here: leave it out, and have budget_loader make a loader "
                "over a few samples"
            )
        if "dataloader_iter" in signature(self.trainer.lightning_module.training_step).parameters:
            raise OptionError(
                "a training_step with dataloader_iter reads batches ahead by itself, so that it is "
                "unknown which of them were trained on: take batch instead"
            )
        made = copy.copy(self.budget_loader())
        is_combined = hasattr(made, "flattened")  # a CombinedLoader
        leaves, structure = tree_flatten(made)
        leaves = made.flattened if is_combined else leaves
        of_one = {"num_replicas": 1, "rank": 0}
        for leaf in leaves:
            check_dealt(
                leaf, **getattr(self.trainer.strategy, "distributed_sampler_kwargs", of_one)
            )
        self._loaders = loaders = [_Loader(leaf, self) for leaf in leaves]
        self._go_on(loaders)
        if not is_combined:
            return tree_unflatten(loaders, structure)
        made.flattened = loaders
        return made

    def _go_on(self, loaders: list[_Loader]) -> None:
        """Begin Lightning's epoch, or go to the positions of the checkpoint."""
        loop = self.trainer.fit_loop
        loaded, self._loaded = self._loaded, None
        self._goes_on = loaded is not None
        self._epoch = loop.epoch_progress.current.processed
        self._offset = min(self._offset, self._epoch)
        states: list[Any] = [None] * len(loaders)
        if loaded is not None:
            saved = of_this_rank(loaded)
            states, self._offset = saved["loaders"], saved["offset"]
            self._epoch = saved["epoch"] + saved["is_over"]
            if len(states) != len(loaders):
                raise StateError(
                    f"the checkpoint has the positions of {len(states)} loaders, and budget_loader "
                    f"returned {len(loaders)}: return those that it was saved with"
                )
        elif loop.restarting and loop.epoch_loop.batch_progress.current.processed:
            raise StateError(
                f"the checkpoint has no position of a {type(self).__name__} to go on from within "
                "an epoch: resume from one that was saved with this data module, or load the "
                "weights alone"
            )
        for loader, state in zip(loaders, states, strict=True):
            if state is None:
                loader.choose(self._epoch - self._offset)
            else:
                loader.load(state)

    def begin_epoch(self, epoch: int) -> None:
        """Have all loaders begin one of Lightning's epochs, unless they are in it."""
        if self._goes_on:  # Lightning may have counted an epoch that `max_steps` has ended
            self._offset += epoch - self._epoch
        elif epoch != self._epoch:
            for loader in self._loaders or ():
                loader.has_ended = False
                loader.choose(epoch - self._offset)
        else:
            return
        self._epoch, self._goes_on = epoch, False
        self._began = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data module and the positions of each rank; a collective."""
        others: dict[str, Any] = super().state_dict()
        if self._loaders is None:
            return others if self._loaded is None else {**others, _KEY: self._loaded}
        loop = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        in_step = progress.current.ready - progress.current.processed
        is_over = progress.is_last_batch and not in_step and progress.total.ready > self._began
        ahead = loop.max_batches == inf  # else Lightning needs no batch to find the end
        following = self._epoch + 1 - self._offset
        states = [
            loader.save(in_step, ahead=ahead, following=following if is_over else None)
            for loader in self._loaders
        ]
        state = {
            "epoch": self._epoch,
            "offset": self._offset,
            "is_over": is_over,
            "loaders": states,
        }
        return {**others, _KEY: of_each_rank(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the data module; the loaders are made later."""
        state = dict(state_dict)
        self._loaded, self._loaders = state.pop(_KEY, None), None
        super().load_state_dict(state)


class _Loader(HostedLoader):
    """A loader that Lightning iterates over.

    Attributes:
        has_ended: a loop over it has ended in the present one of Lightning's epochs.
    """

    def __init__(self, loader: DataLoader[Any], data: BudgetDataMixin) -> None:
        super().__init__(loader)
        self._data = data
        self.has_ended = self._ends_again = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches."""
        if self._ends_again:  # a `CombinedLoader` of a resumed run learns it this way
            self._ends_again = False
            return
        yield from super().__iter__()
        self.has_ended = True

    @property
    def sampler(self) -> _Loader:
        """Itself: Lightning calls `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin one of Lightning's epochs."""
        self._data.begin_epoch(epoch)

    def save(self, in_step: int, *, ahead: bool, following: int | None) -> dict[str, Any] | None:
        """Return the position after the last batch that was trained on.

        Args:
            in_step: 1 while Lightning trains on a batch.
            ahead: Lightning reads one ahead.
            following: the epoch that follows, where Lightning's epoch is over.

        Returns:
            `None`: the beginning of that epoch.
        """
        if following is not None and not self.source.epoch == following != self.reads:
            return None
        is_open = self.reads is not None
        before_end = following is not None or (in_step and not is_open)
        return {
            "position": self.position(in_step + (ahead and is_open)),
            "has_ended": self.has_ended and not before_end,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `save` returned."""
        self.go_to(state["position"])
        self.has_ended = self._ends_again = state["has_ended"]
