"""Figures of plans, batches, costs and memory, as `matplotlib.figure.Figure` (extra `plot`).

Nothing is told by colour alone: areas are hatched, lines have styles and points markers. Each
function returns a figure without a window; `figure.savefig("plan.svg")` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.protocol import CostModel
from torchbudget.errors import OptionError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan
from torchbudget.plotting import new_figure
from torchbudget.units import MAX_BYTES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EDGE: Final = {"edgecolor": "black", "linewidth": 0.3}
_DATA: Final = {"color": "0.5", "label": "data", **_EDGE}
_PADDING: Final = {"color": "0.9", "hatch": "xx", "label": "padding", **_EDGE}
_STYLES: Final = ("-", "--", ":", "-.")
_MARKERS: Final = ("o", "s", "^", "D")
_BINS: Final = 40
_GRID: Final = 48  # points on each axis of a cost's surface
_LEVELS: Final = 12


def plot_sizes(plan: Plan, *, epoch: int = 0, axis: int = 0) -> Figure:
    """The elements of an epoch by the size of their samples, and the padding that they get.

    Args:
        plan: such as `sampler.plan`.
        epoch: which one.
        axis: of the sizes, where there are several.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: there is no such axis.
    """
    if not 0 <= axis < plan.sizes.axes:
        raise OptionError(f"axis must be 0 to {plan.sizes.axes - 1}, got {axis!r}")
    figure, [axes] = new_figure()
    largest = int(np.atleast_1d(plan.sizes.largest)[axis])
    edges = np.linspace(0, largest + 1, min(_BINS, largest + 1) + 1)
    data, padding = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for own, padded in _padded_sizes(plan, epoch, axis):
        data += np.histogram(own, edges, weights=own)[0]
        padding += np.histogram(own, edges, weights=padded - own)[0]
    widths = np.diff(edges)
    axes.bar(edges[:-1], data, widths, align="edge", **_DATA)
    axes.bar(edges[:-1], padding, widths, align="edge", bottom=data, **_PADDING)
    axes.set(xlabel="size of a sample", ylabel="elements in an epoch", xlim=(0, largest + 1))
    axes.legend()
    return figure


def _padded_sizes(plan: Plan, epoch: int, axis: int) -> Any:
    """Samples' own and padded sizes on an axis, int64 arrays of the shape `(n,)`, by blocks."""
    for span in plan.spans(Cursor(epoch=epoch)):
        block, rules = span.block, plan.rules
        packs = rules.packing is not None
        padded = rules.padded(block.sizes if packs else block.for_samples(block.padded()))
        own = block.sizes.astype(np.int64)
        yield own.reshape(len(own), -1)[:, axis], padded.reshape(len(own), -1)[:, axis]


