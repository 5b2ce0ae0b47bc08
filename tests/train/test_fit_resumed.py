"""Trainings that were broken off: callbacks, random numbers, statistics and ranks go on, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.support.ranks import run_ranks
from tests.train.test_fit import (
    NEVER,
    BreakOff,
    BrokenOff,
    Epoch,
    Training,
    assert_equal,
    samples,
)
from torchbudget import GradAccumulator, PadCollate
from torchbudget.errors import StateError
from torchbudget.train.step import Step

# ---------------------------------------------------------------------- callbacks


class Plateau:
    """Lowers the learning rate where the validation loss does not fall fast."""

    def __init__(self, training: Training) -> None:
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            training.optimizer, factor=0.5, patience=1, threshold=0.9
        )

    def __call__(self, record: Step | Epoch) -> None:
        if isinstance(record, Epoch):
            self.scheduler.step(record.validation or 0.0)

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


class Averaging:
    """Averages the model after each step, and draws random numbers for it."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.average = AveragedModel(training.model)

    def update(self, record: Step | Epoch) -> None:
        if isinstance(record, Step) and torch.rand(()) < 0.7:
            self.average.update_parameters(self.training.model)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


def fit_with(
    training: Training, stop: tuple[type[Any], float], folder: Path
) -> tuple[Plateau, Averaging]:
    plateau, averaging = Plateau(training), Averaging(training)
    training.fit_until(*stop, folder=folder, callbacks=[plateau, averaging.update])
    return plateau, averaging


def test_what_callbacks_do_at_a_saved_record_is_not_lost(tmp_path: Path) -> None:
    """Their own state, the learning rate that they changed, and the numbers that they drew."""
    torch.manual_seed(11)
    whole = Training()
    plateau, averaging = fit_with(whole, NEVER, tmp_path / "whole")
    torch.manual_seed(11)
    for stop in [(Step, 3), (Epoch, 0), (Epoch, 1), (Step, 9), (Epoch, 2), NEVER]:
        part = Training()
        found, averaged = fit_with(part, stop, tmp_path / "part")
        torch.manual_seed(0)
    assert plateau.scheduler.state_dict() == found.scheduler.state_dict()
    rate = whole.optimizer.param_groups[0]["lr"]
    assert rate == part.optimizer.param_groups[0]["lr"]
    assert rate < 0.03 * 0.9**5  # it was lowered by more than the other schedule
    assert_equal(part.model, whole.model)
    assert_equal(averaged.average, averaging.average)


@pytest.mark.parametrize(("kind", "number"), [(Step, 4), (Step, 6), (Epoch, 1)])
def test_a_stop_is_saved(kind: type[Any], number: int, tmp_path: Path) -> None:
    """Where a callback ended the training, it is over for later calls too."""

    def end(record: Step | Epoch) -> bool:
        return (type(record), record.number) == (kind, number)

    ended, later = Training(), Training()
    history = ended.fit(folder=tmp_path, callbacks=[end])
    assert later.fit(folder=tmp_path) == history
    assert_equal(later.model, ended.model)
    steps = ended.accumulator.last
    assert steps is not None
    assert later.accumulator.state_dict()["steps"] == steps.number


def test_the_callbacks_must_be_those_that_were_saved(tmp_path: Path) -> None:
    fit_with(Training(), (Step, 1), tmp_path)
    with pytest.raises(StateError, match="the states of 2 callbacks, but 0 have a state_dict"):
        Training().fit(folder=tmp_path)


def test_a_checkpoint_that_could_not_be_loaded_is_noticed_at_the_first_one(tmp_path: Path) -> None:
    """And not when it is needed."""
    training = Training()
    training.optimizer.param_groups[0]["lr"] = np.float64(0.03)
    with pytest.raises(StateError, match=r"\['lr'\] is a numpy.float64"):
        training.fit(folder=tmp_path, checkpoint_steps=1)
    assert training.accumulator.state_dict()["steps"] == 1


# ---------------------------------------------------------------------- random numbers


