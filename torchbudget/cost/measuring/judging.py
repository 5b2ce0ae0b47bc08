"""Whether a fit is good enough, and which margin it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torchbudget.cost.measuring.subject import Subject
from torchbudget.cost.models.measured import Form, MeasuredCost
from torchbudget.cost.models.padded import PaddedCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.table import TableCost
from torchbudget.units import format_bytes

# A form whose error on any probe is larger is not the step's.
_FITS: Final = 0.1


def table_unless_it_fits(
    forms: tuple[PaddedCost, ...], probes: Sequence[Probe], subject: Subject
) -> tuple[Form, ...]:
    """The forms; or, where one probe is far off, a table of the probes, a warning and a note."""
    errors = MeasuredCost(forms=forms, margin=0, probes=tuple(probes)).errors()
    worst = max(errors, key=abs)
    if abs(worst) <= _FITS:
        return forms
    probe = probes[errors.index(worst)]
    subject.warn(
        f"no formula fits: {probe.n} samples of size {probe.size} took "
        f"{format_bytes(probe.peak_bytes)}, the fitted form is off by {worst:+.1%}; a table of the "
        "measured batches is used instead, which is safe but coarse"
    )
    n, sizes, peaks = columns(probes)
    return (TableCost(numbers=tuple(n), sizes=tuple(sizes), peak_bytes=tuple(peaks)),)


def margin_of(cost: MeasuredCost, least: float) -> float:
    """The margin that a fit needs.

    Twice the largest underestimate of a probe that was held out, and at least the largest of any.
    """
    under = [max(1 / (1 + error) - 1, 0) for error in cost.errors()]
    held_out = [u for u, probe in zip(under, cost.probes, strict=True) if probe.held_out]
    return max([least, *under, *(2 * one for one in held_out)])
