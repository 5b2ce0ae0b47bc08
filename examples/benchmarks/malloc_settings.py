"""Which setting of malloc keeps a budget of the CPU, in how much time?

Question: a step is measured by `measure_cost(budget=…)` and then trained on ragged batches that
fill the budget, both under one setting of malloc, in a process of its own. How much processor time
does an epoch take, how near to the budget does resident memory come, and how many samples fit?

Command: PYTHONPATH=. python examples/benchmarks/malloc_settings.py [--samples N] [--budgets K]
[--repetitions K] [--settings TEXT …] [--models TEXT …] [--json PATH]

Hardware:

    table

TODO
"""  # noqa: E501  (tables)

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from glob import glob
from itertools import product
from typing import Any

import torch
from _common import Results, Sizes, lognormal, parser, timed

from tests.support.model_classes import CLASSES
from torchbudget import MemoryBudgetBatchSampler, measure_cost
from torchbudget.errors import CostError, MeasureWarning, OversizeError
from torchbudget.machine import allocators
from torchbudget.machine.high_water import RESIDENT
from torchbudget.machine.process_tree import process_memory

KIB, MIB = 2**10, 2**20
DEFAULTS = "glibc's defaults"
# Sizes from which glibc maps blocks, and free bytes that it keeps at the heap's end.
SETTINGS = {
    "128 KiB, 128 KiB": (128 * KIB, 128 * KIB),
    "1 MiB, 16 MiB": (MIB, 16 * MIB),
    "2 MiB, 64 MiB": (2 * MIB, 64 * MIB),
    "4 MiB, 128 KiB": (4 * MIB, 128 * KIB),
    "4 MiB, 64 MiB": (4 * MIB, 64 * MIB),
    "32 MiB, 64 MiB": (32 * MIB, 64 * MIB),
}
HUGE = ", huge pages"  # torch asks the kernel for them, for tensors of at least 2 MiB
PRELOADED = {"jemalloc": "libjemalloc.so.2", "tcmalloc": "libtcmalloc_minimal.so.4"}
ALL = (
    DEFAULTS,
    "128 KiB, 128 KiB",
    "128 KiB, 128 KiB" + HUGE,
    "1 MiB, 16 MiB",
    "2 MiB, 64 MiB",
    "2 MiB, 64 MiB" + HUGE,
    "4 MiB, 128 KiB",
    "4 MiB, 64 MiB",
    "4 MiB, 64 MiB" + HUGE,
    "32 MiB, 64 MiB",
    *PRELOADED,
)
FOLDERS = ("/usr/lib/*", "/usr/lib64", "/usr/local/lib")
BUDGETS = (1, 4)  # GiB
MEDIAN = {"U-Net": (40, 40)}  # of the sizes that `case_of` draws
SHARE = 0.4  # of the budget, that the tensors of the same batch take


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


# Each with how many samples are trained on, for each GiB and each thousand that are asked for.
MODELS = {"encoder, padding masked": 1.0, "BERT": 0.3, "U-Net": 0.15}


def cell(name: str, gib: int, setting: str, samples: int) -> dict[str, float]:
    """Measure and train in this process, under one setting."""
    setting = setting.removesuffix(HUGE)
    if setting in SETTINGS:
        allocators.trim_malloc = partial(allocators.trim_malloc, *SETTINGS[setting])
    else:
        allocators.trim_malloc = lambda: True
    step, make_batch, sizes = case_of(name)
    budget = gib * 2**30
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasureWarning)
        measuring, cost = timed(lambda: measure_cost(step, make_batch, sizes=sizes, budget=budget))
    sizes = sizes[: int(samples * gib * MODELS[name])]
    batches = list(MemoryBudgetBatchSampler(sizes, cost, budget))
    seconds, peak = 0.0, 0
    for batch in batches:
        size = sizes[batch].max(axis=0).tolist()
        made = make_batch(len(batch), size)
        RESIDENT.reset()
        seconds += timed(partial(step, made))[0].cpu_s
        peak = max(peak, process_memory().peak_resident_bytes or 0)
    median = MEDIAN.get(name, 33)
    tensors = replace(cost, offset=0.0, scale=1.0, margin=0.0)
    made = make_batch(int(tensors.capacity(median, int(SHARE * budget))), median)
    same = [timed(partial(step, made))[0].cpu_s for _ in range(4)][1:]
    return {
        "epoch, s": seconds,
        "same batch, s": min(same),
        "peak": peak / budget,
        "samples": len(sizes) / len(batches),
        "batches": len(batches),
        "measuring, s": measuring.cpu_s,
    }


def run(name: str, gib: int, setting: str, samples: int) -> dict[str, Any]:
    """The cell of one process; empty if the allocator is not installed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["THP_MEM_ALLOC_ENABLE"] = str(int(setting.endswith(HUGE)))
    if setting in PRELOADED:
        found = [one for folder in FOLDERS for one in glob(f"{folder}/{PRELOADED[setting]}")]
        if not found:
            return {}
        environment["LD_PRELOAD"] = found[0]
    command = [sys.executable, __file__, "--cell", name, str(gib), setting, str(samples)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    one: dict[str, Any] = json.loads(done.stdout)
    return one


def main() -> None:
    if sys.argv[1:2] == ["--cell"]:
        name, gib, setting, samples = sys.argv[2:]
        try:
            found = cell(name, int(gib), setting, int(samples))
        except (CostError, OversizeError) as error:  # what stays in the process fills the budget
            found = {"refused": str(error)}
        print(json.dumps(found))
        return
    line = parser(__doc__, samples=4_000, budgets=len(BUDGETS), repetitions=2)
    line.add_argument("--settings", nargs="+", default=[""], help="parts of their names")
    line.add_argument("--models", nargs="+", default=[""], help="parts of their names")
    arguments = line.parse_args()
    chosen = [one for one in ALL if any(part in one for part in arguments.settings)]
    models = [one for one in MODELS if any(part in one for part in arguments.models)]
    for name, gib in product(models, BUDGETS[: arguments.budgets]):
        turns = {one: [] for one in chosen}
        for repetition in range(arguments.repetitions):
            for setting in chosen if repetition % 2 == 0 else reversed(chosen):
                one = run(name, gib, setting, arguments.samples)
                turns[setting].append(one)
                print(
                    name,
                    gib,
                    setting,
                    one,
                    file=sys.stderr,
                    flush=True,
                )


if __name__ == "__main__":
    main()