def plot_batch(sizes: npt.ArrayLike, *, size_multiple: int = 1) -> Figure:
    """One batch as a picture: a bar for each sample, padding in light grey.

    Args:
        sizes: of its samples, shape `(n,)`.
        size_multiple: the padded size is a multiple of it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: there are no samples, or sizes of several axes.
    """
    own = np.asarray(sizes, np.int64)
    if own.ndim != 1 or not own.size:
        raise OptionError(f"expected the sizes of a batch, shape (n,), got {own.shape}")
    padded = -(-own.max() // size_multiple) * size_multiple
    figure, [axes] = new_figure()
    places = np.arange(len(own))
    axes.barh(places, own, height=1.0, **_DATA)
    axes.barh(places, padded - own, left=own, height=1.0, **_PADDING)
    axes.invert_yaxis()
    share = 1 - own.sum() / max(padded * len(own), 1)
    axes.set(xlabel="elements", ylabel="sample", xlim=(0, max(padded, 1)))
    axes.set_title(f"{len(own):,} samples, {share:.1%} padding")
    axes.legend(loc="lower right")
    return figure


def plot_cost(
    cost: CostModel, *, max_size: int | None = None, budget_bytes: int | None = None
) -> Figure:
    """A cost's surface over numbers of samples and sizes, its frontier and its probes.

    Args:
        cost: of one ragged axis.
        max_size: the largest size; by default what was measured.
        budget_bytes: whose frontier is drawn, the most samples of each size that fit; it also sets
            how many samples are shown.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: the cost has several axes, or `max_size` is not known.
    """
    if getattr(cost, "axes", 1) != 1:
        raise OptionError("the surface of a cost is drawn for one ragged axis, this one has more")
    probes = cost.probes if isinstance(cost, MeasuredCost) else ()
    longest = max_size or max((probe.size[0] for probe in probes), default=0)
    if not longest:
        raise OptionError("max_size is needed: this cost was not measured")
    most = max((probe.n for probe in probes), default=64)
    sizes = np.unique(np.geomspace(1, longest, _GRID).round().astype(np.int64))
    frontier = None if budget_bytes is None else cost.capacity(sizes, budget_bytes)
    if frontier is not None:
        most = max(most, int(np.clip(frontier, 1, 4096).max()))
    figure, [axes] = new_figure()
    numbers = np.unique(np.geomspace(1, most, _GRID).round().astype(np.int64))
    _draw_surface(figure, axes, cost, sizes, numbers)
    if frontier is not None:
        axes.plot(sizes, np.clip(frontier, 0.5, most), "k-", linewidth=2, label="budget")
    for held_out, marker, label in ((False, "o", "probe"), (True, "x", "held out")):
        chosen = [probe for probe in probes if probe.held_out == held_out]
        if chosen:
            places = [probe.size[0] for probe in chosen], [probe.n for probe in chosen]
            axes.plot(*places, linestyle="", marker=marker, color="black", label=label)
    axes.set(xlabel="padded size", ylabel="samples", xscale="log", yscale="log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")
    return figure


def _draw_surface(
    figure: Any, axes: Any, cost: CostModel, sizes: npt.NDArray[Any], numbers: npt.NDArray[Any]
) -> None:
    """Levels of bytes in greys and lines; blank where the cost predicts nothing."""
    from matplotlib.colors import LogNorm

    found = cost.batch_bytes(numbers[:, None], sizes[None])
    surface = np.ma.masked_equal(found, MAX_BYTES) / 2**20
    low, high = float(surface.min()), float(surface.max())
    if high > low:
        levels = np.geomspace(max(low, high / 2**16), high, _LEVELS)
        look = {"cmap": "Greys", "norm": LogNorm(levels[0], levels[-1]), "alpha": 0.6}
        filled = axes.contourf(sizes, numbers, surface, levels, extend="min", **look)
        axes.contour(sizes, numbers, surface, levels, colors="black", linewidths=0.4)
        figure.colorbar(filled, ax=axes, label="MiB", format="%.3g")


def plot_predictions(
    predicted_bytes: npt.ArrayLike,
    measured_bytes: npt.ArrayLike,
    *,
    budget_bytes: int | None = None,
) -> Figure:
    """Predicted against real bytes, batch by batch and against each other.

    Args:
        predicted_bytes: of each batch, shape `(batches,)`.
        measured_bytes: the peaks of their steps, shape `(batches,)`.
        budget_bytes: drawn as a line.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: the two have other shapes, or no batches.
    """
    predicted = np.asarray(predicted_bytes, np.float64) / 2**20
    measured = np.asarray(measured_bytes, np.float64) / 2**20
    if predicted.shape != measured.shape or predicted.ndim != 1 or not predicted.size:
        raise OptionError(
            "expected as many predicted as measured batches, and at least one, got the shapes "
            f"{predicted.shape} and {measured.shape}"
        )
    figure, (left, right) = new_figure(2, width=10)
    left.plot(predicted, "k--", label="predicted")
    left.plot(measured, "k-o", markersize=3, label="measured")
    if budget_bytes is not None:
        left.axhline(budget_bytes / 2**20, color="black", linestyle=":", label="budget")
    left.set(xlabel="batch", ylabel="MiB", ylim=(0, None))
    left.legend()
    most = max(predicted.max(), measured.max())
    right.plot([0, most], [0, most], color="0.5", linestyle="-", label="as predicted")
    for over, marker, label in ((False, "o", "within"), (True, "x", "more than predicted")):
        chosen = (measured > predicted) == over
        if chosen.any():
            right.plot(predicted[chosen], measured[chosen], f"k{marker}", label=label)
    right.set(xlabel="predicted, MiB", ylabel="measured, MiB")
    right.legend()
    return figure


def plot_memory(
    time_s: npt.ArrayLike,
    used_bytes: Mapping[str, npt.ArrayLike],
    *,
    budget_bytes: Mapping[str, int] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Memory over time, and the budgets that it must stay under.

    Args:
        time_s: of each reading, shape `(readings,)`.
        used_bytes: by name, such as "host" and "device", shape `(readings,)`; NaN: not read.
        budget_bytes: by the same names.
        marks: times with a name, such as where a snapshot was taken.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: a series has another number of readings.
    """
    times = np.asarray(time_s, np.float64)
    budgets = budget_bytes or {}
    figure, [axes] = new_figure()
    for number, (name, series) in enumerate(used_bytes.items()):
        values = np.asarray(series, np.float64) / 2**20
        if values.shape != times.shape:
            raise OptionError(f"{name} has {values.shape} readings at {times.shape} times")
        style = _STYLES[number % len(_STYLES)]
        marker = _MARKERS[number % len(_MARKERS)]
        read = ~np.isnan(values)  # what is read rarely is a line all the same
        every = max(np.count_nonzero(read) // 8, 1)
        look: dict[str, Any] = {"color": "black", "linestyle": style, "marker": marker}
        axes.plot(times[read], values[read], markevery=every, label=name, **look)
        if name in budgets:
            most = budgets[name] / 2**20
            label = f"budget of {name}"
            axes.axhline(most, color="0.5", linestyle=style, linewidth=2, label=label)
    for time, name in marks:
        axes.axvline(time, color="0.5", linestyle=":", linewidth=0.8)
        axes.annotate(name, (time, 1), xycoords=("data", "axes fraction"), rotation=90, va="top")
    axes.set(xlabel="seconds", ylabel="MiB", ylim=(0, None))
    axes.legend()
    return figure
