"""Ranks that start after the sampler was made are asked when they are needed."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS, TOKENS, counted, sampler_of
from torchbudget import BudgetedIterableDataset

SCRIPT = """
import copy, json, pickle, sys
from pathlib import Path
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchbudget import BudgetedIterableDataset, MemoryBudgetBatchSampler, PaddedCost
from torchbudget.errors import OptionError

lengths, state = json.loads(sys.argv[2]), json.loads(sys.argv[3])


def sampler_of(**options):
    return MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), 1000, **options)


def loader_of(sampler, workers=0):
    return DataLoader(
        list(range(len(lengths))), batch_sampler=sampler, num_workers=workers, collate_fn=list
    )


def stream_of(**options):
    shards = [list(enumerate(lengths))[n::4] for n in range(4)]
    cost = PaddedCost(unit_bytes=1)
    return BudgetedIterableDataset(
        shards, cost, 1000, size=size_of, window=64, collate_fn=numbers, **options
    )


def size_of(sample):
    return sample[1]


def numbers(samples):
    return [number for number, _ in samples]


def refusal(ask):
    try:
        return ask()
    except OptionError as error:
        return str(error)


streams = [DataLoader(stream_of(), batch_size=None, num_workers=n) for n in (0, 2)]
in_parts = DataLoader(stream_of(split="ranks", uneven=True), batch_size=None, num_workers=2)
begun_stream, waiting, resumed_stream = stream_of(), stream_of(split="ranks"), stream_of()
next(iter(begun_stream))
resumed_stream.load_state_dict(json.loads(sys.argv[4]))
loaders = [loader_of(sampler_of(), workers) for workers in (0, 2)]
alone = [len(loader) for loader in loaders]
resumed, chosen, begun = sampler_of(), sampler_of(), sampler_of()
resumed.load_state_dict(state)
chosen.load_state_dict(state)
chosen.set_epoch(chosen.epoch)
next(iter(begun))
copied = pickle.loads(pickle.dumps(begun))
dist.init_process_group("gloo")
refused = [refusal(ask) for ask in (lambda: len(begun), begun_stream.state_dict)]
refused.append(refusal(lambda: next(iter(waiting))))
begun.set_epoch(1)
begun_stream.set_epoch(1)
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
    "streams": [list(loader) for loader in streams],
    "in parts": list(in_parts),
    "resumed stream": list(resumed_stream),
    "later stream": list(begun_stream),
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


def _stream(rank: int) -> Any:
    shards = [list(enumerate(LENGTHS.tolist()))[n::4] for n in range(4)]
    options: dict[str, Any] = {"num_replicas": 2, "rank": rank}
    return BudgetedIterableDataset(
        shards, TOKENS, 1000, size=_length, window=64, collate_fn=_numbers, **options
    )


def _length(sample: tuple[int, int]) -> int:
    return sample[1]


def _numbers(samples: list[tuple[int, int]]) -> list[int]:
    return [number for number, _ in samples]


def _begun_stream() -> dict[str, Any]:
    """Of two ranks, at the end of an epoch's first loop."""
    stream = _stream(0)
    list(stream)
    saved: dict[str, Any] = stream.state_dict()
    return saved


def stream(rank: int, *, state: dict[str, Any] | None = None, epoch: int = 0) -> list[list[int]]:
    """What a stream that knows its ranks from the beginning yields."""
    one = _stream(rank)
    if state is not None:
        one.load_state_dict(state)
    else:
        one.set_epoch(epoch)
    return list(one)


def every(parts: Iterable[list[list[int]]]) -> bool:
    """Whether all ranks' batches are each sample once."""
    return counted(batch for part in parts for batch in part) == Counter(range(len(LENGTHS)))


@pytest.mark.distributed
def test_ranks_that_start_after_the_sampler_was_made(state: dict[str, Any], tmp_path: Path) -> None:
    """Each draws its own part: in loaders made before, after `len`, after a state was loaded.

    What a loop has begun alone is not gone on with, unless the epoch is chosen anew.
    """
    streamed_state = _begun_stream()
    given = [json.dumps(one) for one in (LENGTHS.tolist(), state, streamed_state)]
    found = run_ranks(SCRIPT, tmp_path, 2, *given)
    for rank, one in enumerate(found):
        drawn, part = list(sampler_of(num_replicas=2, rank=rank)), _stopped(rank)
        assert one["alone"] == [len(sampler_of())] * 2
        assert one["len"] == [len(drawn)] * 2
        assert one["batches"] == [drawn, drawn]
        part.load_state_dict(part.state_dict())
        assert one["resumed"] == one["chosen"] == list(part) == drawn[3:]
        sampled, streamed, waits = one["refused"]
        assert "began on num_replicas=1, and torch.distributed has 2 ranks" in sampled
        assert "began on num_replicas=1, and torch.distributed has 2 ranks" in streamed
        assert "their numbers of batches differ" in waits
        assert one["copied"] == drawn
        part.set_epoch(1)
        assert one["later"] == list(part)
        assert one["resumed stream"] == stream(rank, state=streamed_state)
        assert one["later stream"] == stream(rank, epoch=1)
    for number in range(2):
        assert every(one["streams"][number] for one in found)
        assert len({len(one["streams"][number]) for one in found}) == 1
    assert every(one["in parts"] for one in found)
    assert every(one["batches"][0] for one in found)


SPAWNED = """
import json, sys
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
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_a_spawned_worker_takes_what_its_parent_saw(tmp_path: Path) -> None:
    """It has no process group to ask: the parts of both ranks are still each sample once."""
    first, second = run_ranks(SPAWNED, tmp_path, 2)
    assert len(first) == len(second)
    assert sorted(number for batch in first + second for number in batch) == list(range(60))


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
