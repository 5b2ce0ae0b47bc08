"""Ranks that plan by other sizes, costs, budgets or options: noticed at the first loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS

pytestmark = pytest.mark.distributed

START = """
import json, random, sys, threading
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchbudget import (
    BudgetedIterableDataset, MeasuredCost, MemoryBudget, MemoryBudgetBatchSampler, PaddedCost)
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.errors import OptionError, RankError, TorchBudgetError
from torchbudget.integrations.positioned import PositionedLoader
from torchdata.stateful_dataloader import StatefulDataLoader

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
folder, lengths = Path(sys.argv[1]), json.loads(sys.argv[2])
cost, outcomes = PaddedCost(unit_bytes=1), {}


def sampler(cost=cost, budget=2000, lengths=lengths, **options):
    return MemoryBudgetBatchSampler(lengths, cost, budget, **options)


class Texts:
    def __iter__(self):
        return ([0] * n for n in lengths)


def part(shard, shards):
    return ([0] * n for n in lengths[shard::shards])


class OfRank:
    # It splits itself by rank, though the ranks of the stream are to share it.

    def __iter__(self):
        return ([0] * n for n in lengths[rank::2])


class Crops:
    # It has a generator of its own, which is another one on each rank.

    def __init__(self):
        self.rng = random.Random(rank)

    def __call__(self, sample):
        return sample[: self.rng.randint(1, len(sample))]


def stream(source=Texts(), cost=cost, budget=2000, **options):
    return BudgetedIterableDataset(source, cost, budget, size=len, collate_fn=list, **options)


def at_epoch(source, epoch):
    source.set_epoch(epoch)
    return source


def after(source, batches):
    alone = sampler(num_replicas=2, rank=0)
    loop = iter(alone)
    for _ in range(batches):
        next(loop)
    source.load_state_dict(alone.state_dict())
    return source


def tracked(stream, workers=0, **options):
    return stream.tracked(DataLoader(stream, batch_size=None, num_workers=workers, **options))


def positioned(stream):
    return PositionedLoader(StatefulDataLoader(stream, batch_size=None, num_workers=1))


def outcome(loop):
    try:
        return [len(batch) for batch in loop()]
    except TorchBudgetError as error:
        return f"{type(error).__name__}: {error}"
"""

CASES = """
outcomes = {
    "same": outcome(sampler),
    "budget": outcome(lambda: sampler(budget=2000 - 300 * rank)),
    "cost": outcome(lambda: sampler(PaddedCost(unit_bytes=1, fixed_bytes=rank))),
    "balance": outcome(lambda: sampler(balance=PaddedCost(sample_bytes=1, unit_bytes=rank))),
    "seed": outcome(lambda: sampler(seed=rank)),
    "sizes": outcome(lambda: sampler(lengths=lengths[rank:])),
    "window": outcome(lambda: sampler(window=64 + rank)),
    "by hand": outcome(lambda: sampler(budget=2000 - 300 * rank, num_replicas=1, rank=0)),
    "agreed": outcome(lambda: sampler(
        PaddedCost(unit_bytes=1 + rank), MemoryBudget(device=2000 + 300 * rank, host=2000 - rank),
        balance=PaddedCost(sample_bytes=1, unit_bytes=rank), agree=True)),
    "stream": outcome(lambda: tracked(stream(budget=2000 - 300 * rank))),
    "stream, workers": outcome(lambda: tracked(stream(seed=rank), workers=2)),
    "epoch": outcome(lambda: at_epoch(sampler(), rank)),
    "state": outcome(lambda: after(sampler(), 3 * rank)),
    "stream, host": outcome(lambda: tracked(
        stream(budget=MemoryBudget(device=2000, host=10**6 + rank)))),
    "stream, drop_last": outcome(lambda: tracked(stream(drop_last=bool(rank)))),
    "stream, look_ahead": outcome(lambda: tracked(stream(look_ahead=10**6 + rank))),
    "stream, epoch": outcome(lambda: tracked(at_epoch(stream(), rank))),
    "not agreed": outcome(lambda: sampler(budget=2000 if rank else "much", agree=True)),
    "stream, plain": outcome(lambda: stream(window=64 + rank)),
    "stream, agreed": outcome(lambda: tracked(stream(budget=2000 - 300 * rank, agree=True))),
    "stream, each its own": outcome(lambda: tracked(
        stream(part, budget=2000 - 300 * rank, batches_per_epoch=3))),
    "stream, in a loader with states": outcome(lambda: positioned(stream(seed=rank))),
    "stream, same": outcome(lambda: tracked(stream(), workers=2)),
    "stream, same, out of order": outcome(lambda: tracked(stream(), workers=2, in_order=False)),
    "stream, of rank": outcome(lambda: tracked(stream(OfRank()))),
    "stream, of rank, workers": outcome(lambda: tracked(stream(OfRank()), workers=2)),
    "stream, of rank, plain": outcome(lambda: stream(OfRank())),
    "stream, of rank, in a loader with states": outcome(lambda: PositionedLoader(
        StatefulDataLoader(stream(OfRank()), batch_size=None))),
    "stream, crops": outcome(lambda: tracked(stream(transforms=[Crops()]), workers=1)),
}

# Not only once, either.
apart = stream(OfRank())
outcomes["apart"], outcomes["apart again"] = (outcome(lambda: tracked(apart)) for _ in range(2))

# Not only once: what differs is refused again. In inference mode, too.
twice = sampler(window=64 + rank)
with torch.inference_mode():
    outcomes["once"], outcomes["twice"] = outcome(lambda: twice), outcome(lambda: twice)

