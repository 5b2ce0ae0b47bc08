"""Which setting of malloc keeps a budget of the CPU, in how much time?

Question: a step is measured by `measure_cost(budget=…)` and then trained on ragged batches that
fill the budget, both under one setting of malloc, in a process of its own. How much processor time
does a sample take, how near to the budget does resident memory come, and how many samples of the
median size fit at once? A setting is the size from which glibc maps blocks, and the free bytes that
it keeps at the heap's end.

Command: PYTHONPATH=. python examples/benchmarks/malloc_settings.py [--samples N] [--budgets K]
[--repetitions K] [--settings TEXT …] [--models TEXT …] [--json PATH]

Hardware: a virtual machine with 2 cores of AMD EPYC, which other programs used too (load average 2
to 6); one thread, Python 3.11.7, torch 2.13.0+cpu, glibc 2.36, jemalloc 5.3.0, gperftools 2.10.
`--samples 3000`, one repetition: a tenth of a time may be noise. Rows at 4 GiB that are not there
were not run. –: nothing was trained, since the largest sample does not fit.

    model                    GiB          mapped from, kept  ms a sample  peak  at once
    encoder, padding masked    1           glibc's defaults         1.44  0.88    1,125
    encoder, padding masked    1         128 KiB, 0.125 MiB         3.20  0.98    2,011
    encoder, padding masked    1              1 MiB, 16 MiB         2.68  0.98    2,001
    encoder, padding masked    1              4 MiB, 64 MiB         2.05  0.89    1,407
    encoder, padding masked    1  1 MiB, 16 MiB, huge pages         2.40  0.98    2,003
    encoder, padding masked    1                   jemalloc         2.55  0.98    1,964
    encoder, padding masked    1                   tcmalloc            –     –        –
    encoder, padding masked    4           glibc's defaults         2.68  0.87    8,418
    encoder, padding masked    4         128 KiB, 0.125 MiB         3.17  0.99   11,425
    encoder, padding masked    4              1 MiB, 16 MiB         2.93  0.99   11,403
    encoder, padding masked    4              4 MiB, 64 MiB         3.49  0.99   11,370
    BERT                       1           glibc's defaults         5.87  0.91       18
    BERT                       1         128 KiB, 0.125 MiB        13.16  0.98      415
    BERT                       1              1 MiB, 16 MiB        12.05  0.98      409
    BERT                       1              4 MiB, 64 MiB         5.98  0.77      160
    BERT                       1  1 MiB, 16 MiB, huge pages        11.13  0.99      412
    BERT                       1                   jemalloc         9.09  0.94      351
    BERT                       1                   tcmalloc         5.57  0.93       48
    BERT                       4           glibc's defaults         5.65  0.64      976
    BERT                       4         128 KiB, 0.125 MiB        13.03  0.99    2,580
    BERT                       4              1 MiB, 16 MiB        13.62  0.99    2,572
    U-Net                      1           glibc's defaults         5.37  0.97      251
    U-Net                      1         128 KiB, 0.125 MiB        19.31  0.98      679
    U-Net                      1              1 MiB, 16 MiB        18.62  0.99      683
    U-Net                      1              4 MiB, 64 MiB        17.01  0.99      645
    U-Net                      1  1 MiB, 16 MiB, huge pages        13.03  0.99      681
    U-Net                      1                   jemalloc        15.79  0.98      655
    U-Net                      1                   tcmalloc            –     –        –
    U-Net                      4           glibc's defaults        20.73  1.01    3,800
    U-Net                      4         128 KiB, 0.125 MiB        19.30  0.99    3,984
    U-Net                      4              1 MiB, 16 MiB        20.23  0.99    3,973
    highest peak / budget of 128 KiB, 0.125 MiB ≤ 1: 0.99 (rounded, as above), holds

The library's setting is 128 KiB and 128 KiB: peaks stay within the budget. 1 MiB and 16 MiB took
0.84 to 1.05 times its processor time for these models, but `any_model_cpu.py --budgets 1` found a
decoder whose loss is made in chunks, with smaller blocks: its runs took 1.04 and 1.06 times the
budget, those with 128 KiB 0.95 times. With 4 MiB and 64 MiB, 5 to 61 % fewer samples fit 1 GiB than
with 128 KiB, and a BERT by a traced cost took 1.22 times a budget of 800 MiB (1.03 times with 1
MiB, and with 128 KiB). glibc's defaults took 0.28 to 1.07 times the processor time of the library's
setting, partly since their batches are smaller: blocks of up to 32 MiB are used again. They fit 44
to 96 % fewer samples at 1 GiB, 5 to 62 % fewer at 4 GiB, and the U-Net exceeded its budget. Huge
pages (`THP_MEM_ALLOC_ENABLE=1`) took 8 to 30 % less time than 1 MiB and 16 MiB without them.
jemalloc kept the budgets that were measured under it, and 2 to 16 % fewer samples fit; tcmalloc
keeps so much that two models did not fit at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Results, Sizes, lognormal, parser, timed

from tests.support.model_classes import CLASSES
from torchbudget import MemoryBudgetBatchSampler, measure_cost
from torchbudget.errors import CostError, MeasureWarning, OversizeError
from torchbudget.machine import allocators
from torchbudget.machine.process_tree import process_memory, restart_peak

DEFAULTS = "glibc's defaults"
# KiB from which glibc maps blocks, and MiB that it keeps free at the heap's end.
SETTINGS = {
    "128 KiB, 0.125 MiB": (128, 0.125),
    "1 MiB, 16 MiB": (1024, 16),
    "4 MiB, 64 MiB": (4096, 64),
}
HUGE = ", huge pages"  # torch asks the kernel for them, for tensors of at least 2 MiB
PRELOADED = {"jemalloc": "libjemalloc.so.2", "tcmalloc": "libtcmalloc_minimal.so.4"}
ALL = (DEFAULTS, *SETTINGS, "1 MiB, 16 MiB" + HUGE, *PRELOADED)
BUDGETS = (1, 4)  # GiB
OURS = "128 KiB, 0.125 MiB"


def bert() -> tuple[Callable[[Any], object], Callable[[int, int], Any]]:
    """A BERT of four layers from a config of transformers, trained as in a plain loop."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Any) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def make(n: int, length: int) -> Any:
        mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1))
        mask[0] = True
        ids = torch.randint(1, 2000, (n, length)) * mask
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.arange(n) % 2}

    return step, make


