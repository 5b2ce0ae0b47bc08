"""A rank without data, for `torch.distributed.algorithms.Join`."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import Join, Joinable, JoinHook


def notify_joined(one: Joinable) -> None:
    """Tell ranks without data, inside a `Join`, that this one has some."""
    work = Join.notify_join_context(one)
    if work is not None:
        work.wait()  # or else a process may end while a collective of its own is under way


class Joined(JoinHook):
    """Shadows the steps of the ranks that have data.

    Args:
        micro_batch: does what an empty micro-batch does.
        flush: takes what is left, when no rank has data.
    """

    def __init__(self, micro_batch: Callable[[], None], flush: Callable[[], None]) -> None:
        self._micro_batch = micro_batch
        self._flush = flush

    def main_hook(self) -> None:
        """One micro-batch of the other ranks."""
        self._micro_batch()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data."""
        self._flush()