# Once: a second loop needs no other rank.
again = sampler()
list(again)
if rank == 0:
    outcomes["alone afterwards"] = outcome(lambda: again)
dist.barrier()

# In another thread nothing is compared: its collectives would get between those of a step.
other = sampler()
thread = threading.Thread(target=lambda: outcomes.update(thread=outcome(lambda: other)))
if rank == 0:
    thread.start()
    thread.join()

# Where costs were agreed on, steps observed by the one that was given would be lost.
mine = MeasuredCost(forms=(Form(terms=(Term(1.0, 1, (1,)),)),), margin=0.01 * rank)
agreed = sampler(mine, agree=True)
outcomes["margin"] = agreed.cost.margin
if rank:
    mine.observe(1, 10, 20)
try:
    agreed.replan()
except OptionError as error:
    outcomes["observed"] = str(error)
(folder / f"{rank}.json").write_text(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two ranks, each case in turn."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(
        "import warnings\nwarnings.simplefilter('ignore')" + START + CASES,
        folder,
        2,
        LENGTHS.tolist(),
    )


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("budget", "budget_bytes: 2000 on rank 0, 1700 on rank 1"),
        ("cost", "cost: "),
        ("balance", "balance: "),
        ("seed", "seed: 0 on rank 0, 1 on rank 1"),
        ("sizes", f"the number of samples: {len(LENGTHS)} on rank 0, {len(LENGTHS) - 1} on rank 1"),
        ("window", "window: 64 on rank 0, 65 on rank 1"),
        ("stream", "budget: 2000 on rank 0, 1700 on rank 1"),
        ("stream, workers", "seed: 0 on rank 0, 1 on rank 1"),
        ("stream, in a loader with states", "seed: 0 on rank 0, 1 on rank 1"),
        ("epoch", "epoch: 0 on rank 0, 1 on rank 1"),
        ("state", "rounds: 0 on rank 0, 3 on rank 1"),
        ("once", "window: "),
        ("twice", "window: "),
        ("stream, host", "budget.host: "),
        ("stream, drop_last", "drop_last: False on rank 0, True on rank 1"),
        ("stream, look_ahead", "look_ahead: "),
        ("stream, epoch", "epoch: 0 on rank 0, 1 on rank 1"),
        ("stream, plain", "window: 64 on rank 0, 65 on rank 1"),
    ],
)
def test_what_differs_is_an_error_on_every_rank(
    outcomes: list[dict[str, Any]], case: str, told: str
) -> None:
    """Otherwise samples would come twice or never, in silence."""
    for each in outcomes:
        assert each[case].startswith("RankError: ranks would share out samples that differ")
        assert told in each[case]


@pytest.mark.parametrize(
    "case",
    [
        "stream, of rank",
        "stream, of rank, workers",
        "stream, of rank, plain",
        "stream, of rank, in a loader with states",
        "stream, crops",
        "apart",
        "apart again",
    ],
)
def test_other_samples_are_an_error_on_every_rank(
    outcomes: list[dict[str, Any]], case: str
) -> None:
    """At the first batch of a loop that is tracked, or has no workers: it knows its window."""
    for each in outcomes:
        assert each[case].startswith("RankError: rank 0 and rank 1 read other samples")


@pytest.mark.parametrize(
    "case",
    ["same", "agreed", "stream, agreed", "stream, same", "stream, same, out of order"],
)
def test_ranks_that_agree_share_all_samples(outcomes: list[dict[str, Any]], case: str) -> None:
    """Each sample comes once, on equal numbers of batches, under the smallest budget."""
    numbers = [each[case] for each in outcomes]
    assert sum(map(sum, numbers)) == len(LENGTHS)
    assert len(numbers[0]) == len(numbers[1])


def test_what_is_read_apart_need_not_be_the_same(outcomes: list[dict[str, Any]]) -> None:
    """Ranks given by hand, and ranks that each read their own part of the source."""
    for each in outcomes:
        assert sum(each["by hand"]) == len(LENGTHS)
        assert len(each["stream, each its own"]) == 3
    assert sum(outcomes[0]["alone afterwards"]) < len(LENGTHS)
    assert sum(outcomes[0]["thread"]) < len(LENGTHS)


def test_rank_0s_cost_is_agreed_on(outcomes: list[dict[str, Any]]) -> None:
    """Steps that were observed by the cost that was given do not go unnoticed."""
    assert [each["margin"] for each in outcomes] == [0, 0]
    for each in outcomes:
        assert "call observe of sampler.cost" in each["observed"]


def test_what_fails_on_one_rank_fails_on_all(outcomes: list[dict[str, Any]]) -> None:
    """A budget that cannot be read keeps no other rank waiting."""
    first, second = (each["not agreed"] for each in outcomes)
    assert first.startswith("BudgetError")
    assert second.startswith("RankError: rank 0 failed, see its traceback: BudgetError")


MISSING = """
dist.destroy_process_group()
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("short", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=3))
if rank != 1:
    (folder / f"{rank}.json").write_text(json.dumps(outcome(sampler)))
else:
    (folder / f"{rank}.json").write_text("null")
"""


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """The others raise at the group's timeout, instead of waiting for it in their first step."""
    first, _, third = run_ranks("import os\n" + START + MISSING, tmp_path, 3, LENGTHS.tolist())
    assert first.startswith("RankError: not all ranks came")
    assert "Rank 1 failed" in first or "Ranks 1 failed" in first
    assert third.startswith("RankError: not all ranks came")
