"""How much padding is left, and how full are the batches?

Question: for 1,000,000 lengths log-normal(5, 1), clipped to 16 to 4,096, and a budget of 16,384
padded units, what are padding and fill of micro-batches cut from uniform windows of 4,096? Do they
equal those of a plain greedy cut of the same windows, from the longest sample down? What do other
windows and other libraries' samplers reach?

Command: python examples/benchmarks/padding.py [--samples N] [--peer-samples N] [--json PATH]

Hardware: 2 cores of an AMD EPYC, Python 3.11, torch 2.13.0 CPU, NumPy 2.4;
transformers 5.24.0, infinibatch 0.1.1, lhotse 1.33.0.

    batches of                        samples  batches  padding   fill    over  largest  µs a sample
    torchbudget, window 4,096       1,000,000   15,881    3.60%  0.973       0   16,384        0.119
      its windows, cut plainly      1,000,000   15,881    3.64%  0.973       0   16,384        0.348
    torchbudget, window 512         1,000,000   19,919   18.29%  0.915       0   16,384        0.118
    torchbudget, window 1,024       1,000,000   17,729   11.26%  0.946       0   16,384        0.207
    torchbudget, window 2,048       1,000,000   16,520    6.52%  0.964       0   16,384        0.095
    torchbudget, window 8,192       1,000,000   15,545    1.93%  0.977       0   16,384        0.085
    torchbudget, window 16,384      1,000,000   15,363    1.01%  0.979       0   16,384        0.085
    torchbudget, window 65,536      1,000,000   15,222    0.28%  0.981       0   16,384        0.084
    torch, 4 at random              1,000,000  250,000   54.65%  0.131       0   16,384        0.548
    torch, 63 at random             1,000,000   15,874   85.49%  6.464  15,873  258,048        0.147
    transformers LengthGrouped, 63  1,000,000   15,874   18.81%  1.155   4,719  258,048        0.528
    infinibatch, read-ahead 4,096   1,000,000   15,873    3.63%  0.973       0   16,384        0.878
    lhotse DynamicBucketing           100,000    1,658    7.88%  0.972      12   22,452       12.453
    padding, window 4,096 ≤ 0.0365: 0.035967, holds
    fill, window 4,096 ≥ 0.972: 0.97259, holds
    batches over the budget ≤ 0: 0, holds
    batches / the plain cut's ≤ 1: 1, holds

All figures are computed from the batches. Random batches have 4 samples, which always fit, or 63,
the mean number in our batches; LengthGroupedSampler gets 63, too. Infinibatch reads ahead as many
samples as a window has. Lhotse runs on fewer samples, with 30 buckets and the durations as lengths.
The time is that of making all batches and keeping them, measured once.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from _common import Batches, Results, Sizes, flat, lognormal, options, padded_figures, timed
from torch.utils.data import BatchSampler, RandomSampler

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

Make: TypeAlias = Callable[[], Batches]

BUDGET = 16_384
WINDOW = 4096


def greedy_cut(sizes: Sizes, batches: Batches) -> Batches:
    """Cut the windows that the batches come from once more, one sample after the other.

    A micro-batch never crosses a window, so each stretch of 4,096 samples is one.
    """
    order = flat(batches)[0]
    cut: Batches = []
    for first in range(0, len(order), WINDOW):
        window = order[first : first + WINDOW]
        batch: list[int] = []
        for index in window[np.argsort(-sizes[window], kind="stable")].tolist():
            if batch and (len(batch) + 1) * sizes[batch[0]] > BUDGET:
                cut.append(batch)
                batch = []
            batch.append(index)
        cut.append(batch)
    return cut


def torch_fixed(samples: int, number: int) -> Make:
    return lambda: list(BatchSampler(RandomSampler(range(samples)), number, drop_last=False))


def transformers_grouped(sizes: Sizes, number: int) -> Make:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = BatchSampler(LengthGroupedSampler(number, lengths=sizes.tolist()), number, False)
    return lambda: list(sampler)


def infinibatch_bucketed(sizes: Sizes, read_ahead: int) -> Make:
    from infinibatch.iterators import (
        BucketedReadaheadBatchIterator,
        NativeCheckpointableIterator,
    )

    order = list(range(len(sizes)))
    random.Random(0).shuffle(order)
    lengths = sizes.tolist()
    iterator = BucketedReadaheadBatchIterator(
        NativeCheckpointableIterator(order),
        read_ahead=read_ahead,
        key=lengths.__getitem__,
        batch_size=lambda longest: BUDGET // lengths[longest],
    )
    return lambda: list(iterator)


def lhotse_bucketed(sizes: Sizes) -> Make:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = [
        MonoCut(id=str(index), start=0, duration=float(length), channel=0)
        for index, length in enumerate(sizes.tolist())
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather read the cuts from a file
        sampler = DynamicBucketingSampler(
            CutSet(cuts), max_duration=BUDGET, num_buckets=30, shuffle=True
        )
    return lambda: [[int(cut.id) for cut in batch] for batch in sampler]


def main() -> None:
    arguments = options(__doc__, samples=1_000_000, peer_samples=100_000)
    sizes = lognormal(arguments.samples, 5, 1, 16, 4096)
    few = sizes[: arguments.peer_samples]
    results = Results(
        {
            "batches of": "",
            "samples": ",d",
            "batches": ",d",
            "padding": ".2%",
            "fill": ".3f",
            "over": ",d",
            "largest": ",d",
            "µs a sample": ".3f",
        }
    )

    def add(name: str, make: Make, of: Sizes = sizes) -> dict[str, Any]:
        """Make the batches, check that all samples are there, and enter their figures."""
        elapsed, batches = timed(make)
        assert np.array_equal(np.sort(flat(batches)[0]), np.arange(len(of)))
        figures = padded_figures(of, batches, BUDGET)
        us = elapsed.wall_s / len(of) * 1e6
        results.row(**{"batches of": name, "samples": len(of), **figures, "µs a sample": us})
        return figures

    def add_peer(name: str, prepare: Callable[..., Make], of: Sizes, *settings: int) -> None:
        try:
            make = prepare(of, *settings)
        except ImportError as error:
            results.row(**{"batches of": f"{name}: no module {error.name}"})
        else:
            add(name, make, of)

    def ours(window: int) -> Make:
        cost = PaddedCost(unit_bytes=1)
        # Through iter, because list itself asks a sampler for its len, which is planned too.
        return lambda: list(iter(MemoryBudgetBatchSampler(sizes, cost, BUDGET, window=window)))

    mine = add(f"torchbudget, window {WINDOW:,}", ours(WINDOW))
    plain = add("  its windows, cut plainly", lambda: greedy_cut(sizes, ours(WINDOW)()))
    for window in (512, 1024, 2048, 8192, 16_384, 65_536):
        if window <= arguments.samples:
            add(f"torchbudget, window {window:,}", ours(window))
    safe, mean = BUDGET // int(sizes.max()), round(len(sizes) / mine["batches"])
    for number in (safe, mean):
        add(f"torch, {number} at random", torch_fixed(len(sizes), number))
    add_peer(f"transformers LengthGrouped, {mean}", transformers_grouped, sizes, mean)
    add_peer(f"infinibatch, read-ahead {WINDOW:,}", infinibatch_bucketed, sizes, WINDOW)
    add_peer("lhotse DynamicBucketing", lhotse_bucketed, few)

    results.bar("padding, window 4,096", mine["padding"], 0.0365)
    results.bar("fill, window 4,096", mine["fill"], 0.972, at_least=True)
    results.bar("batches over the budget", mine["over"], 0)
    results.bar("batches / the plain cut's", mine["batches"] / plain["batches"], 1)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
