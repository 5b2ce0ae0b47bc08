"""Any iterable as a source, with a state of its own if it has one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torchbudget.data.stream.slot import Split, WorkerSlot


class PlainSource:
    """An iterable. Libraries whose data sets need more derive from it.

    Args:
        data: as the user passed it.

    Attributes:
        split: the processes by which it splits itself; `None`: it does not.
    """

    split: Split | None = None
    _first_to_open: ClassVar[WeakValueDictionary[int, PlainSource]] = WeakValueDictionary()

    def __init__(self, data: Any) -> None:
        self.data = data
        self._first_state: Any = None

    @property
    def is_iterable(self) -> bool:
        """Whether it can be opened."""
        return isinstance(self.data, Iterable)

    @property
    def seeks(self) -> bool:
        """Whether it has a state that says exactly where it stands."""
        return hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")

    def check_ranks(self, slot: WorkerSlot) -> None:
        """Raise an `OptionError` where it splits itself by other ranks than the stream's."""

    def open(self, slot: WorkerSlot, *, epoch: int) -> Iterable[Any]:
        """The samples of a pass, from the beginning, whatever was loaded before."""
        if self.seeks:
            # Of streams that share it, another one may have moved it since.
            first = self._first_to_open.setdefault(id(self.data), self)
            if first._first_state is None:
                first._first_state = copy.deepcopy(self.first_state())
            self._first_state = first._first_state
            self.data.load_state_dict(copy.deepcopy(self._first_state))
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        iterable: Iterable[Any] = self.data
        return iterable

    def first_state(self) -> Any:
        """A state that makes it start over."""
        return self.data.state_dict()
