"""Accumulated steps over real ranks, as users wrap their models, are the large batch's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.large_steps import EXACT
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks, torchrun

IS_THOROUGH = os.environ.get("TORCHBUDGET_HYPOTHESIS") == "thorough"
CASES = 30 if IS_THOROUGH else 12

pytestmark = pytest.mark.distributed


def cases(folder: Path, ranks: int, *names: str) -> list[dict[str, Any]]:
    return run_ranks(script("step_cases"), folder, ranks, *names)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, CASES) if IS_THOROUGH else (0,))
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_steps(ranks: int, first: int, tmp_path: Path) -> None:
    """Plain, DDP, over a group, FSDP whole or in part; parts that fail, ranks without data: 1e-12.

    `TORCHBUDGET_HYPOTHESIS=thorough` tries 300 cases on each number of ranks, instead of 12.
    """
    start = torchrun if first == 0 and ranks == 2 else run_ranks
    results = start(script("random_steps"), tmp_path, ranks, 1000 * ranks + first, CASES)
    found = [case for told in results for case in told]
    assert len(found) == ranks * CASES
    assert [case for case in found if case[-1] > EXACT] == []


def test_ranks_with_unequal_data(tmp_path: Path) -> None:
    """Ranks that end early join the steps of the others; a sampler plans the steps of all."""
    for told in cases(tmp_path, 3, "early", "planned"):
        for name, steps in (("early", 4), ("planned", 3)):
            worst, number = told[name]
            assert worst <= EXACT
            assert number == steps


def test_what_ddp_does_stays_true(tmp_path: Path) -> None:
    """Its buffers are rank 0's after a step; its forward belongs into a micro-batch, of any player.

    A rank without a gradient sums zeros of the same dtype: buffers of ranks have to match.
    """
    names = ["buffers", "players"] + ["other_dtype"] * hasattr(torch.Tensor, "grad_dtype")
    first, second = cases(tmp_path, 2, *names)
    assert first == second
    assert first["buffers"][0] == ["BatchNormWarning", "UnsynchronizedWarning"]
    assert first["players"] == ["UnsynchronizedWarning"]
    if "other_dtype" in first:
        assert first["other_dtype"] == [[1 - 0.5 * (1 + 2) / 2] * 3, [1 - 0.5 * 7 / 2] * 3]


def test_a_step_that_one_rank_gives_up(tmp_path: Path) -> None:
    """It has no memory, or its batch is refused: every rank raises, and the next step is exact."""
    results = cases(tmp_path, 2, "given_up")
    said = [
        ("out of memory on another rank", "out of memory with one sample"),
        ("out of memory on another rank", "where gradients are summed over ranks"),
        ("a batch was refused on another rank", "the forward changed batch['x'] in place"),
    ]
    for rank, told in enumerate(results):
        for (text, cleared, worst), expected in zip(told["given_up"], said, strict=True):
            assert expected[rank] in text
            assert cleared
            assert worst <= EXACT


@pytest.mark.slow
def test_shards_groups_and_meshes(tmp_path: Path) -> None:
    """FSDP2 that replicates too, tensor parallel modules, DDP over two of four ranks: 1e-12.

    A step of ranks is shared by the group that is passed; any other group is refused.
    """
    for rank, told in enumerate(cases(tmp_path, 4, "hybrid", "subgroups", "tensor_parallel")):
        assert told["hybrid"] <= EXACT
        said, worst, seen, shared = told["subgroups"]
        assert "pass its process_group as group=" in said
        assert worst <= EXACT
        assert seen == rank  # ignored by DDP, and left alone
        assert shared == 2 * (2 * (rank // 2))  # of the first rank of its group
        plain, difference, sharded, its_difference = told["tensor_parallel"]
        assert "pass group= of the ranks that have the same part" in plain
        assert "pass group= of the ranks of its mesh" in sharded
        assert max(difference, its_difference) <= EXACT


def test_gradients_that_fsdp_has_of_a_micro_batch_that_raised_are_dropped(tmp_path: Path) -> None:
    """It has accumulated them where no optimizer sees them; a summary knows this rank's shards."""
    for told in cases(tmp_path, 2, "raised", "summary"):
        in_float64, in_float32 = told["raised"]
        assert in_float64 <= EXACT
        assert in_float32 <= 1e-4
        assert told["summary"] == [True] * 3


def test_what_is_wrong_on_one_rank_lets_all_skip(tmp_path: Path) -> None:
    """A scaler and `skip_nonfinite` decide once for all ranks, with one read a step."""
    names = ("weights_on_devices", "nonfinite", "shards_of_a_scaler", "reads")
    for told in cases(tmp_path, 2, *names):
        steps, same, said = told["weights_on_devices"]
        assert [names for names, _ in steps] == [[], ["tolist"] * 2] * 3
        assert [skipped for _, skipped in steps] == [None, False, False, True, True, False]
        assert same
        assert "must be a number of at least 0" in said
        assert told["nonfinite"] == [[True, False]] * 4
        assert told["shards_of_a_scaler"] == [[[False, False], [True, True], [True, True]], 2.0]
        assert told["reads"] == [[], ["tolist"]] * 2  # of the sums on the host


def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path) -> None:
    """At construction, or at the first micro-batch where only that can know; no rank waits."""
    said = [
        *["fully_shard every rank must know the step's last micro-batch"] * 2,
        "reduces gradients over 2 ranks, but 1 share a step",
        "DTensor over ranks that share a step",
        "FSDP reduces gradients in the backward",
        "parallelism or SyncBatchNorm",
        "static_graph=True",
        "a communication hook",
        *["pass the wrapped one"] * 2,
    ]
    for told in cases(tmp_path, 2, "refused"):
        assert len(told["refused"]) == len(said)
        for text, expected in zip(told["refused"], said, strict=True):
            assert expected in text


def test_a_joint_loss_of_all_ranks(tmp_path: Path) -> None:
    """Every rank's samples and one temperature: 1e-12; what differs or is pending is refused."""
    for rank, told in enumerate(cases(tmp_path, 2, "joint")):
        worst, differs, pending = told["joint"]
        assert worst <= EXACT
        assert "must be the same in all micro-batches and on all ranks" in differs
        assert "['0.0', '1.0']" in differs
        assert "1 micro-batches are pending" in pending
        assert pending.startswith("StepError" if rank else "RankError")
