"""Ranks that plan: together, late, by other facts, without one of them, or killed and restarted."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support import streams
from tests.support.costs import measured
from tests.support.provocations import collected
from tests.support.rank_scripts import error_of, join
from tests.support.samplers import LENGTHS, TOKENS, loader_of, sampler_of
from tests.support.steps import step_of
from tests.support.streams import make
from tests.support.streams import tracked_loop as tracked
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudget,
    MemoryBudgetBatchSampler,
    Mixture,
    PackedCost,
    PaddedCost,
    agree,
    loader,
    loader_options,
)
from torchbudget.distributed import gathered, host_group
from torchbudget.errors import StateMismatchError, TorchBudgetError
from torchbudget.host import loader as loaders

# ---------------------------------------------------------------------- ranks that differ


def texts(numbers: Iterable[int] = LENGTHS) -> Iterator[list[int]]:
    return ([0] * n for n in numbers)


class Texts:
    def __iter__(self) -> Any:
        return texts()


class OfRank:
    """It splits itself by rank, though the ranks of the stream are to share it."""

    def __iter__(self) -> Any:
        return texts(LENGTHS[dist.get_rank() :: 2])


class Crops:
    """It has a generator of its own, which is another one on each rank."""

    def __init__(self) -> None:
        self.rng = random.Random(dist.get_rank())

    def __call__(self, sample: list[int]) -> list[int]:
        return sample[: self.rng.randint(1, len(sample))]


def part(shard: int, shards: int) -> Iterator[list[int]]:
    return texts(LENGTHS[shard::shards])


def planned(sizes: Any = LENGTHS, **options: Any) -> Any:
    return sampler_of(sizes, **{"budget": 2000} | options)


def mixed(share: float) -> dict[str, Any]:
    mixture = Mixture(np.arange(len(LENGTHS)) % 2, {0: share, 1: 1})
    return {"weights": mixture, "samples_per_step": 64, "steps_per_epoch": 4}


def streamed(source: Any = None, cost: Any = TOKENS, budget: Any = 2000, **options: Any) -> Any:
    source = Texts() if source is None else source
    return BudgetedIterableDataset(source, cost, budget, size=len, collate_fn=list, **options)


def at_epoch(source: Any, epoch: int) -> Any:
    source.set_epoch(epoch)
    return source


def after(source: Any, batches: int) -> Any:
    alone = planned(num_replicas=2, rank=0)
    for _ in islice(alone, batches):
        pass
    source.load_state_dict(alone.state_dict())
    return source


def agreed(make: Callable[..., Any], cost: Any, budget: Any) -> Any:
    cost, budget = agree(cost, budget)
    return make(cost=cost, budget=budget)


def outcome(loop: Callable[[], Any]) -> Any:
    try:
        return [len(batch) for batch in loop()]
    except TorchBudgetError as error:
        return f"{type(error).__name__}: {error}"


OTHERS = "rank 0 and rank 1 read different"


def compare() -> Any:
    """What two ranks get that plan by other facts, or read other samples: batches or a refusal."""
    warnings.simplefilter("ignore")
    rank, _ = join(timeout=timedelta(seconds=20))
    other_cost, less = PaddedCost(unit_bytes=1, fixed_bytes=rank), 2000 - 300 * rank
    mine = MemoryBudget(device=2000 + 300 * rank, host=10**6 - rank)
    parts: Any = {"look_ahead": 30_000, "max_batch_size": 1}
    roomy = MemoryBudget(device=2000, host=10**9)
    shards = [list(texts(LENGTHS[n::4])) for n in range(4)]
    twice, loop = planned(window=64 + rank), streamed(shards)
    # What is said on each rank; nothing where the ranks share all samples.
    other_workers = "the number of workers (at least 1): 1 on rank 0, 2 on rank 1"
    cases: dict[str, tuple[str, Callable[[], Any]]] = {
        "same": ("", planned),
        "budget": ("budget_bytes: 2000 on rank 0, 1700 on rank 1", lambda: planned(budget=less)),
        "cost": ("cost: ", lambda: planned(cost=other_cost)),
        "time": ("time: ", lambda: planned(time=PaddedCost(sample_bytes=1, unit_bytes=rank))),
        "limits": ("limits: ", lambda: planned(limits=[(TOKENS, 2000 - rank)])),
        "seed": ("seed: 0 on rank 0, 1 on rank 1", lambda: planned(seed=rank)),
        "sizes": (
            f"the number of samples: {len(LENGTHS)} on rank 0, {len(LENGTHS) - 1} on rank 1",
            lambda: planned(LENGTHS[rank:]),
        ),
        "window": ("window: 64 on rank 0, 65 on rank 1", lambda: planned(window=64 + rank)),
        "batches_per_epoch": (
            "batches_per_epoch or steps_per_epoch: 8 on rank 0, 9 on rank 1",
            lambda: planned(batches_per_epoch=8 + rank),
        ),
        "shares": ("the mixture's shares, or what was drawn: ", lambda: planned(**mixed(1 + rank))),
        "agreed": ("", lambda: agreed(planned, other_cost, mine)),
        "epoch": ("epoch: 0 on rank 0, 1 on rank 1", lambda: at_epoch(planned(), rank)),
        "state": ("rounds: 0 on rank 0, 3 on rank 1", lambda: after(planned(), 3 * rank)),
        "once": ("window: ", lambda: twice),  # not only once: what differs is refused again
        "twice": ("window: ", torch.inference_mode()(lambda: twice)),
        "packed and padded": (
            "cost: ",
            lambda: planned(cost=[PackedCost, PaddedCost][rank](unit_bytes=1)),
        ),
        "stream": (
            "budget_bytes: 2000 on rank 0, 1700 on rank 1",
            lambda: tracked(streamed(budget=less)),
        ),
        "workers": (
            "seed: 0 on rank 0, 1 on rank 1",
            lambda: tracked(streamed(seed=rank), workers=2),
        ),
        "look_ahead": ("look_ahead: ", lambda: tracked(streamed(look_ahead=10**6 + rank))),
        "epoch of a stream": (
            "epoch: 0 on rank 0, 1 on rank 1",
            lambda: tracked(at_epoch(streamed(), rank)),
        ),
        "plain": ("window: 64 on rank 0, 65 on rank 1", lambda: streamed(window=64 + rank)),
        "agreed stream": ("", lambda: tracked(agreed(streamed, other_cost, mine))),
        "same stream": ("", lambda: tracked(streamed(), workers=2)),
        "out of order": ("", lambda: tracked(streamed(), workers=2, in_order=False)),
        "of rank": (OTHERS, lambda: tracked(streamed(OfRank()))),
        "of rank, workers": (OTHERS, lambda: tracked(streamed(OfRank()), workers=2)),
        "of rank, plain": (OTHERS, lambda: streamed(OfRank())),
        "crops": (OTHERS, lambda: tracked(streamed(transforms=[Crops()]), workers=1)),
        "1 and 2 workers": (other_workers, lambda: tracked(streamed(), workers=1 + rank)),
        "of shards": (other_workers, lambda: tracked(streamed(shards), workers=1 + rank)),
        "of parts": (
            other_workers,
            lambda: tracked(streamed(part, batches_per_epoch=3), workers=1 + rank),
        ),
        "the host's look-ahead": (
            "look_ahead: 250000000 on rank 0, 125000000 on rank 1",
            lambda: tracked(streamed(budget=roomy), workers=1 + rank),
        ),
        "parts of a look-ahead": ("", lambda: tracked(streamed(**parts), workers=1)),
        "with a worker and without": ("", lambda: tracked(streamed(shards), workers=rank)),
        "equal at first": ("", lambda: tracked(loop, workers=1)),
        "and then not": (
            "the number of workers (at least 1): 2 on rank 0, 3 on rank 1",
            lambda: tracked(loop, workers=2 + rank),
        ),
        "as before on one": (other_workers, lambda: tracked(loop, workers=1 + rank)),
    }
    compared = {name: (told, outcome(case)) for name, (told, case) in cases.items()}
    outcomes = {
        "by hand": outcome(lambda: planned(budget=less, num_replicas=1, rank=0)),
        "not agreed": outcome(lambda: agreed(planned, TOKENS, 2000 if rank else "much")),
        "each its own": outcome(lambda: tracked(streamed(part, budget=less, batches_per_epoch=3))),
    }
    # Once: a second loop needs no other rank.
    again = planned()
    list(again)
    if rank == 0:
        outcomes["alone afterwards"] = outcome(lambda: again)
        samples = [torch.ones(length) for length in LENGTHS]
        alone = partial(loader, samples, TOKENS, 2000, num_replicas=1, rank=0)
        outcomes["loader, alone"] = outcome(lambda: (one.lengths for one in alone()))
    dist.barrier()
    # In another thread nothing is compared: its collectives would get between those of a step.
    other = planned()
    thread = threading.Thread(target=lambda: outcomes.update(thread=outcome(lambda: other)))
    if rank == 0:
        thread.start()
        thread.join()
    return compared, outcomes


def workers_of_ranks() -> list[Any]:
    """The workers that `loader_options` gives two ranks, of which one has room for one only."""
    rank, _ = join()
    host = MemoryBudget(host="64GiB")
    chosen = loader_options(streamed(), host, max_workers=2 - rank)
    alone = loader_options(streamed(num_replicas=2, rank=0), host, max_workers=2 - rank)
    less = MemoryBudget(host=2**20) if rank else host
    refused = error_of(lambda: loader_options(streamed(), less, max_workers=1))
    return [chosen["num_workers"], chosen.limited_by, alone["num_workers"], refused]


def missing() -> str:
    """Three ranks of which one does not come to the loop."""
    rank, _ = join(timeout=timedelta(seconds=3))
    return "" if rank == 1 else error_of(lambda: next(iter(sampler_of())))


# ---------------------------------------------------------------------- ranks that start late


def start_late(state: str, streamed_state: str) -> dict[str, Any]:
    """Samplers and streams that were made, begun or loaded before their ranks started."""
    several = [streams.loader_of(make("shards"), workers) for workers in (0, 2)]
    several += [streams.loader_of(make("shards", split="ranks", uneven=True), 2)]
    begun_stream, resumed_stream = make("shards"), make("shards")
    waiting = make("shards", split="ranks")
    next(iter(begun_stream))
    resumed_stream.load_state_dict(json.loads(streamed_state))
    loaders = [loader_of(sampler_of(), num_workers=workers) for workers in (0, 2)]
    alone = [len(loader) for loader in loaders]
    resumed, chosen, begun = sampler_of(), sampler_of(), sampler_of()
    resumed.load_state_dict(json.loads(state))
    chosen.load_state_dict(json.loads(state))
    chosen.set_epoch(chosen.epoch)
    next(iter(begun))
    copied = pickle.loads(pickle.dumps(begun))  # noqa: S301  (made here)
    join()
    alone_stream = make("shards")
    alone_stream.load_state_dict(begun_stream.state_dict())
    refused = [error_of(lambda: len(begun))]
    refused += [error_of(lambda one=one: next(iter(one))) for one in (alone_stream, waiting)]
    begun.set_epoch(1)
    begun_stream.set_epoch(1)
    by_hand = sampler_of(num_replicas=3, rank=2)
    return {
        "ranks": [sampler_of().num_replicas, sampler_of().rank, sampler_of(rank=0).rank],
        "by hand": [pickle.loads(pickle.dumps(by_hand)).rank, by_hand.num_replicas],  # noqa: S301
        "alone": alone,
        "len": [len(loader) for loader in loaders],
        "batches": [list(loader) for loader in loaders],
        "resumed": list(resumed),
        "chosen": list(chosen),
        "refused": refused,
        "copied": list(copied),
        "later": list(begun),
        "streams": [[[n for n, _ in batch] for batch in loader] for loader in several],
        "resumed stream": list(resumed_stream),
        "later stream": list(begun_stream),
    }


def spawn() -> list[list[int]]:
    """A stream in a spawned worker, which has no process group to ask."""
    del sys.modules["__main__"].__file__  # which a spawned worker would run again
    shards = [[[number] for number in range(start, 60, 4)] for start in range(4)]
    stream = BudgetedIterableDataset(shards, TOKENS, 8, size=len, collate_fn=streams.same)
    join()
    loader = streams.loader_of(stream, 1, multiprocessing_context="spawn")
    return [[number for (number,) in batch] for batch in loader]


# ---------------------------------------------------------------------- groups and plans of ranks


def groups() -> list[Any]:
    """Groups on the host, and shares of the machine's memory, on three ranks."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    sampler = MemoryBudgetBatchSampler([1] * 9, TOKENS, 4)
    whole = MemoryBudget.detect("cpu")
    # A backend for each kind of device, as `init_process_group()` without one chooses where there
    # is CUDA: gloo stands for it here.
    dist.init_process_group("cpu:gloo,cuda:gloo")
    rank = dist.get_rank()

    def least(group: Any) -> int:
        number = torch.tensor(rank + 1)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
        return int(number)

    everyone, some, plain = host_group(), dist.new_group([1, 2]), dist.new_group(backend="gloo")
    found = [dist.get_backend(everyone), least(everyone), host_group() is everyone]
    found += [least(host_group(some)) if rank else None, host_group(plain) is plain]
    host = MemoryBudget(host="4GiB")
    refused = [error_of(lambda: MemoryBudget.detect("cpu"))]
    refused += [error_of(lambda: loader_options(sampler, host, dataset=[0] * 9))]
    asked = MemoryBudget.detect("cpu", ranks_per_machine=2)
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    shares = [asked.host / whole.host, MemoryBudget.detect("cpu").host / whole.host]  # type: ignore[operator]
    return [found, refused, shares]


