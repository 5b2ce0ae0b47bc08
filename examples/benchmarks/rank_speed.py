"""How many tokens a second do two ranks train on, under one memory limit?

Question: a byte-level transformer that keeps its attention's scores learns docstrings on two ranks,
each of which may need so much memory and no more. How many bytes of text does an epoch take a
second with our batches, and with what people use otherwise: fixed batches, transformers'
LengthGroupedSampler and BatchRebalanceSampler, lhotse's buckets, windows of tokens by hand? For how
much of a step do ranks wait for the other one? What do their fullest batches need?

Command: PYTHONPATH=. python examples/benchmarks/rank_speed.py [--samples N] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU; transformers 5.24.0,
lhotse 1.33.0.

    limit, batches                             a rank  left out  twice  padding  tokens/s  speed  waiting   peak
    96 MiB, torchbudget                            55         0      0     4.7%    67,725   1.00     1.6%  0.998
    96 MiB, torchbudget, half of the room         112         0      0     2.4%    75,327   1.11     1.1%  0.923
    96 MiB, torchbudget, default window            56         0      0     8.3%    65,677   0.95     2.3%  1.002
    96 MiB, torchbudget, samples_per_step          65         0      0    15.3%    60,807   0.90     2.0%  0.999
    96 MiB, fixed batches                         625         0      0    35.0%    39,011   0.58    11.7%  0.962
    96 MiB, LengthGroupedSampler                  625         0      0     1.4%    67,438   1.00     3.7%  0.962
    96 MiB, BatchRebalanceSampler                  99       196      0     7.5%    66,752   0.98     2.7%  0.973
    96 MiB, lhotse                                 70         0      0     5.4%    67,724   0.99     1.0%  1.002
    96 MiB, tokens by hand                         91         0      0     2.0%    68,506   0.99     5.4%  0.997
    96 MiB, tokens by hand, half of the room      172         8      0     1.0%    77,708   1.10     2.7%  0.921
    192 MiB, torchbudget                           23         0      0     9.0%    62,232   1.00     2.4%  0.972
    192 MiB, torchbudget, half of the room         43         0      0     5.4%    66,433   1.05     1.1%  0.834
    192 MiB, torchbudget, default window           24         0      0    12.7%    58,010   0.93     3.2%  0.985
    192 MiB, torchbudget, samples_per_step         32         0      0    26.9%    48,593   0.78     3.3%  0.971
    192 MiB, fixed batches                        208         4      0    63.6%    19,013   0.30    10.1%  0.972
    192 MiB, LengthGroupedSampler                 208         4      0     2.7%    64,371   1.03     5.6%  0.972
    192 MiB, BatchRebalanceSampler                 45       196      0    15.7%    56,544   0.91     4.7%  0.923
    192 MiB, lhotse                                33         0      0     5.7%    61,820   0.99     7.1%  0.966
    192 MiB, tokens by hand                        37         4      0     4.7%    61,299   0.97     9.8%  0.972
    192 MiB, tokens by hand, half of the room      70         3      0     2.6%    64,508   1.04     6.3%  0.833
    96 MiB: the fastest other one's speed / ours ≤ 1: 0.99113, holds
    96 MiB: waiting, beyond the least ≤ 0: 0.0053504, DOES NOT HOLD
    96 MiB: peak / limit ≤ 1: 1.0018, DOES NOT HOLD
    192 MiB: the fastest other one's speed / ours ≤ 1: 0.98606, holds
    192 MiB: waiting, beyond the least ≤ 0: -0.022337, holds
    192 MiB: peak / limit ≤ 1: 0.9855, holds

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

`half of the room`: a limit is not a target. Smaller micro-batches have less padding, and stay
nearer to this core's caches, which few hundred bytes of work a token do not outweigh: under the
same limit half of it is a twentieth to a tenth faster, for us as for the tokens by hand. The bar
compares the fastest of ours with the fastest of the others. `torchbudget` and the tokens by hand
sort 2,048 samples together, lhotse all of them; where our default window is a quarter of the 2,500
samples, batches have twice the padding.

The table is from before `waiting` was the median of the repetitions, and before the row "equal
times", which balances ranks by the measured time of a step instead of its bytes. A later run of
these contenders alone, five epochs of each at 96 MiB, then ended early: there ranks waited 0.2 to
0.7 % of a step with equal times, 1.2 to 1.7 % as in the first row, 1.1 to 1.7 % with lhotse, 2.5 to
2.9 % with half of the tokens by hand. At 192 MiB two epochs of each: 1.8 %, 2.1 to 2.5, 2.5 to 3.0
and 5.9 to 6.0 %.

The limit is set before the cost is measured, by what the process has then. Between runs the highest
peak was 0.996 to 1.002 of it.
"""  # noqa: E501  (tables)

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
    trace_peak_bytes,
)
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory

