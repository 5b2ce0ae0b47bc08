"""The training loop of a framework that reads a sampler or a stream without its adapter."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

_LIGHTNING: Final = "torchbudget.integrations.lightning.BudgetDataMixin"
_TRANSFORMERS: Final = "torchbudget.integrations.transformers.BudgetTrainerMixin"
_ADAPTERS: Final = frozenset(name.rpartition(".")[0] for name in (_LIGHTNING, _TRANSFORMERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Functions:
    """Those of a module of a framework that matter.

    Attributes:
        reads: the one that reads the number of batches once.
        begin: those that begin to read batches.
        takes: the one that one of these calls, and that takes a batch: a loader of Accelerate
            begins with its first one, and so does one that passes over batches.
        run: the one around them that is given a checkpoint, and the name of that argument.
        instead: what needs no number of batches.
    """

    reads: str
    begin: tuple[str, ...]
    takes: str = ""
    run: tuple[str, str] | None = None
    instead: str


_FIT: Final = _Functions(
    reads="setup_data", begin=("advance",), run=("_run", "ckpt_path"), instead=_LIGHTNING
)
_EVALUATE: Final = _Functions(  # of several loaders, `run` begins the later ones
    reads="setup_data", begin=("reset", "run"), instead="shuffle=False"
)
_TRAIN: Final = _Functions(
    reads="set_initial_training_values",
    begin=("_run_epoch",),
    takes="get_batch_samples",
    run=("_inner_training_loop", "resume_from_checkpoint"),
    instead=_TRANSFORMERS,
)
_HOSTS: Final = {
    "lightning.pytorch.loops.fit_loop": _FIT,
    "lightning.pytorch.loops.evaluation_loop": _EVALUATE,
    "pytorch_lightning.loops.fit_loop": _FIT,
    "pytorch_lightning.loops.evaluation_loop": _EVALUATE,
    "transformers.trainer": _TRAIN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoop:
    """The loop that calls.

    Attributes:
        framework: whose it is.
        instead: what needs no number of batches.
        loop: the object.
        reads: it reads the number of batches; else it begins an epoch.
        resumed: the argument by which a training was given a checkpoint to go on from; `None`: it
            was given none.
    """

    framework: str
    instead: str
    loop: Any
    reads: bool
    resumed: str | None


def host_loop() -> HostLoop | None:
    """The loop that calls, if no adapter is between.

    It is on the stack. A framework that was not imported costs nothing.
    """
    loaded = [name for name in _HOSTS if name in sys.modules]
    frame: FrameType | None = sys._getframe(1) if loaded else None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in _ADAPTERS:
            return None
        if module in loaded and frame.f_code.co_name != _HOSTS[module].takes:
            return _host_in(frame, module)
        frame = frame.f_back
    return None


def _host_in(frame: FrameType, module: str) -> HostLoop | None:
    """The loop of a framework's function, if that reads the number or begins an epoch."""
    functions, name = _HOSTS[module], frame.f_code.co_name
    if name != functions.reads and name not in functions.begin:
        return None
    framework = module.partition(".")[0]
    return HostLoop(
        framework=framework,
        instead=functions.instead,
        loop=frame.f_locals["self"],
        reads=name == functions.reads,
        resumed=None if functions.run is None else _resumed(frame, framework, *functions.run),
    )


def _resumed(frame: FrameType | None, framework: str, function: str, argument: str) -> str | None:
    """The argument's name, if the function of the framework that is around a frame got one."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == function and module.partition(".")[0] == framework:
            return None if frame.f_locals.get(argument) is None else argument
        frame = frame.f_back
    return None
