"""Accelerate, Lightning and the Trainer, with the adapters and without, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.cells import CELLS, Refused, Right
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.peer, pytest.mark.slow]

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
