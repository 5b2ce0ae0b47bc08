"""Two ranks of which one leaks; both plan with its margin."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.trainings import Creeping
from torchbudget import MemoryMonitor
from torchbudget.errors import OptionError
from torchbudget.machine.process_tree import process_memory

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
resident = torch.tensor(process_memory().resident_bytes)
dist.all_reduce(resident, dist.ReduceOp.MAX)
run = Creeping(leaks=rank == 1, resident_bytes=int(resident))
refused = None
try:
    run.fit(MemoryMonitor() if rank == 0 else None, epochs=1)
except OptionError as error:
    refused = str(error)
with MemoryMonitor(replan=run.sampler, replan_batches=5) as monitor:
    run.fit(monitor, epochs=2)
margin = run.sampler.plan.rules.cost.margin
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([refused, margin, run.numbers]))
