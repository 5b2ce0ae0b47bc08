"""Runs that are killed and started again: every sample of each epoch once over the whole story.

Stories whose ranks are simulated, thousands of them, are cases of `tests/fuzz.py`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.stories import tell

STORIES = range(20 if os.environ.get("TORCHBUDGET_HYPOTHESIS") == "thorough" else 1)
KINDS = ("iterable", "map", "shards")


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["sampler", "stream"])
@pytest.mark.parametrize("seed", STORIES)
def test_stories_of_real_processes(
    source: str, seed: int, tmp_path: Path, record_property: Any
) -> None:
    """Ranks with workers, killed by SIGKILL at a random moment, and started as other ranks.

    Other numbers of ranks and workers, another budget; the position is `tracked`'s. A stream may
    refuse those within a window: the last start is then one that it was saved under.
    """
    kind = source if source == "sampler" else KINDS[seed % len(KINDS)]
    options = {"samples_per_step": 50} if source == "sampler" else {"window": 32}
    starts = tell(random.Random(seed), tmp_path, kind, at_windows=bool(seed % 2), **options)
    record_property("story", f"{kind}, at windows {bool(seed % 2)}: {starts}")
