"""Checkpoints: which loaders have a position."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS, Numbers, as_list, sampler_of
from tests.train.test_fit import Training
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.train.checkpoint import has_position, load_run_state, run_state
from torchbudget.train.checkpoint import RunFolder


class OwnSampler(BatchSampler):
    """A batch sampler with a state, which does not know of batches that are read ahead."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]


def test_whose_position_can_be_saved() -> None:
    """That of a source that knows of batches read ahead; not that of any object with a state."""
    data = list(range(6))
    own = OwnSampler(SequentialSampler(data), 2, drop_last=False)
    assert has_position(Training().loader)
    assert not has_position(DataLoader(data, batch_sampler=own))
    assert not has_position(DataLoader(data, batch_size=2))


def test_a_position_needs_a_loader_that_can_load_it() -> None:
    training = Training()
    state = run_state(training.model, training.accumulator, training.loader, is_over=True)
    with pytest.raises(StateError, match="cannot load one"):
        load_run_state(state, training.model, training.accumulator, training.validation)


@pytest.mark.parametrize("apart", [0, 1])
def test_ranks_at_different_places_go_on_as_as_many(apart: int) -> None:
    """Where steps end by samples, one rank may have had more batches than another."""
    training = Training()
    sampler, states = training.loader.batch_sampler, []
    for number, _ in enumerate(sampler.tracked(training.loader), 1):
        states.append(
            run_state(training.model, training.accumulator, training.loader, is_over=False)
        )
        if number == 2:
            break
    state = {**states[0], "ranks": [states[one]["ranks"][0] for one in (0, apart)]}
    with pytest.raises(StateMismatchError, match="go on with 2 ranks") if apart else nullcontext():
        load_run_state(state, training.model, training.accumulator, training.loader)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "last.pt").mkdir()  # stands for a disk that fails: a file's modes bind no root
    with pytest.raises(IsADirectoryError):
        RunFolder(tmp_path).read()


def test_statistics_are_json_where_numbers_are_not_finite(tmp_path: Path) -> None:
    """JSON knows neither NaN nor infinity; a skipped step may have both."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    RunFolder(tmp_path).write_record("step", {"loss": math.nan, "norm": math.inf, "number": 3})
    line = (tmp_path / "statistics.jsonl").read_text()
    found = json.loads(line, parse_constant=refuse)
    assert found == {"kind": "step", "loss": None, "norm": None, "number": 3}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_whose_workers_are_ahead(workers: int) -> None:
    """Saved after the last batches but some, which workers have prepared, those still come."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        options: dict[str, Any] = {"num_workers": workers, "collate_fn": as_list}
        return stateful(Numbers(len(LENGTHS)), batch_sampler=sampler_of(), **options)

    whole = list(loader())
    for left in range(1, 6):
        training, begun, later = Training(), loader(), loader()
        came = len(list(islice(begun, len(whole) - left)))
        state = run_state(training.model, training.accumulator, begun, is_over=False)
        load_run_state(state, training.model, training.accumulator, later)
        assert list(later) == whole[came:]


CALLBACKS = """
import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.train.test_fit import Training

dist.init_process_group("gloo")
rank = dist.get_rank()


class Average:
    def __call__(self, record):
        pass

    def state_dict(self):
        if rank == 1:
            raise RuntimeError("no average yet")
        return {}

    def load_state_dict(self, state):
        pass


try:
    Training().fit(folder=Path(sys.argv[2]), callbacks=[Average()])
except RuntimeError as error:
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.mark.distributed
def test_a_callback_without_a_state_on_one_rank_ends_all(tmp_path: Path) -> None:
    """The other rank does not wait for it, and names it."""
    first, second = run_ranks(CALLBACKS, tmp_path, 2, tmp_path / "files")
    assert second == "RuntimeError: no average yet"
    assert first == f"RankError: rank 1 failed, see its traceback: {second}"
