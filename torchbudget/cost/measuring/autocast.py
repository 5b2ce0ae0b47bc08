"""Autocast's cache of casts, where a step is measured inside an open autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


def autocast_is_active() -> bool:
    """Whether an autocast context is open, so that its cache outlives the step."""
    outer = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return outer > 0


@contextmanager
def autocast_cache_kept() -> Iterator[None]:
    """Leave the casts that an open autocast has cached as they are, and add none.

    Without an open one, the contexts of the step itself clear the cache when they close.
    """
    if not autocast_is_active():
        yield
        return
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        # Contexts that were made before would enable it.
        with patch.object(torch, "set_autocast_cache_enabled", lambda _: None):
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
