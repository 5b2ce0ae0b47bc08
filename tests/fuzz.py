"""Do the laws hold in cases that nobody thought of?

Random cases of the library's laws, each kind in a module of `tests/fuzzing`: samplers that are
started again on other ranks and under other budgets, streams that fail and go on, accumulated steps
of any cut and wrapping, trainings that fail anywhere. Ranks, workers and kills are simulated in one
process; `tests/data/test_stories.py` and `tests/train` have real ones.

    python tests/fuzz.py --cases 10000 --seed 0

A case is made from the seed, its kind and its number alone (and the versions of Python and
hypothesis): `--first 5000` goes on from that number, `--only streams:17` repeats one case. The exit
status is 1 if a law was broken.

Result of `python tests/fuzz.py --cases 25`:

    kind        cases  refused  violations  seconds
    samplers       25        1           0        8
    streams        25        5           0       11
    steps          25        0           0       12
    fits           25        0           0       20

    samplers: 1,548 batches, 115 starts, 19 killed
    streams: 789 batches, 60 starts, 42 faults, 10 elsewhere
    steps: 75 steps, 55 out of memory, 13 resumed
    fits: 55 starts, 30 faults

Hardware: 2 cores of an Intel Xeon that other work shared, Python 3.11, torch 2.13.0 CPU.

Refused samplers: samples cannot be split evenly, `drop_last` leaves nothing, no sample fits the
budget. Refused streams: they cannot be dealt to the ranks, or nothing is left of the source.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

# One thread each: two that take sums in another order make other parameters.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT: Final = Path(__file__).parent.parent
KINDS: Final = ("samplers", "streams", "steps", "fits")


def check(kind: str, number: int, seed: int = 0) -> Counter[str]:
    """Check one case; counts of what was checked.

    Raises:
        Refused: for a reason that the case allows.
        Exception: a law is broken.
    """
    import numpy as np  # after `prepare` has found the packages
    import torch

    from torchbudget.errors import TorchBudgetWarning

    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    chance = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch
        warnings.simplefilter("error", TorchBudgetWarning)
        told: Counter[str] = importlib.import_module(f"tests.fuzzing.{kind}").check(
            chance, Path(folder)
        )
    return told


def outcome(kind: str, number: int, seed: int = 0) -> tuple[str, str, Counter[str]]:
    """A case's outcome, the reason unless its laws held, and counts of what was checked."""
    from tests.support.refusals import Refused

    try:
        return "held", "", check(kind, number, seed)
    except Refused as refused:
        return "refused", str(refused).strip(), Counter()
    except Exception:  # noqa: BLE001  (whatever it is, no law allows it)
        return "violation", traceback.format_exc(), Counter()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the cases, and print violations and a table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="repeat one case, such as samplers:17")
    options = parser.parse_args(arguments)
    if options.only:
        kind, _, number = options.only.partition(":")
        print(dict(check(kind, int(number), options.seed)))
        return 0
    found = {kind: Counter[str]() for kind in options.kind}
    told, seconds = {kind: Counter[str]() for kind in options.kind}, Counter[str]()
    with suppress(KeyboardInterrupt):
        for number in range(options.first, options.first + options.cases):
            for kind in options.kind:
                began_s = time.monotonic()
                result, why, checked = outcome(kind, number, options.seed)
                seconds[kind] += time.monotonic() - began_s  # type: ignore[assignment]
                found[kind][result] += 1
                told[kind] += checked
                if result == "refused":
                    told[kind][f"refused: {why}"] += 1
                elif result == "violation":
                    print(f"violation: {kind}:{number}\n{why}", flush=True)
    print(f"{'kind':<10}{'cases':>7}{'refused':>9}{'violations':>12}{'seconds':>9}")
    for kind, one in found.items():
        refused, broken = one["refused"], one["violation"]
        row = f"{kind:<10}{one.total():>7,}{refused:>9,}{broken:>12,}{seconds[kind]:>9,.0f}"
        print(row)
    for kind, counts in told.items():
        print(f"{kind}: " + ", ".join(f"{n:,} {name}" for name, n in counts.most_common()))
    return int(any(one["violation"] for one in found.values()))


if __name__ == "__main__":
    prepare()
    sys.exit(main())
