"""A stream in a spawned worker, which has no process group to ask."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.support.streams import TOKENS, same
from torchbudget import BudgetedIterableDataset

del sys.modules["__main__"].__file__  # which a spawned worker would run again
shards = [[[number] for number in range(start, 60, 4)] for start in range(4)]
stream = BudgetedIterableDataset(shards, TOKENS, 8, size=len, collate_fn=same)
dist.init_process_group("gloo")
loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
drawn = [[number for (number,) in batch] for batch in loader]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(drawn))
