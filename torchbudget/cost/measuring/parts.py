"""Steps that take their batch, or its loss, in parts: what fits all but small batches.

A batch of less than one part takes a share of a whole part's memory that no polynomial is. Such
batches are rarely planned: what the smallest whole parts take is their upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from torchbudget.cost.measuring.fitting import fit_peaks, form_of
from torchbudget.cost.measuring.terms import plain_powers, powers_of
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.protocol import IntArray

# A fit to large batches that misses one of them by more is not taken.
_MISFIT: Final = 0.05
# Nor is one whose bound of small batches is more than this share of the budget.
_SMALL: Final = 0.9


def fit_large_batches(
    probes: Sequence[Probe], longest: Sequence[int], room: int | None
) -> tuple[tuple[Form, ...], float, int] | None:
    """The forms that fit all probes but small ones, and a bound of those.

    Args:
        probes: batches of all numbers of samples.
        longest: the largest size on every axis.
        room: the budget, if there is one.

    Returns:
        The forms, the last of which is the bound; how much such a fit is below a peak that it has
        not seen, as a share of it; and the bound in bytes. `None` where there are no such forms.
    """
    n, sizes, _ = columns(probes)
    axes = len(sizes[0])
    samples, areas = np.array(n), np.array(sizes).prod(axis=1)
    for in_samples, least in _choices(samples, samples * areas):
        units = samples if in_samples else samples * areas
        large = [probe for probe, one in zip(probes, units, strict=True) if one >= least]
        small = [probe.peak_bytes for probe, one in zip(probes, units, strict=True) if one < least]
        if len(large) < len(plain_powers(axes)) + 2:
            return None
        forms, under = fit_peaks(*columns(large))
        cost = MeasuredCost(forms=forms, margin=0, probes=tuple(large))
        if under > _MISFIT or max(map(abs, cost.errors())) > _MISFIT:
            continue
        # Of so many units in samples of the longest size, which take the most for their number.
        number = least if in_samples else -(-least // math.prod(longest))
        whole = cost.fitted_bytes(number, longest if axes > 1 else longest[0])
        bound = max(int(whole), *small)
        if room is None or bound <= _SMALL * room:
            constant = form_of([float(bound)], powers_of(axes)[:1])
            return (*forms, constant), under, bound
    return None


def _choices(samples: IntArray, elements: IntArray) -> list[tuple[bool, int]]:
    """Whether samples are counted, or samples times size, and the least number of a large batch.

    The choices that leave out the fewest batches come first.
    """
    choices = [
        (int((units < least).sum()), units is samples, least)
        for units in (samples, elements)
        for least in np.unique(units)[1:].tolist()
    ]
    return [(in_samples, least) for _, in_samples, least in sorted(choices)]
