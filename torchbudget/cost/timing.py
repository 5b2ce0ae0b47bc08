"""Seconds of a step, by steps of their own: warm, repeated, and without the optimizer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchbudget.cost.measured import MeasuredCost
from torchbudget.cost.protocol import FloatArray
from torchbudget.cost.subject import Size, Subject
from torchbudget.units import MAX_BYTES

# Seconds that all of it may take, or this share of measuring, if that is more.
_SECONDS: Final = 3.0
_SHARE: Final = 0.1
# The first step of a shape warms up, and the least time of the others counts.
_REPEATS: Final = 4
# Sizes, as places between the smallest and the largest, and the shares of the budget's rest that
# batches of them take beside one sample.
_PLACES: Final = (0.0, 0.35, 0.7, 1.0)
_SHARES: Final = (0.01, 0.04, 0.15, 0.4)
_HELD_OUT: Final = 3  # every third shape only tells the error
_COEFFICIENTS: Final = 4


def timed(
    cost: MeasuredCost,
    subject: Subject,
    room: int,
    seconds_of: Callable[[tuple[int, Size], int], float],
    measured_s: float,
) -> MeasuredCost:
    """The cost with the coefficients of its time, and a note of its error on other shapes.

    Args:
        cost: of bytes.
        subject: the step and its batches.
        room: the budget.
        seconds_of: the least seconds of some steps on a shape, the same on all ranks.
        measured_s: seconds that measuring has taken.
    """
    left_s = max(_SECONDS, _SHARE * measured_s)
    shapes: list[tuple[int, Size]] = []
    seconds: list[float] = []
    for shape in _shapes(cost, subject, room):
        # Each shape takes at least as long as the one before.
        if seconds and left_s < _REPEATS * seconds[-1]:
            break
        shapes.append(shape)
        seconds.append(seconds_of(shape, _REPEATS))
        left_s -= _REPEATS * seconds[-1]
    terms, took = _terms(cost, shapes), np.array(seconds)
    fitted = np.arange(len(shapes)) % _HELD_OUT != _HELD_OUT - 1
    errors = terms[~fitted] @ _fitted(terms[fitted], took[fitted]) / took[~fitted] - 1
    known = (
        f", by {len(errors)} others, up to {np.abs(errors).max():.0%} off" if len(errors) else ""
    )
    note = f"time was measured with {len(shapes)} shapes{known}"
    subject.notes.append(note)
    return replace(cost, seconds=tuple(_fitted(terms, took).tolist()))


def _shapes(cost: MeasuredCost, subject: Subject, room: int) -> list[tuple[int, Size]]:
    """Shapes from one sample of the smallest size on, by their bytes."""
    sizes = list(dict.fromkeys(map(subject.domain.between, _PLACES)))
    asked = np.array(sizes)[:, 0] if cost.axes == 1 else np.array(sizes)
    ones = cost.batch_bytes(1, asked)
    found = {}
    for size, each, one in zip(sizes, asked, ones.tolist(), strict=True):
        shares = [one, *(int(ones.min() + share * (room - ones.min())) for share in _SHARES)]
        for amount in shares if one <= room else ():
            n = min(int(cost.capacity(each, amount)), subject.most_samples(size))
            if n >= 1:
                found[n, size] = int(cost.batch_bytes(n, each))
    return sorted(found, key=lambda shape: (found[shape], shape))


def _terms(cost: MeasuredCost, shapes: list[tuple[int, Size]]) -> FloatArray:
    """1, n, traced bytes beside those of no samples, and floating-point operations.

    A grid has no operations: where there is one, bytes stand for them.
    """
    n = np.array([n for n, _ in shapes])
    sizes = np.array([size if cost.axes > 1 else size[0] for _, size in shapes])
    of_bytes = np.maximum(cost.traced_bytes(n, sizes) - cost.empty, 0)
    flops = cost.work.traced_bytes(n, sizes) if cost.grid is None else 0 * n
    terms = np.stack([np.ones(len(n)), n, of_bytes, flops], axis=1)
    return np.where(terms < MAX_BYTES, terms, 0.0)


def _fitted(terms: FloatArray, seconds: FloatArray) -> FloatArray:
    """Coefficients, none negative, by the least squares of relative errors."""
    weighted = terms / seconds[:, None]
    scales = np.maximum(weighted.max(axis=0), 1e-300)
    coefficients, used = np.zeros(_COEFFICIENTS), np.flatnonzero(weighted.any(axis=0))
    while len(used):
        solved = np.linalg.lstsq(weighted[:, used] / scales[used], np.ones(len(seconds)))[0]
        if solved.min() >= 0:
            coefficients[used] = solved / scales[used]
            break
        used = used[solved > solved.min()]  # without the term that would be negative, until none is
    return coefficients


@contextmanager
def optimizer_seconds(wait: Callable[[], object]) -> Iterator[Callable[[], float]]:
    """Count the seconds that optimizers of torch step inside: no part of a micro-batch.

    Args:
        wait: for the device.
    """
    begun: list[float] = []
    spent_s = 0.0

    def before(*_: Any) -> None:
        wait()
        begun.append(time.perf_counter())

    def after(*_: Any) -> None:
        nonlocal spent_s
        wait()
        start_s = begun.pop()
        if not begun:  # one that another calls is counted with that
            spent_s += time.perf_counter() - start_s

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield lambda: spent_s
    finally:
        for hook in hooks:
            hook.remove()