def fork() -> int:
    """A rank that forks right after each of 300 collectives; how many children were stuck."""
    rank, _ = join()
    stuck = 0
    for _ in range(300):
        gathered(rank)
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
    return stuck


def replan() -> list[Any]:
    """An epoch that ranks, whose workers run ahead unequally far, plan anew in the middle."""
    warnings.simplefilter("ignore")
    rank, _ = join()
    cost = measured(margin=0.01)
    sizes = np.random.default_rng(0).integers(1, 300, 2000)
    sampler = sampler_of(sizes, 1_000_000, cost=cost, window=200)
    iterator = iter(sampler)
    epoch: list[list[int]] = []
    margins: list[float] = []
    ahead = [next(iterator) for _ in range(3 * rank)]
    for number in range(10_000):
        ahead += islice(iterator, 1)
        if not ahead:
            break
        epoch.append(ahead.pop(0))
        if number == 7 and rank == 1:
            cost.observe(10, 100, 1_300_000)
        if number % 5 == 4 and number < 40:
            margins.append(sampler.replan())
    return [epoch, margins]


def provoke(name: str) -> list[tuple[str, str]]:
    """What a rank has met that does what meets an error."""
    join()
    return collected(name, Path(sys.argv[1]))


# ---------------------------------------------------------------------- stories


