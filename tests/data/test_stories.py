"""Runs that are killed and started again: every sample of each epoch once over the whole story."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS, sampler_of
from tests.support.tracked_streams import SIZES
from torchbudget.errors import UnevenRanksError

IS_THOROUGH = os.environ.get("TORCHBUDGET_HYPOTHESIS") == "thorough"
EPOCHS = 2


class Story:
    """Ranks that are simulated, one chapter for each start; what came before the last save counts.

    Attributes:
        counted: of each epoch, how often each sample came.
        refused: starts on a number of ranks that what is left cannot be dealt to.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        some = self._random.choices(LENGTHS.tolist(), k=self._random.randint(1, 300))
        step = self._random.choice([None, None, 16, 100])
        self._options = {"sizes": some, "samples_per_step": step, "seed": seed}
        if step is None:
            self._options["window"] = self._random.choice([None, 8, 40, 1000])
        self._samples = len(some)
        self._saved: dict[str, Any] | None = None
        self.counted = [Counter[int]() for _ in range(EPOCHS)]
        self.refused = 0

    def is_over(self) -> bool:
        """Whether all epochs are."""
        return self._saved is not None and self._saved["epoch"] >= EPOCHS

    def start(self) -> None:
        """Some batches on any number of ranks, under any budget; then all ranks are killed."""
        number = min(self._random.choice([1, 1, 2, 3, 5, 8]), self._samples)
        budget = self._random.choice([400, 1000, 3000])
        ranks = [
            sampler_of(budget=budget, num_replicas=number, rank=rank, **self._options)
            for rank in range(number)
        ]
        try:
            for sampler in ranks:
                if self._saved is not None:
                    sampler.load_state_dict(json.loads(json.dumps(self._saved)))
            loops = [iter(sampler) for sampler in ranks]
        except UnevenRanksError:
            self.refused += 1
            return
        epoch = ranks[0].epoch
        unsaved: list[int] = []
        while self._random.random() < 0.95:
            batches = [next(loop, None) for loop in loops]
            assert len({batch is None for batch in batches}) == 1  # as many on every rank
            unsaved += [index for batch in batches if batch is not None for index in batch]
            if batches[0] is None or self._random.random() < 0.3:
                self._save(ranks, epoch, unsaved)
            if batches[0] is None:
                return

    def _save(self, ranks: list[Any], epoch: int, unsaved: list[int]) -> None:
        states = [sampler.state_dict() for sampler in ranks]
        assert all(state == states[0] for state in states)
        self._saved = states[0]
        window = self._saved["stop"] - self._saved["start"]
        assert len(json.dumps(self._saved)) <= 2048 + window // 8
        self.counted[epoch] += Counter(unsaved)
        unsaved.clear()


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_stories_of_kills_and_restarts(block: int) -> None:
    """200 of them, on other ranks and budgets with every start: nothing is lost or repeated."""
    starts, refused = 0, 0
    for seed in range(50 * block, 50 * (block + 1)):
        story = Story(seed)
        while not story.is_over():
            story.start()
            starts += 1
        refused += story.refused
        samples = len(story._options["sizes"])
        assert all(counted == Counter(range(samples)) for counted in story.counted), seed
    assert starts > 120
    assert refused < starts / 10


SCRIPT = """
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from tests.support import samplers, streams
from tests.support.tracked_streams import make
from torchbudget.errors import StateMismatchError

folder, files, chapter, after_s, kind, workers, budget, at_windows, options = sys.argv[1:]
dist.init_process_group("gloo")
rank, saved, workers = dist.get_rank(), Path(files, "saved.json"), int(workers)
start = {"ranks": dist.get_world_size(), "workers": workers, "budget": int(budget)}
if kind == "sampler":
    source = samplers.sampler_of(budget=int(budget), **json.loads(options))
    loader = samplers.loader_of(source, num_workers=workers)
else:
    source = make(kind, budget=int(budget), **json.loads(options))
    loader = streams.loader_of(source, workers)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def is_to_be_saved(done):
    if at_windows == "False":
        return done % 3 == 0
    return not any(worker["rounds"] for worker in source.state_dict().get("workers", ()))


def run():
    done, log = 0, Path(files, f"{chapter}.{rank}.jsonl").open("w")
    if saved.exists():
        source.load_state_dict(json.loads(saved.read_text())["state"])
    while (epoch := source.epoch) < 2:
        for batch in source.tracked(loader):
            done += 1
            numbers = [one if kind == "sampler" else one[0] for one in batch]
            log.write(json.dumps([done, epoch, numbers]) + "\\n")
            log.flush()
            if done == 1 and float(after_s):
                timer = threading.Timer(float(after_s), die)
                timer.daemon = True
                timer.start()
            time.sleep(0.01)  # a step
            dist.barrier()
            if rank == 0 and is_to_be_saved(done):
                save(done)
    dist.barrier()
    if rank == 0:
        save(done)


def save(done):
    state = {"chapter": chapter, "done": done, "start": start, "state": source.state_dict()}
    saved.with_suffix(".part").write_text(json.dumps(state))
    saved.with_suffix(".part").replace(saved)


if float(after_s):
    try:
        run()
    except StateMismatchError as error:
        Path(files, f"{chapter}.refused").write_text(str(error))
    finally:  # also where it is over before its time
        die()
run()
Path(folder, f"{rank}.json").write_text("null")
"""
STORIES = range(20 if IS_THOROUGH else 1)
KINDS = ("iterable", "map", "shards")


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
    """One story of ranks that are processes; `options` of the sampler or stream.

    Returns the starts: ranks, workers, the budget, and whether it was refused.
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
        run_ranks(SCRIPT, folder, start["ranks"], *arguments, killed=killed, within_s=within_s)
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