class SeededByWorkers(Dataset[dict[str, Tensor]]):
    """Samples with labels that a worker draws with its seed and the index, as augmentations are."""

    def __init__(self, data: Sequence[dict[str, Tensor]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        info = get_worker_info()
        generator = torch.Generator().manual_seed(index + (0 if info is None else info.seed))
        labels = self.data[index]["labels"]
        noise = torch.rand(labels.shape, generator=generator) < 0.3
        return self.data[index] | {"labels": torch.where(noise, 0, labels)}


class Persisting(Training):
    """With workers that persist, for training and for validation."""

    def __init__(self, loader: Callable[..., Any], *, persistent: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
        options["collate_fn"] = PadCollate()
        data = SeededByWorkers(self.loader.dataset)
        self.loader = loader(data, batch_sampler=self.sampler, **options)
        held_out = SeededByWorkers(samples(20, 9))
        self.validation = DataLoader(held_out, batch_size=7, shuffle=True, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_are_seeded_as_in_the_uninterrupted_training(
    persistent: bool, kind: str, tmp_path: Path
) -> None:
    """And starting them draws no number that the uninterrupted training would not have drawn."""
    loader: Any = DataLoader
    if kind != "DataLoader":
        loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    torch.manual_seed(11)
    whole = Persisting(loader, persistent=persistent)
    expected = whole.fit(epochs=3)
    torch.manual_seed(11)
    for stop in [(Step, 5), (Epoch, 1), NEVER]:
        part = Persisting(loader, persistent=persistent)
        found = part.fit_until(*stop, epochs=3, folder=tmp_path)
        torch.manual_seed(0)
    assert_equal(part.model, whole.model)
    assert [e.validation for e in found] == [e.validation for e in expected]


class Shuffled(Training):
    """A loader that shuffles by a generator of its own, or by the global one."""

    def __init__(self, workers: int, *, own: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"collate_fn": PadCollate(), "num_workers": workers}
        options["persistent_workers"] = workers > 0
        options["generator"] = torch.Generator().manual_seed(5) if own else None
        self.loader = DataLoader(samples(60, 0), batch_size=8, shuffle=True, **options)
        self.accumulator = GradAccumulator(self.optimizer, self.model, steps=2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [True, False])
def test_a_loader_that_shuffles_goes_on(workers: int, own: bool, tmp_path: Path) -> None:
    """Between epochs, where its checkpoints are: the next epoch has the order that it would."""
    torch.manual_seed(11)
    whole = Shuffled(workers, own=own)
    whole.fit(epochs=3)
    torch.manual_seed(11)
    for number in (0, 1, 99):
        part = Shuffled(workers, own=own)
        try:
            part.fit(epochs=3, folder=tmp_path, callbacks=[BreakOff(Epoch, number)])
        except BrokenOff:
            torch.manual_seed(0)
    assert_equal(part.model, whole.model)


def test_the_generators_must_be_those_that_were_saved(tmp_path: Path) -> None:
    Shuffled(0, own=True).fit(epochs=1, folder=tmp_path)
    with pytest.raises(StateError, match="states of 1 generators of the loaders, which have 0"):
        Shuffled(0, own=False).fit(epochs=2, folder=tmp_path)


def test_a_training_that_had_no_checkpoint_yet_begins_its_statistics_again(tmp_path: Path) -> None:
    """Killed before its first one, it has each line once."""

    def end(record: Step | Epoch) -> None:
        if record.number == 3:
            raise BrokenOff

    with pytest.raises(BrokenOff):
        Training().fit(folder=tmp_path, callbacks=[end])
    Training().fit(folder=tmp_path, epochs=2)
    lines = list(map(json.loads, (tmp_path / "statistics.jsonl").read_text().splitlines()))
    assert [line["number"] for line in lines if line["kind"] == "step"] == list(range(1, 9))


# ---------------------------------------------------------------------- ranks

UNEVEN = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.train.test_fit import BreakOff, BrokenOff, Step, Training, loss_of, samples, tokens
from torchbudget import BudgetedIterableDataset, GradAccumulator, PaddedCost, fit


def source(shard, num_shards):
    return iter(samples([24, 7][shard], shard))


def train(folder, stop, seen):
    training = Training()
    stream = BudgetedIterableDataset(
        source, PaddedCost(unit_bytes=1), 60, size="x", window=6, uneven=True
    )

    def noted(model, batch):
        seen.append(batch["x"].sum().item())
        return loss_of(model, batch)

    try:
        fit(
            training.model, DataLoader(stream, batch_size=None), noted,
            GradAccumulator(training.optimizer, training.model, steps=2),
            epochs=2, weight=tokens, folder=folder, checkpoint_steps=1,
            callbacks=[BreakOff(Step, stop)],
        )
    except BrokenOff:
        return None
    return training.model.head.weight.tolist()


folder, files = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(100 + rank)
seen = []
results = [train(Path(files, "whole"), 0, seen)]
for stop in range(3, 9):
    torch.manual_seed(100 + rank)
    train(Path(files, f"at {stop}"), stop, [])
    torch.manual_seed(0)
    results.append(train(Path(files, f"at {stop}"), 0, []))
Path(folder, f"{rank}.json").write_text(json.dumps([results, len(seen)]))
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_each_rank_goes_on_at_its_own_place(tmp_path: Path) -> None:
    """Ranks with unequal numbers of batches, broken off where one has none left, too."""
    ranks = run_ranks(UNEVEN, tmp_path, 2, tmp_path / "files")
    assert ranks[0][1] > 2 * ranks[1][1]  # they were unequal
    whole, *resumed = ranks[0][0]
    assert all(weights == whole for results, _ in ranks for weights in results)
    folders = [tmp_path / "files" / "whole", *(tmp_path / "files").glob("at *")]
    statistics = {
        tuple(
            line["weight"]
            for line in map(json.loads, (folder / "statistics.jsonl").read_text().splitlines())
            if line["kind"] == "step"
        )
        for folder in folders
    }
    assert len(resumed) == 6
    [steps] = statistics  # each step has the same samples, however it was broken off
    assert len(steps) > 9


ONE_RANK_ENDS = """
import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.train.test_fit import Step, Training
from tests.train.test_fit_resumed import Plateau
from torchbudget.errors import OptionError, RankError

folder, files = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()


def ends(record):
    return rank == 1 and (type(record), record.number) == (Step, 6)


def fails(record):
    if ends(record):
        raise RuntimeError("no such metric")


found = []
for name in ("with a folder", None):
    history = Training().fit(folder=name and Path(files, name), callbacks=[ends])
    found.append([epoch.steps for epoch in history])
try:
    Training().fit(callbacks=[fails])
except (RankError, RuntimeError) as error:
    found.append([type(error).__name__, str(error)])
again = Training().fit(folder=Path(files, "with a folder"))
found.append([epoch.steps for epoch in again])
training = Training()
try:
    training.fit(folder=Path(files, "other"), callbacks=[Plateau(training)][rank:])
except OptionError as error:
    found.append(str(error))
Path(folder, f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_a_callback_of_one_rank_ends_all(tmp_path: Path) -> None:
    """At the same step, for good; and where it raises, the others say so."""
    first, second = run_ranks(ONE_RANK_ENDS, tmp_path, 2, tmp_path)
    assert first[:2] == second[:2] == [[4], [4]]
    assert first[2] == [
        "RankError",
        "rank 1 failed, see its traceback: RuntimeError: no such metric",
    ]
    assert second[2] == ["RuntimeError", "no such metric"]
    assert first[3] == second[3] == [4]
    assert first[4] == second[4]
    assert "must be on every rank" in first[4]
    assert "the ranks have [1, 0] of them" in first[4]


FOLDERS = """
import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.train.test_fit import Training
from torchbudget.errors import StateMismatchError

folder, files = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
own = Path(files, f"node {rank}")
found = []
Training().fit(folder=own, epochs=1)
try:
    Training().fit(folder=own, epochs=2)
except StateMismatchError as error:
    found.append(str(error))
Path(folder, f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_folders_that_differ_between_ranks_are_noticed(tmp_path: Path) -> None:
    """Only the first rank writes; the others would begin anew beside it."""
    first, second = run_ranks(FOLDERS, tmp_path, 2, tmp_path)
    for [message], node in [(first, "node 0"), (second, "node 1")]:
        assert f"the ranks must share one folder, but in {tmp_path / node} rank 0 has" in message
        assert "rank 1 no checkpoint: use a folder that all nodes see" in message
