"""Ranks that start after the sampler was made are asked when they are needed."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS, counted, sampler_of

SCRIPT = """
import copy, json, pickle, sys
from pathlib import Path
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchbudget import MemoryBudgetBatchSampler, PaddedCost
from torchbudget.errors import OptionError

lengths, state = json.loads(sys.argv[2]), json.loads(sys.argv[3])


def sampler_of(**options):
    return MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), 1000, **options)


def loader_of(sampler, workers=0):
    return DataLoader(
        list(range(len(lengths))), batch_sampler=sampler, num_workers=workers, collate_fn=list
    )


loaders = [loader_of(sampler_of(), workers) for workers in (0, 2)]
alone = [len(loader) for loader in loaders]
resumed, chosen, begun = sampler_of(), sampler_of(), sampler_of()
resumed.load_state_dict(state)
chosen.load_state_dict(state)
chosen.set_epoch(chosen.epoch)
next(iter(begun))
copied = pickle.loads(pickle.dumps(begun))
dist.init_process_group("gloo")
try:
    refused = len(begun)
except OptionError as error:
    refused = str(error)
begun.set_epoch(1)
result = {
    "alone": alone,
    "len": [len(loader) for loader in loaders],
    "batches": [list(loader) for loader in loaders],
    "steps": list(sampler_of().steps),
    "resumed": list(resumed),
    "chosen": list(chosen),
    "refused": refused,
    "copied": list(copied),
    "later": list(begun),
}
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(result))
"""


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Of two ranks, within a window."""
    saved: dict[str, Any] = _stopped().state_dict()
    return saved


def _stopped(rank: int = 0) -> Any:
    sampler = sampler_of(num_replicas=2, rank=rank)
    batches = iter(sampler)
    for _ in range(3):
        next(batches)
    return sampler


@pytest.mark.distributed
def test_ranks_that_start_after_the_sampler_was_made(state: dict[str, Any], tmp_path: Path) -> None:
    """Each draws its own part: in loaders made before, after `len`, after a state was loaded.

    What a loop has begun alone is not gone on with, unless the epoch is chosen anew.
    """
    found = run_ranks(SCRIPT, tmp_path, 2, json.dumps(LENGTHS.tolist()), json.dumps(state))
    for rank, one in enumerate(found):
        drawn, part = list(sampler_of(num_replicas=2, rank=rank)), _stopped(rank)
        assert one["alone"] == [len(sampler_of())] * 2
        assert one["len"] == [len(drawn)] * 2
        assert one["batches"] == [drawn, drawn]
        part.load_state_dict(part.state_dict())
        assert one["resumed"] == one["chosen"] == list(part) == drawn[3:]
        assert "began on num_replicas=1, and torch.distributed has 2 ranks" in one["refused"]
        assert one["copied"] == drawn
        part.set_epoch(1)
        assert one["later"] == list(part)
    together = counted(batch for one in found for batch in one["batches"][0])
    assert together == Counter(range(len(LENGTHS)))


def test_a_state_is_checked_at_once(state: dict[str, Any]) -> None:
    """That of other sizes is refused where it is loaded, whatever the ranks."""
    with pytest.raises(ValueError, match="the samples' sizes"):
        sampler_of(LENGTHS + 1).load_state_dict(state)


def pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))  # noqa: S301  (made here)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_ranks_given_by_hand_stay(copied: Any) -> None:
    """In every copy."""
    sampler = sampler_of(num_replicas=3, rank=2)
    assert (copied(sampler).num_replicas, copied(sampler).rank) == (3, 2)
    assert list(copied(sampler)) == list(sampler)
