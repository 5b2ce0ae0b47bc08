"""What does planning cost on thousands of ranks?

Question: with the sizes of up to 1,000,000,000 samples in a memory map (uint16), and optimizer
steps of 65,536 and 1,048,576 samples on 8 to 4,096 ranks, how long does one rank take to its first
batch, how much memory is there beyond the sizes, and how evenly are the ranks loaded? With full
micro-batches, and with those that take the least time.

Command: python examples/benchmarks/plan_large.py [--most-samples N] [--json PATH]
(the file is written to the temporary directory, and removed; TMPDIR chooses another disk)

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, which other programs used too, Python 3.11, torch
2.13.0 CPU, NumPy 2.4.

    samples               cut     a step  ranks  construct, s  first, s  MiB  imbalance   bound
    1,000,000            full     65,536      8          0.02     0.010    3     1.0010  1.0000
    1,000,000            full     65,536     64          0.02     0.010    3     1.0014  1.0000
    1,000,000            full     65,536    512          0.03     0.014    3     1.0083  1.0000
    1,000,000            full     65,536  4,096          0.07     0.078    3     1.3755  1.3755
    1,000,000            full  1,048,576      8          0.09     0.306   39     1.0009  1.0000
    1,000,000            full  1,048,576     64          0.08     0.176   34     1.0002  1.0000
    1,000,000            full  1,048,576    512          0.04     0.061   32     1.0005  1.0000
    1,000,000            full  1,048,576  4,096          0.05     0.115   34     1.0042  1.0000
    1,000,000      least time     65,536      8          0.15     0.012    9     1.0009  1.0000
    1,000,000      least time     65,536     64          0.13     0.011    9     1.0013  1.0000
    1,000,000      least time     65,536    512          0.10     0.009    9     1.0073  1.0000
    1,000,000      least time     65,536  4,096          0.30     0.025   17     1.2401  1.2401
    1,000,000      least time  1,048,576      8          0.14     0.044   35     1.0013  1.0000
    1,000,000      least time  1,048,576     64          0.19     0.038   34     1.0014  1.0000
    1,000,000      least time  1,048,576    512          0.14     0.046   39     1.0011  1.0000
    1,000,000      least time  1,048,576  4,096          0.33     0.303   42     1.0012  1.0000
    10,000,000           full     65,536      8          0.11     0.022    4     1.0013  1.0000
    10,000,000           full     65,536     64          0.02     0.005    4     1.0012  1.0000
    10,000,000           full     65,536    512          0.04     0.009    4     1.0076  1.0000
    10,000,000           full     65,536  4,096          0.04     0.020    4     1.5042  1.5042
    10,000,000           full  1,048,576      8          0.23     0.235   41     1.0002  1.0000
    10,000,000           full  1,048,576     64          0.21     0.251   41     1.0002  1.0000
    10,000,000           full  1,048,576    512          0.25     0.266   41     1.0005  1.0000
    10,000,000           full  1,048,576  4,096          0.22     0.471   42     1.0016  1.0000
    10,000,000     least time     65,536      8          0.06     0.004   10     1.0006  1.0000
    10,000,000     least time     65,536     64          0.22     0.023   10     1.0012  1.0000
    10,000,000     least time     65,536    512          0.31     0.024   10     1.0070  1.0000
    10,000,000     least time     65,536  4,096          0.50     0.045   17     1.3228  1.3228
    10,000,000     least time  1,048,576      8          0.92     0.260   38     1.0008  1.0000
    10,000,000     least time  1,048,576     64          0.13     0.040   39     1.0002  1.0000
    10,000,000     least time  1,048,576    512          0.40     0.167   44     1.0012  1.0000
    10,000,000     least time  1,048,576  4,096          0.70     0.433   44     1.0011  1.0000
    100,000,000          full     65,536      8          0.29     0.016    7     1.0003  1.0000
    100,000,000          full     65,536     64          0.62     0.027    7     1.0015  1.0000
    100,000,000          full     65,536    512          0.63     0.022    7     1.0079  1.0000
    100,000,000          full     65,536  4,096          0.12     0.010    7     1.3964  1.3964
    100,000,000          full  1,048,576      8          0.49     0.082   45     1.0003  1.0000
    100,000,000          full  1,048,576     64          0.14     0.058   45     1.0002  1.0000
    100,000,000          full  1,048,576    512          0.32     0.123   45     1.0008  1.0000
    100,000,000          full  1,048,576  4,096          0.40     0.303   45     1.0017  1.0000
    100,000,000    least time     65,536      8          0.39     0.012   13     1.0006  1.0000
    100,000,000    least time     65,536     64          0.44     0.021   13     1.0010  1.0000
    100,000,000    least time     65,536    512          0.43     0.016   13     1.0074  1.0000
    100,000,000    least time     65,536  4,096          0.53     0.027   20     1.2534  1.2534
    100,000,000    least time  1,048,576      8          0.70     0.127   40     1.0007  1.0000
    100,000,000    least time  1,048,576     64          0.58     0.156   40     1.0003  1.0000
    100,000,000    least time  1,048,576    512          0.41     0.089   45     1.0008  1.0000
    100,000,000    least time  1,048,576  4,096          0.51     0.238   45     1.0009  1.0000
    1,000,000,000        full     65,536      8          3.05     0.022   16     1.0011  1.0000
    1,000,000,000        full     65,536     64          3.02     0.016   16     1.0009  1.0000
    1,000,000,000        full     65,536    512          3.34     0.025   16     1.0077  1.0000
    1,000,000,000        full     65,536  4,096          3.12     0.024   16     1.4701  1.4701
    1,000,000,000        full  1,048,576      8          1.85     0.181   54     1.0003  1.0000
    1,000,000,000        full  1,048,576     64          2.71     0.194   49     1.0003  1.0000
    1,000,000,000        full  1,048,576    512          1.93     0.112   54     1.0010  1.0000
    1,000,000,000        full  1,048,576  4,096          1.90     0.274   54     1.0016  1.0000
    1,000,000,000  least time     65,536      8          1.32     0.014   22     1.0005  1.0000
    1,000,000,000  least time     65,536     64          1.21     0.008   22     1.0015  1.0000
    1,000,000,000  least time     65,536    512          1.31     0.009   22     1.0069  1.0000
    1,000,000,000  least time     65,536  4,096          1.40     0.014   29     1.3010  1.3010
    1,000,000,000  least time  1,048,576      8          2.01     0.100   48     1.0003  1.0000
    1,000,000,000  least time  1,048,576     64          1.95     0.092   49     1.0002  1.0000
    1,000,000,000  least time  1,048,576    512          2.20     0.105   55     1.0008  1.0000
    1,000,000,000  least time  1,048,576  4,096          1.86     0.136   55     1.0009  1.0000
    first batch, s ≤ 1: 0.47072, holds
    memory beyond the sizes, MiB ≤ 64: 55.367, holds
    imbalance above its bound ≤ 0.01: 0.008299, holds

Lengths are clip(lognormal(3.2, 0.8), 1, 1024), the budget is 8,192 padded units. For the least
time the budget is 65,536 units, and the time of a micro-batch is its padded units and 300 more.
Each row is one rank in a process of its own. `construct` is the one check of all sizes, which reads
them, but for a few ms; `first` is all from then to the first batch: one step is planned, for all
ranks. Both are medians of three samplers of other seeds. `MiB` is the peak of anonymous memory over
all of this, without the copy of the sizes that the sampler makes where it takes up to 32 MiB.
`imbalance` is the costliest rank's sum of costs in a step over the mean rank's (for the least time,
of times), and `bound` what no plan gets below: 1, or the longest sample alone over that mean. Both
are means over one step of each sampler.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from _common import Results, median, options, timed, watched, write_sizes

from torchbudget import MemoryBudgetBatchSampler, PaddedCost
from torchbudget.plan.cursor import Cursor

TIMES = 3
RANKS = (8, 64, 512, 4096)
STEPS = (65_536, 1_048_576)
COST = PaddedCost(unit_bytes=1)
CUTS = {"full": (8192, COST), "least time": (65_536, PaddedCost(fixed_bytes=300, unit_bytes=1))}


def child(path: Path, step: int, ranks: int, cut: str) -> None:
    """Print that all is imported, wait for a line, work, and print the figures as JSON."""
    sizes = np.memmap(path, np.uint16, "r")
    budget, balanced = CUTS[cut]
    time = None if balanced is COST else balanced
    print("ready", flush=True)
    sys.stdin.readline()

    def construct(seed: int) -> MemoryBudgetBatchSampler:
        # The rank in the middle, without torch.distributed.
        options = {"seed": seed, "time": time, "num_replicas": ranks, "rank": ranks // 2}
        return MemoryBudgetBatchSampler(sizes, COST, budget, samples_per_step=step, **options)

    constructed, first, imbalances, bounds = [], [], [], []
    for seed in range(TIMES):
        elapsed, sampler = timed(partial(construct, seed))
        constructed.append(elapsed)
        first.append(timed(lambda sampler=sampler: next(iter(sampler)))[0])
        sampler.set_epoch(0)  # the step that was planned is not kept any more
        plan = sampler.plan
        block = next(plan.spans(Cursor(epoch=0))).block
        sums = block.costs(plan.rules, balanced).reshape(-1, ranks).sum(axis=0)
        imbalances.append(sums.max() / sums.mean())
        bounds.append(max(1, balanced.batch_bytes(1, block.sizes.max()) / sums.mean()))
        copied = 0 if np.may_share_memory(plan.sizes.values, sizes) else plan.sizes.values.nbytes
        del sampler, plan, block
    found = {"construct_s": median(constructed), "first_s": median(first)}
    found |= {"imbalance": float(np.mean(imbalances)), "bound": float(np.mean(bounds))}
    print(json.dumps(found | {"copied_bytes": copied}), flush=True)


def main() -> None:
    if "--child" in sys.argv:
        path, step, ranks, cut = sys.argv[-4:]
        child(Path(path), int(step), int(ranks), cut)
        return
    arguments = options(
        __doc__, most_samples=1_000_000_000, least_samples=1_000_000, most_ranks=4096
    )
    results = Results(
        {
            "samples": ",",
            "cut": "",
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
            few = [ranks for ranks in RANKS if ranks <= arguments.most_ranks]
            for cut, step, ranks in product(CUTS, STEPS, few):
                found = watched(__file__, "--child", str(path), str(step), str(ranks), cut)
                beyond = found["beyond_bytes"]
                results.row(
                    **{
                        "samples": samples,
                        "cut": cut,
                        "a step": step,
                        "ranks": ranks,
                        "construct, s": found["construct_s"],
                        "first, s": found["first_s"],
                        "MiB": None if beyond is None else (beyond - found["copied_bytes"]) / 2**20,
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
