"""Random cases that can be made again, and faults at a chosen call, wherever it happens to be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from torchbudget import MeasuredCost

T = TypeVar("T", bound=tuple[Any, ...])
STARTS = 8  # after which a case fails no more


def drawn(strategy: SearchStrategy[T], chance: random.Random) -> T:
    """An example of a strategy whose examples begin with sizes and a cost.

    Measured costs, by which planning takes ten times as long, are one in ten.
    """
    found: list[T] = []

    @settings(database=None)
    @given(strategy)
    def take(value: T) -> None:
        found.append(value)

    enough = 4000
    while not found or (isinstance(found[-1][1], MeasuredCost) and chance.random() >= 0.1):
        take.hypothesis.fuzz_one_input(chance.randbytes(enough))  # type: ignore[attr-defined]
        enough *= 2
    return found[-1]


class Fault(Exception):  # noqa: N818  (made by a test)
    """A call failed."""


class Killed(BaseException):
    """The process ended there, or was interrupted."""


class Fuse:
    """Fails at one of the calls that reach it while it is lit."""

    left = 0  # calls
    kind: type[BaseException] = Fault

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.kind

    @contextmanager
    def lit(
        self, chance: random.Random, calls: int, told: Counter[str], kind: Any = None
    ) -> Iterator[None]:
        """Fail within so many calls, and count it; never after `STARTS` starts.

        Raises:
            BaseException: one that is not the fuse's, nor comes of it.
        """
        self.kind = kind or chance.choice([Fault, Killed])
        self.left = chance.randint(1, calls) if told["starts"] < STARTS else 0
        try:
            yield
        except BaseException as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, (Fault, Killed)):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            told["faults"] += 1
        finally:
            self.left = 0


FUSE = Fuse()
