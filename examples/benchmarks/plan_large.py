"""What does planning cost on thousands of ranks?

Question: with the sizes of up to 1,000,000,000 samples in a memory map (uint16), and optimizer
steps of 65,536 and 1,048,576 samples on 8 to 4,096 ranks, how long does one rank take to its first
batch, how much memory is there beyond the sizes, and how evenly are the ranks loaded?

Command: python examples/benchmarks/plan_large.py [--most-samples N] [--json PATH]
(the file is written to the temporary directory, and removed; TMPDIR chooses another disk)

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, which other programs used too, Python 3.11, torch
2.13.0 CPU, NumPy 2.4.

    samples           a step  ranks  construct, s  first, s  MiB  imbalance   bound
    1,000,000         65,536      8          0.01     0.012    2     1.0007  1.0000
    1,000,000         65,536     64          0.00     0.006    2     1.0013  1.0000
    1,000,000         65,536    512          0.01     0.080    5     1.0083  1.0000
    1,000,000         65,536  4,096          0.01     0.112    6     1.3755  1.3755
    1,000,000      1,048,576      8          0.01     0.285   39     1.0009  1.0000
    1,000,000      1,048,576     64          0.02     0.379   39     1.0002  1.0000
    1,000,000      1,048,576    512          0.02     0.322   39     1.0005  1.0000
    1,000,000      1,048,576  4,096          0.01     0.323   39     1.0042  1.0000
    10,000,000        65,536      8          0.04     0.017    3     1.0009  1.0000
    10,000,000        65,536     64          0.05     0.014    4     1.0012  1.0000
    10,000,000        65,536    512          0.05     0.079    6     1.0076  1.0000
    10,000,000        65,536  4,096          0.05     0.097    7     1.5042  1.5042
    10,000,000     1,048,576      8          0.05     0.294   38     1.0002  1.0000
    10,000,000     1,048,576     64          0.03     0.188   38     1.0002  1.0000
    10,000,000     1,048,576    512          0.02     0.177   38     1.0005  1.0000
    10,000,000     1,048,576  4,096          0.06     0.523   42     1.0016  1.0000
    100,000,000       65,536      8          0.38     0.014    6     1.0013  1.0000
    100,000,000       65,536     64          0.41     0.021    6     1.0015  1.0000
    100,000,000       65,536    512          0.42     0.080    9     1.0079  1.0000
    100,000,000       65,536  4,096          0.53     0.165   10     1.3964  1.3964
    100,000,000    1,048,576      8          0.30     0.366   41     1.0003  1.0000
    100,000,000    1,048,576     64          0.45     0.389   41     1.0002  1.0000
    100,000,000    1,048,576    512          0.41     0.109   41     1.0008  1.0000
    100,000,000    1,048,576  4,096          0.31     0.379   42     1.0017  1.0000
    1,000,000,000     65,536      8          2.61     0.039   16     1.0007  1.0000
    1,000,000,000     65,536     64          3.14     0.031   16     1.0009  1.0000
    1,000,000,000     65,536    512          4.21     0.067   18     1.0077  1.0000
    1,000,000,000     65,536  4,096          5.00     0.185   18     1.4701  1.4701
    1,000,000,000  1,048,576      8          2.89     0.332   50     1.0003  1.0000
    1,000,000,000  1,048,576     64          2.52     0.294   50     1.0003  1.0000
    1,000,000,000  1,048,576    512          1.45     0.146   50     1.0010  1.0000
    1,000,000,000  1,048,576  4,096          2.18     0.423   52     1.0016  1.0000
    first batch, s ≤ 1: 0.52322, holds
    memory beyond the sizes, MiB ≤ 64: 51.574, holds
    imbalance above its bound ≤ 0.01: 0.008299, holds

Lengths are clip(lognormal(3.2, 0.8), 1, 1024), the budget is 8,192 padded units. Each row is one
rank in a process of its own. `construct` is the one check of all sizes, which reads them, but for a
few ms; `first` is all from then to the first batch: one step is planned, for all ranks. Both are
medians of three samplers of other seeds. `MiB` is the peak of anonymous memory over all of this,
without the copy of the sizes that the sampler makes where it takes up to 32 MiB. `imbalance` is
the costliest rank's sum of costs in a step over the mean rank's, and `bound` what no plan gets
below: 1, or the longest sample alone over that mean. Both are means over one step of each sampler.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from _common import Results, median, options, timed, watched, write_sizes

from torchbudget import MemoryBudgetBatchSampler, PaddedCost
from torchbudget.plan.cursor import Cursor

TIMES = 3
RANKS = (8, 64, 512, 4096)
STEPS = (65_536, 1_048_576)
COST = PaddedCost(unit_bytes=1)


def child(path: Path, step: int, ranks: int) -> None:
    """Print that all is imported, wait for a line, work, and print the figures as JSON."""
    sizes = np.memmap(path, np.uint16, "r")
    print("ready", flush=True)
    sys.stdin.readline()

    def construct(seed: int) -> MemoryBudgetBatchSampler:
        # The rank in the middle, without torch.distributed.
        options = {"seed": seed, "num_replicas": ranks, "rank": ranks // 2}
        return MemoryBudgetBatchSampler(sizes, COST, 8192, samples_per_step=step, **options)

    constructed, first, imbalances, bounds = [], [], [], []
    for seed in range(TIMES):
        elapsed, sampler = timed(partial(construct, seed))
        constructed.append(elapsed)
        first.append(timed(lambda sampler=sampler: next(iter(sampler)))[0])
        sampler.set_epoch(0)  # the step that was planned is not kept any more
        plan = sampler.plan
        block = next(plan.spans(Cursor(epoch=0))).block
        sums = block.costs(plan.rules, COST).reshape(-1, ranks).sum(axis=0)
        imbalances.append(sums.max() / sums.mean())
        bounds.append(max(1, COST.batch_bytes(1, block.sizes.max()) / sums.mean()))
        copied = 0 if np.may_share_memory(plan.sizes.values, sizes) else plan.sizes.values.nbytes
        del sampler, plan, block
    found = {"construct_s": median(constructed), "first_s": median(first)}
    found |= {"imbalance": float(np.mean(imbalances)), "bound": float(np.mean(bounds))}
    print(json.dumps(found | {"copied_bytes": copied}), flush=True)


def main() -> None:
    if "--child" in sys.argv:
        path, step, ranks = sys.argv[-3:]
        child(Path(path), int(step), int(ranks))
        return
    arguments = options(
        __doc__, most_samples=1_000_000_000, least_samples=1_000_000, most_ranks=4096
    )
    results = Results(
        {
            "samples": ",",
            "a step": ",",
            "ranks": ",",
            "construct, s": ".2f",
            "first, s": ".3f",
            "MiB": ".0f",
            "imbalance": ".4f",
            "bound": ".4f",
        }
    )
    samples = arguments.least_samples
    while samples <= arguments.most_samples:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sizes.bin"
            write_sizes(path, samples)
            for step in STEPS:
                for ranks in [few for few in RANKS if few <= arguments.most_ranks]:
                    found = watched(__file__, "--child", str(path), str(step), str(ranks))
                    beyond = found["beyond_bytes"]
                    results.row(
                        **{
                            "samples": samples,
                            "a step": step,
                            "ranks": ranks,
                            "construct, s": found["construct_s"],
                            "first, s": found["first_s"],
                            "MiB": None
                            if beyond is None
                            else (beyond - found["copied_bytes"]) / 2**20,
                            "imbalance": found["imbalance"],
                            "bound": found["bound"],
                        }
                    )
        samples *= 10
    rows = results.rows
    results.bar("first batch, s", max(row["first, s"] for row in rows), 1)
    if all(row["MiB"] is not None for row in rows):
        results.bar("memory beyond the sizes, MiB", max(row["MiB"] for row in rows), 64)
    over = max(row["imbalance"] - row["bound"] for row in rows)
    results.bar("imbalance above its bound", over, 0.01)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
