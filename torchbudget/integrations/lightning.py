"""Lightning: a data module's loaders that it neither rebuilds, nor cuts short, nor forgets."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from inspect import signature
from math import inf
from typing import Any, Final

from torch.utils._pytree import tree_flatten, tree_unflatten

from torchbudget.distributed import Ranks
from torchbudget.errors import OptionError, StateError, StateMismatchError
from torchbudget.integrations.hosted import HostedLoader, of_this_rank

_DataModule: Any = object  # the data module comes after the mixin
_KEY: Final = "torchbudget"  # in the data module's part of a checkpoint


class BudgetDataMixin(_DataModule):  # type: ignore[misc]
    """A base class to list before `LightningDataModule`; override `budget_loader`.

    The mixin hides the `DataLoader` from Lightning, so that Lightning does not replace its sampler,
    whatever `use_distributed_sampler` says; and it has no `len`, which Lightning would read once,
    and cut longer epochs short. Lightning's checkpoints then have each rank's position in all
    loaders, within an epoch too.

    If `max_steps` or a callback ends an epoch early, the resumed run continues it, and so does a
    second `fit` of the same trainer and data module; if `limit_train_batches` ends it, they do not.
    Each of Lightning's epochs starts all loaders from their beginning; shorter ones start over as
    in Lightning's `CombinedLoader`. Where Lightning has the loaders made anew, they go on where
    those before them stood.

    >>> class Data(BudgetDataMixin):  # and LightningDataModule
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    _loaders: list[_Loader] | None = None
    # Of each rank: where loaders begin, or have begun; `None`: at an epoch's beginning.
    _loaded: list[list[dict[str, Any]]] | None = None
    _began = 0  # Lightning's count of batches when the loaders were made
    _loop: Any = None  # Lightning's loop that they were made for

    def budget_loader(self) -> Any:
        """Return a loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`.

        Or several of them, in a dict, a list or a `CombinedLoader`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override budget_loader")

    def train_dataloader(self) -> Any:
        """Make the loaders, at the positions of the checkpoint or of the loaders before.

        Raises:
            OptionError: `training_step` takes a `dataloader_iter`, or the batches are dealt to
                other ranks than the strategy's data-parallel ones.
            StateError: the checkpoint is from within an epoch, and has no position; or within an
                epoch there are positions of another number of loaders, or of other data.
        """
        if "dataloader_iter" in signature(self.trainer.lightning_module.training_step).parameters:
            raise OptionError(
                "a training_step with dataloader_iter prefetches batches, so the position of the "
                "loop is unknown: take batch instead"
            )
        made = copy.copy(self.budget_loader())
        is_combined = hasattr(made, "flattened")  # a CombinedLoader
        leaves, structure = tree_flatten(made)
        leaves = made.flattened if is_combined else leaves
        of_one = {"num_replicas": 1, "rank": 0}
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", of_one)
        loaders = [_Loader(leaf, **ranks) for leaf in leaves]
        self._go_on(loaders)
        if not is_combined:
            return tree_unflatten(loaders, structure)
        made.flattened = loaders
        return made

    def _go_on(self, loaders: list[_Loader]) -> None:
        """Go to the places of the checkpoint, or where the loaders before stand; or begin an epoch.

        Where an epoch begins, loaders over other data than before begin the one that Lightning has.
        """
        loop = self.trainer.fit_loop
        progress, epoch = loop.epoch_loop.batch_progress, loop.epoch_progress.current.processed
        # Batches of the loaders before; less than 0 after a search of a learning rate.
        trained = progress.total.ready - self._began if self._loop is loop else -1
        saved = None if self._loaders is not None and trained else self._loaded
        states, begins = ([], True) if saved is None else (of_this_rank(saved), False)
        if saved is None and loop.restarting and progress.current.processed:
            raise StateError(
                f"the checkpoint has no position of a {type(self).__name__}, to continue within an "
                "epoch: resume from one that was saved with this data module, or load the weights "
                "alone"
            )
        if saved is None and self._loaders is not None and trained > 0:
            states, begins = self._states()
            if any(state["has_ended"] for state in states):  # Lightning begins each loop twice
                raise StateError(
                    "a second fit cannot continue an epoch in which a shorter loader has ended: "
                    "save a checkpoint, and pass it as ckpt_path"
                )
        self._loaded = [states] if states else None
        if begins and len(states) != len(loaders):
            states = [{"begins": epoch, "has_ended": False}] * len(loaders)
        if len(states) != len(loaders):
            raise StateError(
                f"there are the positions of {len(states)} loaders, of the checkpoint or of those "
                f"before, and budget_loader returned {len(loaders)}: return as many"
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load(state, epoch if begins else None)
        self._loop, self._began, self._loaders = loop, progress.total.ready, loaders

    def _states(self) -> tuple[list[dict[str, Any]], bool]:
        """The states after the last batch that was trained on, and whether the epoch is over."""
        loop = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        in_step = progress.current.ready - progress.current.processed
        is_over = progress.is_last_batch and not in_step and progress.total.ready > self._began
        ahead = loop.max_batches == inf  # else Lightning needs no batch to find the end
        loaders = self._loaders or ()
        return [one.save(in_step, is_over=is_over, ahead=ahead) for one in loaders], is_over

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data module and the positions of each rank; a collective."""
        others: dict[str, Any] = super().state_dict()
        if self._loaders is None:
            return others if self._loaded is None else {**others, _KEY: self._loaded}
        return {**others, _KEY: Ranks().gather_objects(self._states()[0])}

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

    has_ended = False
    _ends_again = False
    _epoch: int | None = None  # Lightning's number, which may be ahead of the source's

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches."""
        if self._ends_again:  # a `CombinedLoader` of a resumed run learns it this way
            self._ends_again = False
            return
        yield from super().__iter__()
        self.has_ended = True

    @property
    def sampler(self) -> _Loader:
        """The object itself: Lightning calls `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin one of Lightning's epochs, unless the loader is in it."""
        if self._epoch not in (None, epoch):
            self.has_ended = False
            if self.reads is not None:  # the last one was cut short
                self.choose(self.reads + 1)
        self._epoch = epoch

    def save(self, in_step: int, *, is_over: bool, ahead: bool) -> dict[str, Any]:
        """Return the position after the last batch that was trained on.

        Args:
            in_step: 1 while Lightning trains on a batch.
            is_over: Lightning's epoch is over.
            ahead: Lightning reads one ahead.
        """
        if is_over and self.reads is not None:
            return {"begins": self.reads + 1, "has_ended": False}
        is_open = self.reads is not None
        before_end = is_over or (in_step and not is_open)
        return {
            "position": self.position(in_step + (ahead and is_open)),
            "has_ended": self.has_ended and not before_end,
        }

    def load(self, state: Mapping[str, Any], otherwise: int | None) -> None:
        """Go on from a state that `save` returned.

        Args:
            state: the state.
            otherwise: the epoch to begin if it is a state of other data; `None`: an error.
        """
        try:
            if "begins" in state:
                self.choose(state["begins"])
            else:
                self.go_to(state["position"])
        except StateMismatchError:
            if otherwise is None:
                raise
            self.choose(otherwise)
        self.has_ended = self._ends_again = state["has_ended"]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning warns of a loader without it, and the mixin saves."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load nothing."""
