"""The states of callbacks: alike on all ranks, or each rank's own."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from torchbudget.train.callback_states import digest_of

OWN_STATES = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.test_fit import Training
from torchbudget.errors import StateMismatchError
from torchbudget.train.step import Step

folder, files, goes_on = sys.argv[1:]
if goes_on != "alone":
    dist.init_process_group("gloo")
rank = dist.get_rank() if goes_on != "alone" else 0


class Counting:
    # On each rank as many as its number, and a tensor that is the same on all.
    def __init__(self):
        self.counted, self.tensor = 0, torch.zeros(3)

    def __call__(self, record):
        if isinstance(record, Step):
            self.counted += 1 + rank
            self.tensor += 1

    def state_dict(self):
        return {"counted": self.counted, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.counted, self.tensor = state["counted"], state["tensor"]


counting, whole, found = Counting(), Counting(), []
if goes_on == "together":
    Training().fit(folder=Path(files, "whole"), epochs=2, callbacks=[whole])
    Training().fit(folder=Path(files, "part"), epochs=1, callbacks=[Counting()])
try:
    Training().fit(folder=Path(files, "part"), epochs=2, callbacks=[counting])
    found = [[one.counted, one.tensor.tolist()] for one in (whole, counting)]
except StateMismatchError as error:
    found = [str(error)]
Path(folder, f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_each_rank_has_the_state_of_its_own_callback_again(tmp_path: Path) -> None:
    """As in the uninterrupted training; another number of ranks is told that it cannot."""
    first, second = run_ranks(OWN_STATES, tmp_path, 2, tmp_path, "together")
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert second[1][0] == 2 * first[1][0] > 0
    [[refused]] = run_ranks(OWN_STATES, tmp_path, 1, tmp_path, "alone")
    assert "each of the 2 ranks of the checkpoint had another state of Counting" in refused
    assert "go on with 2 ranks" in refused


def state(number: float = 2.5) -> dict[str, Any]:
    average = OrderedDict(weight=torch.arange(6.0).view(2, 3))
    return {"average": average, "n": torch.tensor(3), "best": [number, "x"]}


def test_states_are_alike_by_what_they_hold() -> None:
    """Their values, types, names and places count."""
    assert digest_of(state()) == digest_of(state())
    other = state()
    other["average"]["weight"][1, 2] += 1
    changed = [other, state(2), state() | {"n": 3}, {"of": state()}]
    assert len({digest_of(one) for one in [state(), *changed]}) == 5