sys.path.append(str(Path(__file__).parent.parent))

from train_text import ByteData, Transformer, docstrings, loss_sum

OURS = "torchbudget"
OTHERS_OF_OURS = (
    "torchbudget, half of the room",
    "torchbudget, equal times",
    "torchbudget, default window",
    "torchbudget, samples_per_step",
)
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
            OTHERS_OF_OURS[0]: lambda: self.with_half.ours(window=self.buffer),
            OTHERS_OF_OURS[1]: lambda: self.ours(window=self.buffer, time=self.cost.time),
            OTHERS_OF_OURS[2]: self.ours,
            OTHERS_OF_OURS[3]: lambda: self.ours(samples_per_step=self.step),
            "fixed batches": self.fixed,
            "LengthGroupedSampler": self.grouped,
            "BatchRebalanceSampler": self.rebalanced,
            "lhotse": self.lhotse,
            "tokens by hand": self.by_hand,
            "tokens by hand, half of the room": self.with_half.by_hand,
        }

    @property
    def with_half(self) -> Plans:
        """Those under half of what the budget leaves beyond the smallest micro-batch."""
        least = int(self.cost.batch_bytes(1, int(self.sizes.min())))
        return replace(self, budget=(least + self.budget) // 2)

    def ours(self, **options: Any) -> list[Batches]:
        made = (
            MemoryBudgetBatchSampler(
                self.sizes, self.cost, self.budget, num_replicas=RANKS, rank=rank, **options
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
            cost = measure_cost(
                self.train, self.made, max_size=longest, budget=self.budget, accumulate=True
            )
            plans = Plans(self.sizes, cost, self.budget, self.step)
            # Elsewhere: what peers import, and keep, would take room here.
            with mp.get_context("spawn").Pool(1) as pool:
                contenders = [pool.apply(plans.all)]
        dist.broadcast_object_list(contenders)
        self.contenders: dict[str, list[Batches]] = contenders[0]
        self.waiting: dict[str, list[float]] = {name: [] for name in self.contenders}
        self.peaks = dict.fromkeys(self.contenders, 0)

    def made(self, n: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(256, (n, length))
        return {"ids": ids, "labels": ids.clone()}

    def train(self, batch: Any) -> None:
        """The step on one rank, to measure."""
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

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
            waited = 1 - times.mean(axis=0).sum() / times.max(axis=0).sum()
            self.waiting[name].append(float(waited))

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
            "waiting": statistics.median(self.waiting[name][1:]),  # first calls compile kernels
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
    """Rows and bars of one limit; the first one is ours, and speeds are multiples of its."""
    ours = [row for row in told if row["batches"] in (OURS, *OTHERS_OF_OURS)]
    others = [row for row in told if row not in ours]
    for row in told:
        row["speed"] = row["tokens"] / told[0]["tokens"] / row["slower"]
        row["tokens/s"] = row["tokens"] / row["seconds"]
        results.row(**row | {"limit, batches": f"{limit}, {row['batches']}"})
    fastest = [max(row["speed"] for row in rows) for rows in (others, ours)]
    results.bar(f"{limit}: the fastest other one's speed / ours", fastest[0] / fastest[1], 1)
    least, mine = (min(row["waiting"] for row in rows) for rows in (others, ours))
    results.bar(f"{limit}: our least waiting, beyond that of others", mine - least, 0)
    results.bar(f"{limit}: peak / limit", max(row["peak"] for row in ours), 1)


if __name__ == "__main__":
    main()
