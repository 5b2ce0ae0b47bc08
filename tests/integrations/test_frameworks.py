"""Accelerate, Lightning and the Trainer, with the adapters and without, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.cells import EPOCHS_ONLY, RIGHT, RecordProperty, Refused, Row, check_rows
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.peer, pytest.mark.slow]

OWN = "Accelerate, its own `prepare`"
SHARDED = Refused("ShardedTwiceError", ["BatchSamplerShard, by prepare()"])
DISPATCHED = Refused("ShardedTwiceError", ["prepare() with dispatch_batches=True"])
GROWS = Refused("OptionError", ["has read len once", "batches_per_epoch"])
RECOUNTED = Refused("OptionError", ["use_stateful_dataloader=True"])
REBUILT = Refused("TypeError", ["use_distributed_sampler=False"])  # Lightning's own
UNEQUAL = Refused("OptionError", ["a loader of unequal epochs", "batches_per_epoch"])


def rows_of(framework: str, ranks: int) -> dict[str, Row]:
    """The rows of the matrix, by setting."""
    several = ranks > 1
    if framework == "accelerate":
        options = "`even_batches`, `split_batches`, `dispatch_batches`, `use_seedable_sampler`"
        dealt = (SHARDED, DISPATCHED)
        return {
            "default": Row("Accelerate"),
            "others": Row(f"Accelerate: {options}, `data_seed`, `non_blocking`"),
            "stateful": Row("Accelerate: `use_stateful_dataloader=True`, `StatefulDataLoader`"),
            "by itself": Row(OWN, *(dealt if several else (EPOCHS_ONLY,))),
            "by itself, stateful": Row(
                f"{OWN}: `use_stateful_dataloader=True`", *(dealt if several else (RECOUNTED,))
            ),
        }
    if framework == "lightning":
        mixin, plain = "Lightning, data module with the mixin", "Lightning, without the mixin"
        return {
            "DataLoader": Row(mixin),
            "StatefulDataLoader": Row(f"{mixin}: `StatefulDataLoader`"),
            "max_steps": Row(f"{mixin}: `max_steps` ends within an epoch"),
            "by itself": Row(plain, GROWS, EPOCHS_ONLY),
            "without": Row(f"{plain}, resumed", Refused("StateError", ["ckpt_path"])),
            "by itself, use_distributed_sampler": Row(
                f"{plain}: `use_distributed_sampler=True`",
                REBUILT if several else GROWS,
                EPOCHS_ONLY,
            ),
        }
    dealt = (SHARDED, Refused("ShardedTwiceError", ["DataLoaderDispatcher, by prepare()"]))
    return {
        "with the mixin": Row("Trainer, with the mixin", RIGHT, UNEQUAL),
        "StatefulDataLoader": Row("Trainer: `StatefulDataLoader`", RIGHT, UNEQUAL),
        "by itself": Row("Trainer, without the mixin", GROWS, EPOCHS_ONLY),
        "resumed": Row(
            "Trainer, without the mixin, resumed", Refused("StateError", ["resume_from_checkpoint"])
        ),
        "by itself, prepared": Row(
            "Trainer, without the mixin: `accelerator.prepare`",
            *(dealt if several else (GROWS, EPOCHS_ONLY)),
        ),
    }


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_every_sample_comes_once(
    framework: str, ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Resumed is uninterrupted, gradients are whole steps'; or an error names the setting."""
    pytest.importorskip(framework)
    script = Path(__file__).parent / "scripts" / f"{framework}_cells.py"
    found = run_ranks(script.read_text(), tmp_path, ranks, within_s=540)
    check_rows(found, rows_of(framework, ranks), record_property)
