"""Run, stop, save, load: the rest equals the rest."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

Loop = Callable[[Any], Iterable[Any]]


def as_json(state: Any) -> Any:
    """The state after a file of JSON."""
    return json.loads(json.dumps(state))


def as_pickle(state: Any) -> Any:
    """The state after `torch.save`, which pickles."""
    return pickle.loads(pickle.dumps(state))  # noqa: S301  (our own)


def in_parts(make: Callable[[], Any], stops: Iterable[int], *, loop: Loop = iter) -> list[Any]:
    """All batches of an epoch that is stopped, saved, and loaded into a new source at each stop.

    Args:
        make: a new source: a sampler, a stream, a loader, or the iterator of one.
        stops: numbers of batches, each counted from the stop before.
        loop: over a source; yields its batches.
    """
    source, batches = make(), []
    for number in stops:
        running = iter(loop(source))
        batches += islice(running, number)
        state = as_json(source.state_dict())
        source = make()
        source.load_state_dict(state)
    return batches + list(loop(source))


def check_every_stop(
    make: Callable[[], Any],
    *,
    loop: Loop = iter,
    file: Callable[[Any], Any] = as_json,
    every: int = 1,
) -> list[Any]:
    """The rest equals the rest from every batch of an epoch but its last one.

    Saving changes nothing: the epoch with all its states is the one without.

    Args:
        make: as for `in_parts`.
        loop: likewise.
        file: the state as it comes back from where it is kept.
        every: go on from one batch in so many.

    Returns:
        The batches of the epoch.
    """
    whole = list(loop(make()))
    source, states = make(), []
    for batch, expected in zip(loop(source), whole, strict=True):
        assert batch == expected
        states.append(file(source.state_dict()))
    for done in range(1, len(whole), every):
        source = make()
        source.load_state_dict(states[done - 1])
        assert list(loop(source)) == whole[done:], f"after {done} of {len(whole)} batches"
    return whole
