"""Accumulated steps of any cut, rule, wrapping and failure: each is the large batch's, in float64.

What must hold is the law of `tests.support.accumulation`.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from tests.support.accumulation import Accumulation

GROUPED = ("ddp", "fsdp", "inner fsdp")
WRAPPINGS = ("plain", "plain", "checkpointed", "two optimizers", *GROUPED)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this rank alone, for what cannot be wrapped without one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a reducer must not outlive its group
        dist.destroy_process_group()


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """Three steps of random data."""
    wrapping = chance.choice(WRAPPINGS)
    if wrapping not in GROUPED:
        return Accumulation(chance, wrapping).check()
    with group_of_one():
        return Accumulation(chance, wrapping).check()
