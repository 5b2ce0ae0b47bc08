"""What ranks do together: it succeeds on all of them, or raises on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torchbudget.distributed import host_group
from torchbudget.errors import RankError
from torchbudget.train.process_group import Ranks

T = TypeVar("T")


def on_host(ranks: Ranks) -> Ranks:
    """The same ranks, joined by a process group on the host; a collective."""
    return Ranks(host_group(ranks.group)) if len(ranks) > 1 else ranks


def on_each_rank(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """What the work returns on each rank; one small collective.

    A rank that fails waits here for the others, which are at work still.

    Args:
        ranks: joined by a process group on the host.
        work: done on each; what it returns is pickled.

    Raises:
        RankError: it failed on another rank.
    """
    try:
        mine = work()
    except Exception as error:
        ranks.gather_objects((f"{type(error).__name__}: {error}", None))
        raise
    outcomes = ranks.gather_objects((None, mine))
    _check([failure for failure, _ in outcomes])
    return [result for _, result in outcomes]


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """As `on_each_rank`, of what runs inside.

    Args:
        ranks: joined by a process group on the host.

    Raises:
        RankError: it failed on another rank.
    """
    try:
        yield
    except Exception as error:
        ranks.gather_objects(f"{type(error).__name__}: {error}")
        raise
    _check(ranks.gather_objects(None))


def _check(failures: Sequence[Any]) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RankError(f"rank {rank} failed, see its traceback: {failure}")
