"""How many tokens a second do two ranks train on, under one memory limit?

Question: a byte-level transformer that keeps its attention's scores learns docstrings on two ranks,
each of which may need so much memory and no more. How many bytes of text does an epoch take a
second with our batches, and with what people use otherwise: fixed batches, transformers'
LengthGroupedSampler and BatchRebalanceSampler, lhotse's buckets, windows of tokens by hand? For how
much of a step do ranks wait for the other one? What do their fullest batches need?

Command: PYTHONPATH=. python examples/benchmarks/rank_speed.py [--samples N] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU; transformers 5.23.0,
lhotse 1.33.0; other work ran on both, which shows in the seconds, and most in the waiting.

    limit, batches                          a rank  left out  twice  padding  tokens/s  speed  waiting   peak
    96 MiB, torchbudget                         63         0      0     7.5%    29,981   1.00     3.2%  1.002
    96 MiB, torchbudget, samples_per_step       71         0      0    13.8%    27,148   0.90     4.3%  1.000
    96 MiB, fixed batches                      625         0      0    35.0%    19,048   0.58    10.4%  0.980
    96 MiB, LengthGroupedSampler               625         0      0     1.4%    38,842   1.00     4.9%  0.980
    96 MiB, BatchRebalanceSampler               99       196      0     7.5%    40,135   1.10     2.5%  0.992
    96 MiB, lhotse                              75         0      0     5.4%    38,865   1.08     2.4%  1.002
    96 MiB, tokens by hand                      96        52      0     1.8%    40,487   1.11     4.3%  0.993
    192 MiB, torchbudget                        25         0      0    12.5%    38,288   1.00     5.2%  0.988
    192 MiB, torchbudget, samples_per_step      32         0      0    26.8%    32,513   0.87     4.1%  0.988
    192 MiB, fixed batches                     208         4      0    63.6%    13,712   0.36     8.6%  0.989
    192 MiB, LengthGroupedSampler              208         4      0     2.7%    35,865   1.05     5.7%  0.988
    192 MiB, BatchRebalanceSampler              45       196      0    15.7%    33,041   0.89     2.5%  0.943
    192 MiB, lhotse                             34         0      0     5.7%    37,182   0.97     5.0%  0.966
    192 MiB, tokens by hand                     38         0      0     4.5%    34,608   1.04     7.5%  0.989
    96 MiB: the fastest other one's speed ≤ 1: 1.1089, DOES NOT HOLD
    96 MiB: waiting, beyond the least ≤ 0: 0.0076607, DOES NOT HOLD
    96 MiB: peak / limit ≤ 1: 1.0022, DOES NOT HOLD
    192 MiB: the fastest other one's speed ≤ 1: 1.0496, DOES NOT HOLD
    192 MiB: waiting, beyond the least ≤ 0: 0.027596, DOES NOT HOLD
    192 MiB: peak / limit ≤ 1: 0.98849, holds

The table is from before the first row took the buffer by hand for its window: `torchbudget` has the
default one there, a quarter of the samples.

The limit is `--mib`, or twice as much, beyond what the process has before it trains. Every
contender is set as full as that allows, by the same measured cost: the largest batch size, the most
tokens, the fewest groups a step with which none of its batches is predicted to need more. Batches
of schemes that know no ranks are dealt in turn. All take optimizer steps of about `--step` samples:
losses are summed, then gradients are added over the ranks. `tokens/s` counts no padding, and a
sample that comes twice once. `waiting` is the time from a rank's last backward of a step to that of
the slowest, over the time of the slowest, mean of the ranks. `left out` are samples that do not
come in the epoch, `twice` those that come again. `peak` is the high-water mark of resident memory
as a share of the limit, the highest of any rank and repetition. One thread a rank; contenders run
in turn, and speeds are compared within a turn.

Ours are the fewest and fullest batches. Of 2,500 samples, our 126 batches of both ranks have more
padding than 192 of the tokens by hand, and on a core that a few hundred bytes keep busy, padding is
all that counts: the fastest one is a tenth ahead, fixed batches take twice as long or more.
"""  # noqa: E501  (tables)

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import Batches, Results, Sizes, alternate, flat, median, options, padded_sizes, ratio
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    configure_allocators,
    measure_cost,
    peak_memory,
    trace_peak_bytes,
)
from torchbudget.machine.process_tree import process_memory

