"""How long a step takes, by steps that are made for this: all shapes in turn, several times.

The time that optimizers take is no part of it: they step once, after many micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.measured import MeasuredCost
from torchbudget.cost.protocol import FloatArray
from torchbudget.cost.subject import Size, Subject
from torchbudget.units import MAX_BYTES

# Seconds that all of it may take, or this share of measuring, if that is more; or as long as
# enough shapes take. They are the smallest ones, while runs for the bytes are the largest.
_SECONDS: Final = 3.0
_TIME_SHARE: Final = 0.1
# Each shape is stepped on once to warm up, and then so often, all shapes in turn, as in training: a
# step on the shape of the one before took 14 % less. The least time of each shape counts.
_PASSES: Final = (2, 5)
# Sizes, as places between the smallest and the largest, and the shares of the budget's rest that
# batches of them take beside one sample. Batches that take the least time are small.
_PLACES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_SHARES: Final = (0.0, 0.003, 0.012, 0.05, 0.2)
# The same for budgets with room for few samples, which give fewer than `_ENOUGH_SHAPES`.
_MORE_PLACES: Final = (*np.linspace(0, 1, 17).tolist(),)
_MORE_SHARES: Final = (0.0, 0.05, 0.1, 0.2, 0.4)
# Of the budget's rest, what one sample may take: perhaps no batch of its size has been run.
_MOST_OF_ONE: Final = 0.5
_LEAST_SHAPES: Final = 6  # of which a first fit has four
_ENOUGH_SHAPES: Final = 9  # with six, a slow encoder was up to 657 % off, with nine 11 %
_HELD_OUT: Final = 3  # every third shape is held out of a first fit, for the error
# Shares of the shapes below a knee. Above one, each byte may take longer: kernels that were begun
# ahead are waited for, and caches are full. Without it, five kinds of steps took up to 8 % less
# than predicted where they are short, and 8 % more where they are long.
_KNEES: Final = (0.2, 0.4, 0.6, 0.8)
_LEAST_ABOVE: Final = 3  # shapes, or a slope would follow from the noise of one
_LEAST_TERM: Final = 1e-300  # of a term that no shape has
_NEGLIGIBLE: Final = 1e-9  # of terms scaled to at most 1
_MOST_JOINS: Final = 100


def timed(
    cost: MeasuredCost,
    subject: Subject,
    room: int,
    seconds_of: Callable[[tuple[int, Size]], float],
    measured_s: float,
    samples: int,
) -> MeasuredCost:
    """The cost with the coefficients of its time, and a note of its error on other shapes.

    A step without an optimizer, as that of `predict`, gets no time if a tenth of one pass over the
    samples is less than timing may take.

    Args:
        cost: of bytes.
        subject: the step and its batches.
        room: the budget.
        seconds_of: the seconds of a step on a shape, on the slowest rank; infinite if it ran out of
            memory. A collective.
        measured_s: seconds that measuring has taken, on the slowest rank.
        samples: in the data set, of the rank that has most; 0: it is not known.

    Returns:
        The cost with its time; without one if too few shapes could be timed, or if all of them had
        one sample.
    """
    left_s = max(_SECONDS, _TIME_SHARE * measured_s)
    if not subject.state.optimizers and samples:  # a forward, of one pass
        each_s = max((one.seconds or 0.0) / one.n for one in cost.probes)
        if _TIME_SHARE * each_s * samples < left_s:
            return cost
    shapes: list[tuple[int, Size]] = []
    once_s = 0.0
    for shape in _shapes(cost, subject, room):
        if not shapes:
            seconds_of(shape)  # what the first step compiles or begins comes once
        seconds = seconds_of(shape)
        is_late = (once_s + seconds) * (1 + _PASSES[0]) > left_s
        if (is_late and len(shapes) >= _ENOUGH_SHAPES) or math.isinf(seconds):
            break
        shapes.append(shape)
        once_s += seconds
    if len(shapes) < _LEAST_SHAPES or max(n for n, _ in shapes) == 1:
        return cost
    passes = int(np.clip(left_s / once_s - 1, *_PASSES))
    took = np.min([[*map(seconds_of, shapes)] for _ in range(passes)], axis=0)
    fitted = np.arange(len(shapes)) % _HELD_OUT != _HELD_OUT - 1
    known, bytes_above = _terms(cost, shapes)
    knees = np.quantile(bytes_above, _KNEES)
    knees = knees[(bytes_above > knees[:, None]).sum(axis=1) >= _LEAST_ABOVE]
    knees = knees if len(knees) else np.zeros(1)  # no knee: all bytes count
    choices = [np.column_stack([known, np.maximum(bytes_above - knee, 0)]) for knee in knees]
    held_out = _best([terms[fitted] for terms in choices], took[fitted])
    errors = choices[held_out[0]][~fitted] @ held_out[1] / took[~fitted] - 1
    subject.notes.append(
        f"time was measured with {len(shapes)} shapes; without {len(errors)} of them, the fit was "
        f"up to {np.abs(errors).max():.0%} off there"
    )
    at, coefficients = _best(choices, took)
    return replace(cost, seconds=tuple(coefficients.tolist()), knee=int(knees[at]))


def _shapes(cost: MeasuredCost, subject: Subject, room: int) -> list[tuple[int, Size]]:
    """Shapes from one sample of the smallest size on, by their bytes."""
    found: dict[tuple[int, Size], int] = {}
    for places, shares in ((_PLACES, _SHARES), (_MORE_PLACES, _MORE_SHARES)):
        sizes = list(dict.fromkeys(map(subject.domain.between, places)))
        asked = np.array(sizes)[:, 0] if cost.axes == 1 else np.array(sizes)
        ones = cost.batch_bytes(1, asked)
        least = int(ones.min())
        for size, each, one in zip(sizes, asked, ones.tolist(), strict=True):
            for share in shares if one <= least + _MOST_OF_ONE * (room - least) else ():
                amount = max(one, int(least + share * (room - least)))
                n = min(int(cost.capacity(each, amount)), subject.most_samples(size))
                found[n, size] = int(cost.batch_bytes(n, each))
        if len(found) >= _ENOUGH_SHAPES:
            break
    return sorted(found, key=lambda shape: (found[shape], shape))


def _terms(cost: MeasuredCost, shapes: list[tuple[int, Size]]) -> tuple[FloatArray, FloatArray]:
    """The terms of `MeasuredCost.time` but the last, `(shapes, terms)`, and traced bytes.

    Bytes are those beside an empty batch's. A grid has no operations, nor has a step with so many
    that no polynomial in n bounds them, of which `cost.time` could make no table.
    """
    n, sizes = np.array([n for n, _ in shapes]), np.array([size for _, size in shapes])
    asked = sizes if cost.axes > 1 else sizes[:, 0]
    traced = cost.traced_bytes(n, asked)
    of_bytes = np.where(traced < MAX_BYTES, np.maximum(traced - cost.empty, 0), 0)
    pieces = tuple(replace(one, sums=(one.flops,)) for one in cost.pieces)
    flops = 0 * n
    with suppress(UntraceableError):
        if cost.grid is None:
            for one in pieces:
                one.in_n(sizes)
            flops = replace(cost, pieces=pieces).traced_bytes(n, asked)
    by_axis = [term for size in sizes.T for term in (size, n * size)]
    terms = np.stack([np.ones(len(n)), n, *by_axis, flops, of_bytes], axis=1)
    terms = np.where(terms < MAX_BYTES, terms, 0.0)
    return terms, terms[:, -1]


def _best(choices: Sequence[FloatArray], seconds: FloatArray) -> tuple[int, FloatArray]:
    """Which choice of terms, `(shapes, terms)`, fits best, and its coefficients.

    The coefficients are those that are not negative and have the least squares of relative errors.
    """
    weighted = [terms / seconds[:, None] for terms in choices]
    found = [_not_negative(one) for one in weighted]
    errors = [
        np.square(one @ solved - 1).sum() for one, solved in zip(weighted, found, strict=True)
    ]
    best = int(np.argmin(errors))
    return best, found[best]


def _not_negative(terms: FloatArray) -> FloatArray:
    """Coefficients, none negative, with which terms, `(shapes, terms)`, come closest to ones.

    The method is of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23: the term
    that helps most joins, and terms that would become negative leave.
    """
    scales = np.maximum(terms.max(axis=0), _LEAST_TERM)
    matrix, ones = terms / scales, np.ones(len(terms))
    found, joined = np.zeros(len(scales)), np.zeros(len(scales), bool)
    for _ in range(_MOST_JOINS):
        helps = np.where(joined, 0.0, matrix.T @ (1 - matrix @ found))
        if helps.max() <= _NEGLIGIBLE:
            break
        joined[helps.argmax()] = True
        while True:
            solved = np.zeros(len(scales))
            solved[joined] = np.linalg.lstsq(matrix[:, joined], ones, rcond=None)[0]
            leaving = joined & (solved < 0)
            if not leaving.any():
                break
            # As far towards the solution as none is negative.
            share = (found[leaving] / (found[leaving] - solved[leaving])).min()
            found += share * (solved - found)
            joined &= found > _NEGLIGIBLE
        found = solved
    coefficients: FloatArray = found / scales
    return coefficients


@contextmanager
def optimizer_seconds(wait: Callable[[], object]) -> Iterator[Callable[[], float]]:
    """Yield a function that tells for how many seconds torch's optimizers have stepped inside.

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

    with register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after):
        yield lambda: spent_s
