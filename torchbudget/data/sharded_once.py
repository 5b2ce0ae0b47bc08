"""Whether a framework deals to its processes what is dealt to the ranks already."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torchbudget.errors import ShardedTwiceError

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


def check_sharded_once(num_replicas: int) -> None:
    """Raise where the caller is iterated by a framework that deals batches to its processes.

    What iterates is on the stack, in the process that starts the workers or in the worker itself.
    A framework that was not imported costs nothing, and one process is no sharding.

    Raises:
        ShardedTwiceError: the framework's part of this rank's part is all that would come.
    """
    loaded = [name for name in _SHARDING if name in sys.modules] if num_replicas > 1 else []
    frame: FrameType | None = sys._getframe(1) if loaded else None
    while frame is not None:
        # Reading a frame's locals keeps them alive: those of other modules are left alone.
        module = frame.f_globals.get("__name__")
        if module in loaded:
            _check(module, frame.f_locals.get("self"), num_replicas)
        frame = frame.f_back


def _check(module: str, wrapper: Any, num_replicas: int) -> None:
    for name, setting in _SHARDING[module].items():
        if not isinstance(wrapper, getattr(sys.modules[module], name, ())):
            continue
        state: Any = getattr(wrapper, "state", wrapper)
        processes = state.num_processes
        if processes > 1:
            package = module.partition(".")[0]
            raise ShardedTwiceError(
                f"batches are dealt to {num_replicas} ranks already, and {package}'s {name}, by "
                f"{setting}, deals them to {processes} processes again: most samples would never "
                f"come. {_INSTEAD}"
            )
