"""How far a fit can be trusted: its margin, its range, and a table where no formula fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from torchbudget.cost.measuring.shapes import Subject
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.table import TableCost
from torchbudget.cost.models.vouched import VouchedRange
from torchbudget.units import format_bytes

# A form that predicts less than a probe by more is not the step's, nor one of peaks alone that
# predicts more by more: layers round short sizes down.
_UNDER: Final = 0.1
_OVER: Final = 0.3
# Sizes below such a share of the largest are short: there a layer that rounds them is far off.
_SHORT: Final = 1 / 16
# Peaks above the lowest by less may be on the floor.
_FLOOR: Final = 1.01


def judged_cost(
    forms: tuple[Form, ...],
    probes: Sequence[Probe],
    least: float,
    subject: Subject,
    *,
    everywhere: bool,
    misfit: float = 0.0,
) -> MeasuredCost:
    """The cost of forms, with the margin that they need.

    Args:
        forms: whose maximum counts.
        probes: what was measured.
        least: the least margin.
        subject: what was measured; is warned of a form that does not fit.
        everywhere: whether the forms hold beyond what the probes have reached.
        misfit: the least margin of the forms, where that is more.
    """
    n, sizes, peaks = columns(probes)
    fitted = MeasuredCost(forms=forms, margin=0, probes=tuple(probes))
    table, margin = None, margin_of(fitted, max(least, misfit))
    if not fits(fitted, everywhere=everywhere):
        errors = fitted.errors()
        worst = max(errors, key=abs)
        probe = probes[errors.index(worst)]
        instead = "where a table of the measured batches says less, it is used"
        if not is_monotone(probes):
            instead = "and larger batches took less than smaller ones, so that others may take more"
        subject.warn(
            f"no formula fits: {probe.n} samples of size {probe.size} took "
            f"{format_bytes(probe.peak_bytes)}, the fitted form is off by {worst:+.1%}; {instead}"
        )
        most = tuple(math.ceil((1 + least) * peak) for peak in peaks)
        if is_monotone(probes):
            table = TableCost(numbers=tuple(n), sizes=tuple(sizes), peak_bytes=most)
        everywhere = False
    vouched = None
    if not everywhere:
        # A prediction that is off by no more than the margin counts as reached.
        reached = tuple(math.ceil((1 + margin) * peak) for peak in peaks)
        vouched = VouchedRange(
            numbers=tuple(n),
            sizes=tuple(sizes),
            peak_bytes=reached,
            floor_bytes=math.ceil(_FLOOR * min(reached)),
        )
    return MeasuredCost(
        forms=forms,
        margin=margin,
        largest=subject.domain.largest,
        vouched=vouched,
        table=table,
        probes=tuple(probes),
    )


def is_monotone(probes: Sequence[Probe]) -> bool:
    """Whether no batch took more than one that is as large, in samples and on every axis."""
    return not any(
        one.n <= other.n
        and all(a <= b for a, b in zip(one.size, other.size, strict=True))
        and one.peak_bytes > _FLOOR * other.peak_bytes
        for one in probes
        for other in probes
    )


def fits(cost: MeasuredCost, *, everywhere: bool = False) -> bool:
    """Whether the forms are near every probe; where they hold everywhere, short ones may be less.

    Args:
        cost: of forms, without a margin.
        everywhere: whether each moment of the step was fitted, so that layers that round sizes are
            why a form is above a step.
    """
    longest = np.max([probe.size for probe in cost.probes], axis=0)
    return all(
        error >= -_UNDER
        and (error <= _OVER or (everywhere and np.any(probe.size < _SHORT * longest)))
        for error, probe in zip(cost.errors(), cost.probes, strict=True)
    )


def margin_of(cost: MeasuredCost, least: float) -> float:
    """The margin that a fit needs.

    Twice the largest underestimate of a probe that was held out, and at least the largest of any.
    """
    under = [max(1 / (1 + error) - 1, 0) for error in cost.errors()]
    held_out = [u for u, probe in zip(under, cost.probes, strict=True) if probe.held_out]
    return max([least, *under, *(2 * one for one in held_out)])
