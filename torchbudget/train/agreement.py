"""What ranks do together: it succeeds on all of them, or raises on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchbudget.distributed import failing_together, host_group
from torchbudget.train.process_group import Ranks

T = TypeVar("T")


def on_host(ranks: Ranks) -> Ranks:
    """The same ranks, joined by a process group on the host; a collective."""
    return Ranks(host_group(ranks.group)) if len(ranks) > 1 else ranks


def on_each_rank(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """What the work returns on each rank; it fails together, see `failing_together`."""
    with failing_together(ranks.gather_objects):
        mine = work()
    return ranks.gather_objects(mine)


def on_any_rank(ranks: Ranks, work: Callable[[], bool]) -> bool:
    """Whether the work returns true on any rank; it fails together, see `failing_together`.

    One collective of two numbers where it succeeds, which is cheap enough for every step.
    """
    mine, failure = False, None
    try:
        mine = work()
    except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
        failure = error
    ends, failures = ranks.sum_on_host([mine, failure is not None])
    if failures:
        with failing_together(ranks.gather_objects):
            if failure is not None:
                raise failure
    return bool(ends)
