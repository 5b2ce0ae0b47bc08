"""A rank that forks right after each of 300 collectives; it prints how many children were stuck."""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from torchbudget.distributed import gathered

dist.init_process_group("gloo")
stuck = 0
for _ in range(300):
    gathered(dist.get_rank())
    child = os.fork()
    if not child:
        os._exit(0)
    end = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < end:
        time.sleep(0.001)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
        stuck += 1
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(stuck))
