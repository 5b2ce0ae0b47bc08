"""An epoch of training, and an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.support.fake_device import FakeDevice, put_in_place
from tests.support.ranks import group_of_one
from tests.support.training_cases import CASES
from tests.support.training_cases import tokens as texts
from tests.support.trainings import Training, loss_of, samples, tokens
from torchbudget import (
    BudgetedIterableDataset,
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PackedCost,
    PadCollate,
    PaddedBatch,
    PaddedCost,
    evaluate,
    fit,
    warm_up,
)
from torchbudget.errors import OptionError, SampleError
from torchbudget.restoring import TrainingState
from torchbudget.train.loop import train_epoch


def test_an_evaluation_is_that_of_the_whole() -> None:
    """Whatever the batches, in evaluation mode, which is then what it was."""
    training = Training()
    model = training.model
    model.head.eval()
    modes = [module.training for module in model.modules()]
    found = evaluate(model, training.validation, loss_of, weight=tokens)
    assert [module.training for module in model.modules()] == modes
    [batch] = DataLoader(samples(6, 9), batch_size=20, collate_fn=PadCollate())
    model.eval()
    assert found == pytest.approx(loss_of(model, batch).item() / batch.num_tokens, rel=1e-6)
    mean = evaluate(
        model, training.validation, lambda m, b: loss_of(m, b) / tokens(b), weight=tokens, mean=True
    )
    assert mean == pytest.approx(found, rel=1e-6)
    rows = [torch.ones(4, 3), torch.zeros(0, 3), 2 * torch.ones(2, 3)]  # the mean of one is NaN
    head = nn.Linear(3, 1)
    found = evaluate(head, rows, lambda m, one: m(one).mean(), weight=len, mean=True)
    assert found == pytest.approx(head(torch.cat(rows)).mean().item(), rel=1e-6)
    with pytest.raises(OptionError, match=r"no batch had a weight above 0.*used up"):
        evaluate(model, [], loss_of)


class LossWithHead(nn.Module):
    """A criterion that has a part of its own, with dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.head(model(batch)).square().sum()


def test_an_evaluation_trains_nothing_that_the_criterion_has() -> None:
    """Its modules are in evaluation mode, too: dropped nothing, and kept their statistics.

    They are found as those of `predict`, in functions of any kind.
    """
    model, loss = nn.Linear(3, 3), LossWithHead()
    batch = torch.randn(8, 3)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    found = evaluate(model, [batch], lambda m, batch: loss.head(m(batch)).square().sum())
    torch.testing.assert_close(loss.state_dict(), before, rtol=0, atol=0)
    assert all(part.training for part in loss.modules())
    loss.eval()
    assert found == pytest.approx(loss(model, batch).item() / 8, rel=1e-6)


class EndsEarly:
    """A collate that calls `next` on an iterator that has no more, after a few batches."""

    def __init__(self, batches: int) -> None:
        self.names = iter(range(batches))
        self.collate = PadCollate()

    def __call__(self, data: Any) -> Any:
        next(self.names)
        return data if isinstance(data, PaddedBatch) else self.collate(data)


def ends_early(kind: str, workers: int) -> DataLoader[Any]:
    data, cost = samples(60, 3), PaddedCost(unit_bytes=1)
    sizes = [len(one["x"]) for one in data]
    if kind == "sampler":
        sampler = MemoryBudgetBatchSampler(sizes, cost, 100)
        return DataLoader(data, batch_sampler=sampler, collate_fn=EndsEarly(3), num_workers=workers)
    stream = BudgetedIterableDataset(
        [data], cost, 100, size=lambda one: len(one["x"]), collate_fn=PadCollate()
    )
    return DataLoader(stream, batch_size=None, collate_fn=EndsEarly(3), num_workers=workers)


@pytest.mark.parametrize(("kind", "workers"), [("sampler", 0), ("stream", 0), ("stream", 1)])
@pytest.mark.parametrize("loop", ["evaluate", "train_epoch", "fit", "validation"])
def test_a_loop_that_ends_before_the_epoch_is_an_error(loop: str, kind: str, workers: int) -> None:
    """What a collate raises is not taken for the end of the data, where nothing is saved either."""
    training, loader = Training(), ends_early(kind, workers)
    model, accumulator = training.model, training.accumulator
    if loop in ("train_epoch", "fit"):
        accumulator = GradAccumulator(training.optimizer, model, steps=1)
    trained = (model, loader, loss_of, accumulator)
    loops: dict[str, Callable[[], object]] = {
        "evaluate": lambda: evaluate(model, loader, loss_of, weight=tokens),
        "train_epoch": lambda: train_epoch(*trained, weight=tokens),
        "fit": lambda: fit(*trained, epochs=1, weight=tokens),
        "validation": lambda: training.fit(epochs=1, validation=loader),
    }
    with pytest.raises(SampleError, match="StopIteration"):
        loops[loop]()


