"""Whether a framework that reads `len` once would cut a longer epoch short."""

from __future__ import annotations

from collections.abc import Callable

from torchbudget.data.host_loop import host_loop
from torchbudget.errors import OptionError


class ReadOnce:
    """The length that the loop of a framework has read for the epochs that it begins."""

    def __init__(self) -> None:
        self._loop: int | None = None  # which
        self._length = 0

    def note(self, length: int) -> None:
        """A length is given to whoever calls: a loop that is run again reads it anew."""
        host = host_loop()
        if host is not None and host.reads:
            self._loop, self._length = id(host.loop), length

    def check(self, epoch: int, count: Callable[[], int]) -> None:
        """An epoch begins, whose batches are counted where a framework has read a length.

        Raises:
            OptionError: it has more batches than the framework will take.
        """
        host = None if self._loop is None else host_loop()
        if host is None or id(host.loop) != self._loop:
            return
        length = count()
        if length > self._length:
            raise OptionError(
                f"epoch {epoch} has {length} batches, but {host.framework} has read len "
                f"once, {self._length}, and would leave the others out: use {host.instead}, "
                "or batches_per_epoch, with which every epoch has as many"
            )
