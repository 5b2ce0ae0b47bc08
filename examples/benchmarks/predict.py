"""What does `predict` gain over sorting by length, with batches of a fixed size?

Question: a small transformer embeds texts, most of them short and a few long, with a budget for the
memory of each process. How many samples a second does `predict` embed, and how many do batches of
samples sorted by length, of as many as fit of the longest? Are the outputs in order, and the peaks
within the budget, on one rank and on two?

Command: python examples/benchmarks/predict.py [--samples N] [--mib MIB] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU; other work ran on
both, which shows in the seconds.

    corpus, ranks            batches of  batches a rank  seconds  samples/s  speed-up  peak / budget
    docstrings, 1               predict              24     2.23        673      1.61          0.992
    docstrings, 1  sorted, fixed size 3             500     3.60        416      1.00          0.965
    docstrings, 2               predict              12     1.79        837      0.89          0.978
    docstrings, 2  sorted, fixed size 3             250     1.61        934      1.00          0.956
    sentences, 1                predict              19     1.42      4,234      4.41          0.990
    sentences, 1   sorted, fixed size 3           2,000     6.26        959      1.00          0.993
    sentences, 2                predict              10     2.11      2,843      1.44          0.973
    sentences, 2   sorted, fixed size 3           1,000     3.03      1,980      1.00          0.994
    speed-up, docstrings, 1 ≥ 1.3: 1.6129, holds
    peak / budget, docstrings, 1 ≤ 1: 0.99158, holds
    error of an output, docstrings, 1 ≤ 1e-05: 1.5219e-07, holds
    speed-up, docstrings, 2 ≥ 1.3: 0.88768, DOES NOT HOLD
    peak / budget, docstrings, 2 ≤ 1: 0.9781, holds
    error of an output, docstrings, 2 ≤ 1e-05: 1.5219e-07, holds
    speed-up, sentences, 1 ≥ 1.3: 4.4125, holds
    peak / budget, sentences, 1 ≤ 1: 0.99015, holds
    error of an output, sentences, 1 ≤ 1e-05: 1.3224e-07, holds
    speed-up, sentences, 2 ≥ 1.3: 1.4356, holds
    peak / budget, sentences, 2 ≤ 1: 0.97294, holds
    error of an output, sentences, 2 ≤ 1e-05: 9.9181e-08, holds

The texts are docstrings of Python's standard library (203 bytes on average), or four times as many
random ones with the lengths of sentences, and one document of 4,096 bytes in a thousand. A core is
busy with some hundred bytes: more of them at once save only the time of calls, and pay for new
pages of memory. So `predict` gains where fixed batches are smaller than that, and nothing on
docstrings where each rank has one core. On one rank two threads share each small operation, and
wait for each other while other work runs, which makes small batches slower still.

The cost is measured on a forward-only step by the first rank, and sent to the others. The budget is
`--mib` beyond what the fullest process has in memory before that, about half of which measuring
takes for good. The outputs stay in memory, and have room left for them in the budget. The fixed
size is the measured cost's capacity for the longest sample. `peak` is the high-water mark of
resident memory, the highest of any rank and repetition. Fixed batches are dealt to ranks in turn,
and their outputs gathered on the first rank as two tensors; `predict` has `gather="first"`. The
ranks share the cores. Each contender runs `--repetitions` times, in turn; the speed-up is the
median over them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import Results, alternate, lognormal, median, options, ratio
from torch import Tensor
from torch.utils.data import DataLoader

from torchbudget import (
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    configure_allocators,
    measure_cost,
    predict,
    sizes_of,
)
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory

sys.path.append(str(Path(__file__).parent.parent))

from train_text import ByteData, Transformer, docstrings

OURS, FIXED = "predict", "sorted, fixed size"


class Embedder(Transformer):
    """Texts to one vector each: `(n, L)` to `(n, width)`."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        x = self.norm(self.blocks(x)) * mask.unsqueeze(-1)
        return x.sum(1) / mask.sum(1, keepdim=True)


