"""How fast a loader yields its batches under given options."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from torchbudget.data.loading.host_model import Setting
from torchbudget.data.loading.trial import LoaderParts

_BATCHES: Final = 4096  # more than are ever timed


def samples_per_second(
    parts: LoaderParts, batches: Sequence[list[int]], setting: Setting, *, seconds: float
) -> float:
    """Samples that a loop takes in a second while it does nothing else.

    The data set is read in other processes only, also without workers.

    Args:
        parts: of the loader.
        batches: lists of indices, those that come first; they are repeated.
        setting: of the loader.
        seconds: after which no further batch is taken.
    """
    batches = [*batches] * -(-_BATCHES // len(batches))
    if not setting.workers:
        return _in_a_child(parts, batches, seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of more workers than processors
        loader = parts.loader(
            batches,
            num_workers=setting.workers,
            prefetch_factor=setting.prefetch,
            pin_memory=setting.pins,
        )
        return _timed(loader, batches, setting.workers * setting.prefetch, seconds)


def _timed(
    loader: Iterable[Any], batches: Sequence[list[int]], warm_up: int, seconds: float
) -> float:
    """The clock begins once all workers have started, and what they had ready is taken."""
    taken, began = 0, time.monotonic()
    for number, batch in enumerate(loader):
        del batch
        if number < warm_up:
            began = time.monotonic()
            continue
        taken += len(batches[number])
        if time.monotonic() - began > seconds:
            break
    return taken / max(time.monotonic() - began, 1e-9)


def _in_a_child(parts: LoaderParts, batches: Sequence[list[int]], seconds: float) -> float:
    context = parts.workers_context
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_time_alone, args=(parts, batches, seconds, sender), daemon=True)
    child.start()
    sender.close()
    try:
        found: float = receiver.recv()
    except EOFError:  # it has died: nothing is known of it
        found = 0.0
    child.join()
    return found


def _time_alone(
    parts: LoaderParts, batches: Sequence[list[int]], seconds: float, sender: Connection
) -> None:
    torch.set_num_threads(1)  # after a fork other threads of torch would be waited for
    loader = parts.loader(batches, num_workers=0)
    sender.send(_timed(loader, batches, 1, seconds))