def story(
    files: str, chapter: str, after_s: str, kind: str, number: str, budget: str, at_windows: str,
    options: str,
) -> None:  # fmt: skip
    """A rank that reads two epochs, saves as it goes, and is killed after some time."""
    (rank, ranks), saved, workers = join(), Path(files, "saved.json"), int(number)
    start = {"ranks": ranks, "workers": workers, "budget": int(budget)}
    if kind == "sampler":
        source = sampler_of(budget=int(budget), **json.loads(options))
        loader = loader_of(source, num_workers=workers)
    else:
        source = make(kind, budget=int(budget), **json.loads(options))
        loader = streams.loader_of(source, workers)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def is_to_be_saved(done: int) -> bool:
        if at_windows == "False":
            return done % 3 == 0
        return not any(worker["rounds"] for worker in source.state_dict().get("workers", ()))

    def save(done: int) -> None:
        state = {"chapter": chapter, "done": done, "start": start, "state": source.state_dict()}
        saved.with_suffix(".part").write_text(json.dumps(state))
        saved.with_suffix(".part").replace(saved)

    def read() -> None:
        done, log = 0, Path(files, f"{chapter}.{rank}.jsonl").open("w")  # noqa: SIM115
        if saved.exists():
            source.load_state_dict(json.loads(saved.read_text())["state"])
        while (epoch := source.epoch) < 2:
            for batch in source.tracked(loader):
                done += 1
                numbers = [one if kind == "sampler" else one[0] for one in batch]
                log.write(json.dumps([done, epoch, numbers]) + "\n")
                log.flush()
                if done == 1 and float(after_s):
                    timer = threading.Timer(float(after_s), die)
                    timer.daemon = True
                    timer.start()
                time.sleep(0.01)  # a step
                dist.barrier()
                if rank == 0 and is_to_be_saved(done):
                    save(done)
        dist.barrier()
        if rank == 0:
            save(done)

    if float(after_s):
        try:
            read()
        except StateMismatchError as error:
            Path(files, f"{chapter}.refused").write_text(str(error))
        finally:  # also where it is over before its time
            die()
    read()


# ---------------------------------------------------------------------- in one line


def with_loader() -> Any:
    """The cost of a joined step, the samples of this rank, and the refusal of a huge budget."""
    join()
    warnings.simplefilter("ignore")
    data = [torch.ones(n % 7 + 2, 4) for n in range(64)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    step = step_of(lambda batch: model(batch.data).square().mean(), model)
    loaders.measure_cost = partial(loaders.measure_cost, method="trace")
    made = loader(data, step, "2GiB", max_batch_size=5)
    sampler: Any = made.batch_sampler
    refused = error_of(lambda: loader(data, step, 2**50))
    return repr(sampler.cost), [index for batch in sampler for index in batch], refused
