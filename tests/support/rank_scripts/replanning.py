"""An epoch that ranks, whose workers run ahead unequally far, plan anew in the middle."""

import json
import sys
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tests.support.costs import measured
from torchbudget import MemoryBudgetBatchSampler

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
cost = measured(margin=0.01)
sizes = np.random.default_rng(0).integers(1, 300, 2000)
sampler = MemoryBudgetBatchSampler(sizes, cost, 1_000_000, window=200)
iterator = iter(sampler)
epoch: list[list[int]] = []
margins: list[float] = []
ahead = [next(iterator) for _ in range(3 * rank)]
for number in range(10_000):
    ahead += islice(iterator, 1)
    if not ahead:
        break
    epoch.append(ahead.pop(0))
    if number == 7 and rank == 1:
        cost.observe(10, 100, 1_300_000)
    if number % 5 == 4 and number < 40:
        margins.append(sampler.replan())
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([epoch, margins]))
