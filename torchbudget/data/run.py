"""`Run`: one loop over a loader that knows where it stands after each batch that came.

Workers read ahead of the loop, so that a sampler or a stream alone does not know which of its
batches came. A run takes one record for each of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

from torch.utils.data import DataLoader

from torchbudget.errors import DiscardedStateWarning, StateError, warn

Place = TypeVar("Place")

# A host that reads one batch ahead asks for the position before it; one more for an end that it
# has seen ahead.
_KEPT: Final = 3
_ENDED: Final = object()


class Run(Iterator[Any], AbstractContextManager["Run[Any]"], Generic[Place]):
    """One loop over a loader; `tracked` of a sampler or a stream returns one.

    While a run is open, other loops over its sampler or stream do not change the position; of
    several runs the last one that yielded a batch counts. After a `break` the sampler or stream
    stays after the last batch of the run, and the next tracked loop continues there. An error of
    the loader ends the run.

    Args:
        runs: open runs of the sampler or stream, which this one joins.
        loader: the loader; the run calls `iter(loader)`.
    """

    def __init__(self, runs: WeakSet[Any], loader: DataLoader[Any]) -> None:
        self._runs = runs
        self._batches: Iterator[Any] | None = iter(loader)
        # The loaders' iterator of workers that persist is one object, which a later loop restarts.
        self._restarts = getattr(self._batches, "_sampler_iter", None)
        self._first = self._began()
        self._places: deque[Place] = deque([self._first], _KEPT)
        self._runs.add(self)

    @abstractmethod
    def _began(self) -> Place:
        """Return the place where the loop begins, once `iter(loader)` was called."""

    @abstractmethod
    def _take(self, came: Any) -> tuple[Place, Any]:
        """Return the place after what came from the loader, and the user's batch."""

    @abstractmethod
    def _end(self) -> Place:
        """Return the place after the loader's end; raise if batches are missing."""

    @abstractmethod
    def _move_to(self, place: Place) -> None:
        """Move the sampler or stream, unless another position was chosen since the run began."""

    @abstractmethod
    def _state(self, place: Place) -> dict[str, Any]:
        """Return the state of a place."""

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            if getattr(self._batches, "_sampler_iter", None) is not self._restarts:
                raise StateError(
                    "with persistent workers, another loop over this loader began inside a tracked "
                    "one: end the tracked loop first, or give the other loop a loader of its own"
                )
            came = next(self._batches, _ENDED)
            if came is _ENDED:
                self._places[-1] = self._end()  # the same place, once the epoch is known to be over
            else:
                place, came = self._take(came)
                self._places.append(place)
        except BaseException:
            self.close()
            raise
        self._move_to(self._places[-1])
        if came is _ENDED:
            self.close()
            raise StopIteration
        return came

    @property
    def last(self) -> Place:
        """The record of the batch that came last; before the first one, where the loop began."""
        return self._places[-1]

    def position(self, back: int = 0) -> dict[str, Any]:
        """Return the position after the last batch received, as `state_dict` does.

        Args:
            back: go back this many batches, for a loop that fetches batches ahead: 0, 1 or 2.

        Raises:
            StateError: that many positions are not kept.
        """
        if back >= _KEPT:
            raise StateError(f"{_KEPT} positions are kept: back must be less, got {back}")
        return self._state(self._places[max(len(self._places) - 1 - back, 0)])

    def start_over(self) -> None:
        """Put the sampler or stream back where the run began, for a host whose loops start over."""
        self.close()
        self._move_to(self._first)

    def close(self) -> None:
        """End the run at its present position."""
        self._batches = None  # ends workers that do not persist
        self._runs.discard(self)

    def __exit__(self, *_: object) -> None:
        self.close()


def warn_of_discarded_state(loaded: int, chosen: int, *, within: bool) -> None:
    """Warn the caller of `set_epoch` if samples would be lost, or come again.

    Args:
        loaded: the epoch in which the state stands.
        chosen: another one.
        within: it stands after the first of that epoch's batches.
    """
    if within or chosen < loaded:
        warn(
            f"set_epoch({chosen}) discards the position that was loaded in epoch {loaded}: samples "
            "are lost or repeated. Continue that epoch, as in `for epoch in range(sampler.epoch, "
            "epochs)`, or do not load the state",
            DiscardedStateWarning,
        )
