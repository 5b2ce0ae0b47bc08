"""Stories of ranks that are processes: killed at random moments, and started as other ranks."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS
from tests.support.streams import SIZES


def tell(
    chance: random.Random,
    files: Path,
    kind: str = "sampler",
    *,
    at_windows: bool = False,
    chapters: int = 4,
    within_s: float = 240,
    **options: Any,
) -> list[Any]:
    """One story; every sample of two epochs comes once over the whole of it.

    Args:
        chance: that numbers of ranks and workers, budgets and times are drawn from.
        files: an empty folder.
        kind: "sampler", or the kind of a stream's source.
        at_windows: save between windows only.
        chapters: starts; the last one is not killed.
        within_s: for each start.
        options: of the sampler or stream.

    Returns:
        The starts: ranks, workers, the budget, and whether it was refused.
    """
    saved = files / "saved.json"
    counts: dict[str, int] = {}
    starts: list[Any] = []
    for chapter in range(chapters):
        start = {
            "ranks": chance.choice([1, 2, 3]),
            "workers": chance.choice([0, 2]),
            "budget": chance.choice([400, 1000]),
        }
        is_last, after_s = chapter == chapters - 1, round(chance.uniform(0.01, 0.6), 2)
        if is_last and kind != "sampler" and saved.exists():
            start = json.loads(saved.read_text())["start"]
        folder = files / str(chapter)
        folder.mkdir()
        killed = () if is_last else range(start["ranks"])
        arguments = [files, chapter, 0 if is_last else after_s, kind, start["workers"]]
        arguments += [start["budget"], at_windows, json.dumps(options)]
        text = script("planning.story")
        run_ranks(text, folder, start["ranks"], *arguments, killed=killed, within_s=within_s)
        if saved.exists():
            found = json.loads(saved.read_text())
            counts[found["chapter"]] = found["done"]
        starts.append([*start.values(), (files / f"{chapter}.refused").exists()])
    assert any(log.read_text() for log in files.glob("0.*.jsonl"))  # killed within their loops
    came = [Counter[int](), Counter[int]()]
    for chapter_name, done in counts.items():
        for log in files.glob(f"{chapter_name}.*.jsonl"):
            for line in log.read_text().splitlines():
                number, epoch, batch = json.loads(line)
                if number <= done:
                    came[epoch].update(batch)
    assert came == [Counter(range(len(LENGTHS if kind == "sampler" else SIZES)))] * 2
    return starts
