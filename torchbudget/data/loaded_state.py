"""A state that was loaded, and an epoch that is chosen before it was used."""

from __future__ import annotations

import warnings

from torchbudget.errors import DiscardedStateWarning


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
    warnings.warn(message, DiscardedStateWarning, stacklevel=3)
