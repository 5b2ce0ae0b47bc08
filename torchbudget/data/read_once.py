"""Whether a framework that reads `len` once would cut a longer epoch short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

from torchbudget.errors import OptionError

# By module, the functions that read the number of batches once, and those that begin an epoch;
# what else calls from there (evaluation) reads to the end. And the adapter that needs no number.
_LIGHTNING: Final = "torchbudget.integrations.lightning.BudgetDataMixin"
_HOSTS: Final = {
    "lightning.pytorch.loops.fit_loop": ({"setup_data", "advance"}, _LIGHTNING),
    "lightning.pytorch.loops.evaluation_loop": (set[str](), _LIGHTNING),
    "pytorch_lightning.loops.fit_loop": ({"setup_data", "advance"}, _LIGHTNING),
    "pytorch_lightning.loops.evaluation_loop": (set[str](), _LIGHTNING),
    "transformers.trainer": (
        {"set_initial_training_values", "_run_epoch"},
        "torchbudget.integrations.transformers.BudgetTrainerMixin",
    ),
}
_ADAPTERS: Final = "torchbudget.integrations."


class ReadOnce:
    """The first length that the training loop of a framework has read."""

    def __init__(self) -> None:
        self._loop: int | None = None  # which
        self._length = 0

    def note(self, length: int) -> None:
        """A length is given to whoever calls."""
        host = _host()
        if host is not None and host[1] != self._loop:
            self._loop, self._length = host[1], length

    def check(self, epoch: int, count: Callable[[], int]) -> None:
        """An epoch begins, whose batches are counted where a framework has read a length.

        Raises:
            OptionError: it has more batches than the framework will take.
        """
        host = None if self._loop is None else _host()
        if host is None or host[1] != self._loop:
            return
        length = count()
        if length > self._length:
            module = host[0]
            raise OptionError(
                f"epoch {epoch} has {length} batches, but {module.partition('.')[0]} has read len "
                f"once, {self._length}, and would leave the others out: use {_HOSTS[module][1]}, "
                "or batches_per_epoch, with which every epoch has as many"
            )


def _host() -> tuple[str, int] | None:
    """The module and the identity of the training loop that calls, if no adapter is between."""
    loaded = [name for name in _HOSTS if name in sys.modules]
    frame: FrameType | None = sys._getframe(2) if loaded else None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ADAPTERS):
            return None
        if module in loaded:
            reads = frame.f_code.co_name in _HOSTS[module][0]
            return (module, id(frame.f_locals["self"])) if reads else None
        frame = frame.f_back
    return None
