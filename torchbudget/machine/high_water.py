"""High-water marks of memory, of which the kernel and CUDA's allocator keep one each.

A mark can only be read and reset. Blocks of code that each want the most of their own time, one
inside the other or in several threads, share it through `HighWater`: whoever resets the mark hands
over what it was to all others first. Only what is reset elsewhere, past this module, is lost.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

from torchbudget.machine.process_tree import ROOT, read_fields


class HighWater:
    """The owner of one memory's marks.

    Args:
        read: the marks now; several where several are reset together.
        reset: makes them start from what is used now; whether that was possible.
    """

    def __init__(self, read: Callable[[], tuple[int, ...]], reset: Callable[[], bool]) -> None:
        self._read = read
        self._reset = reset
        self._open: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._lock = threading.Lock()

    def begin(self) -> Mark | None:
        """Return a mark that starts from the present use; `None` where the mark cannot be reset."""
        with self._lock:
            if not self._hand_over_and_reset():
                return None
            mark = Mark(self)
            self._open.add(mark)
            return mark

    def reset(self) -> bool:
        """Reset the mark itself; return whether that was possible."""
        with self._lock:
            return self._hand_over_and_reset()

    def renew_lock(self) -> None:
        """Make a lock that is free, in a process that was forked while a thread may have had it."""
        self._lock = threading.Lock()

    def most(self, mark: Mark) -> tuple[int, ...]:
        """Return the highest values since the mark began."""
        with self._lock:
            mark.hand_over(self._read())
            return mark.before

    def _hand_over_and_reset(self) -> bool:
        if self._open:
            now = self._read()
            for mark in self._open:
                mark.hand_over(now)
        return self._reset()


class Mark:
    """The highest values since it began, as long as it is referred to.

    Attributes:
        before: the most up to the last time that the memory's mark was read or reset.
    """

    def __init__(self, owner: HighWater) -> None:
        self._owner = owner
        self.before: tuple[int, ...] = ()

    def most(self) -> tuple[int, ...]:
        """Return the highest values since the mark began."""
        return self._owner.most(self)

    def hand_over(self, now: tuple[int, ...]) -> None:
        """Take in the present values of the memory's marks."""
        self.before = tuple(map(max, self.before, now)) if self.before else now


def _read() -> tuple[int, ...]:
    return (read_fields(ROOT / "proc/self/status").get("VmHWM", 0),)


def restart_peak(pid: int | None = None) -> bool:
    """Reset a process's mark itself; return whether the kernel allowed it.

    Args:
        pid: a child; None is this process, whose mark has one owner, `RESIDENT`.
    """
    try:
        (ROOT / "proc" / str(pid or "self") / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


# The mark of this process's resident memory, `VmHWM`.
RESIDENT: Final = HighWater(_read, restart_peak)
os.register_at_fork(after_in_child=RESIDENT.renew_lock)
