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
