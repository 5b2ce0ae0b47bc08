"""Groups on the host, and shares of the machine's memory, on three ranks."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchbudget import MemoryBudget, MemoryBudgetBatchSampler, PaddedCost, loader_options
from torchbudget.distributed import host_group
from torchbudget.errors import OptionError

os.environ.pop("LOCAL_WORLD_SIZE", None)
sampler = MemoryBudgetBatchSampler([1] * 9, PaddedCost(unit_bytes=1), 4)
whole = MemoryBudget.detect("cpu")
# A backend for each kind of device, as `init_process_group()` without one chooses where there is
# CUDA: gloo stands for it here.
dist.init_process_group("cpu:gloo,cuda:gloo")
rank = dist.get_rank()


def least(group: Any) -> int:
    number = torch.tensor(rank + 1)
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return int(number)


def refusal(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except OptionError as error:
        return str(error)
    return ""


everyone, some, plain = host_group(), dist.new_group([1, 2]), dist.new_group(backend="gloo")
groups = [dist.get_backend(everyone), least(everyone), host_group() is everyone]
groups += [least(host_group(some)) if rank else None, host_group(plain) is plain]
options = {"dataset": [0] * 9}
refused = [refusal(lambda: MemoryBudget.detect("cpu"))]
refused += [refusal(lambda: loader_options(sampler, MemoryBudget(host="4GiB"), **options))]
asked = MemoryBudget.detect("cpu", ranks_per_machine=2)
os.environ["LOCAL_WORLD_SIZE"] = "3"
shares = [asked.host / whole.host, MemoryBudget.detect("cpu").host / whole.host]  # type: ignore[operator]
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([groups, refused, shares]))
