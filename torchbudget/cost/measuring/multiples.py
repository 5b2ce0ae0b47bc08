"""Whether a step pads samples by itself, to whole windows or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from torchbudget.cost.measuring.peaks import fit_peaks
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.probe import Probe, columns

# Windows and chunks are powers of two, nearly always.
_CANDIDATES: Final = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Peaks that a form of the rounded sizes misses by no more are explained by it: the batch itself is
# not padded yet.
_EXPLAINED: Final = 0.02


def padded_multiple(probes: Sequence[Probe]) -> int | None:
    """The multiple of sizes that explains peaks, where the sizes themselves do not.

    Padding makes steps of the peaks, which no polynomial of the sizes follows; one of the sizes
    rounded up does. Takes no more traces.

    Args:
        probes: what was measured, of shapes whose sizes are no multiples.

    Returns:
        The same for every axis; `None` where none explains the peaks.
    """
    n, sizes, peaks = columns(probes)
    most = np.max(sizes)
    for multiple in _CANDIDATES:
        if multiple > most / 2:
            break
        rounded = -(-np.array(sizes) // multiple) * multiple
        fit = fit_peaks(n, rounded, peaks)
        cost = MeasuredCost(forms=fit.forms(n, rounded), margin=0)
        fitted = cost.fitted_bytes(n, rounded if cost.axes > 1 else rounded[:, 0])
        if np.abs(fitted / np.array(peaks) - 1).max() < _EXPLAINED:
            return multiple
    return None
