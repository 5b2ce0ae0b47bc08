"""One measured batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured batch.

    Attributes:
        n: samples.
        size: padded size, one int per axis.
        peak_bytes: the peak of its step.
        held_out: whether it was left out of the fit, to judge it.
        how: "trace" or "run".
        seconds: duration of the step; `None` where it was traced.
    """

    n: int
    size: tuple[int, ...]
    peak_bytes: int
    held_out: bool
    how: str
    seconds: float | None = None


def columns(probes: Sequence[Probe]) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
    """Samples, sizes and peaks of probes."""
    return [p.n for p in probes], [p.size for p in probes], [p.peak_bytes for p in probes]
