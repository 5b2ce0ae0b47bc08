"""The window that a sampler's options choose."""

from __future__ import annotations

from torchbudget.checks import optional
from torchbudget.errors import OptionError


def window_of(samples_per_step: int | None, window: int | None) -> int | None:
    """The length of windows; `None`: the default one.

    Raises:
        OptionError: both are given.
    """
    if samples_per_step is not None and window is not None:
        raise OptionError(
            "with samples_per_step a window is one step: leave window out, "
            f"got window={window}, samples_per_step={samples_per_step}"
        )
    return optional("samples_per_step", samples_per_step) or optional("window", window)
