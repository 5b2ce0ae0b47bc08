"""Questions to `torch.distributed`: ranks, and groups whose collectives run on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget.distributed import AskedRanks, is_distributed, ranks_on_this_machine
from torchbudget.errors import OptionError


def test_without_a_process_group() -> None:
    assert not is_distributed()
    assert AskedRanks().now() == (1, 0)
    assert AskedRanks(4, 3).now() == (4, 3)
    with pytest.raises(OptionError, match="below num_replicas=2"):
        AskedRanks(2, 2)


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As given; else as torchrun says; else one."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (ranks_on_this_machine(None), ranks_on_this_machine(3)) == (1, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (ranks_on_this_machine(None), ranks_on_this_machine(3)) == (4, 3)
    for ranks in (0, -1, 1.5, True, "2"):
        with pytest.raises(OptionError, match="ranks_per_machine must be an int of at least 1"):
            ranks_on_this_machine(ranks)  # type: ignore[arg-type]


@pytest.mark.distributed
def test_groups_on_the_host_and_shares_of_the_machine(tmp_path: Path) -> None:
    """A group is made once, for its own ranks; one that runs on the host already is it.

    Ranks share their machine's memory by torchrun's word or the caller's, or none takes it all.
    """
    told = run_ranks(script("planning.groups"), tmp_path, 3)
    for rank, (groups, refused, shares) in enumerate(told):
        assert groups == ["gloo", 1, True, 2 if rank else None, True]
        for message in refused:
            assert "this is one of 3 ranks, and its launcher does not say how" in message
        assert shares == pytest.approx([1 / 2, 1 / 3], rel=0.05)


@pytest.mark.slow
@pytest.mark.distributed
def test_children_of_a_rank_do_not_wait_for_its_threads(tmp_path: Path) -> None:
    """Of 600 children none is stuck; with `all_gather_object` one in about 700 is, under load.

    Gloo's thread would be at work in the interpreter then, whose locks the child finds closed.
    """
    assert run_ranks(script("planning.fork"), tmp_path, 2) == [0, 0]
