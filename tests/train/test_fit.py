"""Epochs, evaluations and whole trainings, which go on exactly where they were stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.large_steps import CLASSES
from tests.support.ranks import run_ranks
from torchbudget import (
    BudgetedIterableDataset,
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    PaddedCost,
    evaluate,
    fit,
)
from torchbudget.errors import OptionError, StateError
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step


class Tagger(nn.Module):
    """Labels of positions, after dropout."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # or a resumed training would draw as a new one
            torch.manual_seed(4)
            self.embed = nn.Embedding(CLASSES, 16)
            self.head = nn.Linear(16, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.embed(x))))


def samples(n: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (n,), generator=generator).tolist()
    texts = [torch.randint(CLASSES, (length,), generator=generator) for length in lengths]
    return [{"x": text, "labels": (text + 1) % CLASSES} for text in texts]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["x"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def tokens(batch: PaddedBatch) -> int:
    return batch.num_tokens


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers are the same, bit for bit."""
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


NEVER = (Epoch, math.inf)


class BrokenOff(Exception):  # noqa: N818  (no failure)
    """A training ended here, as if its process had."""


class BreakOff:
    """A callback that breaks a training off after a record, whose checkpoint is written then."""

    def __init__(self, kind: type[Any], number: float) -> None:
        self.record = (kind, number)
        self.seen = False

    def __call__(self, record: Step | Epoch) -> None:
        if self.seen:
            raise BrokenOff
        self.seen = (type(record), record.number) == self.record


class Training:
    """Everything that a run consists of, made anew."""

    def __init__(self, workers: int = 0, loader: Callable[..., Any] = DataLoader) -> None:
        data = samples(120, 0)
        lengths = [len(one["x"]) for one in data]
        self.sampler = MemoryBudgetBatchSampler(
            lengths, PaddedCost(unit_bytes=1), 100, samples_per_step=30, seed=1
        )
        self.loader = loader(
            data, batch_sampler=self.sampler, collate_fn=PadCollate(), num_workers=workers
        )
        self.model = Tagger()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.accumulator = GradAccumulator(
            self.optimizer, self.model, steps=self.sampler, max_norm=1.0, scheduler=schedule
        )
        self.validation = DataLoader(samples(20, 9), batch_size=7, collate_fn=PadCollate())

    def fit(self, **options: Any) -> list[Epoch]:
        arguments = {"epochs": 4, "weight": tokens, "validation": self.validation}
        return fit(self.model, self.loader, loss_of, self.accumulator, **arguments | options)

    def fit_until(self, kind: type[Any], number: float, **options: Any) -> list[Epoch]:
        """Save after every step, and break off after that record; the epochs if it never comes."""
        callbacks = [*options.pop("callbacks", ()), BreakOff(kind, number)]
        try:
            return self.fit(checkpoint_steps=1, callbacks=callbacks, **options)
        except BrokenOff:
            return []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [[1], [4, 5], [8], [3, 10, 13]])
def test_stopped_and_resumed_is_uninterrupted(at: list[int], workers: int, tmp_path: Path) -> None:
    """After any step, at the end of an epoch too, several times, dropout and all: bit for bit."""
    torch.manual_seed(11)
    whole = Training(workers)
    expected = whole.fit()
    torch.manual_seed(11)
    for stop in [*at, math.inf]:
        part = Training(workers)
        found = part.fit_until(Step, stop, folder=tmp_path)
        torch.manual_seed(0)  # another process begins with other numbers
    assert_equal(part.model, whole.model)
    facts = [(e.number, e.validation, e.steps, e.skipped) for e in found]
    assert facts == [(e.number, e.validation, e.steps, e.skipped) for e in expected]
    assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=1e-12)
    lines = list(map(json.loads, (tmp_path / "statistics.jsonl").read_text().splitlines()))
    assert [line["number"] for line in lines if line["kind"] == "step"] == list(range(1, 17))
    assert [line["number"] for line in lines if line["kind"] == "epoch"] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("snapshots", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on(workers: int, snapshots: int, tmp_path: Path) -> None:
    """From every step, the last one of an epoch too, whatever its own state would be."""
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    stateful = partial(loader, snapshot_every_n_steps=snapshots)
    torch.manual_seed(11)
    whole = Training(workers, stateful)
    expected = whole.fit(epochs=3)
    torch.manual_seed(11)
    for stop in [(Step, 2), (Step, 4), (Step, 5), (Epoch, 1), (Step, 11), NEVER]:
        part = Training(workers, stateful)
        found = part.fit_until(*stop, epochs=3, folder=tmp_path)
        torch.manual_seed(0)
    assert_equal(part.model, whole.model)
    assert [e.validation for e in found] == [e.validation for e in expected]


class Streamed(Training):
    """The same, of a stream, whose length is not known."""

    def __init__(
        self, workers: int, loader: Callable[..., Any], batches: int | None = None
    ) -> None:
        super().__init__()
        stream = BudgetedIterableDataset(
            [samples(60, 0), samples(60, 1)],
            PaddedCost(unit_bytes=1),
            100,
            size="x",
            window=30,
            batches_per_epoch=batches,
        )
        self.loader = loader(stream, batch_size=None, num_workers=workers)
        self.accumulator = GradAccumulator(self.optimizer, self.model, steps=5)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "batches"), [("DataLoader", None), ("DataLoader", 14), ("StatefulDataLoader", None)]
)
def test_a_stream_is_stopped_and_goes_on(
    kind: str, batches: int | None, workers: int, tmp_path: Path
) -> None:
    """Each epoch another order, within epochs and between them; of a number of batches, too."""
    stateful: Any = DataLoader
    if kind != "DataLoader":
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    torch.manual_seed(11)
    whole = Streamed(workers, stateful, batches)
    expected = whole.fit(epochs=3, folder=tmp_path / "whole")
    last = expected[0].steps
    torch.manual_seed(11)
    for stop in [(Step, 2), (Step, last), (Epoch, 0), (Step, last + 1), (Epoch, 1), NEVER]:
        part = Streamed(workers, stateful, batches)
        found = part.fit_until(*stop, epochs=3, folder=tmp_path / "part")
        torch.manual_seed(0)
    assert [e.steps for e in found] == [e.steps for e in expected]
    assert_equal(part.model, whole.model)


@pytest.mark.parametrize("kind", [Training, Streamed])
def test_workers_end_with_the_training(kind: Any) -> None:
    """Also where an error ends it that is kept, as a notebook keeps the last one."""
    training = kind(2) if kind is Training else kind(2, DataLoader)

    def stop(_: Any) -> None:
        assert active_children()
        raise BrokenOff

    with pytest.raises(BrokenOff) as kept:
        training.fit(epochs=2, callbacks=[stop])
    assert not active_children()
    assert kept.tb


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    history = Training().fit(folder=tmp_path, epochs=2)
    again = Training()
    assert again.fit(folder=tmp_path, epochs=2) == history
    assert len(again.fit(folder=tmp_path, epochs=3)) == 3


def test_it_learns_and_keeps_the_best(tmp_path: Path) -> None:
    """The validation loss falls, and `best.pt` holds the model of the lowest one."""
    training = Training()
    history = training.fit(folder=tmp_path, epochs=6)
    losses = [epoch.validation for epoch in history]
    assert losses[-1] < 0.5 * losses[0]
    best = Tagger()
    best.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    found = evaluate(best, training.validation, loss_of, weight=tokens)
    assert found == pytest.approx(min(losses), rel=1e-6)


def test_the_seconds_of_every_epoch_are_told() -> None:
    """Some of each, and together no more than the training took; without checkpoints, too."""
    began_s = time.perf_counter()
    seconds = [epoch.seconds for epoch in Training().fit(epochs=2)]
    assert min(seconds) > 0
    assert sum(seconds) <= time.perf_counter() - began_s


def test_patience(tmp_path: Path) -> None:
    """A learning rate of 0 never gets better: two epochs after the first it ends."""
    training = Training()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    assert len(training.fit(patience=2, epochs=9)) == 3
    with pytest.raises(OptionError, match="needs validation"):
        training.fit(patience=2, validation=None)


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": math.nan},
        {"epochs": -1},
        {"epochs": "2"},
        {"patience": 0},
        {"checkpoint_steps": 0, "folder": "never"},
        {"checkpoint_steps": 2},
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """Before anything is trained or written; also checkpoints that would have no folder."""
    training, before = Training(), Training().model
    with pytest.raises(OptionError, match=next(iter(options))):
        training.fit(**options)
    assert_equal(training.model, before)


@pytest.mark.parametrize("name", ["loader", "validation"])
def test_an_iterator_that_is_used_up_is_noticed(name: str) -> None:
    """Later epochs would have nothing to train or to evaluate on."""
    training = Training()
    if name == "loader":
        training.accumulator = GradAccumulator(training.optimizer, training.model, steps=1)
    setattr(training, name, (batch for batch in list(training.validation)))
    assert len(training.fit(epochs=1)) == 1
    with pytest.raises(OptionError, match=f"{name} had no batch"):
        training.fit(epochs=1)


def test_a_callback_ends_it() -> None:
    seen: list[Any] = []

    def callback(record: Step | Epoch) -> bool:
        seen.append(record)
        return isinstance(record, Epoch) and record.number == 1

    assert len(Training().fit(callbacks=[callback])) == 2
    assert [type(record) for record in seen] == [*4 * [Step], Epoch] * 2


def test_what_a_callback_has_ended_is_over_without_a_position_too(tmp_path: Path) -> None:
    """A later call must not train the epoch again that was ended within."""
    for steps in ([1], []):
        training, seen = Training(), []
        training.loader = training.validation
        training.accumulator = GradAccumulator(training.optimizer, training.model, steps=1)
        before = Training().model

        def callback(step: Step | Epoch, seen: list[int] = seen) -> bool:
            seen.append(step.number)
            return True

        assert training.fit(folder=tmp_path, callbacks=[callback]) == []
        assert seen == steps
        with pytest.raises(AssertionError):
            assert_equal(training.model, before)


def test_batches_of_any_kind_are_saved_between_epochs(tmp_path: Path) -> None:
    """A list has no position, and each epoch begins at its beginning."""
    whole, first, second = Training(), Training(), Training()
    for training in (whole, first, second):
        training.loader = list(training.validation)
        training.accumulator = GradAccumulator(training.optimizer, training.model, steps=1)
    torch.manual_seed(0)
    expected = whole.fit(epochs=2)
    torch.manual_seed(0)
    first.fit(epochs=1, folder=tmp_path)
    found = second.fit(epochs=2, folder=tmp_path)
    assert [(e.loss, e.validation) for e in found] == [(e.loss, e.validation) for e in expected]
    assert_equal(second.model, whole.model)


def test_a_loader_without_a_state_has_no_checkpoints(tmp_path: Path) -> None:
    training = Training()
    training.loader = training.validation
    with pytest.raises(OptionError, match="position can be saved"):
        training.fit(folder=tmp_path, checkpoint_steps=1)


@pytest.mark.parametrize("place", ["loader", "validation"])
def test_sizes_of_another_data_set_are_refused(place: str) -> None:
    """Half of the samples would never be trained on, or evaluated, in silence."""
    sampler = MemoryBudgetBatchSampler([1] * 20, PaddedCost(unit_bytes=1), 64)
    wrong = DataLoader(samples(40, 0), batch_sampler=sampler, collate_fn=PadCollate())
    training = Training()
    setattr(training, place, wrong)
    with pytest.raises(OptionError, match="has 20 sizes, but the data set has 40 samples"):
        training.fit()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    torch.save({"run": {"version": 9}}, tmp_path / "last.pt")
    with pytest.raises(StateError, match="version"):
        Training().fit(folder=tmp_path)


RANKS = """
import json
import time
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.train.test_fit import BreakOff, BrokenOff, Step, Training

folder, files = sys.argv[1:]
dist.init_process_group("gloo")
told = []
for kind in ("whole", "stopped"):
    for stop in ([99] if kind == "whole" else [6, 99]):
        training = Training()
        torch.manual_seed(100 + dist.get_rank())  # every rank drops others
        where = Path(files, kind)
        try:
            history = training.fit(
                folder=where, checkpoint_steps=2, validation=training.loader,
                callbacks=[BreakOff(Step, stop)],
            )
        except BrokenOff:
            pass
    told.append([[e.loss, e.validation, e.steps] for e in history])
    told.append(training.model.head.weight.tolist())
Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(told))
"""


@pytest.mark.distributed
def test_fitting_over_ranks(tmp_path: Path) -> None:
    """Two ranks train alike, evaluate together, are stopped and go on; the first one writes."""
    first, second = run_ranks(RANKS, tmp_path, 2, tmp_path / "files")
    assert first == second
    whole, weights, stopped, resumed = first
    assert weights == resumed
    assert [e[1:] for e in whole] == [e[1:] for e in stopped]
    lines = (tmp_path / "files" / "whole" / "statistics.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 5


SUBGROUPS = """
import json
import time
import sys
from pathlib import Path

import torch.distributed as dist

from tests.train.test_fit import DataLoader, PadCollate, Tagger, evaluate, loss_of, samples, tokens

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0, 1]), dist.new_group([2])]
mine = samples(20, 9)[10 * rank : 10 * (rank + 1)] if rank < 2 else samples(7, 3)
loader = DataLoader(mine, batch_size=4, collate_fn=PadCollate())
found = evaluate(Tagger(), loader, loss_of, weight=tokens, group=groups[rank == 2])
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_an_evaluation_over_some_of_the_ranks(tmp_path: Path) -> None:
    """Each group has the loss of its own samples, on every rank of it."""
    first, second, third = run_ranks(SUBGROUPS, tmp_path, 3)
    whole = DataLoader(samples(20, 9), batch_size=20, collate_fn=PadCollate())
    alone = DataLoader(samples(7, 3), batch_size=7, collate_fn=PadCollate())
    assert first == second == pytest.approx(evaluate(Tagger(), whole, loss_of, weight=tokens))
    assert third == pytest.approx(evaluate(Tagger(), alone, loss_of, weight=tokens))
