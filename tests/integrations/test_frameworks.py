"""Accelerate, Lightning, the Trainer and torch's checkpoints, on real processes."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.cells import CELLS, Refused, Right
from tests.support.commands import ROOT
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RIGHT, EPOCHS_ONLY = Right(), Right(resumed=False)
SHARDED = Refused("ShardedTwiceError", ["BatchSamplerShard, by prepare()"])
DISPATCHED = Refused("ShardedTwiceError", ["prepare() with dispatch_batches=True"])
READ_BY_EACH = Refused("ShardedTwiceError", ["split over 2 ranks already", "IterableDatasetShard"])
DISPATCHES = Refused("ShardedTwiceError", ["DataLoaderDispatcher, by prepare()"])
UNLIKE = Refused("OptionError", ["reads len once", "batches_per_epoch"])
RECOUNTED = Refused("OptionError", ["use_stateful_dataloader=True"])
REBUILT = Refused("TypeError", ["use_distributed_sampler=False"])  # Lightning's own
UNEQUAL = Refused("OptionError", ["a loader of unequal epochs", "batches_per_epoch"])
LIGHTNING_RESUMED = Refused("StateError", ["ckpt_path"])
TRAINER_RESUMED = Refused("StateError", ["resume_from_checkpoint"])

# By framework and setting: what comes of a sampler and a stream, in one process and in two.
EXPECTED = {
    "accelerate": {
        "default": [(RIGHT, RIGHT)] * 2,
        "others": [(RIGHT, RIGHT)] * 2,
        "stateful": [(RIGHT, RIGHT)] * 2,
        "by itself": [(EPOCHS_ONLY, EPOCHS_ONLY), (SHARDED, DISPATCHED)],
        "by itself, stateful": [(RECOUNTED, RECOUNTED), (SHARDED, DISPATCHED)],
        "by itself, read by each": [(EPOCHS_ONLY, EPOCHS_ONLY), (SHARDED, READ_BY_EACH)],
    },
    "lightning": {
        "DataLoader": [(RIGHT, RIGHT)] * 2,
        "StatefulDataLoader": [(RIGHT, RIGHT)] * 2,
        "max_steps": [(RIGHT, RIGHT)] * 2,
        "reload_dataloaders_every_n_epochs": [(RIGHT, RIGHT)] * 2,
        "several fits": [(RIGHT, RIGHT)] * 2,
        "a step fails": [(RIGHT, RIGHT)] * 2,
        "by itself": [(UNLIKE, EPOCHS_ONLY)] * 2,
        "without": [(LIGHTNING_RESUMED, LIGHTNING_RESUMED)] * 2,
        "by itself, use_distributed_sampler": [(UNLIKE, EPOCHS_ONLY), (REBUILT, EPOCHS_ONLY)],
        "Fabric": [(EPOCHS_ONLY, EPOCHS_ONLY)] * 2,
    },
    "transformers": {
        "with the mixin": [(RIGHT, UNEQUAL)] * 2,
        "StatefulDataLoader": [(RIGHT, UNEQUAL)] * 2,
        "by itself": [(UNLIKE, EPOCHS_ONLY)] * 2,
        "resumed": [(TRAINER_RESUMED, TRAINER_RESUMED)] * 2,
        "by itself, prepared": [(UNLIKE, EPOCHS_ONLY), (UNLIKE, DISPATCHES)],
    },
}


@pytest.mark.peer
@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", EXPECTED)
def test_every_sample_comes_once(framework: str, ranks: int, tmp_path: Path) -> None:
    """Resumed is uninterrupted, gradients are whole steps'; or an error names the setting."""
    pytest.importorskip(framework)
    script = Path(__file__).parent / "scripts" / f"{framework}_cells.py"
    found = run_ranks(script.read_text(), tmp_path, ranks, within_s=540)
    for setting, of_numbers in EXPECTED[framework].items():
        for at, (source, _) in enumerate(CELLS[ranks]):
            outcome = of_numbers[ranks - 1][source == "stream"]
            outcome.check([one[setting][at] for one in found])


# ---------------------------------------------------------------------- checkpoints of torch


def run(folder: Path, ranks: int, *, saves: bool) -> list[Any]:
    own = folder / f"{saves}, {ranks}"
    own.mkdir()
    script = Path(__file__).parent / "scripts" / "distributed_checkpoint.py"
    return run_ranks(script.read_text(), own, ranks, folder, saves)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_position_of_two_ranks_is_loaded(ranks: int, tmp_path: Path) -> None:
    """Two go on with the same batches; other numbers take every sample once, or refuse."""
    begun, resumed = run(tmp_path, 2, saves=True), run(tmp_path, ranks, saves=False)
    for name in begun[0]:
        refused = {one[name].get("refused") for one in resumed}
        if ranks == 2:
            assert [one[name]["rest"] for one in resumed] == [one[name]["rest"] for one in begun]
        elif refused == {None}:
            parts = [one[name]["before"] for one in begun] + [one[name]["rest"] for one in resumed]
            counted = Counter(chain(*chain(*parts)))
            assert counted == Counter(range(len(LENGTHS) if "sampler" in name else 400)), name
        else:
            missing = f"Missing key in checkpoint state_dict: data.rank 0 of {ranks}"
            expected = missing if name.startswith("ranks") else f"ranks: saved 2, now {ranks}"
            assert not name.startswith("sampler")
            assert all(expected in text for text in refused), refused


# ---------------------------------------------------------------------- examples


FRAMEWORKS = ["accelerate", "lightning", "transformers", "torch.distributed.checkpoint"]


@pytest.mark.peer
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(framework: str, tmp_path: Path) -> None:
    """To the last digit: it takes the same steps of the same samples."""
    pytest.importorskip(framework)
    name = framework.removeprefix("torch.").replace(".", "_")
    path = ROOT / "examples" / f"with_{name}.py"

    def last_line(folder: str, *arguments: object) -> str:
        printed, _ = run_ranks(
            script("fitting.example"), tmp_path, 2, path, tmp_path / folder, *arguments
        )
        (line,) = [one for one in printed.splitlines() if "the last one's loss" in one]
        return str(line).partition("; ")[2]

    whole, stopped = last_line("whole"), last_line("stopped", "--stop", 5)
    assert last_line("stopped") == whole != stopped