def case_of(name: str) -> tuple[Callable[[Any], object], Callable[[int, Any], Any], Sizes]:
    """A step, its batches, and sizes as data sets have them."""
    lengths = lognormal(20_000, 3.5, 0.7, 8, 256)
    if name == "BERT":
        return *bert(), lengths
    case = CLASSES[name]()
    if name == "U-Net":
        rows = lognormal(40_000, 3.7, 0.5, 16, 128).reshape(-1, 2)
        return case.step, case.make_batch, rows
    return case.step, case.make_batch, lengths


# Each with its share of the samples that are asked for: their steps take long.
MODELS = {"encoder, padding masked": 1.0, "BERT": 0.3, "U-Net": 0.15}


def cell(name: str, gib: int, setting: str, samples: int) -> dict[str, float]:
    """Measure and train in this process, under one setting."""
    setting = setting.removesuffix(HUGE)
    if setting in SETTINGS:
        kib, mib = SETTINGS[setting]
        allocators.trim_malloc = partial(allocators.trim_malloc, kib << 10, int(mib * 2**20))
    else:
        allocators.trim_malloc = lambda: True
    step, make_batch, sizes = case_of(name)
    budget = gib * 2**30
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasureWarning)
        cost = measure_cost(step, make_batch, sizes=sizes, budget=budget)
    at_once = int(cost.capacity(np.median(sizes, axis=0).astype(int), budget))
    sizes = sizes[: int(samples * gib * MODELS[name])]
    seconds, peak = 0.0, 0
    for batch in MemoryBudgetBatchSampler(sizes, cost, budget):
        made = make_batch(len(batch), sizes[batch].max(axis=0).tolist())
        restart_peak()
        seconds += timed(partial(step, made))[0].cpu_s
        peak = max(peak, process_memory().peak_resident_bytes or 0)
    return {"ms a sample": 1000 * seconds / len(sizes), "peak": peak / budget, "at once": at_once}


def run(name: str, gib: int, setting: str, samples: int) -> dict[str, float]:
    """The cell of one process; empty if the allocator is not installed, or nothing fits."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["THP_MEM_ALLOC_ENABLE"] = str(int(setting.endswith(HUGE)))
    if setting in PRELOADED:
        found = [*Path("/usr").glob(f"lib*/**/{PRELOADED[setting]}")]
        if not found:
            return {}
        environment["LD_PRELOAD"] = str(found[0])
    command = [sys.executable, __file__, "--cell", name, str(gib), setting, str(samples)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    one: dict[str, float] = json.loads(done.stdout)
    return one


def main() -> None:
    if sys.argv[1:2] == ["--cell"]:
        name, gib, setting, samples = sys.argv[2:]
        try:
            found = cell(name, int(gib), setting, int(samples))
        except (CostError, OversizeError):  # what stays in the process fills the budget
            found = {}
        print(json.dumps(found))
        return
    line = parser(__doc__, samples=4_000, budgets=len(BUDGETS), repetitions=1)
    line.add_argument("--settings", nargs="+", default=[""], help="parts of their names")
    line.add_argument("--models", nargs="+", default=[""], help="parts of their names")
    arguments = line.parse_args()
    settings = [one for one in ALL if any(part in one for part in arguments.settings)]
    models = [one for one in MODELS if any(part in one for part in arguments.models)]
    formats = {"model": "", "GiB": "d", "mapped from, kept": ""}
    results = Results(formats | {"ms a sample": ".2f", "peak": ".2f", "at once": ",d"})
    highest = 0.0
    for name, gib in product(models, BUDGETS[: arguments.budgets]):
        turns: dict[str, list[dict[str, float]]] = {one: [] for one in settings}
        for repetition in range(arguments.repetitions):
            for setting in settings if repetition % 2 == 0 else reversed(settings):
                turns[setting].append(run(name, gib, setting, arguments.samples))
        for setting, found in turns.items():
            row: dict[str, float] = {}
            if all(found):
                row = {key: max(one[key] for one in found) for key in found[0]}
                row["ms a sample"] = min(one["ms a sample"] for one in found)
            results.row(**{"model": name, "GiB": gib, "mapped from, kept": setting, **row})
            if setting == OURS:
                highest = max(highest, row.get("peak", 0.0))
    results.bar(f"highest peak / budget of {OURS}", highest, 1)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
