"""How fast is the block mask of a packed batch?

Question: how long does `batch.block_mask()` take for samples of log-normal(6, 1) lengths, clipped
to 16 to 4,096, compared with torch's `create_block_mask` of the same causal mask? The bar is 100
times, at 16,384 positions.

Command: python examples/benchmarks/block_mask.py [--positions P] [--repetitions R] [--json PATH]

Hardware: 2 cores of an AMD EPYC, Python 3.11, torch 2.13.0 CPU.

    positions  samples  create_block_mask, ms  block_mask, ms  ratio
    2,048            5                   25.9           0.553     47
    8,192           20                  322.2           0.641    492
    16,384          35                1,339.4           1.198  1,169
    times as fast, 16,384 positions ≥ 100: 1169.1, holds

Each row is a race of its own, in which the two take turns in going first. The times are medians;
the ratio is the median of (create_block_mask's time / block_mask's time). Both are made on the CPU,
and `create_block_mask` is not compiled. The two masks are checked to be equal, full and partial
blocks, in both directions.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from _common import Results, alternate, lognormal, median, options, ratio
from torch.nn.attention.flex_attention import create_block_mask

from torchbudget import PackCollate, PackedBatch

PARTS = [
    f"{kind}{axis}_{name}"
    for kind in ("", "full_")
    for axis in ("kv", "q")
    for name in ("num_blocks", "indices")
]


def packed(positions: int) -> PackedBatch:
    """Samples of this many positions in all; the last one is cut short."""
    ends = lognormal(positions, 6.0, 1.0, 16, 4096).cumsum().clip(max=positions)
    bounds = [0, *ends[: int((ends < positions).sum()) + 1].tolist()]
    return PackCollate()([torch.zeros(b - a) for a, b in pairwise(bounds)])


def main() -> None:
    arguments = options(__doc__, positions=16_384, repetitions=5)
    results = Results(
        {
            "positions": ",d",
            "samples": ",d",
            "create_block_mask, ms": ",.1f",
            "block_mask, ms": ",.3f",
            "ratio": ",.0f",
        }
    )
    sizes = sorted({arguments.positions // 8, arguments.positions // 2, arguments.positions})
    for positions in sizes:
        batch = packed(positions)
        made = batch.block_mask()
        create = partial(
            create_block_mask, made.mask_mod, None, None, positions, positions, device="cpu"
        )
        expected = create()
        assert all(torch.equal(getattr(made, part), getattr(expected, part)) for part in PARTS)
        contenders: dict[str, Any] = {"torch": create, "ours": batch.block_mask}
        times = alternate(contenders, arguments.repetitions)
        faster = ratio(times["torch"], times["ours"])
        results.row(
            positions=positions,
            samples=batch.num_samples,
            **{
                "create_block_mask, ms": median(times["torch"]) * 1e3,
                "block_mask, ms": median(times["ours"]) * 1e3,
                "ratio": faster,
            },
        )
    results.bar(f"times as fast, {arguments.positions:,} positions", faster, 100, at_least=True)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
