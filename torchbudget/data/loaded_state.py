"""A state that was loaded, and then another epoch was chosen, or other rules hold."""

from __future__ import annotations

from torchbudget.errors import DiscardedStateWarning, OtherNumbersWarning
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.numbers import Numbers
from torchbudget.warn import warn


def warn_of_discarded_state(loaded: int, chosen: int, *, within: bool) -> None:
    """Warn the caller of `set_epoch` where samples would be lost, or come again.

    Args:
        loaded: the epoch in which the state stands.
        chosen: another one.
        within: it stands after the first of that epoch's batches.
    """
    if within:
        message = (
            f"set_epoch({chosen}) discards the position that was loaded in epoch {loaded}; go on "
            "in that epoch, or do not load the state"
        )
    elif chosen < loaded:
        message = (
            f"set_epoch({chosen}) goes back to an epoch that was over when the loaded state was "
            f"saved: its samples come again. Go on with epoch {loaded}, as in "
            "`for epoch in range(sampler.epoch, epochs)`, or do not load the state"
        )
    else:
        return
    warn(message, DiscardedStateWarning)


def warn_of_other_numbers(numbers: Numbers, cursor: Cursor) -> None:
    """Warn where an epoch goes on by other rules, and so with other numbers of micro-batches.

    Args:
        numbers: that it is to have.
        cursor: where it goes on.
    """
    suspended = []
    if numbers.per_epoch is not None:
        suspended.append(f"batches_per_epoch={numbers.per_epoch!r} until it ends")
    if numbers.per_step is not None and cursor.left is not None:
        suspended.append(f"micro_batches_per_step={numbers.per_step} for the step that was begun")
    if suspended:
        warn(
            f"epoch {cursor.epoch} goes on under other ranks, another budget, cost or option, or "
            f"after replan(): this suspends {' and '.join(suspended)}",
            OtherNumbersWarning,
        )
