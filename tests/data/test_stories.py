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
        assert len(json.dumps(self._saved)) <= 2048 + 2 * (window / 6 + 4)  # base64 of its bits
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
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from tests.support.samplers import LENGTHS, TOKENS, loader_of, sampler_of

folder, files, chapter, after_s, workers, budget, options = sys.argv[1:]
dist.init_process_group("gloo")
rank, saved = dist.get_rank(), Path(files, "saved.json")
sampler = sampler_of(budget=int(budget), **json.loads(options))
if saved.exists():
    sampler.load_state_dict(json.loads(saved.read_text())["state"])
dist.barrier()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run():
    done = 0
    with Path(files, f"{chapter}.{rank}.jsonl").open("w") as log:
        while (epoch := sampler.epoch) < 2:
            for batch in sampler.tracked(loader_of(sampler, num_workers=int(workers))):
                done += 1
                log.write(json.dumps([done, epoch, batch]) + "\\n")
                log.flush()
                time.sleep(0.01)  # a step
                dist.barrier()
                if rank == 0 and done % 3 == 0:
                    save(done)
    dist.barrier()
    if rank == 0:
        save(done)


def save(done):
    saved.with_suffix(".part").write_text(
        json.dumps({"chapter": chapter, "done": done, "state": sampler.state_dict()}))
    saved.with_suffix(".part").replace(saved)


if float(after_s):
    timer = threading.Timer(float(after_s), die)
    timer.daemon = True
    timer.start()
    try:
        run()
    finally:  # the end comes even if the other ranks were first
        die()
run()
Path(folder, f"{rank}.json").write_text("null")
"""


def tell(
    chance: random.Random,
    folder: Path,
    *,
    chapters: int = 4,
    within_s: float = 240,
    **options: Any,
) -> None:
    """One story of ranks that are processes; `options` of the sampler."""
    counts: dict[str, int] = {}
    for chapter in range(chapters):
        ranks, is_last = chance.choice([1, 2, 3]), chapter == chapters - 1
        after_s = 0 if is_last else round(chance.uniform(0.1, 1.5), 2)
        own = folder / str(chapter)
        own.mkdir()
        killed = () if is_last else range(ranks)
        arguments = [folder, chapter, after_s, chance.choice([0, 2]), chance.choice([400, 1000])]
        arguments.append(json.dumps(options))
        run_ranks(SCRIPT, own, ranks, *arguments, killed=killed, within_s=within_s)
        if (saved := folder / "saved.json").exists():
            found = json.loads(saved.read_text())
            counts[found["chapter"]] = found["done"]
    came = [Counter[int](), Counter[int]()]
    for chapter_name, done in counts.items():
        for log in folder.glob(f"{chapter_name}.*.jsonl"):
            for line in log.read_text().splitlines():
                number, epoch, batch = json.loads(line)
                if number <= done:
                    came[epoch].update(batch)
    assert came == [Counter(range(len(LENGTHS)))] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("seed", range(20 if IS_THOROUGH else 2))
def test_stories_of_real_processes(seed: int, tmp_path: Path) -> None:
    """Ranks with workers, killed by SIGKILL at a random moment, and started as other ranks.

    Other numbers of ranks and workers, another budget; the position is `tracked`'s.
    """
    tell(random.Random(seed), tmp_path, samples_per_step=50)
