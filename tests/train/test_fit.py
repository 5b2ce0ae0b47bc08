"""Whole trainings, which go on exactly where they were stopped."""

from __future__ import annotations

import math
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.fake_device import FakeDevice, put_in_place
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.trainings import (
    BrokenOff,
    Creeping,
    Tagger,
    Training,
    assert_equal,
    loss_of,
    samples,
    statistics,
    tokens,
)
from torchbudget import (
    GiB,
    MemoryBudgetBatchSampler,
    MemoryMonitor,
    PadCollate,
    PaddedCost,
    evaluate,
)
from torchbudget.errors import BudgetError, OptionError, StateError
from torchbudget.machine.process_tree import process_memory
from torchbudget.observe.report import read_records, recorded_runs
from torchbudget.random_state import RandomState
from torchbudget.train import fit as fit_module
from torchbudget.train.fit import Epoch
from torchbudget.train.loop import train_epoch
from torchbudget.train.step import Step


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_workers_end_with_the_training(kind: Any) -> None:
    """Also where an error ends it that is kept, as a notebook keeps the last one."""

    def stop(_: Any) -> None:
        assert active_children()
        raise BrokenOff

    with pytest.raises(BrokenOff) as kept:
        Training(kind, num_workers=1).fit(stop)
    assert not active_children()
    assert kept.tb


# ---------------------------------------------------------------------- promises


def test_it_learns_keeps_the_best_and_is_over(tmp_path: Path) -> None:
    """`best.pt` has the model of the lowest loss; a finished run has nothing to do."""
    training, began_s = Training(), time.perf_counter()
    history = training.fit(folder=tmp_path, epochs=6)
    losses = [epoch.validation for epoch in history]
    assert losses[-1] < 0.7 * losses[0]
    assert min(epoch.seconds for epoch in history) > 0
    assert sum(epoch.seconds for epoch in history) <= time.perf_counter() - began_s
    best = Tagger()
    best.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    found = evaluate(best, training.validation, loss_of, weight=tokens)
    assert found == pytest.approx(min(losses), rel=1e-6)
    again = Training()
    assert again.fit(folder=tmp_path, epochs=6) == history
    assert len(again.fit(folder=tmp_path, epochs=7)) == 7


def test_schedule_free_optimizers_return_their_weights(tmp_path: Path) -> None:
    """The returned weights are validated, saved in `best.pt`, and in the model at the end."""
    run = Training(free=True)
    epochs = run.fit(folder=tmp_path)
    assert not run.optimizer.param_groups[0]["train_mode"]

    def validated() -> float:
        return evaluate(run.model, run.validation, loss_of, weight=tokens)

    assert validated() == pytest.approx(epochs[-1].validation, rel=1e-6)
    best = torch.load(tmp_path / "best.pt")
    torch.testing.assert_close(best, run.model.state_dict(), rtol=0, atol=0)
    run.optimizer.train()
    assert validated() != pytest.approx(epochs[-1].validation, rel=1e-6)


def test_patience() -> None:
    """A learning rate of 0 never gets better: two epochs after the first it ends."""
    training = Training()
    training.validation = list(training.validation)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    assert len(training.fit(patience=2, epochs=9)) == 3


def of_other_sizes() -> DataLoader[Any]:
    sampler = MemoryBudgetBatchSampler([1] * 20, PaddedCost(unit_bytes=1), 64)
    return DataLoader(samples(40, 0), batch_sampler=sampler, collate_fn=PadCollate())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epochs": math.nan}, "epochs"),
        ({"epochs": -1}, "epochs"),
        ({"patience": 0}, "patience"),
        ({"patience": 2, "validation": None}, "needs validation"),
        ({"checkpoint_steps": 0, "folder": "never"}, "checkpoint_steps"),
        ({"checkpoint_steps": 2}, "checkpoint_steps"),
        ({"validation": of_other_sizes()}, "has 20 sizes, but the data set has 40 samples"),
        ({"loader": of_other_sizes()}, "has 20 sizes, but the data set has 40 samples"),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], match: str) -> None:
    """Before anything is trained or written; half of the samples would be left out in silence."""
    training, before = Training(), Training().model
    training.loader = options.pop("loader", training.loader)
    with pytest.raises(OptionError, match=match):
        training.fit(**options)
    assert_equal(training.model, before)


