"""Three ranks of which one does not come to the loop."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.support.samplers import sampler_of
from torchbudget.errors import RankError

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, told = dist.get_rank(), ""
if rank != 1:
    try:
        next(iter(sampler_of()))
    except RankError as error:
        told = str(error)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(told))