class Work:
    """What one rank does.

    Args:
        settings: of the command line.
        data: all texts.
    """

    def __init__(self, settings: argparse.Namespace, data: ByteData) -> None:
        self.data = data
        self.sizes = np.asarray(sizes_of(data, "ids", progress=False))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model = Embedder(settings.max_length, settings.width, layers=settings.layers).eval()
        self.step(self.made(2, self.longest))  # loads kernels
        room: list[Any] = [None] * self.ranks
        dist.all_gather_object(room, process_memory().resident_bytes)
        self.budget = max(room) + settings.mib * 2**20
        cost: list[Any] = [None]
        if not self.rank:
            cost = [measure_cost(self.step, self.made, max_size=self.longest, budget=self.budget)]
        dist.broadcast_object_list(cost)
        self.cost = cost[0]
        # Outputs stay in memory: as small tensors, each takes about 1 KiB beside its values.
        values = len(data) * 4 * settings.width
        self.room = self.budget - values - len(data) * 1024
        self.fits = int(self.cost.capacity(self.longest, self.budget - values))
        self.peaks = dict.fromkeys((OURS, FIXED), 0)
        self.outputs: dict[str, Any] = {}

    @property
    def longest(self) -> int:
        return int(self.sizes.max())

    @torch.no_grad()
    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.model(*batch)

    def made(self, n: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randint(256, (n, length)), torch.ones(n, length, dtype=torch.bool)

    def called(self, batch: PaddedBatch) -> Tensor:
        return self.model(batch["ids"], batch.mask)

    def loader(self, batches: Any) -> DataLoader[Any]:
        return DataLoader(self.data, batch_sampler=batches, collate_fn=PadCollate())

    def ours(self) -> None:
        sampler = MemoryBudgetBatchSampler(self.sizes, self.cost, self.room, shuffle=False)
        self.outputs[OURS] = predict(self.called, self.loader(sampler), gather="first")

    @torch.no_grad()
    def fixed(self) -> None:
        order = np.argsort(-self.sizes, kind="stable")
        batches = [order[i : i + self.fits].tolist() for i in range(0, len(order), self.fits)]
        mine = batches[self.rank :: self.ranks]
        found = torch.cat([self.called(batch) for batch in self.loader(mine)])
        indices = torch.tensor([index for batch in mine for index in batch])
        received: list[Any] = [None] * self.ranks
        dist.gather_object((indices, found), None if self.rank else received)
        if not self.rank:
            outputs = torch.empty(len(order), found.shape[1])
            for places, values in received:
                outputs[places] = values
            self.outputs[FIXED] = outputs

    def measured(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """A run that all ranks begin together, and whose peak is noted."""

        def work() -> None:
            self.outputs.pop(name, None)
            dist.barrier()
            with peak_memory("cpu") as peak:
                run()
            dist.barrier()
            if isinstance(found := self.outputs.get(name), list):
                self.outputs[name] = torch.stack(found)  # which takes less
            self.peaks[name] = max(self.peaks[name], peak.bytes)

        return work


class Sentences(ByteData):
    """Random bytes of log-normal lengths, and one document of the largest length in a thousand."""

    def __init__(self, samples: int, max_length: int) -> None:
        lengths = lognormal(samples, 2.5, 1.2, 4, max_length)
        lengths[::1000] = max_length
        super().__init__(map(random.Random(0).randbytes, lengths.tolist()), max_length)


def corpora(settings: argparse.Namespace) -> dict[str, Callable[[], ByteData]]:
    n, longest = settings.samples, settings.max_length
    return {
        "docstrings": lambda: ByteData(islice(docstrings(0), n), longest),
        "sentences": lambda: Sentences(4 * n, longest),
    }


def rank_main(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Time both on one of the ranks; the first one writes what was found."""
    configure_allocators()
    torch.manual_seed(0)
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // settings.ranks, 1))
    store = dist.FileStore(f"{folder}/store", settings.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks)
    data = corpora(settings)[settings.corpus]()
    work = Work(settings, data)
    runs = {OURS: work.measured(OURS, work.ours), FIXED: work.measured(FIXED, work.fixed)}
    for run in runs.values():  # first calls compile kernels
        run()
    times = alternate(runs, settings.repetitions)
    peaks: list[Any] = [None] * settings.ranks
    dist.all_gather_object(peaks, work.peaks)
    if not rank:
        found = work.outputs[OURS]
        error = (found - work.outputs[FIXED]).abs().max() / found.abs().max()
        plan = MemoryBudgetBatchSampler(work.sizes, work.cost, work.room, shuffle=False)
        told = {
            "seconds": {name: median(times[name]) for name in runs},
            "speed-up": ratio(times[FIXED], times[OURS]),
            "peaks": {name: max(one[name] for one in peaks) / work.budget for name in runs},
            "batches": {OURS: len(plan), FIXED: -(-len(data) // work.fits) // settings.ranks},
            "fits": work.fits,
            "samples": len(data),
            "error": float(error),
        }
        Path(folder, "told.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still need the interpreter


def main() -> None:
    settings = options(
        __doc__,
        samples=1500,
        max_length=4096,
        mib=144,
        width=64,
        layers=2,
        repetitions=3,
        most_ranks=2,
    )
    results = Results(
        {
            "corpus, ranks": "",
            "batches of": "",
            "batches a rank": ",d",
            "seconds": ".2f",
            "samples/s": ",.0f",
            "speed-up": ".2f",
            "peak / budget": ".3f",
        }
    )
    for corpus, ranks in product(corpora(settings), range(1, settings.most_ranks + 1)):
        settings.corpus, settings.ranks = corpus, ranks
        with TemporaryDirectory() as folder:
            mp.spawn(rank_main, (settings, folder), nprocs=ranks)
            told = json.loads(Path(folder, "told.json").read_text())
        for name in (OURS, FIXED):
            seconds = told["seconds"][name]
            results.row(
                **{
                    "corpus, ranks": f"{corpus}, {ranks}",
                    "batches of": f"{FIXED} {told['fits']}" if name == FIXED else name,
                    "batches a rank": told["batches"][name],
                    "seconds": seconds,
                    "samples/s": told["samples"] / seconds,
                    "speed-up": told["speed-up"] if name == OURS else 1.0,
                    "peak / budget": told["peaks"][name],
                }
            )
        where = f"{corpus}, {ranks}"
        results.bar(f"speed-up, {where}", told["speed-up"], 1.3, at_least=True)
        results.bar(f"peak / budget, {where}", told["peaks"][OURS], 1)
        results.bar(f"error of an output, {where}", told["error"], 1e-5)
    results.finish(settings.json)


if __name__ == "__main__":
    main()
