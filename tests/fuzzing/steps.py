"""Accumulated steps of any cut, rule, wrapping and failure: each is the large batch's, in float64.

What must hold is the law of `tests.support.accumulation`.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tests.support.accumulation import Accumulation
from tests.support.ranks import group_of_one

GROUPED = ("ddp", "fsdp", "inner fsdp")
WRAPPINGS = ("plain", "plain", "checkpointed", "two optimizers", *GROUPED)


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """Three steps of random data."""
    wrapping = chance.choice(WRAPPINGS)
    if wrapping not in GROUPED:
        return Accumulation(chance, wrapping).check()
    with group_of_one():
        return Accumulation(chance, wrapping).check()
