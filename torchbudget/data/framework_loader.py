"""Whether a loader of a framework would lose batches, or repeat them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torchbudget.errors import OptionError, ShardedTwiceError

# What deals batches to processes, by module and class, and the setting that chooses it.
_SHARDING: Final = {
    "accelerate.data_loader": {
        "BatchSamplerShard": "prepare()",
        "DataLoaderDispatcher": "prepare() with dispatch_batches=True",
        "IterableDatasetShard": "prepare() with dispatch_batches=False",
    },
    "transformers.trainer_pt_utils": {"IterableDatasetShard": "Trainer"},
}
_INSTEAD: Final = (
    "With Accelerate, use torchbudget.integrations.accelerate.prepare(accelerator, loader); with "
    "transformers' Trainer, torchbudget.integrations.transformers.BudgetTrainerMixin"
)


def check_framework_loader(num_replicas: int) -> None:
    """Raise where the caller is read by a framework's loader that loses or repeats batches.

    What iterates is on the stack, in the process that starts the workers or in the worker itself.
    A framework that was not imported costs nothing, and one process is no sharding.

    Raises:
        ShardedTwiceError: the framework's part of this rank's part is all that would come.
        OptionError: it keeps a position, and goes on from it in another epoch.
    """
    loaded = [name for name in _SHARDING if name in sys.modules]
    frame: FrameType | None = sys._getframe(1) if loaded else None
    while frame is not None:
        # Reading a frame's locals keeps them alive: those of other modules are left alone.
        module = frame.f_globals.get("__name__")
        if module in loaded:
            wrapper = frame.f_locals.get("self")
            if num_replicas > 1:
                _check_sharding(module, wrapper, num_replicas)
            _check_position(wrapper)
        frame = frame.f_back


def _check_sharding(module: str, wrapper: Any, num_replicas: int) -> None:
    for name, setting in _SHARDING[module].items():
        if not isinstance(wrapper, getattr(sys.modules[module], name, ())):
            continue
        processes = vars(wrapper).get("num_processes")
        if processes is None:  # a dispatcher, which may be half made: it asks for a state first
            processes = sys.modules[module].PartialState().num_processes
        if processes > 1:
            package = module.partition(".")[0]
            raise ShardedTwiceError(
                f"batches are dealt to {num_replicas} ranks already, and {package}'s {name}, by "
                f"{setting}, deals them to {processes} processes again: most samples would never "
                f"come. {_INSTEAD}"
            )


def _check_position(wrapper: Any) -> None:
    """Raise for a loader of Accelerate that is a StatefulDataLoader.

    It begins to read before it chooses the epoch, and counts epochs from 0 again when it goes on:
    the epoch after the one that was loaded would be that one once more.
    """
    if getattr(wrapper, "__dict__", {}).get("use_stateful_dataloader"):
        raise OptionError(
            "use_stateful_dataloader=True has accelerate's own loader count epochs from 0 after "
            "load_state, and read one of them again: use "
            "torchbudget.integrations.accelerate.prepare(accelerator, loader), which saves the "
            "position with either setting, or leave it out"
        )
