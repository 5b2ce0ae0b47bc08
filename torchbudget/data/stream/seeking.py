"""A source that has a state of its own: where one of its readers stands in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torchbudget.data.stream.generators import ReadingGenerators


class SourcePlace:
    """The place of one reader in a source, which it finds again after another one has read.

    The state is that of the source, and so all that read it in a process have it together: a loop
    within another one moves it.

    Args:
        data: the source, with `state_dict` and `load_state_dict`.
        open_again: starts it over for this reader.
        generators: that it draws from.
    """

    _last: ClassVar[WeakValueDictionary[int, SourcePlace]] = WeakValueDictionary()

    def __init__(
        self, data: Any, open_again: Callable[[], Iterable[Any]], generators: ReadingGenerators
    ) -> None:
        self._data, self._open_again, self._generators = data, open_again, generators
        self._state: dict[str, Any] | None = None  # the last one; at the beginning there is none
        self._drawn = generators.of_source_now
        self.take_over()

    @property
    def was_moved(self) -> bool:
        """Whether another reader has opened the source, or gone on in it, since this one did."""
        return self._last.get(id(self._data)) is not self

    def state(self, position: int) -> dict[str, Any]:
        """The source's own state, at the position to which this reader has just read."""
        self._drawn = self._generators.of_source_now
        self._state = {"position": position, "source": copy.deepcopy(self._data.state_dict())}
        return self._state

    def load(self, state: dict[str, Any]) -> int:
        """Go to the position of a state, and return it."""
        self._data.load_state_dict(copy.deepcopy(state["source"]))
        self._state = state
        position: int = state["position"]
        return position

    def take_over(self) -> None:
        """This reader is the one that moves the source now, and draws what it drew there."""
        self._last[id(self._data)] = self
        self._generators.of_source_now = self._drawn

    def go_back(self) -> tuple[Iterable[Any], int]:
        """Go to the last state; the source from there on, and the position."""
        iterable = self._open_again()
        return iterable, 0 if self._state is None else self.load(self._state)
