"""What is asked of `torch.distributed`: ranks, and a group whose collectives run on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from torchbudget.distributed import is_distributed, ranks_of, ranks_on_this_machine
from torchbudget.errors import OptionError


def test_without_a_process_group() -> None:
    assert not is_distributed()
    assert ranks_of(None, None) == (1, 0)
    assert ranks_of(4, 3) == (4, 3)
    with pytest.raises(OptionError, match="below num_replicas=2"):
        ranks_of(2, 2)


# A backend for each kind of device, as `init_process_group()` without one chooses where there is
# CUDA: gloo stands for it here.
GROUPS = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from torchbudget.distributed import host_group

dist.init_process_group("cpu:gloo,cuda:gloo")
rank = dist.get_rank()


def least(group):
    number = torch.tensor(rank + 1)
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return int(number)


everyone, some = host_group(), dist.new_group([1, 2])
found = [dist.get_backend(everyone), least(everyone), host_group() is everyone]
found.append(least(host_group(some)) if rank else None)
plain = dist.new_group(backend="gloo")
found.append(host_group(plain) is plain)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_a_group_on_the_host_is_made_once(tmp_path: Path) -> None:
    """Of the ranks of the group that is asked for; one that runs on the host already is it."""
    found = run_ranks(GROUPS, tmp_path, 3)
    assert found == [["gloo", 1, True, 2 if rank else None, True] for rank in range(3)]


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As given; else as torchrun says; else one."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (ranks_on_this_machine(None), ranks_on_this_machine(3)) == (1, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (ranks_on_this_machine(None), ranks_on_this_machine(3)) == (4, 3)
    with pytest.raises(OptionError, match="ranks_per_machine must be an int of at least 1, got 0"):
        ranks_on_this_machine(0)


SHARED = """
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from torchbudget import MemoryBudget, MemoryBudgetBatchSampler, PaddedCost, loader_options
from torchbudget.errors import OptionError

sampler = MemoryBudgetBatchSampler([1] * 8, PaddedCost(unit_bytes=1), 4)
os.environ.pop("LOCAL_WORLD_SIZE", None)
whole = MemoryBudget.detect("cpu")
dist.init_process_group("gloo")
refused = []
for ask in (
    lambda: MemoryBudget.detect("cpu"),
    lambda: loader_options(sampler, MemoryBudget(host="4GiB"), dataset=[0] * 8),
):
    try:
        ask()
    except OptionError as error:
        refused.append(str(error))
asked = MemoryBudget.detect("cpu", ranks_per_machine=2)
os.environ["LOCAL_WORLD_SIZE"] = "2"
halved = MemoryBudget.detect("cpu")
found = [refused, asked.host / whole.host, halved.host / whole.host]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_ranks_share_the_memory_of_their_machine(tmp_path: Path) -> None:
    """By torchrun's word, or that of the caller; where nobody says it, none takes it all."""
    for refused, *shares in run_ranks(SHARED, tmp_path, 2):
        assert len(refused) == 2
        for message in refused:
            assert message.startswith("this is one of 2 ranks, and its launcher does not say how")
        assert shares == pytest.approx([0.5, 0.5], rel=0.05)