def test_an_evaluation_leaves_ddp_as_it_was() -> None:
    """It broadcasts no buffers meanwhile, and does so again afterwards, if it did."""
    with group_of_one():
        for before in (True, False):
            model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
            model.require_forward_param_sync = before
            during: list[bool] = []

            def loss_of_rows(model: nn.Module, batch: Tensor, seen: Any = during) -> Tensor:
                seen.append(model.require_forward_param_sync)
                return model(batch).square().sum()

            evaluate(model, [torch.randn(8, 3)], loss_of_rows)
            assert during == [False]
            assert model.require_forward_param_sync == before


def test_tensors_and_a_last_incomplete_step() -> None:
    """Plain tensors weigh their samples; what is left of a step is taken at the end."""
    model = nn.Linear(3, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2)
    steps: list[tuple[float, bool]] = []
    train_epoch(
        model,
        torch.ones(10, 3).split(4),
        lambda m, batch: m(batch).square().sum(),
        accumulator,
        device="cpu",
        when_stepped=lambda step, is_over: steps.append((step.weight, is_over)),
    )
    assert steps == [(8, False), (2, True)]


# ---------------------------------------------------------------------- warming up


def texts_of(sizes: list[int]) -> Any:
    return [{"x": texts(1, size)["x"][0]} for size in sizes]


@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_the_extremes_are_those_of_the_epoch(seed: int, epoch: int, packed: bool) -> None:
    """No batch costs more, none has a longer sample, and none has only shorter ones."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(3, 1, 300), 1, 400).astype(int)
    cost = (PackedCost if packed else PaddedCost)(unit_bytes=1)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 1000, window=64, seed=seed)
    sampler.set_epoch(epoch)
    extremes = sampler.extremes()
    batches = list(sampler)
    bytes_of = sampler.batch_bytes
    longest = [sizes[batch].max() for batch in batches]
    assert all(sorted(one.tolist()) in map(sorted, batches) for one in extremes.values())
    assert bytes_of(extremes["largest"]) == max(bytes_of(np.array(batch)) for batch in batches)
    assert sizes[extremes["longest"]].max() == max(longest)
    assert sizes[extremes["shortest"]].max() == min(longest)


def test_they_are_run_and_nothing_changes() -> None:
    """Three real steps, on the epoch's own batches; the model and the sampler stay as they are."""
    training = CASES["encoder, fused attention"]()
    sizes = np.random.default_rng(0).integers(4, 200, 100).tolist()
    data = texts_of(sizes)
    sampler = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 1000)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())
    numbers: list[int] = []  # anything else would be put back

    def step(batch: PaddedBatch) -> None:
        numbers.extend((batch.num_samples, *batch.padded_size))
        training.step({"x": batch["x"]})

    before = {name: t.clone() for name, t in training.model.state_dict().items()}
    state = sampler.state_dict()
    ran = warm_up(step, loader)
    seen = [*zip(numbers[::2], numbers[1::2], strict=True)]
    assert [one.name for one in ran] == ["largest", "longest", "shortest"]
    assert [one.predicted_bytes for one in ran] == [n * length for n, length in seen[1:]]
    assert all(one.peak_bytes > 2**20 for one in ran)
    assert seen[1][1] == max(sizes)
    assert all(torch.equal(before[name], t) for name, t in training.model.state_dict().items())
    assert not training.optimizer.state
    assert sampler.state_dict() == state


def test_what_was_reserved_before_is_in_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """On figures that stand in for a GPU's: 9 GiB of earlier work are returned first."""
    device = put_in_place(monkeypatch, FakeDevice(process_bytes=2**29))
    device.take(9 * 2**30)
    device.free(9 * 2**30)
    monkeypatch.setattr(TrainingState, "device", property(lambda _: torch.device("cuda")))
    training = CASES["encoder, fused attention"]()
    sizes = [4, 8, 16] * 9
    sampler = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 64)
    loader = DataLoader(texts_of(sizes), batch_sampler=sampler, collate_fn=PadCollate())

    def step(batch: PaddedBatch) -> None:
        device.take(2**30)
        training.step({"x": batch["x"]})
        device.free(2**30)

    peaks = [one.peak_bytes for one in warm_up(step, loader)]
    assert peaks == [2**30 + 2**29] * 3


def test_another_sampler_is_refused() -> None:
    loader: Any = DataLoader([1, 2, 3], batch_size=2)
    with pytest.raises(OptionError, match="got DataLoader with batch_sampler=BatchSampler"):
        warm_up(lambda batch: batch, loader)
