"""The state of an accumulator, in the middle of a step too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.large_steps import (
    OPTIMIZERS,
    Data,
    accumulate,
    difference,
    make_model,
    parts_of,
    sgd,
)
from tests.support.ranks import run_ranks
from torchbudget import GradAccumulator
from torchbudget.errors import StateError


@pytest.mark.parametrize("done", range(9))
def test_resumed_equals_uninterrupted(done: int) -> None:
    """Anywhere, in the middle of a step too, bit for bit."""
    pieces = parts_of(Data.make(32), 4)
    model = make_model("transformer")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    accumulator = GradAccumulator(optimizer, model, steps=3)
    accumulate(accumulator, model, pieces[:done])
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict(), accumulator.state_dict()])
    accumulate(accumulator, model, pieces[done:])
    accumulator.flush()
    again = make_model("transformer")
    its = OPTIMIZERS["AdamW"](again.parameters())
    resumed = GradAccumulator(its, again, steps=3)
    for one, state in zip((again, its, resumed), kept, strict=True):
        one.load_state_dict(state)
    accumulate(resumed, again, pieces[done:])
    resumed.flush()
    assert difference(again, model) == 0
    assert resumed.last == accumulator.last


def test_the_state_between_steps_is_plain() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, parts_of(Data.make(8), 4))
    state = accumulator.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state["steps"] == 1


@pytest.mark.parametrize("state", [{}, {"version": 9}, 3])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    model = make_model("CNN")
    with pytest.raises(StateError):
        GradAccumulator(sgd(model), model).load_state_dict(state)


def scaler(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("options", [{"divisor": 2}, {"scaler": scaler(8)}, {}])
def test_gradients_of_another_scale_are_refused(options: dict[str, Any]) -> None:
    """In the middle of a step; between two, none are in the state."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2, divisor=4, scaler=scaler(16))
    other = GradAccumulator(sgd(model), model, steps=2, **options)
    other.load_state_dict(accumulator.state_dict())
    accumulate(accumulator, model, [Data.make(4)])
    state = accumulator.training_state()
    with pytest.raises(StateError, match="gradients times 4, but here"):
        other.load_state_dict(state["accumulator"])
    same = GradAccumulator(sgd(model), model, divisor=4, scaler=scaler(8))
    same.load_training_state(state)
    assert same.state_dict()["weight"] == Data.make(4).weight
    accumulator.step()


def test_gradients_of_other_parameters_are_refused() -> None:
    model, other = make_model("CNN"), make_model("tied")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    accumulate(accumulator, model, [Data.make(4)])
    state = accumulator.state_dict()
    accumulator.step()
    with pytest.raises(StateError, match="other parameters"):
        GradAccumulator(sgd(other), other).load_state_dict(state)


OF_RANKS = """
import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.large_steps import Data, accumulate, make_model, parts_of, sgd
from torchbudget import GradAccumulator
from torchbudget.errors import StateMismatchError

dist.init_process_group("gloo")
rank = dist.get_rank()
model = make_model("CNN")
accumulator = GradAccumulator(sgd(model), model, steps=2)
pieces = parts_of(Data.make(16), 4)
found = []
for done in (1, 2):
    accumulate(accumulator, model, [pieces[rank]])
    states = [None, None]
    dist.all_gather_object(states, accumulator.state_dict())
    other = GradAccumulator(sgd(model), model, steps=2)
    for state in states:
        try:
            other.load_state_dict(state)
        except StateMismatchError as error:
            found.append(str(error))
        else:
            found.append(None)
    other.load_state_dict(states[rank])
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([found, states[0]]))
"""


@pytest.mark.distributed
def test_one_rank_s_part_of_a_step_is_for_that_rank_alone(tmp_path: Path) -> None:
    """Between steps, any rank's state will do."""
    results = run_ranks(OF_RANKS, tmp_path, 2)
    for rank, (found, _) in enumerate(results):
        within, between = found[:2], found[2:]
        assert within[rank] is None
        assert f"rank {1 - rank} of 2, but this is rank {rank} of 2" in within[1 - rank]
        assert between == [None, None]
    model = make_model("CNN")
    GradAccumulator(sgd(model), model, steps=2).load_state_dict(results[0][1])
