"""Accumulated steps over real ranks, as users wrap their models, are the large batch's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accumulation import GIVEN_UP
from tests.support.large_steps import EXACT
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks

IS_THOROUGH = os.environ.get("TORCHBUDGET_HYPOTHESIS") == "thorough"
CASES = 30 if IS_THOROUGH else 12

pytestmark = pytest.mark.distributed


def cases(folder: Path, ranks: int, *names: str) -> list[dict[str, Any]]:
    return run_ranks(script("steps.cases"), folder, ranks, *names)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, CASES) if IS_THOROUGH else (0,))
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_steps(ranks: int, first: int, tmp_path: Path) -> None:
    """Steps of any wrapping, options and cut: 1e-12; a step that one rank gives up, all give up.

    Plain, DDP, over a group, FSDP whole, in part or with replicas; parts that fail, ranks without
    data, weights on a device. A rank has no memory for a sample or for the sum, changes its batch,
    raises or has a gradient that is not finite: nothing of that step stays on any rank.
    `TORCHBUDGET_HYPOTHESIS=thorough` tries 300 cases on each number of ranks, instead of 12.
    """
    results = run_ranks(script("steps.random_steps"), tmp_path, ranks, 1000 * ranks + first, CASES)
    assert all(set(faults) == {"raised", "nonfinite", *GIVEN_UP} for faults in results)


def test_what_stays_true_on_two_ranks(tmp_path: Path) -> None:
    """What DDP does stays true: its buffers are rank 0's after a step, its forward is inside.

    A rank without a gradient sums zeros of the same dtype. Gradients that FSDP has of a micro-batch
    that raised are dropped. A summary knows this rank's shards. A step reads the host's sums, and a
    device once if it has a scaler. A joint loss is that of all samples.
    """
    names = ["buffers", "players", "raised", "summary", "reads", "joint"]
    names += ["other_dtype"] * hasattr(torch.Tensor, "grad_dtype")
    results = cases(tmp_path, 2, *names)
    assert results[0]["buffers"] == results[1]["buffers"]
    for rank, told in enumerate(results):
        assert told["buffers"][0] == ["BatchNormWarning", "UnsynchronizedWarning"]
        assert told["players"] == ["UnsynchronizedWarning"]
        if "other_dtype" in told:
            assert told["other_dtype"] == [[1 - 0.5 * (1 + 2) / 2] * 3, [1 - 0.5 * 7 / 2] * 3]
        assert told["raised"] <= 1e-4  # its forward is in float32
        assert told["summary"] == [True] * 3
        read, said = told["reads"]
        assert read == [[], ["tolist"]] * 2 + [[], ["tolist"] * 2] * 2
        assert "must be a number of at least 0" in said
        worst, differs, pending = told["joint"]
        assert worst <= EXACT
        assert "must be the same in all micro-batches and on all ranks" in differs
        assert "('n', 1)" in differs
        assert "1 micro-batches are pending" in pending
        assert pending.startswith("StepError" if rank else "RankError")


def test_ranks_with_unequal_data(tmp_path: Path) -> None:
    """Ranks that end early join the steps of the others."""
    for told in cases(tmp_path, 3, "early"):
        worst, number = told["early"]
        assert worst <= EXACT
        assert number == 4


@pytest.mark.slow
def test_groups_and_meshes(tmp_path: Path) -> None:
    """DDP over two of four ranks, and tensor parallel modules: 1e-12.

    A step of ranks is shared by the group that is passed; any other group is refused.
    """
    for rank, told in enumerate(cases(tmp_path, 4, "subgroups", "tensor_parallel")):
        said, worst, seen, shared, skipped = told["subgroups"]
        assert "pass its process_group as group=" in said
        assert worst <= EXACT
        assert seen == rank  # ignored by DDP, and left alone
        assert shared == 2 * (2 * (rank // 2))  # of the first rank of its group
        sharded, difference, plain, its_difference, its_skipped = told["tensor_parallel"]
        assert "pass group= of the ranks that have the same part" in plain
        assert "pass group= of the ranks of its mesh" in sharded
        assert max(difference, its_difference) <= EXACT
        assert skipped
        assert its_skipped


def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path) -> None:
    """At construction, or at the first micro-batch where only that can know; no rank waits."""
    said = [
        *["fully_shard every rank must know the step's last micro-batch"] * 2,
        "reduces gradients over 2 ranks, but 1 share a step",
        "DTensor over ranks that share a step",
        "FSDP reduces gradients in a backward",
        "parallelism or SyncBatchNorm",
        "static_graph=True",
        "a communication hook",
        *["pass the wrapped module"] * 2,
    ]
    for told in cases(tmp_path, 2, "refused"):
        assert len(told["refused"]) == len(said)
        for text, expected in zip(told["refused"], said, strict=True):
            assert expected in text


@pytest.mark.slow
def test_a_round_in_which_one_rank_has_no_image(tmp_path: Path) -> None:
    """The gradient is that of one process: 1e-12, with accumulation.

    `GradAccumulator` needs nothing for it; a loop of one's own under DDP needs an image times 0 in
    each micro-batch without one, or `find_unused_parameters`. In a step without any image the
    accumulator leaves the vision part without a gradient, as one process does.
    """
    pytest.importorskip("transformers")
    pytest.importorskip("PIL", reason="makes images")
    for told in run_ranks(script("images.gradients_of_steps"), tmp_path, 2):
        assert set(told) == {"last", "first", "never", "nobody"}
        for name, found in told.items():
            assert max(found[way] for way in ("accumulator", "unused", "image")) <= EXACT, name
            assert found["missing"] == (found["of"] if name == "nobody" else 0)
