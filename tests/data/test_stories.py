"""Runs that are killed and started again: every sample of each epoch once over the whole story.

Stories whose ranks are simulated, thousands of them, are cases of `tests/fuzz.py`.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS
from tests.support.streams import SIZES

STORIES = range(20 if os.environ.get("TORCHBUDGET_HYPOTHESIS") == "thorough" else 1)
CHAPTERS = 4  # starts; the last one is not killed
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
    chance = random.Random(seed)
    saved = tmp_path / "saved.json"
    counts: dict[str, int] = {}
    starts: list[Any] = []
    for chapter in range(CHAPTERS):
        start = {
            "ranks": chance.choice([1, 2, 3]),
            "workers": chance.choice([0, 2]),
            "budget": chance.choice([400, 1000]),
        }
        is_last, after_s = chapter == CHAPTERS - 1, round(chance.uniform(0.01, 0.6), 2)
        if is_last and kind != "sampler" and saved.exists():
            start = json.loads(saved.read_text())["start"]
        folder = tmp_path / str(chapter)
        folder.mkdir()
        killed = () if is_last else range(start["ranks"])
        arguments = [tmp_path, chapter, 0 if is_last else after_s, kind, start["workers"]]
        arguments += [start["budget"], bool(seed % 2), json.dumps(options)]
        text = script("planning.story")
        run_ranks(text, folder, start["ranks"], *arguments, killed=killed)
        if saved.exists():
            found = json.loads(saved.read_text())
            counts[found["chapter"]] = found["done"]
        starts.append([*start.values(), (tmp_path / f"{chapter}.refused").exists()])
    assert any(log.read_text() for log in tmp_path.glob("0.*.jsonl"))  # killed within their loops
    came = [Counter[int](), Counter[int]()]
    for chapter_name, done in counts.items():
        for log in tmp_path.glob(f"{chapter_name}.*.jsonl"):
            for line in log.read_text().splitlines():
                number, epoch, batch = json.loads(line)
                if number <= done:
                    came[epoch].update(batch)
    assert came == [Counter(range(len(LENGTHS if kind == "sampler" else SIZES)))] * 2
    record_property("story", f"{kind}, at windows {bool(seed % 2)}: {starts}")
