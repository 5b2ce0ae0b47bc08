"""Samplers that are stopped and started again: on other ranks, under other budgets and costs.

What must hold is the law of `tests.support.sampler_chain`.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from unittest.mock import patch

from tests.fuzzing.faults import drawn
from tests.support.sampler_cases import cases
from tests.support.sampler_chain import Chain
from torchbudget.plan.cursor import PART


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """One sampler, two epochs, and as many starts as it takes."""
    oversize = chance.choice(["raise", "raise", "raise", "skip", "alone"])
    most, most_ranks = chance.choice([12, 12, 24, 24, 48, 150]), chance.choice([1, 2, 3, 8])
    strategy = cases(most_ranks=most_ranks, fits=oversize == "raise", most=most)
    chain = Chain(chance, drawn(strategy, chance), oversize)
    with patch("torchbudget.plan.cursor.PART", chance.choice([1, 5, PART])):
        return chain.check()
