"""An epoch under a measured cost as a process of its own; prints its peak, runs and batches.

python -m tests.support.script_epoch CASE BUDGET HOW [forward]

`HOW` is a method of `measure_cost`, or a number of samples in each batch. The peak is a share of
what the budget leaves beside what the process had before.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import torch

import torchbudget as tb
from tests.support.training_cases import CASES
from torchbudget.machine.allocators import trim_malloc
from torchbudget.machine.process_tree import process_memory, restart_peak

gc.freeze()  # what is imported takes 0.2 s of each collection
name, budget, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
training = CASES[name]()
step: Any = training.step
if sys.argv[4:] == ["forward"]:
    model = training.model.eval()
    step = torch.no_grad()(lambda batch: model(batch["x"]))
before = process_memory().resident_bytes
rng = np.random.default_rng(0)
ends = np.atleast_1d(training.max_size)
# Over ten batches of each: with six, one more leaves each of them 0.86 as full.
number = {"graphs": 4000, "encoder, fused attention": 6000}.get(name, 2000)
sizes = np.clip(ends * rng.lognormal(-2, 0.8, (number, len(ends))), 2, ends).astype(int)
batches: list[Any]
probes: list[Any] = []
if how.isdecimal():
    trim_malloc()
    batches = np.split(rng.permutation(len(sizes)), range(int(how), len(sizes), int(how)))
else:
    method: Any = how
    options: Any = {"max_size": training.max_size, "budget": budget, "method": method}
    cost = tb.measure_cost(step, training.make_batch, **options)
    probes = [probe for probe in cost.probes if probe.how == "run"]
    batches = list(tb.MemoryBudgetBatchSampler(sizes, cost, budget))
restart_peak()
print("begun", flush=True)  # noqa: T201
for batch in batches:
    size = sizes[batch].max(0)
    size = tuple(map(int, size)) if len(ends) > 1 else int(size[0])
    step(training.make_batch(len(batch), size))
share = ((process_memory().peak_resident_bytes or 0) - before) / (budget - before)
print(share, len(probes), -(-len(sizes) // len(batches)))  # noqa: T201
