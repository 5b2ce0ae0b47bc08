"""`report`: what a monitor's file says of a run, also of one that was killed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchbudget.commands import pages
from torchbudget.commands.answer import Answer, UsageError, as_json
from torchbudget.observe.recorded_run import RecordedRun, recorded_runs
from torchbudget.observe.report import memory_rows
from torchbudget.tables import aligned
from torchbudget.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP: Final = "what a monitor has written"
DESCRIPTION: Final = """\
What the file of a MemoryMonitor says, or of `watch -o`: peaks, budgets, how near the limits came,
what batches took. Of several runs in it, the last one. A run without an end was killed, or runs
still; what it wrote is reported all the same.

  python -m torchbudget report run.jsonl
  python -m torchbudget report run.jsonl --check  # exit code 1 where a budget was exceeded
  python -m torchbudget report run.jsonl --html run.html"""

# What figures show over time, in this order.
_SHOWN: Final = ("host", "process", "shared", "cgroup", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to its parser."""
    parser.add_argument("file", metavar="RUN.JSONL", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a budget was exceeded")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="a .png, .svg or .pdf of it")
    parser.add_argument("--html", metavar="FILE", type=Path, help="one page with figures in it")


def run(options: argparse.Namespace) -> Answer:
    """Read, and write what was asked for."""
    try:
        runs = recorded_runs(options.file)
    except OSError as error:
        raise UsageError(f"cannot read {options.file}: {error.strerror}") from error
    last = runs[-1]
    if options.figure is not None:
        pages.save_figure(_memory(last), options.figure)
    if options.html is not None:
        pages.save(options.html, _page(options.file.name, last))
    failed = tuple(_exceeded(last)) if options.check else ()
    if options.json:
        return Answer(text=as_json(_plain(last)), failed=failed)
    more = [f"runs in this file: {len(runs)}, of which this is the last"] if len(runs) > 1 else []
    lines = [*aligned(_rows(last)), *_remarks(last), *more]
    return Answer(text="\n".join(lines), failed=failed)


def _rows(found: RecordedRun) -> list[list[str]]:
    return memory_rows(found.peaks, [(one["name"], one) for one in found.snapshots])


def _remarks(found: RecordedRun) -> Iterator[str]:
    for what, (used, amount) in found.compared().items():
        share = used / amount
        yield f"{what}: {format_bytes(used)} of {format_bytes(amount)}, {share:.0%} of the budget"
    yield from _unread(found)
    for limit in found.limits:
        text = f"{format_bytes(limit['used_bytes'])} of {format_bytes(limit['limit_bytes'])}"
        yield f"near the limit {limit['name']} after {limit['time_s']:.1f} s: {text}"
    if found.batches:
        yield _batches(found)
    if found.end is None:
        yield f"no end was written: it was killed after {found.seconds:.1f} s, or runs still"
    elif found.end.get("kills"):
        yield f"the kernel killed {found.end['kills']:,} processes of the control group"
    if found.end is not None and found.end.get("lost_lines"):
        yield f"{found.end['lost_lines']:,} lines could not be written"
    began = datetime.fromtimestamp(found.begin["unix_s"], timezone.utc)
    yield (
        f"process {found.begin['pid']}, rank {found.begin['rank']}, {found.seconds:.1f} s from "
        f"{began:%Y-%m-%d %H:%M:%S} UTC"
    )


def _batches(found: RecordedRun) -> str:
    most = max(batch["bytes"] for batch in found.batches)
    text = f"{len(found.batches):,} batches were written, the largest of {format_bytes(most)}"
    known = [batch for batch in found.batches if batch.get("predicted_bytes")]
    if not known:
        return text
    worst = max(batch["bytes"] / batch["predicted_bytes"] for batch in known)
    return f"{text}; at most {worst:.1%} of what was predicted"


def _unread(found: RecordedRun) -> Iterator[str]:
    for what in found.budget.keys() - found.compared().keys():
        yield f"{what}: nothing was read that its budget could be compared with"
    if "host" in found.budget and found.end is not None and not found.end.get("is_exact", True):
        yield "host: shared pages could not be told apart, and are left out: its peak was higher"


def _exceeded(found: RecordedRun) -> Iterator[str]:
    yield from _unread(found)
    for what, (used, amount) in found.compared().items():
        if used > amount:
            yield f"{what}: {format_bytes(used)} were used of {format_bytes(amount)}"


def _plain(found: RecordedRun) -> dict[str, Any]:
    return {
        "begin": dict(found.begin),
        "seconds": found.seconds,
        "peaks": found.peaks,
        "budget": found.budget,
        "snapshots": list(found.snapshots),
        "limits": list(found.limits),
        "batches": len(found.batches),
        "end": None if found.end is None else dict(found.end),
    }


def _memory(found: RecordedRun) -> Figure:
    from torchbudget.observe.figures import plot_memory

    series = {name: found.series(f"{name}_bytes") for name in _SHOWN}
    read = {name: values for name, values in series.items() if values.size and (values >= 0).any()}
    marks = [(float(one["time_s"]), str(one["name"])) for one in found.snapshots]
    budget = found.budget
    if "device" in budget and found.begin.get("on_cpu", False):  # it is the process's own memory
        budget["process"] = budget["device"]
    return plot_memory(found.series("time_s"), read, budget_bytes=budget, marks=marks)


def _page(name: str, found: RecordedRun) -> str:
    """The report as a page with figures in it."""
    from torchbudget.observe.figures import plot_predictions

    parts = [
        pages.table(_rows(found)),
        *map(pages.paragraph, _remarks(found)),
        pages.picture(_memory(found), "Memory over time, and budgets"),
    ]
    known = [batch for batch in found.batches if batch.get("predicted_bytes")]
    if known:
        predicted = [batch["predicted_bytes"] for batch in known]
        measured = [batch["bytes"] for batch in known]
        figure = plot_predictions(predicted, measured, budget_bytes=found.budget.get("device"))
        parts.append(pages.picture(figure, "Predicted against real bytes of batches"))
    return pages.page(f"Memory of {name}", *parts)
