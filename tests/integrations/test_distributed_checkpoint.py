"""Positions in a checkpoint of torch.distributed.checkpoint, of ranks that are real processes.

It takes a state apart, keeps each value once, of any rank, and loads what the state has that it is
loaded into. So the state of a rank must be one value, under a name of its own where ranks differ.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(folder: Path, ranks: int, *, saves: bool) -> list[Any]:
    own = folder / f"{saves}, {ranks}"
    own.mkdir()
    script = Path(__file__).parent / "scripts" / "distributed_checkpoint.py"
    return run_ranks(script.read_text(), own, ranks, folder, saves)


def test_the_same_ranks_go_on_with_the_same_batches(tmp_path: Path) -> None:
    """With the sampler or stream itself in the state, without a name for each rank."""
    begun = run(tmp_path, 2, saves=True)
    resumed = run(tmp_path, 2, saves=False)
    assert len(begun[0]) == 8
    for name in begun[0]:
        for one, other in zip(begun, resumed, strict=True):
            assert other[name]["rest"] == one[name]["rest"], name
    assert begun[0]["ranks, 2"]["rest"] != begun[1]["ranks, 2"]["rest"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_take_every_sample_once_or_refuse(
    ranks: int, tmp_path: Path
) -> None:
    begun = run(tmp_path, 2, saves=True)
    resumed = run(tmp_path, ranks, saves=False)
    for name in begun[0]:
        refused = {one[name].get("refused") for one in resumed}
        if name.startswith("ranks"):
            expected = f"Missing key in checkpoint state_dict: data.rank 0 of {ranks}"
            assert all(expected in text for text in refused)
        elif refused == {None}:
            parts = [one[name]["before"] for one in begun] + [one[name]["rest"] for one in resumed]
            counted = Counter(chain(*chain(*parts)))
            assert counted == Counter(range(len(LENGTHS) if "sampler" in name else 400)), name
        else:
            assert not name.startswith("sampler")
            assert all(f"ranks: saved 2, now {ranks}" in text for text in refused), refused
