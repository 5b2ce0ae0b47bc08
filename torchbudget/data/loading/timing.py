"""How fast a loader yields its batches under given options, and which options are the fastest."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import torch

from torchbudget.data.loading.host_model import Setting
from torchbudget.data.loading.loader_parts import LoaderParts

# A setting's speed is the median of some: what else the machine does slows down one or another.
_ROUNDS: Final = 3
_TRIED: Final = 8  # numbers of workers that are timed in one round or another, about
# Of the fastest: what two timings of one setting differ by.
_AS_FAST: Final = 0.99
# The loop's own work hides what workers take, and waits for what is done without them.
_CLEARLY_SLOWER: Final = 0.95
# Batches of a cycle: of fewer, workers wait for the slowest one.
_LEAST: Final = 8
_MOST: Final = 512
_PATIENCE: Final = 4  # slices, for a cycle

Slice: TypeAlias = tuple[float, float]  # samples a second, and the seconds that it took


def time_workers(
    parts: LoaderParts,
    batches: Sequence[list[int]],
    setting: Callable[[int], Setting],
    most: int,
    *,
    batch_s: float,
    seconds: float,
) -> dict[int, float]:
    """Samples a second of some numbers of workers up to `most`, the fastest ones among them.

    Args:
        parts: of the loader.
        batches: lists of indices, those that come first.
        setting: of the loader, by its number of workers.
        most: workers.
        batch_s: that one worker takes for a batch, about.
        seconds: for all, without those in which workers start.
    """
    rounds = _ROUNDS if parts.starts_by_fork else 1  # starting anew may take long
    slice_s = seconds / (_TRIED * rounds)
    # So many batches that one worker reads them in a slice.
    cycle = batches[: min(_MOST, max(_LEAST, int(slice_s / max(batch_s, 1e-9))))]

    def time_slice(workers: int) -> Slice:
        return _time_loader(parts, cycle, setting(workers), slice_s)

    return speeds_of(time_slice, most, seconds=seconds, rounds=rounds)


def speeds_of(
    time_slice: Callable[[int], Slice], most: int, *, seconds: float, rounds: int
) -> dict[int, float]:
    """Samples a second of numbers of workers, in ascending order.

    First of none, the most, a half and a quarter of them; then again of the fastest two, and of
    what lies between the fastest and its neighbours. All in turn, every other time in reverse, so
    that what else the machine does falls on all.

    Args:
        time_slice: times one of them for a moment.
        most: workers.
        seconds: after which no further round is begun.
        rounds: of each half, at the most.
    """
    slices: dict[int, list[float]] = {}
    spent = 0.0

    def play(numbers: Iterable[int], until: float) -> None:
        nonlocal spent
        order = sorted(numbers)
        for _ in range(rounds):
            if slices and spent >= until:
                break
            for workers in order:
                speed, took = time_slice(workers)
                slices.setdefault(workers, []).append(speed)
                spent += took
            order.reverse()

    play({0, most, most // 2, most // 4}, seconds / 2)
    ranked = sorted(slices, key=lambda workers: statistics.median(slices[workers]))
    finalists = _between(sorted(slices), ranked[-1])
    if rounds > 1:
        finalists.update(ranked[-2:])
    play(finalists, seconds)
    return {workers: statistics.median(found) for workers, found in sorted(slices.items())}


def _between(tried: Sequence[int], best: int) -> set[int]:
    """What lies halfway between the best and the numbers beside it, and was not tried."""
    at = tried.index(best)
    return {(best + other) // 2 for other in tried[max(0, at - 1) : at + 2]} - {*tried}


def fastest(speeds: dict[int, float]) -> int:
    """The number of workers to take: of nearly the same speed the most.

    None only where they are clearly slower: the loop waits for what is loaded without them.

    >>> fastest({0: 100.0, 1: 97.0, 2: 96.5})
    2
    >>> fastest({0: 100.0, 1: 97.0, 2: 91.0})
    1
    >>> fastest({0: 100.0, 1: 94.0})
    0
    """
    best = max((speed for workers, speed in speeds.items() if workers), default=0.0)
    if best < _CLEARLY_SLOWER * speeds.get(0, 0.0):
        return 0
    return max(n for n, speed in speeds.items() if n and speed >= _AS_FAST * best)


def _time_loader(
    parts: LoaderParts, cycle: Sequence[list[int]], setting: Setting, seconds: float
) -> Slice:
    """The data set is read in other processes only, also without workers."""
    if not setting.workers:
        return _in_a_child(parts, cycle, seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of more workers than processors
        loader = parts.loader(
            _over_and_over(cycle),
            num_workers=setting.workers,
            prefetch_factor=setting.prefetch,
            pin_memory=setting.pins,
        )
        return time_cycles(loader, cycle, setting.workers * setting.prefetch, seconds)


def _over_and_over(cycle: Sequence[list[int]]) -> Iterable[list[int]]:
    return chain.from_iterable(repeat(cycle))


def time_cycles(
    loader: Iterable[Any], cycle: Sequence[list[int]], warm_up: int, seconds: float
) -> Slice:
    """Samples that a loop takes in a second while it does nothing else.

    In whole cycles any setting reads the same batches, however many of them are on their way when
    the clock begins and, as many, when it ends.

    Args:
        loader: of the batches of the cycle, over and over.
        cycle: lists of indices.
        warm_up: batches that are taken before the clock begins: once all workers have started, and
            what they had ready is taken.
        seconds: after which no further cycle is begun; one that takes several times as long is
            broken off.
    """
    taken, began = 0, time.monotonic()
    for at, batch in enumerate(loader):
        del batch
        if at < warm_up:
            began = time.monotonic()
            continue
        taken += len(cycle[at % len(cycle)])
        is_whole = (at + 1 - warm_up) % len(cycle) == 0
        if time.monotonic() - began > (seconds if is_whole else _PATIENCE * seconds):
            break
    took = max(time.monotonic() - began, 1e-9)
    return taken / took, took


def _in_a_child(parts: LoaderParts, cycle: Sequence[list[int]], seconds: float) -> Slice:
    context = parts.workers_context
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_time_alone, args=(parts, cycle, seconds, sender), daemon=True)
    child.start()
    sender.close()
    try:
        found: Slice = receiver.recv()
    except EOFError:  # it has died: nothing is known of it
        found = 0.0, seconds
    child.join()
    return found


def _time_alone(
    parts: LoaderParts, cycle: Sequence[list[int]], seconds: float, sender: Connection
) -> None:
    torch.set_num_threads(1)  # after a fork other threads of torch would be waited for
    loader = parts.loader(_over_and_over(cycle), num_workers=0)
    sender.send(time_cycles(loader, cycle, 1, seconds))
