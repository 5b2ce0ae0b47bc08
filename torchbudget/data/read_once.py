"""Whether a framework that reads `len` once would cut a longer epoch short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final

from torchbudget.errors import OptionError

# By module: the function that reads the number of batches once, those that begin to read batches,
# and what needs no number.
_FIT: Final = ("setup_data", {"advance"}, "torchbudget.integrations.lightning.BudgetDataMixin")
_EVALUATE: Final = ("setup_data", {"reset", "run"}, "shuffle=False")  # of several loaders, run
_TRAIN: Final = (
    "set_initial_training_values",
    {"_run_epoch"},
    "torchbudget.integrations.transformers.BudgetTrainerMixin",
)
_HOSTS: Final = {
    "lightning.pytorch.loops.fit_loop": _FIT,
    "lightning.pytorch.loops.evaluation_loop": _EVALUATE,
    "pytorch_lightning.loops.fit_loop": _FIT,
    "pytorch_lightning.loops.evaluation_loop": _EVALUATE,
    "transformers.trainer": _TRAIN,
}
_ADAPTERS: Final = "torchbudget.integrations."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The loop that calls.

    Attributes:
        framework: whose it is.
        instead: what needs no number of batches.
        loop: the identity of the object.
        reads: it reads the number of batches; else it begins an epoch.
    """

    framework: str
    instead: str
    loop: int
    reads: bool


class ReadOnce:
    """The length that the loop of a framework has read for the epochs that it begins."""

    def __init__(self) -> None:
        self._loop: int | None = None  # which
        self._length = 0

    def note(self, length: int) -> None:
        """A length is given to whoever calls: a loop that is run again reads it anew."""
        host = _host()
        if host is not None and host.reads:
            self._loop, self._length = host.loop, length

    def check(self, epoch: int, count: Callable[[], int]) -> None:
        """An epoch begins, whose batches are counted where a framework has read a length.

        Raises:
            OptionError: it has more batches than the framework will take.
        """
        host = None if self._loop is None else _host()
        if host is None or host.loop != self._loop:
            return
        length = count()
        if length > self._length:
            raise OptionError(
                f"epoch {epoch} has {length} batches, but {host.framework} has read len "
                f"once, {self._length}, and would leave the others out: use {host.instead}, "
                "or batches_per_epoch, with which every epoch has as many"
            )


def _host() -> _Host | None:
    """The loop that calls, if no adapter is between."""
    loaded = [name for name in _HOSTS if name in sys.modules]
    frame: FrameType | None = sys._getframe(2) if loaded else None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ADAPTERS):
            return None
        if module in loaded:
            return _host_in(frame, module)
        frame = frame.f_back
    return None


def _host_in(frame: FrameType, module: str) -> _Host | None:
    """The loop of a framework's function, if that reads the number or begins an epoch."""
    reader, beginners, instead = _HOSTS[module]
    name = frame.f_code.co_name
    if name != reader and name not in beginners:
        return None
    return _Host(
        framework=module.partition(".")[0],
        instead=instead,
        loop=id(frame.f_locals["self"]),
        reads=name == reader,
    )