sys.path.append(str(Path(__file__).parent.parent))

from train_text import ByteData, Transformer, docstrings, loss_sum

OURS = "torchbudget"
OTHERS_OF_OURS = ("torchbudget, default window", "torchbudget, samples_per_step")
RANKS = 2


@dataclass
class Plans:
    """The batches of all ranks, by every contender.

    Attributes:
        sizes: of the samples.
        cost: of a batch.
        budget: of each rank, in bytes.
        step: about how many samples an optimizer step takes.
    """

    sizes: Sizes
    cost: MeasuredCost
    budget: int
    step: int

    def all(self) -> dict[str, list[Batches]]:
        """Those of peers that are installed, where anything fits."""
        made = {name: if_installed(make) for name, make in self.makers().items()}
        return {name: batches for name, batches in made.items() if batches}

    def makers(self) -> dict[str, Callable[[], list[Batches] | None]]:
        """How each makes its batches; `None`: a peer is not installed, or nothing fits."""
        return {
            OURS: lambda: self.ours(window=self.buffer),
            OTHERS_OF_OURS[0]: self.ours,
            OTHERS_OF_OURS[1]: lambda: self.ours(samples_per_step=self.step),
            "fixed batches": self.fixed,
            "LengthGroupedSampler": self.grouped,
            "BatchRebalanceSampler": self.rebalanced,
            "lhotse": self.lhotse,
            "tokens by hand": self.by_hand,
        }

    def ours(self, **steps: int) -> list[Batches]:
        made = (
            MemoryBudgetBatchSampler(
                self.sizes, self.cost, self.budget, num_replicas=RANKS, rank=rank, **steps
            )
            for rank in range(RANKS)
        )
        return [list(sampler) for sampler in made]

    def fixed(self) -> list[Batches]:
        return dealt(self.in_runs(np.random.default_rng(0).permutation(len(self.sizes)).tolist()))

    def grouped(self) -> list[Batches]:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        generator = torch.Generator().manual_seed(0)
        sampler = LengthGroupedSampler(
            self.fits * RANKS, lengths=self.sizes.tolist(), generator=generator
        )
        return dealt(self.in_runs(list(sampler)))

    def rebalanced(self) -> list[Batches] | None:
        from transformers.trainer_pt_utils import BatchRebalanceSampler

        for groups in range(1, self.step // RANKS):
            batches = [
                list(
                    BatchRebalanceSampler(self.sizes.tolist(), self.step, RANKS, groups, rank=rank)
                )
                for rank in range(RANKS)
            ]
            if self.all_fit(chain(*batches)):
                return batches
        return None

    def lhotse(self) -> list[Batches] | None:
        from lhotse import CutSet, MonoCut
        from lhotse.dataset import DynamicBucketingSampler

        cuts = CutSet(
            MonoCut(id=str(index), start=0, duration=float(size), channel=0)
            for index, size in enumerate(self.sizes.tolist())
        ).to_eager()

        def of(rank: int, most: float) -> Batches:
            sampler = DynamicBucketingSampler(
                cuts, max_duration=most, num_buckets=30, buffer_size=len(cuts), shuffle=True,
                quadratic_duration=self.quadratic, rank=rank, world_size=RANKS,
            )  # fmt: skip
            return [[int(cut.id.partition("_dup")[0]) for cut in batch] for batch in sampler]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would rather read the cuts from a file
            return self.fullest(lambda most: [of(rank, most) for rank in range(RANKS)])

    def by_hand(self) -> list[Batches] | None:
        """A buffer of samples is sorted, cut at a number of padded tokens, and shuffled."""

        def of(most: float) -> list[Batches]:
            rng, found = np.random.default_rng(0), []
            order = rng.permutation(len(self.sizes))
            for start in range(0, len(order), self.buffer):
                window = order[start : start + self.buffer]
                batches: Batches = [[]]
                for index in window[np.argsort(self.sizes[window], kind="stable")].tolist():
                    if batches[-1] and (len(batches[-1]) + 1) * self.sizes[index] > most:
                        batches.append([])
                    batches[-1].append(index)
                found += [batches[at] for at in rng.permutation(len(batches))]
            return dealt(found)

        return self.fullest(of)

    @property
    def buffer(self) -> int:
        """Samples that are sorted together, as by hand."""
        return 8 * self.step

    @property
    def longest(self) -> int:
        return int(self.sizes.max())

    @property
    def fits(self) -> int:
        return int(self.cost.capacity(self.longest, self.budget))

    @property
    def quadratic(self) -> float:
        """The length at which what is quadratic in it costs as much as what is linear."""
        lengths = np.array([self.longest // 8, self.longest])
        eight, sixteen = (self.cost.batch_bytes(n, lengths) for n in (8, 16))
        short, long = (sixteen - eight) / 8 / lengths  # bytes a token
        pair = (long - short) / (lengths[1] - lengths[0])
        return float((short - pair * lengths[0]) / pair)

    def in_runs(self, order: list[int]) -> Batches:
        return [order[at : at + self.fits] for at in range(0, len(order), self.fits)]

    def all_fit(self, batches: Iterable[list[int]]) -> bool:
        indices, counts = flat(batches)
        needed = self.cost.batch_bytes(counts, padded_sizes(self.sizes, indices, counts))
        return bool((needed <= self.budget).all())

    def fullest(self, made: Callable[[float], list[Batches]]) -> list[Batches] | None:
        """With the most tokens with which all batches fit, to a hundredth."""
        low, high, best = float(self.longest), float(self.sizes.sum()), None
        while high > 1.01 * low:
            middle = math.sqrt(low * high)
            batches = made(middle)
            if self.all_fit(chain(*batches)):
                low, best = middle, batches
            else:
                high = middle
        return best


class Work:
    """What one rank does.

    Args:
        settings: of the command line.
    """

    def __init__(self, settings: argparse.Namespace) -> None:
        self.rank = dist.get_rank()
        self.step = settings.step
        self.data = ByteData(islice(docstrings(0), settings.samples), settings.max_length)
        self.sizes = np.array([len(sample["ids"]) for sample in self.data])
        self.model = Transformer(settings.max_length, settings.width, layers=settings.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        longest = int(self.sizes.max())
        self.backward(self.made(2, longest))  # loads kernels, and then gloo's buffers
        self.take_step()
        trace_peak_bytes(self.train, self.made(2, longest))  # and what measuring imports
        room: list[Any] = [None] * RANKS
        dist.all_gather_object(room, process_memory().resident_bytes)
        self.budget = max(room) + settings.mib * 2**20
        contenders: list[Any] = [None]
        if not self.rank:
            cost = measure_cost(self.train, self.made, max_size=longest, budget=self.budget)
            plans = Plans(self.sizes, cost, self.budget, self.step)
            # Elsewhere: what peers import, and keep, would take room here.
            with mp.get_context("spawn").Pool(1) as pool:
                contenders = [pool.apply(plans.all)]
        dist.broadcast_object_list(contenders)
        self.contenders: dict[str, list[Batches]] = contenders[0]
        self.waiting = dict.fromkeys(self.contenders, 0.0)
        self.peaks = dict.fromkeys(self.contenders, 0)

    def made(self, n: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(256, (n, length))
        return {"ids": ids, "labels": ids.clone()}

    def train(self, batch: Any) -> None:
        """The step on one rank, to measure."""
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def backward(self, batch: Any) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            loss_sum(self.model, batch).backward()

    def take_step(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def epoch(self, name: str) -> Callable[[], None]:
        """An epoch with a contender's batches, which all ranks begin together."""
        of_all = self.contenders[name]
        ends = ends_of_steps(of_all, self.step)

        def work() -> None:
            mine = DataLoader(self.data, batch_sampler=of_all[self.rank], collate_fn=PadCollate())
            busy: list[float] = []
            dist.barrier()
            with peak_memory("cpu") as peak:
                batches = iter(mine)
                for begin, end in pairwise([0, *ends]):
                    begun = time.perf_counter()
                    for batch in islice(batches, end - begin):
                        self.backward(batch)
                    busy.append(time.perf_counter() - begun)
                    self.take_step()
            self.peaks[name] = max(self.peaks[name], peak.bytes)
            both: list[Any] = [None] * RANKS
            dist.all_gather_object(both, busy)
            times = np.array(both)
            self.waiting[name] = float(1 - times.mean(axis=0).sum() / times.max(axis=0).sum())

        return work

    def figures(self, name: str, of_all: list[Batches]) -> dict[str, Any]:
        indices, counts = flat(chain(*of_all))
        padded = counts * padded_sizes(self.sizes, indices, counts)
        once = np.unique(indices)
        tokens = int(self.sizes[once].sum())
        return {
            "batches": name,
            "a rank": len(of_all[0]),
            "left out": len(self.sizes) - len(once),
            "twice": len(indices) - len(once),
            "padding": 1 - int(self.sizes[indices].sum()) / int(padded.sum()),
            "tokens": tokens,
            "waiting": self.waiting[name],
        }


def ends_of_steps(of_all: list[Batches], size: int) -> list[int]:
    """After which micro-batches of a rank as many samples have come to all of them."""
    came = np.sum([np.cumsum([*map(len, batches)]) for batches in of_all], axis=0)
    ends = np.flatnonzero(np.diff(came // size, prepend=0)) + 1
    return sorted({*ends.tolist(), len(came)})


def if_installed(make: Callable[[], list[Batches] | None]) -> list[Batches] | None:
    """The batches; `None` where the peer that makes them is missing."""
    try:
        return make()
    except ImportError:
        return None


def dealt(batches: Batches) -> list[Batches]:
    """Batches in turn, the same number to each rank."""
    return [batches[rank : len(batches) // RANKS * RANKS : RANKS] for rank in range(RANKS)]


def rank_main(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Time all contenders on one of the ranks; the first one writes what was found."""
    configure_allocators()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    work = Work(settings)
    runs = {name: work.epoch(name) for name in work.contenders}
    for run in runs.values():  # first calls compile kernels
        run()
    times = alternate(runs, settings.repetitions)
    peaks: list[Any] = [None] * RANKS
    dist.all_gather_object(peaks, work.peaks)
    if not rank:
        told = [
            work.figures(name, of_all)
            | {
                "seconds": median(times[name]),
                "slower": ratio(times[name], times[OURS]),
                "peak": max(one[name] for one in peaks) / work.budget,
            }
            for name, of_all in work.contenders.items()
        ]
        Path(folder, "told.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still need the interpreter


def main() -> None:
    settings = options(
        __doc__, samples=2500, max_length=1024, mib=96, width=64, layers=1, step=256, repetitions=3
    )
    results = Results(
        {
            "limit, batches": "",
            "a rank": ",d",
            "left out": ",d",
            "twice": ",d",
            "padding": ".1%",
            "tokens/s": ",.0f",
            "speed": ".2f",
            "waiting": ".1%",
            "peak": ".3f",
        }
    )
    for mib in (settings.mib, 2 * settings.mib):
        settings.mib = mib
        with TemporaryDirectory() as folder:
            mp.spawn(rank_main, (settings, folder), nprocs=RANKS)
            told = json.loads(Path(folder, "told.json").read_text())
        add(results, f"{mib} MiB", told)
    results.finish(settings.json)


def add(results: Results, limit: str, told: list[dict[str, Any]]) -> None:
    """Rows and bars of one limit; ours is the first one."""
    others = [row for row in told if row["batches"] not in (OURS, *OTHERS_OF_OURS)]
    for row in told:
        row["speed"] = row["tokens"] / told[0]["tokens"] / row["slower"]
        row["tokens/s"] = row["tokens"] / row["seconds"]
        results.row(**row | {"limit, batches": f"{limit}, {row['batches']}"})
    results.bar(f"{limit}: the fastest other one's speed", max(row["speed"] for row in others), 1)
    least = min(row["waiting"] for row in others)
    results.bar(f"{limit}: waiting, beyond the least", told[0]["waiting"] - least, 0)
    results.bar(f"{limit}: peak / limit", max(row["peak"] for row in told[:3]), 1)


if __name__ == "__main__":
    main()
