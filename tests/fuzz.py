"""Do the laws hold in cases that nobody thought of?

Four kinds of cases, each checked by what it states in its file in `tests/fuzzing`: samplers that
are started again on other ranks and under other budgets, streams that fail and go on, accumulated
steps of any cut and wrapping, trainings that fail anywhere. Ranks, workers and kills are simulated
in one process; and, in fewer cases, are real processes.

    python tests/fuzz.py --cases 10000 --processes 300 --seed 0 --record fuzz.jsonl

The run can be stopped and started again: what is in the record is not run anew. A case is made from
the seed, its kind and its number alone (and the versions of Python and hypothesis); `--only
streams:17` repeats one, `--only streams:p17` one of real processes. It ends with exit status 1 if a
law was broken.

Result of `python tests/fuzz.py --cases 10000 --processes 300 --seed 0`:

    kind                    cases  refused  violations  seconds
    fits                   10,000        0           0    2,567
    fits, processes           300        0           0      769
    samplers               10,000      980           0    1,217
    samplers, processes       300        0           0      515
    steps                  10,000        0           0    1,730
    steps, processes          300        0           0      291
    streams                10,000    1,209           0    1,271
    streams, processes        300       18           0    1,252

    fits: 24,319 starts, 13,611 faults, 408 killed
    samplers: 39,443 starts, 201,339 batches, 7,767 killed
    steps: 30,900 steps, 15,483 out of memory, 5,191 resumed
    streams: 19,430 starts, 192,180 batches, 11,520 faults, 190 killed

Hardware: 2 cores of an Intel Xeon, Python 3.11, torch 2.13.0 CPU. The seconds are those of
processes on cores that other work shared.

Refused samplers: samples cannot be dealt evenly, `drop_last` leaves nothing, no sample fits the
budget. Refused streams: they cannot be dealt to the
ranks, the source has no samples for a worker, or nothing is left of its samples.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

# One thread each: two that take sums in another order make other parameters.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT: Final = Path(__file__).parent.parent
KINDS: Final = ("samplers", "streams", "steps", "fits")
STOP: Final = threading.Event()  # after the present case


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a kind, and whether its ranks, workers and kills are real."""

    kind: str
    number: int
    real: bool
    seed: int

    @classmethod
    def of(cls, line: dict[str, Any]) -> Case:
        """That of a line in the record."""
        return cls(line["kind"], line["number"], line["real"], line["seed"])

    @property
    def name(self) -> str:
        """As `--only` reads it."""
        return f"{self.kind}:{'p' * self.real}{self.number}"

    def run(self) -> Counter[str]:
        """Check it; what was checked.

        Raises:
            Refused: for a reason that the case allows.
            Exception: a law is broken.
        """
        # After `main` has found the packages.
        import numpy as np
        import torch

        from tests.fuzzing.drawing import chance_of
        from torchbudget.errors import TorchBudgetWarning

        if self.real:
            check = getattr(importlib.import_module("tests.fuzzing.processes"), self.kind)
        else:
            check = importlib.import_module(f"tests.fuzzing.{self.kind}").check
        random.seed(self.number)
        np.random.seed(self.number)
        torch.manual_seed(self.number)
        chance = chance_of(self.seed, self.name.partition(":")[0] + "p" * self.real, self.number)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch
            warnings.simplefilter("error", TorchBudgetWarning)
            told: Counter[str] = check(chance, Path(folder))
        return told

    def outcome(self) -> dict[str, Any]:
        """Its line in the record."""
        from tests.support.refusals import Refused

        began_s = time.monotonic()
        line: dict[str, Any] = asdict(self)
        try:
            line |= {"outcome": "held", "checked": self.run()}
        except Refused as refused:
            line |= {"outcome": "refused", "why": str(refused).strip()}
        except Exception:  # noqa: BLE001  (whatever it is, no law allows it)
            line |= {"outcome": "violation", "why": traceback.format_exc()}
        return line | {"seconds": round(time.monotonic() - began_s, 3)}


def cases_of(kinds: list[str], seed: int, cases: int, processes: int) -> Iterator[Case]:
    """One kind after the other within each number, and those of real processes spread evenly."""
    each = max(cases // processes, 1) if processes else 0
    for number in range(max(cases, processes)):
        for kind in kinds:
            if number < cases:
                yield Case(kind, number, False, seed)
            if each and number % each == 0 and number // each < processes:
                yield Case(kind, number // each, True, seed)


def table_of(lines: list[dict[str, Any]]) -> str:
    """How many cases of each kind held, and why others did not."""
    rows = [f"{'kind':<22}{'cases':>7}{'refused':>9}{'violations':>12}{'seconds':>9}"]
    for kind, real in sorted({(one["kind"], one["real"]) for one in lines}):
        mine = [one for one in lines if (one["kind"], one["real"]) == (kind, real)]
        outcomes = Counter(one["outcome"] for one in mine)
        name, seconds = kind + ", processes" * real, sum(one["seconds"] for one in mine)
        rows.append(
            f"{name:<22}{len(mine):>7,}{outcomes['refused']:>9,}{outcomes['violation']:>12,}"
            f"{seconds:>9,.0f}"
        )
    rows.append("")
    for kind in sorted({one["kind"] for one in lines}):
        mine = [one for one in lines if one["kind"] == kind]
        checked = sum((Counter(one.get("checked", {})) for one in mine), Counter[str]())
        refused = Counter(f"refused: {one['why']}" for one in mine if one["outcome"] == "refused")
        told = ", ".join(f"{number:,} {name}" for name, number in (checked + refused).most_common())
        rows.append(f"{kind}: {told}")
    broken = [one for one in lines if one["outcome"] == "violation"]
    return "\n".join(rows + [f"\n{Case.of(one).name}\n{one['why']}" for one in broken])


def prepare() -> None:
    """Make the packages known to this process and to those that it starts."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    importlib.import_module("tests.conftest")  # what processes import before they begin
    for kind in KINDS:
        importlib.import_module(f"tests.fuzzing.{kind}")
    # Whatever frees memory collects garbage, which would look at all that was imported: 0.3 s.
    gc.collect()
    gc.freeze()
    logging.getLogger("torchbudget").setLevel(logging.ERROR)  # it warns of oversize samples
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the cases that are not in the record, and print the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind, in one process")
    parser.add_argument("--processes", type=int, default=300, help="of each kind, in real ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument("--only", help="repeat one case, such as samplers:17 or fits:p3")
    options = parser.parse_args(arguments)
    if options.only:
        kind, _, number = options.only.partition(":")
        case = Case(kind, int(number.lstrip("p")), number.startswith("p"), options.seed)
        print(dict(case.run()))
        return 0
    old = options.record.read_text().splitlines() if options.record.exists() else []
    known = {Case.of(one): one for one in map(json.loads, old) if one["seed"] == options.seed}
    with options.record.open("a") as record, suppress(KeyboardInterrupt):
        for case in cases_of(options.kind, options.seed, options.cases, options.processes):
            if STOP.is_set():
                break
            if case in known:
                continue
            known[case] = line = case.outcome()
            print(json.dumps(line), file=record, flush=True)
            if line["outcome"] == "violation":
                print(f"violation: {case.name}", flush=True)
    lines = list(known.values())
    print(table_of(lines))
    return int(any(one["outcome"] == "violation" for one in lines))


if __name__ == "__main__":
    prepare()
    sys.exit(main())
