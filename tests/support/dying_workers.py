"""Workers of a `DataLoader` that are killed in a test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.utils.data import DataLoader

# What a loop meets whose worker was killed: torch's error, or the end of the socket through which
# the worker was just handing over the file of a tensor.
DEATHS: Final = (RuntimeError, ConnectionError, EOFError, FileNotFoundError)


@contextmanager
def no_signals_of_workers() -> Iterator[None]:
    """Let a loop learn of a dead worker when it waits for a batch.

    By default torch raises in a signal handler: wherever this process happens to be, in pytest's
    own code too, and again for each worker that dies, until the loop's iterator is collected.
    """
    for _ in DataLoader([0], num_workers=1):  # type: ignore[arg-type]
        pass  # by now torch has set its handler
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        gc.collect()
        signal.signal(signal.SIGCHLD, handler)
