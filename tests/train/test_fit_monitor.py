"""A training whose batches are measured, and whose sampler is corrected by what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.trainings import (
    Creeping,
    Training,
    assert_equal,
    loss_of,
)
from torchbudget import GradAccumulator, MemoryMonitor
from torchbudget.errors import OptionError
from torchbudget.machine.process_tree import process_memory
from torchbudget.observe.report import read_records, recorded_runs
from torchbudget.random_state import RandomState
from torchbudget.train.loop import train_epoch
from torchbudget.units import MiB


@pytest.mark.slow
def test_batches_are_cut_down_while_memory_creeps_up(tmp_path: Path) -> None:
    """The margin grows, later windows are cut smaller, every sample still comes once an epoch."""
    run = Creeping()
    path = tmp_path / "run.jsonl"
    with MemoryMonitor(path=path, replan=run.sampler, replan_batches=5) as monitor:
        run.fit(monitor, epochs=2)
    assert run.sampler.plan.rules.cost.margin > 0.1
    half = len(run.numbers) // 4
    assert sum(run.numbers[:half]) / half > 1.3 * sum(run.numbers[-half:]) / half
    assert sum(run.numbers) == 2 * 200
    batches = [record for record in read_records(path) if record["event"] == "batch"]
    assert [record["n"] for record in batches] == run.numbers
    assert batches[-1]["bytes"] > batches[0]["bytes"] + MiB(100)


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


def batches_without_sizes() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, 3).long()}] * 3


def test_batches_of_any_type_are_measured(tmp_path: Path) -> None:
    training, path = Training(), tmp_path / "run.jsonl"
    with MemoryMonitor(path=path) as monitor:
        train_epoch(
            training.model, batches_without_sizes(), loss_of,
            GradAccumulator(training.optimizer, training.model, steps=1),
            weight=lambda _: 1, monitor=monitor,
        )  # fmt: skip
    batches = [record for record in read_records(path) if record["event"] == "batch"]
    assert len(batches) == 3
    assert all(record["bytes"] > 0 and "size" not in record for record in batches)
    assert [len(run.batches) for run in recorded_runs(path)] == [3]


def test_only_padded_batches_correct_a_sampler() -> None:
    run = Creeping(leaks=False, resident_bytes=process_memory(shares=False).resident_bytes)
    with MemoryMonitor(replan=run.sampler) as monitor:
        with pytest.raises(OptionError, match="padded size of each batch"):
            train_epoch(
                run.model, batches_without_sizes(), loss_of, Training().accumulator,
                weight=lambda _: 1, monitor=monitor,
            )  # fmt: skip
        with pytest.raises(OptionError, match="got 3 and None"), monitor.batch(3):
            pass


def test_only_a_measured_cost_is_corrected() -> None:
    with pytest.raises(OptionError, match="only a measured cost"):
        MemoryMonitor(replan=Training().sampler)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_agree_on_what_one_of_them_sees(tmp_path: Path) -> None:
    """One rank's memory creeps up: both plan with its margin, as many batches on each.

    A monitor on one rank only is refused on both.
    """
    (refused, margin, numbers), (refused_too, margin_too, numbers_too) = run_ranks(
        script("fit_monitor"), tmp_path, 2
    )
    assert refused == refused_too
    assert "a monitor, must be on every rank" in refused
    assert margin == margin_too > 0.05
    assert len(numbers) == len(numbers_too)
    assert sum(numbers) + sum(numbers_too) == 2 * 200
