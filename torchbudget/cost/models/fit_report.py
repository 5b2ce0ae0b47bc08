"""How well a measured cost fits its probes, as text and as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchbudget.errors import MissingExtraError
from torchbudget.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchbudget.cost.models.measured import MeasuredCost

_ROW = "{:>8}  {:>12}  {:>12}  {:>12}  {:>8}  {:>8}  {}"


def report(cost: MeasuredCost) -> str:
    """A table of the probes, what was fitted and its errors."""
    lines = [_ROW.format("samples", "size", "measured", "fitted", "error", "seconds", "probe")]
    for probe, error in zip(cost.probes, cost.errors(), strict=True):
        lines.append(
            _ROW.format(
                f"{probe.n:,}",
                " × ".join(map(str, probe.size)),
                format_bytes(probe.peak_bytes),
                format_bytes(round(probe.peak_bytes * (1 + error))),
                f"{error:+.3%}",
                "" if probe.seconds is None else f"{probe.seconds:.3f}",
                f"{probe.how}, held out" if probe.held_out else probe.how,
            )
        )
    lines += [f"form: {form}" for form in cost.forms]
    lines.append(f"margin: {cost.margin:.3%}")
    lines += [f"{name}: {value}" for name, value in cost.measured_on.items()]
    lines += [f"note: {note}" for note in cost.notes]
    return "\n".join(lines)


def plot(cost: MeasuredCost) -> Figure:
    """Measured against fitted bytes, and the errors.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", "plot") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    measured = np.array([probe.peak_bytes for probe in cost.probes]) / 2**20
    errors = np.array(cost.errors())
    held_out = np.array([probe.held_out for probe in cost.probes])
    ends = [measured.min(), measured.max()]
    left.plot(ends, ends, color="0.7")
    for mask, label in ((~held_out, "fitted"), (held_out, "held out")):
        left.plot(measured[mask], measured[mask] * (1 + errors[mask]), "o", label=label)
        right.plot(measured[mask], 100 * errors[mask], "o", label=label)
    right.axhline(-100 * cost.margin, color="0.7")
    left.set(xlabel="measured, MiB", ylabel="fitted, MiB", xscale="log", yscale="log")
    right.set(xlabel="measured, MiB", ylabel="error, %", xscale="log")
    left.legend()
    return figure