@pytest.mark.parametrize("name", ["loader", "validation"])
def test_an_iterator_that_is_used_up_is_noticed(name: str) -> None:
    """Later epochs would have nothing to train or to evaluate on."""
    training = Training("list")
    setattr(training, name, (batch for batch in list(training.validation)))
    assert len(training.fit(epochs=1)) == 1
    with pytest.raises(OptionError, match=r"no batch.*used up"):
        training.fit(epochs=1)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    """Before the first batch; what only shows in a state, at the first checkpoint."""
    with pytest.raises(OptionError, match="position can be saved"):
        Training("shuffled").fit(folder=tmp_path, checkpoint_steps=1)
    training, beside = Training(), nn.Linear(3, 2)
    training.optimizer.add_param_group({"params": list(beside.parameters())})
    with pytest.raises(OptionError, match=r"train 2 parameters that are not in the model.*2, 3"):
        training.fit(folder=tmp_path)
    training = Training()
    training.optimizer.param_groups[0]["weight_decay"] = np.float64(0.01)
    with pytest.raises(StateError, match="values other than tensors"):
        training.fit(folder=tmp_path)
    assert training.accumulator.last is not None
    assert training.accumulator.last.number == 1


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("sampler", {"callbacks": []}, r"callbacks with a state_dict .*, 2\], but this fit has "),
        ("shuffled", {}, "with the same generator="),
    ],
)
def test_another_training_is_refused(
    kind: str, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    Training("sampler").fit(folder=tmp_path, epochs=1)
    with pytest.raises(StateError, match=match):
        Training(kind).fit(folder=tmp_path, **options)


@pytest.mark.parametrize(("kind", "number"), [(Step, 2), (Step, 3), (Epoch, 0)])
def test_a_callback_ends_it_for_good(kind: type[Any], number: int, tmp_path: Path) -> None:
    """Callbacks see each step and epoch; where one ends the training, it is over later, too."""
    seen: list[Any] = []

    def end(record: Step | Epoch) -> bool:
        seen.append(type(record))
        return (type(record), record.number) == (kind, number)

    ended, later = Training(), Training()
    history = ended.fit(end, folder=tmp_path)
    assert seen == ([Step] * 3 + [Epoch])[: number if kind is Step else 4]
    assert later.fit(folder=tmp_path) == history
    assert_equal(later.model, ended.model)
    other = Training("shuffled", end=1)
    assert other.fit(folder=tmp_path / "without a position") == []
    other = Training("shuffled")
    assert other.fit(folder=tmp_path / "without a position") == []


def test_what_a_callback_has_unfrozen_stays_so(tmp_path: Path) -> None:
    """In the call that goes on; what the user freezes between two calls, too."""

    def train(epochs: int, folder: Path, *, frozen: bool = True) -> Training:
        training = Training()
        training.model.embed.requires_grad_(not frozen)

        def unfreeze(record: object) -> None:
            if isinstance(record, Epoch) and record.number == 0:
                training.model.embed.requires_grad_(True)

        training.fit(*([unfreeze] if frozen else []), epochs=epochs, folder=folder)
        return training

    whole = train(3, tmp_path / "whole")
    for epochs in (1, 2, 3):
        part = train(epochs, tmp_path / "part")
    assert_equal(part.model, whole.model)
    train(1, tmp_path / "stages", frozen=False)
    later = Training()
    later.model.embed.requires_grad_(False)
    later.fit(epochs=2, folder=tmp_path / "stages")
    assert not later.model.embed.weight.requires_grad


def test_the_device_s_limit_leaves_room_for_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the budget less what is outside the allocator, after a step and an evaluation again."""
    limited: list[torch.device] = []
    limit = fit_module.limit_device_memory

    def record(budget: object, device: torch.device) -> None:
        limited.append(device)
        limit(budget, "cuda")

    monkeypatch.setattr(fit_module, "limit_device_memory", record)
    fake = put_in_place(monkeypatch, FakeDevice(free_before_bytes=GiB(80)))
    fake.load(GiB(0.5))
    past = 18 * 2**20  # what torch's allocator takes past its limit, which is left free
    rooms: list[float] = []
    training = Training("list")

    @training.model.register_forward_pre_hook
    def run(*_: object) -> None:
        rooms.append((fake.now.fraction * GiB(80) + past) / GiB(1))
        if len(rooms) in (1, 7):  # kernels of the first step, and of the first evaluation
            fake.load(GiB(1))

    training.fit(device_limit="8GiB")
    expected = [7.5] * 3 + [6.5] * 6 + [5.5] * 9
    assert rooms == pytest.approx(expected, abs=1e-6)
    assert set(limited) == {torch.device("cpu")}
    fake.load(GiB(9))
    with pytest.raises(BudgetError, match=r"uses \S+ GiB outside torch's allocator"):
        Training("list").fit(device_limit="8GiB")
    seen: list[object] = []
    with pytest.raises(BudgetError):
        Training("list").fit(seen.append, device_limit="much")
    assert seen == []


# ---------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.distributed
def test_fitting_over_ranks(tmp_path: Path) -> None:
    """Two ranks train and evaluate alike, are stopped and go on; an end of one ends both.

    Ranks with unequal numbers of batches go on at their own places, each step with its samples.
    """
    first, second = run_ranks(script("fitting.fit_together"), tmp_path, 2, tmp_path / "files")
    assert first["weights"] == second["weights"]
    for kind in ("sampler", "uneven"):
        whole, *parts = first["weights"][kind]
        assert len(parts) == 4
        assert all(part == whole for part in parts)
    folders = (tmp_path / "files").glob("uneven*")
    found = {
        tuple(line["weight"] for line in statistics(one) if "weight" in line) for one in folders
    }
    assert len(found) == 1
    assert first["seen"] > 2 * second["seen"]
    assert first["ended"] == second["ended"] == [[], []]
    failed = "RankError: rank 1 failed, see its traceback: "
    no_metric = "RuntimeError: no such metric"
    assert (first["failed"], second["failed"]) == (failed + no_metric, no_metric)
    no_state = "RuntimeError: no average yet"
    assert (first["no state"], second["no state"]) == (failed + no_state, no_state)
    assert "must be on every rank; the ranks have [(1, 0), (0, 0)]" in first["callbacks"]
    assert first["callbacks"] == second["callbacks"]
    assert "rank 1 no checkpoint: use a folder that all nodes see" in second["folders"]
    places = first["other number"]
    assert "were at different positions of the epoch" in places
    assert "continue with 3 ranks" in places


def test_seeds_of_workers_differ_between_epochs() -> None:
    """Or every epoch would have the same augmentations."""
    seen: list[Any] = []
    training = Training("sampler", num_workers=1)

    def look(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch["labels"].sum().item())
        return loss_of(model, batch)

    training.criterion = look  # type: ignore[method-assign]
    training.fit(callbacks=[], validation=None)
    half = len(seen) // 2
    assert sorted(seen[:half]) != sorted(seen[half:])


# ---------------------------------------------------------------------- a monitor


def test_without_a_leak_nothing_is_changed(tmp_path: Path) -> None:
    """Law 9: the training is the same, bit for bit, and so are the random generators after it."""
    ends = []
    resident_bytes = process_memory(shares=False).resident_bytes
    for monitored in (False, True):
        torch.manual_seed(5)
        run = Creeping(leaks=False, resident_bytes=resident_bytes)
        path = tmp_path / f"{monitored}.jsonl"
        if monitored:
            monitor = MemoryMonitor(path=path, interval_s=0.001, replan=run.sampler)
            with monitor:
                run.fit(monitor, epochs=2)
                monitor.snapshot("end")
        else:
            run.fit(None, epochs=2)
        ends.append((run, RandomState.take()))
    (plain, before), (observed, after) = ends
    assert_equal(plain.model, observed.model)
    assert plain.numbers == observed.numbers
    assert plain.sampler.state_dict() == observed.sampler.state_dict()
    assert (before.python, before.numpy) == (after.python, after.numpy)
    assert before.cpu.equal(after.cpu)


def test_batches_without_sizes_are_measured_but_correct_no_sampler(tmp_path: Path) -> None:
    """Nor does what is no measured cost."""
    batch = {"x": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, 3).long()}
    path = tmp_path / "run.jsonl"

    def train(monitor: MemoryMonitor) -> None:
        training = Training("list")
        arguments = training.model, [batch] * 3, loss_of, training.accumulator
        train_epoch(*arguments, weight=lambda _: 1, monitor=monitor)

    with MemoryMonitor(path=path) as monitor:
        train(monitor)
    batches = [record for record in read_records(path) if record["event"] == "batch"]
    assert len(batches) == 3
    assert all(record["bytes"] > 0 and "size" not in record for record in batches)
    assert [len(run.batches) for run in recorded_runs(path)] == [3]
    run = Creeping(leaks=False, resident_bytes=process_memory(shares=False).resident_bytes)
    with MemoryMonitor(replan=run.sampler) as monitor:
        with pytest.raises(OptionError, match="padded size of each batch"):
            train(monitor)
        with pytest.raises(OptionError, match="got 3 and None"), monitor.batch(3):
            pass
    with pytest.raises(OptionError, match="replan needs a cost"):
        MemoryMonitor(replan=Training().sampler)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_agree_on_what_one_of_them_sees(tmp_path: Path) -> None:
    """One rank's memory creeps up: both plan with its margin, as many batches on each.

    A monitor on one rank only is refused on both.
    """
    (refused, margin, numbers), (refused_too, margin_too, numbers_too) = run_ranks(
        script("fitting.creep"), tmp_path, 2
    )
    assert refused == refused_too
    assert "a monitor, must be on every rank" in refused
    assert margin == margin_too > 0.05
    assert len(numbers) == len(numbers_too)
    assert sum(numbers) + sum(numbers_too) == 2 * 200
