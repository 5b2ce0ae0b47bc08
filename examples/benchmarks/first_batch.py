"""How soon does the first batch of a billion samples come, and what does it take?

Question: with the sizes of 1,000,000,000 samples in a memory map (uint16, a file of 2 GB), how long
does the first batch of an epoch take after construction, how much memory is there beyond the sizes,
and what does resuming in the middle of the epoch cost?

Command: python examples/benchmarks/first_batch.py [--samples N] [--json PATH]
(the file is written to the temporary directory, and removed; TMPDIR chooses another disk)

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    what                                       fresh  again        unit
    samples                            1,000,000,000      –           –
    construction                                2.52      –           s
    first batch                                 8.95   6.61          ms
    resume in the middle: load, batch           4.85   1.82          ms
    drawing half the epoch                     65.43      –           s
    the same, a sample                          0.13      –          µs
    state_dict in the middle                    2.08      –          ms
    the state as JSON                          1,826      –  characters
    peak memory beyond the sizes               31.98      –         MiB
    first batch after construction, ms ≤ 10: 8.9521, holds
    first batch after resuming, ms ≤ 10: 4.8474, holds
    memory beyond the sizes, MiB ≤ 64: 31.984, holds

A child process does the work, so that its memory is its own; this one samples the child's anonymous
resident memory every 2 ms, from before construction on. Pages of the memory map are not anonymous:
they are the sizes. Construction reads the whole file once, to check and fingerprint it, and the
file was just written, so it comes from the page cache. `fresh` is the median of five samplers that
were just constructed, `again` of one that continues with other epochs, or loads the same state
again. The epoch is really drawn up to its middle, and the first batch after resuming there is
checked to be the next one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _common import Results, median, options, timed, watched, write_sizes

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

FRESH = 5
AGAIN = 10


def child(path: Path) -> None:
    """Print that all is imported, wait for a line, work, and print the times as JSON."""
    sizes = np.memmap(path, np.uint16, "r")
    print("ready", flush=True)
    sys.stdin.readline()

    def construct() -> MemoryBudgetBatchSampler:
        return MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 8192)

    def first_of(sampler: MemoryBudgetBatchSampler) -> list[int]:
        return next(iter(sampler))

    def resume(sampler: MemoryBudgetBatchSampler, state: dict[str, Any]) -> list[int]:
        sampler.load_state_dict(state)
        return first_of(sampler)

    found: dict[str, Any] = {}
    constructed, first, again = [], [], []
    for _ in range(FRESH):
        elapsed, sampler = timed(construct)
        constructed.append(elapsed)
        first.append(timed(partial(first_of, sampler))[0])
    for epoch in range(AGAIN):
        sampler.set_epoch(epoch + 1)
        again.append(timed(partial(first_of, sampler))[0])
    found |= {"construct_s": median(constructed)}
    found |= {"first_s": median(first), "first_again_s": median(again)}

    sampler.set_epoch(0)
    batches, drawn = iter(sampler), 0

    def draw_to_the_middle() -> None:
        nonlocal drawn
        while drawn < len(sizes) // 2:
            drawn += len(next(batches))

    found["drawing_s"] = timed(draw_to_the_middle)[0].wall_s
    found["drawn"] = drawn
    saved, state = timed(sampler.state_dict)
    found |= {"save_s": saved.wall_s, "state_chars": len(json.dumps(state))}
    expected = next(batches)

    resumed = []
    for _ in range(FRESH):
        sampler = construct()
        elapsed, batch = timed(partial(resume, sampler, state))
        assert batch == expected
        resumed.append(elapsed)
    again = [timed(partial(resume, sampler, state))[0] for _ in range(AGAIN)]
    found |= {"resume_s": median(resumed), "resume_again_s": median(again)}
    print(json.dumps(found), flush=True)


def main() -> None:
    if "--child" in sys.argv:
        child(Path(sys.argv[-1]))
        return
    arguments = options(__doc__, samples=1_000_000_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sizes.bin"
        write_sizes(path, arguments.samples)
        found = watched(__file__, "--child", str(path))

    results = Results({"what": "", "fresh": ",.2f", "again": ",.2f", "unit": ""})
    results.row(what="samples", fresh=f"{arguments.samples:,}")
    results.row(what="construction", fresh=found["construct_s"], unit="s")
    for what, key in (("first batch", "first"), ("resume in the middle: load, batch", "resume")):
        fresh, more = found[f"{key}_s"] * 1e3, found[f"{key}_again_s"] * 1e3
        results.row(what=what, fresh=fresh, again=more, unit="ms")
    results.row(what="drawing half the epoch", fresh=found["drawing_s"], unit="s")
    results.row(
        what="the same, a sample", fresh=found["drawing_s"] / found["drawn"] * 1e6, unit="µs"
    )
    results.row(what="state_dict in the middle", fresh=found["save_s"] * 1e3, unit="ms")
    results.row(what="the state as JSON", fresh=f"{found['state_chars']:,}", unit="characters")
    results.bar("first batch after construction, ms", found["first_s"] * 1e3, 10)
    results.bar("first batch after resuming, ms", found["resume_s"] * 1e3, 10)
    if found["beyond_bytes"] is not None:
        beyond = found["beyond_bytes"] / 2**20
        results.row(what="peak memory beyond the sizes", fresh=beyond, unit="MiB")
        results.bar("memory beyond the sizes, MiB", beyond, 64)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
