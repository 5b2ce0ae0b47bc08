"""What two ranks get that plan by other facts, or read other samples: batches, or the refusal."""

import json
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudget,
    MemoryBudgetBatchSampler,
    PaddedCost,
    agree,
)
from torchbudget.errors import TorchBudgetError

warnings.simplefilter("ignore")
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
folder, lengths = Path(sys.argv[1]), json.loads(sys.argv[2])
cost = PaddedCost(unit_bytes=1)
outcomes: dict[str, Any] = {}


def sampler(cost: Any = cost, budget: Any = 2000, lengths: Any = lengths, **options: Any) -> Any:
    return MemoryBudgetBatchSampler(lengths, cost, budget, **options)


def texts(numbers: Iterable[int] = lengths) -> Iterator[list[int]]:
    return ([0] * n for n in numbers)


class Texts:
    def __iter__(self) -> Any:
        return texts()


class OfRank:
    """It splits itself by rank, though the ranks of the stream are to share it."""

    def __iter__(self) -> Any:
        return texts(lengths[rank::2])


class Crops:
    """It has a generator of its own, which is another one on each rank."""

    def __init__(self) -> None:
        self.rng = random.Random(rank)

    def __call__(self, sample: list[int]) -> list[int]:
        return sample[: self.rng.randint(1, len(sample))]


def part(shard: int, shards: int) -> Iterator[list[int]]:
    return texts(lengths[shard::shards])


def stream(source: Any = None, cost: Any = cost, budget: Any = 2000, **options: Any) -> Any:
    source = Texts() if source is None else source
    return BudgetedIterableDataset(source, cost, budget, size=len, collate_fn=list, **options)


def tracked(stream: Any, workers: int = 0, **options: Any) -> Any:
    return stream.tracked(DataLoader(stream, batch_size=None, num_workers=workers, **options))


def at_epoch(source: Any, epoch: int) -> Any:
    source.set_epoch(epoch)
    return source


def after(source: Any, batches: int) -> Any:
    alone = sampler(num_replicas=2, rank=0)
    loop = iter(alone)
    for _ in range(batches):
        next(loop)
    source.load_state_dict(alone.state_dict())
    return source


def agreed(make: Callable[..., Any], cost: Any, budget: Any, **options: Any) -> Any:
    cost, budget = agree(cost, budget)
    return make(cost=cost, budget=budget, **options)


def outcome(loop: Callable[[], Any]) -> Any:
    try:
        return [len(batch) for batch in loop()]
    except TorchBudgetError as error:
        return f"{type(error).__name__}: {error}"


other_cost = PaddedCost(unit_bytes=1, fixed_bytes=rank)
mine = MemoryBudget(device=2000 + 300 * rank, host=10**6 - rank)
CASES: dict[str, Callable[[], Any]] = {
    "same": sampler,
    "budget": lambda: sampler(budget=2000 - 300 * rank),
    "cost": lambda: sampler(other_cost),
    "balance": lambda: sampler(balance=PaddedCost(sample_bytes=1, unit_bytes=rank)),
    "limits": lambda: sampler(limits=[(cost, 2000 - rank)]),
    "seed": lambda: sampler(seed=rank),
    "sizes": lambda: sampler(lengths=lengths[rank:]),
    "window": lambda: sampler(window=64 + rank),
    "batches_per_epoch": lambda: sampler(batches_per_epoch=8 + rank),
    "by hand": lambda: sampler(budget=2000 - 300 * rank, num_replicas=1, rank=0),
    "agreed": lambda: agreed(sampler, other_cost, mine),
    "not agreed": lambda: agreed(sampler, cost, 2000 if rank else "much"),
    "epoch": lambda: at_epoch(sampler(), rank),
    "state": lambda: after(sampler(), 3 * rank),
    "stream": lambda: tracked(stream(budget=2000 - 300 * rank)),
    "stream, workers": lambda: tracked(stream(seed=rank), workers=2),
    "stream, look_ahead": lambda: tracked(stream(look_ahead=10**6 + rank)),
    "stream, epoch": lambda: tracked(at_epoch(stream(), rank)),
    "stream, plain": lambda: stream(window=64 + rank),
    "stream, agreed": lambda: tracked(agreed(stream, other_cost, mine)),
    "stream, each its own": lambda: tracked(
        stream(part, budget=2000 - 300 * rank, batches_per_epoch=3)
    ),
    "stream, same": lambda: tracked(stream(), workers=2),
    "stream, same, out of order": lambda: tracked(stream(), workers=2, in_order=False),
    "stream, of rank": lambda: tracked(stream(OfRank())),
    "stream, of rank, workers": lambda: tracked(stream(OfRank()), workers=2),
    "stream, of rank, plain": lambda: stream(OfRank()),
    "stream, crops": lambda: tracked(stream(transforms=[Crops()]), workers=1),
}
outcomes |= {name: outcome(case) for name, case in CASES.items()}

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
(folder / f"{rank}.json").write_text(json.dumps(outcomes))
