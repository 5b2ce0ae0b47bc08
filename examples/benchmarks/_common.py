"""What the benchmarks share: arguments, clocks, children, figures of batches, tables and JSON."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Sizes: TypeAlias = npt.NDArray[Any]
Batches: TypeAlias = list[list[int]]

_BLOCK = 10_000_000


def options(doc: str | None, **defaults: int) -> argparse.Namespace:
    """The command line: `--json PATH`, and an int for every default."""
    return parser(doc, **defaults).parse_args()


def parser(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """The parser of `options`, to which a benchmark adds its own."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, help="also write the numbers to this file")
    for name, value in defaults.items():
        made.add_argument(
            "--" + name.replace("_", "-"), type=int, default=value, help=f"default {value:,}"
        )
    return made


def lognormal(samples: int, mean: float, sigma: float, low: int, high: int) -> Sizes:
    """Log-normal lengths, clipped, int64; always the same ones."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(mean, sigma, samples), low, high).astype(np.int64)


# ---------------------------------------------------------------------- clocks


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds on the wall, and of this process's own computing (all its threads)."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Elapsed) -> Elapsed:
        return Elapsed(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before and not within, as `timeit` does.

    A pass over all that is imported takes a tenth of a second, and would come to whoever happens to
    allocate when one is due.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def timed(work: Callable[[], T]) -> tuple[Elapsed, T]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return Elapsed(time.perf_counter() - wall_s, time.process_time() - cpu_s), result


def alternate(
    contenders: Mapping[str, Callable[[], object]], repetitions: int
) -> dict[str, list[Elapsed]]:
    """Time all of them in turn, over and over, every other time in reverse.

    What else the machine does then falls on all alike, and the ratio of two within one repetition
    says more than the ratio of two means.
    """
    times: dict[str, list[Elapsed]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        names = list(contenders)
        for name in names if repetition % 2 == 0 else reversed(names):
            with no_garbage_collection():
                times[name].append(timed(contenders[name])[0])
    return times


def median(times: list[Elapsed], clock: str = "wall_s") -> float:
    return statistics.median(getattr(time, clock) for time in times)


def ratio(mine: list[Elapsed], theirs: list[Elapsed], clock: str = "wall_s") -> float:
    """The median over the repetitions of mine / theirs."""
    return statistics.median(
        getattr(a, clock) / max(getattr(b, clock), 1e-9) for a, b in zip(mine, theirs, strict=True)
    )


# ---------------------------------------------------------------------- sizes and children


def write_sizes(path: Path, samples: int) -> None:
    """Tile a random block, so that making the file does not take longer than the benchmark."""
    block = lognormal(min(samples, _BLOCK), 3.2, 0.8, 1, 1024).astype(np.uint16)
    with path.open("wb") as file:
        for first in range(0, samples, len(block)):
            file.write(block[: samples - first].tobytes())


def anonymous_bytes(process: int) -> int | None:
    """Resident anonymous memory, or `None` where the system does not report it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(lines["RssAnon"].split()[0]) * 1024 if "RssAnon" in lines else None


def watched(*command: str) -> dict[str, Any]:
    """Run a Python script as a child; what it printed as JSON, and its memory.

    The child prints that it is ready once all is imported, and waits for a line. `beyond_bytes` is
    its peak of anonymous memory beyond that of then, seen every 2 ms; `None` where it is unknown.
    """
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = anonymous_bytes(process.pid)
        peak = before or 0
        process.stdin.write("go\n")
        process.stdin.flush()
        while True:
            try:
                process.wait(0.002)
                break
            except subprocess.TimeoutExpired:
                peak = max(peak, anonymous_bytes(process.pid) or 0)
        found: dict[str, Any] = json.loads(process.stdout.read())
    return found | {"beyond_bytes": None if before is None else peak - before}


# ---------------------------------------------------------------------- figures of batches


def flat(batches: Iterable[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All indices in the order of the batches, and the number of samples in each."""
    batches = list(batches)
    counts = np.fromiter(map(len, batches), np.int64, len(batches))
    return np.fromiter(chain.from_iterable(batches), np.int64, int(counts.sum())), counts


def padded_sizes(sizes: Sizes, indices: npt.NDArray[np.int64], counts: Sizes) -> Sizes:
    """The maximum over each batch, on every axis, shape `(batches,)` or `(batches, d)`."""
    return np.maximum.reduceat(sizes[indices], np.cumsum(counts) - counts, axis=0)


def padded_figures(sizes: Sizes, batches: Iterable[list[int]], budget: int) -> dict[str, Any]:
    """Figures of padded batches of one axis, whose cost is their padded elements."""
    indices, counts = flat(batches)
    padded = counts * padded_sizes(sizes, indices, counts)
    return {
        "batches": len(counts),
        "padding": 1 - int(sizes[indices].sum()) / int(padded.sum()),
        "fill": float(padded.mean()) / budget,
        "over": int((padded > budget).sum()),
        "largest": int(padded.max()),
    }


# ---------------------------------------------------------------------- tables and JSON


class Results:
    """Rows and bars of one benchmark: printed as a table, written as JSON.

    Args:
        formats: how each column is printed, by its name and in their order: a format
            specification such as ".2%".
    """

    def __init__(self, formats: Mapping[str, str]) -> None:
        self.formats = formats
        self.rows: list[dict[str, Any]] = []
        self.bars: list[dict[str, Any]] = []

    def row(self, **cells: Any) -> None:
        """A row of the table, shown in a terminal at once: some take minutes."""
        self.rows.append(cells)
        if sys.stderr.isatty():
            shown = [self._cell(cells.get(name), form) for name, form in self.formats.items()]
            print(*shown, sep="  ", file=sys.stderr, flush=True)

    def bar(self, what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        """A figure and what it is to be: at the most `limit`, or `at_least`."""
        holds = bool(value >= limit if at_least else value <= limit)
        self.bars.append(
            {"bar": what, "value": value, "limit": limit, "at_least": at_least, "holds": holds}
        )

    def finish(self, path: Path | None) -> None:
        """Print the table, then the bars; write the JSON."""
        table = [list(self.formats)] + [
            [self._cell(row.get(name), form) for name, form in self.formats.items()]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            first, *rest = [*zip(cells, widths, strict=True)]
            line = "  ".join([first[0].ljust(first[1]), *(c.rjust(width) for c, width in rest)])
            print(line.rstrip())
        for bar in self.bars:
            sign = "≥" if bar["at_least"] else "≤"
            holds = "holds" if bar["holds"] else "DOES NOT HOLD"
            print(f"{bar['bar']} {sign} {bar['limit']:g}: {bar['value']:.5g}, {holds}")
        if path is not None:
            written = {"rows": self.rows, "bars": self.bars}
            path.write_text(json.dumps(written, indent=2) + "\n")

    @staticmethod
    def _cell(value: Any, form: str) -> str:
        if value is None:
            return "–"
        return value if isinstance(value, str) else format(value, form)
