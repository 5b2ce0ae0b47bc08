"""Who iterates a sampler or stream: loaders and frameworks that would lose or repeat its batches.

`Caller.find` passes over the stack once, for each `iter`, `len`, `set_epoch` and pickling. A
framework that was not imported costs nothing.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final, NamedTuple

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchbudget.errors import OptionError, ShardedTwiceError, StateError

_LIGHTNING: Final = "torchbudget.integrations.lightning.BudgetDataMixin"
_TRANSFORMERS: Final = "torchbudget.integrations.transformers.BudgetTrainerMixin"
_ADAPTERS: Final = frozenset(name.rpartition(".")[0] for name in (_LIGHTNING, _TRANSFORMERS))

# The module whose classes deal batches to processes, and the setting that chooses each class.
# transformers' Trainer prepares its loaders by Accelerate, too.
_ACCELERATE: Final = "accelerate.data_loader"
_SHARDING: Final = {
    "BatchSamplerShard": "prepare()",
    "DataLoaderDispatcher": "prepare() with dispatch_batches=True",
    "IterableDatasetShard": "prepare() with dispatch_batches=False",
}


# Loops of frameworks by their module: the function that reads the number of batches, once for all
# epochs; the function around it that is given a checkpoint, with the name of that argument; and the
# adapter or option that needs no number.
_FIT: Final = ("setup_data", "_run", "ckpt_path", _LIGHTNING)
_EVALUATE: Final = ("setup_data", "", "", "shuffle=False")
_LOOPS: Final = {
    "lightning.pytorch.loops.fit_loop": _FIT,
    "lightning.pytorch.loops.evaluation_loop": _EVALUATE,
    "pytorch_lightning.loops.fit_loop": _FIT,
    "pytorch_lightning.loops.evaluation_loop": _EVALUATE,
    "transformers.trainer": (
        "set_initial_training_values",
        "_inner_training_loop",
        "resume_from_checkpoint",
        _TRANSFORMERS,
    ),
}


class Caller(NamedTuple):
    """The code that iterates a sampler or stream, asks for its length, or chooses its epoch.

    Attributes:
        batches_again: torch would collect its batches into batches.
        loader: the `DataLoader` that begins an iteration; `None`: it is another caller.
        reads_ahead: a plain `DataLoader` with workers, which draws batches before its loop takes
            them.
        wrappers: loaders of Accelerate around it.
        reader: the framework that asks for the length without an adapter between; the adapter or
            option that needs no length; and the argument by which the framework was given a
            checkpoint, or `None`. `None`: another caller.
    """

    batches_again: bool
    loader: Any
    reads_ahead: bool
    wrappers: tuple[Any, ...]
    reader: tuple[str, str, str | None] | None

    @classmethod
    def find(cls) -> Caller:
        """Look at the stack above the caller of the function that calls this."""
        frame: FrameType | None = sys._getframe(2)
        assert frame is not None  # noqa: S101  (a method of ours, which somebody has called)
        # Before Python 3.13 `f_locals` keeps a caller's values alive: only those of torch and of
        # the frameworks named above are looked at.
        name = frame.f_globals.get("__name__")
        fetches = name == fetch.__name__ and bool(frame.f_locals.get("auto_collation"))
        reads_ahead = name == _MultiProcessingDataLoaderIter.__module__ and isinstance(
            frame.f_locals.get("self"), _MultiProcessingDataLoaderIter
        )
        loader = frame.f_locals.get("loader") if name == DataLoader.__module__ else None
        batches_again = name == BatchSampler.__module__ or fetches
        wrappers: list[Any] = []
        reader: tuple[str, str, str | None] | None = None
        may_wrap = _ACCELERATE in sys.modules
        loops = [name for name in _LOOPS if name in sys.modules]
        by_adapter = False
        while frame is not None and (may_wrap or loops):
            module = frame.f_globals.get("__name__", "")
            if module == _ACCELERATE:
                wrappers.append(frame.f_locals.get("self"))
            by_adapter = by_adapter or module in _ADAPTERS
            if module in loops and frame.f_code.co_name == _LOOPS[module][0] and not by_adapter:
                reader, loops = _reader_in(frame, module), []
            frame = frame.f_back
        return cls(batches_again, loader, reads_ahead, tuple(wrappers), reader)

    def check_loader(self, num_replicas: int) -> None:
        """Raise if a loader would lose or repeat batches.

        Raises:
            OptionError: torch would batch them again; or Accelerate's loader keeps a position of
                its own, and goes on from it in another epoch.
            ShardedTwiceError: a framework's part of this rank's part is all that would come.
        """
        if self.batches_again:
            raise OptionError(
                "the sampler or stream yields whole batches, which the DataLoader would batch "
                "again: pass a sampler as batch_sampler=, not as sampler=, and batch_size=None "
                "with a stream"
            )
        for wrapper in self.wrappers:
            if num_replicas > 1:
                _check_sharding(wrapper, num_replicas)
            # It begins to read before it chooses the epoch, and counts epochs from 0 again when it
            # goes on: the epoch after the loaded one would be that one once more.
            if getattr(wrapper, "__dict__", {}).get("use_stateful_dataloader"):
                raise OptionError(
                    "with use_stateful_dataloader=True, accelerate's own loader counts epochs from "
                    "0 after load_state, and repeats one: use "
                    "torchbudget.integrations.accelerate.prepare(accelerator, loader), which saves "
                    "the position with either setting, or leave it out"
                )

    def check_length(self, *, epochs_differ: bool) -> None:
        """Raise if a framework that asks for the number of batches would lose or repeat some.

        Lightning begins its loader before it chooses the epoch, and reads ahead of a
        `StatefulDataLoader`'s state. The Trainer counts epochs and batches back from its steps, by
        the first epoch's `len`, and passes over as many batches, whatever they were under the
        budget and the ranks of before. Both ask for `len` first, in the process that trains.

        Args:
            epochs_differ: epochs have different numbers of batches.

        Raises:
            StateError: the framework continues from a checkpoint, without our position.
            OptionError: epochs differ, and the framework reads `len` once for all of them.
        """
        if self.reader is None:
            return
        framework, instead, resumed = self.reader
        if resumed is not None:
            otherwise = f"leave {resumed} out"
            if framework == "transformers":
                otherwise = "load its own state and set ignore_data_skip=True"
            raise StateError(
                f"{framework} continues from {resumed}, which has no position of this sampler or "
                f"stream, so samples would be lost or repeated. Use {instead}, whose checkpoints "
                f"have it, or {otherwise}"
            )
        if epochs_differ:
            raise OptionError(
                f"{framework} reads len once, but epochs have different numbers of batches, so "
                f"longer epochs would lose their last ones: use {instead}, or batches_per_epoch, "
                "which makes all epochs equally long"
            )


def _check_sharding(wrapper: Any, num_replicas: int) -> None:
    for name, setting in _SHARDING.items():
        if not isinstance(wrapper, getattr(sys.modules[_ACCELERATE], name, ())):
            continue
        processes = vars(wrapper).get("num_processes")
        if processes is None:  # a dispatcher, which may be half made: it asks for a state first
            processes = sys.modules[_ACCELERATE].PartialState().num_processes
        if processes > 1:
            raise ShardedTwiceError(
                f"batches are split over {num_replicas} ranks already, and accelerate's {name}, by "
                f"{setting}, splits them over {processes} processes again: samples would be lost. "
                "With Accelerate, use torchbudget.integrations.accelerate.prepare(accelerator, "
                f"loader); with transformers' Trainer, {_TRANSFORMERS}"
            )


def _reader_in(frame: FrameType, module: str) -> tuple[str, str, str | None]:
    """See `Caller.reader`."""
    _, function, argument, instead = _LOOPS[module]
    framework, resumed = module.partition(".")[0], None
    if framework != "transformers" or not frame.f_locals["self"].args.ignore_data_skip:
        around: FrameType | None = frame
        while around is not None and resumed is None:
            package = around.f_globals.get("__name__", "").partition(".")[0]
            if around.f_code.co_name == function and package == framework:
                resumed = None if around.f_locals.get(argument) is None else argument
            around = around.f_back
    return framework, instead, resumed
