"""How well and how fast are batches without padding packed?

Question: for 1,000,000 lengths log-normal(5, 1), clipped to 16 to 4,096, bins of 16,384 tokens and
one window of the whole data set, how full are the bins and how long does planning take? What does
TRL's best-fit-decreasing packing take?

Command: python examples/benchmarks/packing.py [--samples N] [--peer-samples N] [--json PATH]

Hardware: 2 cores of an AMD EPYC that other programs used too, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4. The rows of trl 1.16.0 with datasets 5.2.0, of an Intel Xeon at 2.8 GHz, are those of an
earlier run.

    packing                   samples    bins     fill  over  first, ms  plan, µs  all, µs  CPU, µs
    ours, one window        1,000,000  14,898  0.99947     0    3521.50     3.221    3.168    1.566
    ours, window of 65,536  1,000,000  14,906  0.99894     0     121.86     1.820    1.915    0.949
    ours, window of 4,096   1,000,000  15,020  0.99136     0       3.76     1.088    1.152    0.790
    trl, batches of 100,000   100,000   1,486  0.99941     0          –         –   23.441   23.435
    trl, batches of 1,000     100,000   1,536  0.96688     0          –         –   17.837   17.827
    fill, one window ≥ 0.999: 0.99947, holds
    first batch, for which all is planned, µs a sample ≤ 5: 3.5215, holds

`first` is the time to the first micro-batch, for which its whole window is planned; then, a sample:
`plan` is construction and `len`, which plans the epoch and draws nothing; `all` is construction and
the whole epoch, with its computing time beside it. TRL's time is that of `pack_dataset` in memory
over one column of one-byte tokens, which it also joins, in one batch of the whole data set and in
batches of the default 1,000 samples. The ratio is the median over alternating repetitions of the
two on the same samples. Fill and bins over the budget are computed from the batches as they come.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from _common import Results, Sizes, alternate, flat, lognormal, median, options, ratio, timed

from torchbudget import MemoryBudgetBatchSampler, PackedCost

BUDGET = 16_384


def packed(sizes: Sizes, window: int) -> MemoryBudgetBatchSampler:
    return MemoryBudgetBatchSampler(sizes, PackedCost(unit_bytes=1), BUDGET, window=window)


def fill(sums: Sizes) -> dict[str, Any]:
    return {
        "bins": len(sums),
        "fill": float(sums.mean()) / BUDGET,
        "over": int((sums > BUDGET).sum()),
    }


def make_dataset(sizes: Sizes) -> Any:
    """A data set of one-byte tokens, as trl takes it."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset  # noqa: F401  (imported here, so that it is not timed)

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    return datasets.Dataset(pa.table({"input_ids": tokens}))


def trl_pack(dataset: Any, batch_size: int) -> Any:
    from trl import pack_dataset

    return pack_dataset(
        dataset,
        BUDGET,
        strategy="bfd",
        map_kwargs={
            "batch_size": batch_size,
            "keep_in_memory": True,
            "load_from_cache_file": False,
        },
    )


def main() -> None:
    arguments = options(__doc__, samples=1_000_000, peer_samples=100_000, repetitions=5)
    sizes = lognormal(arguments.samples, 5, 1, 16, 4096)
    few = sizes[: arguments.peer_samples]
    results = Results(
        {
            "packing": "",
            "samples": ",d",
            "bins": ",d",
            "fill": ".5f",
            "over": ",d",
            "first, ms": ".2f",
            "plan, µs": ".3f",
            "all, µs": ".3f",
            "CPU, µs": ".3f",
        }
    )

    def add(name: str, of: Sizes, window: int) -> dict[str, Any]:
        sampler = packed(of, window)
        indices, counts = flat(sampler)
        assert np.array_equal(np.sort(indices), np.arange(len(of)))
        figures = fill(np.add.reduceat(of[indices], np.cumsum(counts) - counts))

        def first() -> None:
            sampler.set_epoch(sampler.epoch + 1)  # nothing is known of this one
            next(iter(sampler))

        times = alternate(
            {
                "first": first,
                "plan": lambda: len(packed(of, window)),
                "all": lambda: deque(packed(of, window), maxlen=0),
            },
            arguments.repetitions,
        )
        per_sample = 1e6 / len(of)
        row = {
            "packing": name,
            "samples": len(of),
            **figures,
            "first, ms": median(times["first"]) * 1e3,
            "plan, µs": median(times["plan"]) * per_sample,
            "all, µs": median(times["all"]) * per_sample,
            "CPU, µs": median(times["all"], "cpu_s") * per_sample,
        }
        results.row(**row)
        return row

    whole = add("ours, one window", sizes, len(sizes))
    for window in (65_536, 4096):
        if window < len(sizes):
            add(f"ours, window of {window:,}", sizes, window)
    results.bar("fill, one window", whole["fill"], 0.999, at_least=True)
    first_us = whole["first, ms"] * 1e3 / len(sizes)
    results.bar("first batch, for which all is planned, µs a sample", first_us, 5)
    try:
        dataset = make_dataset(few)
    except ImportError as error:
        results.row(packing=f"trl: no module {error.name}")
    else:
        add("ours, one window", few, len(few))
        for batch_size in (len(few), 1000):
            elapsed, packs = timed(lambda batch_size=batch_size: trl_pack(dataset, batch_size))
            lengths = packs.data.column("seq_lengths").to_pylist()
            results.row(
                packing=f"trl, batches of {batch_size:,}",
                samples=len(few),
                **fill(np.array([sum(pack) for pack in lengths])),
                **{
                    "all, µs": elapsed.wall_s / len(few) * 1e6,
                    "CPU, µs": elapsed.cpu_s / len(few) * 1e6,
                },
            )
        times = alternate(
            {
                "ours": lambda: deque(packed(few, len(few)), maxlen=0),
                "trl": lambda: trl_pack(dataset, len(few)),
            },
            arguments.repetitions,
        )
        results.bar("ours / trl, all, on the wall", ratio(times["ours"], times["trl"]), 1)
        results.bar("ours / trl, all, CPU", ratio(times["ours"], times["trl"], "cpu_s"), 1)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
