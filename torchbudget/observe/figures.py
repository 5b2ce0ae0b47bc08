"""Three figures, as `matplotlib.figure.Figure` (extra `plot`): padding, costs and memory.

Nothing is told by colour alone: areas are hatched, lines have styles and points markers. Each
function returns a figure without a window; `figure.savefig("plan.svg")` writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from torchbudget.display import new_figure
from torchbudget.errors import OptionError
from torchbudget.observe.report import MonitorReport
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EDGE: Final = {"edgecolor": "black", "linewidth": 0.3}
_DATA: Final = {"color": "0.5", "label": "data", **_EDGE}
_PADDING: Final = {"color": "0.9", "hatch": "xx", "label": "padding", **_EDGE}
_BINS: Final = 40
# Lines and markers of memory over time.
_LOOKS: Final = {"host": "-o", "process": "--s", "shared": ":^", "cgroup": "-.D", "device": "-x"}


def plot_sizes(plan: Plan, *, epoch: int = 0, axis: int = 0) -> Figure:
    """Draw an epoch's elements by the size of their samples, and the padding that they get.

    Args:
        plan: the plan of a sampler: `sampler.plan`.
        epoch: the epoch.
        axis: the axis of the sizes, if there are several.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: there is no such axis.
    """
    if not 0 <= axis < plan.sizes.axes:
        raise OptionError(f"axis must be 0 to {plan.sizes.axes - 1}, got {axis!r}")
    figure, [axes] = new_figure()
    values = np.asarray(plan.sizes.values).reshape(-1, plan.sizes.axes)[:, axis]
    largest = int(values.max())
    edges = np.linspace(0, largest + 1, min(_BINS, largest + 1) + 1)
    data, padding = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for rank in range(plan.ranks.number):
        for micro_batch in plan.micro_batches(Cursor(epoch=epoch), rank=rank):
            own = values[micro_batch.indices].astype(np.int64)
            packs = plan.rules.packing is not None
            padded = plan.rules.padded(own) if packs else micro_batch.padded_size[axis]
            data += np.histogram(own, edges, weights=own)[0]
            padding += np.histogram(own, edges, weights=padded - own)[0]
    axes.bar(edges[:-1], data, np.diff(edges), align="edge", **_DATA)
    axes.bar(edges[:-1], padding, np.diff(edges), align="edge", bottom=data, **_PADDING)
    axes.set(xlabel="size of a sample", ylabel="elements in an epoch", xlim=(0, largest + 1))
    axes.legend()
    return figure


def plot_predictions(run: MonitorReport) -> Figure:
    """Draw the predicted and the measured bytes of each batch.

    Args:
        run: a run that was read back from its file: `recorded_runs(path)[-1]`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OptionError: no batch of the run was predicted.
    """
    known = [batch for batch in run.batches if "predicted_bytes" in batch]
    if not known:
        raise OptionError(
            "no batch of this run was predicted: record it with MemoryMonitor(path=…, "
            "replan=sampler), and read it with recorded_runs(path)"
        )
    predicted = np.array([batch["predicted_bytes"] for batch in known]) / 2**20
    measured = np.array([batch["bytes"] for batch in known]) / 2**20
    figure, [axes] = new_figure()
    axes.plot(predicted, "k--", label="predicted")
    axes.plot(measured, "k-o", markersize=3, label="measured")
    if "device" in run.begin["budget"]:
        budget = run.begin["budget"]["device"] / 2**20
        axes.axhline(budget, color="black", linestyle=":", label="budget")
    axes.set(xlabel="batch", ylabel="MiB", ylim=(0, None))
    axes.legend()
    return figure


def plot_memory(run: MonitorReport) -> Figure:
    """Draw memory over time, with the run's limits and snapshots.

    Args:
        run: `monitor.report()`, or a run that was read back from its file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    budget = dict(run.begin["budget"])
    if run.begin["on_cpu"] and "device" in budget:
        budget["process"] = budget["device"]  # on the CPU the device is the process's memory
    figure, [axes] = new_figure()
    for name, look in _LOOKS.items():
        readings = [(one.time_s, getattr(one, f"{name}_bytes")) for one in run.history]
        read = np.array([one for one in readings if one[1] is not None], np.float64)
        if not len(read):
            continue
        times, used = read.T  # rarely read numbers are joined to a line, too
        every = max(len(read) // 8, 1)
        axes.plot(times, used / 2**20, look, color="black", markevery=every, label=name)
        if name in budget:
            label, most = f"budget of {name}", budget[name] / 2**20
            axes.plot(times[[0, -1]], [most, most], look, color="0.5", label=label)
    for name, sample in run.snapshots:
        axes.axvline(sample.time_s, color="0.5", linestyle=":", linewidth=0.8)
        place = sample.time_s, 1
        axes.annotate(name, place, xycoords=("data", "axes fraction"), rotation=90, va="top")
    axes.set(xlabel="seconds", ylabel="MiB", ylim=(0, None))
    axes.legend()
    return figure
