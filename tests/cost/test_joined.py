"""Measuring steps that ranks take together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", ["sharded", "replicated"])
def test_ranks_measure_together(wrapped: str, tmp_path: Path) -> None:
    """They run the same shapes, though one has less memory left, and find one cost.

    Parameters, shards, buffers and the optimizer's state are restored bit for bit. Where one fails
    all raise: it its own error, the other one with its number and its text.
    """
    results = run_ranks(script("measuring.together"), tmp_path, 2, wrapped)
    found, (first, second) = zip(*results, strict=True)
    assert all(restored for rank in found for restored, *_ in rank)
    assert all(rank == found[0] for rank in found)
    assert not any(notes for *_, notes in found[0])
    assert all("rank 1 failed" in said and "no such file" in said for said in first)
    assert all("make_batch(" in said and "rank 1" not in said for said in second)
