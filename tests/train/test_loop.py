"""An epoch of training, and an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.train.test_fit import Training, loss_of, samples, tokens
from torchbudget import (
    BudgetedIterableDataset,
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    PaddedCost,
    evaluate,
    fit,
    train_epoch,
)
from torchbudget.errors import OptionError, PaddedSizeWarning, SampleError
from torchbudget.train.fit import _EpochLoader as EpochLoader


def test_an_evaluation_is_that_of_the_whole() -> None:
    """Whatever the batches, in evaluation mode, which is then what it was."""
    training = Training()
    model = training.model
    model.head.eval()
    modes = [module.training for module in model.modules()]
    found = evaluate(model, training.validation, loss_of, weight=tokens)
    assert [module.training for module in model.modules()] == modes
    [batch] = DataLoader(samples(20, 9), batch_size=20, collate_fn=PadCollate())
    model.eval()
    assert found == pytest.approx(loss_of(model, batch).item() / batch.num_tokens, rel=1e-6)
    mean = evaluate(
        model, training.validation, lambda m, b: loss_of(m, b) / tokens(b), weight=tokens, mean=True
    )
    assert mean == pytest.approx(found, rel=1e-6)
    assert math.isnan(evaluate(model, [], loss_of))


class LossWithHead(nn.Module):
    """A criterion that has a part of its own, with dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.head(model(batch)).square().sum()


@pytest.mark.parametrize("kind", ["module", "function", "method"])
def test_an_evaluation_trains_nothing_that_the_criterion_has(kind: str) -> None:
    """Its modules are in evaluation mode, too: dropped nothing, and kept their statistics."""
    model, loss = nn.Linear(3, 3), LossWithHead()
    criterion = {
        "module": loss,
        "function": lambda m, batch: loss.head(m(batch)).square().sum(),
        "method": loss.forward,
    }[kind]
    batch = torch.randn(8, 3)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    found = evaluate(model, [batch], criterion)
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["sampler", "stream"])
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


@pytest.mark.parametrize("looked_at", [False, True])
def test_an_evaluation_beside_plain_loops(looked_at: bool) -> None:
    """Loops before it and after it, over a stream's persistent workers, change nothing."""
    stream = BudgetedIterableDataset(
        [samples(60, 3)], PaddedCost(unit_bytes=1), 100, size=lambda one: len(one["x"])
    )
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    model = Training().model
    if looked_at:
        list(loader)
    found = evaluate(model, loader, loss_of, weight=tokens)
    assert sum(batch.num_samples for batch in loader) == 60
    assert evaluate(model, loader, loss_of, weight=tokens) == pytest.approx(found, rel=1e-5)


def test_a_training_without_a_folder_compares_batches_with_the_plan() -> None:
    """A collate that pads to a multiple that the sampler does not know is noticed there, too."""
    training = Training()
    loader = DataLoader(
        training.loader.dataset,
        batch_sampler=training.loader.batch_sampler,
        collate_fn=PadCollate(size_multiple=64),
    )
    with pytest.warns(PaddedSizeWarning, match="size_multiple=1"):
        fit(training.model, loader, loss_of, training.accumulator, epochs=1, weight=tokens)


def test_an_evaluation_leaves_ddp_as_it_was(tmp_path: Path) -> None:
    """It broadcasts no buffers meanwhile, and does so again afterwards, if it did."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
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
    finally:
        dist.destroy_process_group()


def test_tensors_and_a_last_incomplete_step() -> None:
    """Plain tensors weigh their samples; what is left of a step is taken at the end."""
    model = nn.Linear(3, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2)
    steps = train_epoch(
        model,
        torch.ones(10, 3).split(4),
        lambda m, batch: m(batch).square().sum(),
        accumulator,
        device="cpu",
    )
    assert [step.weight for step in steps] == [8, 2]


def test_the_bar_ends_where_a_resumed_epoch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the epoch comes, and is what the bar counts to."""
    tqdm_auto = pytest.importorskip("tqdm.auto", reason="the progress extra")
    totals, seen = [], []

    class Bar(tqdm_auto.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            totals.append(options["total"])
            super().__init__(*args, **options | {"disable": True})

    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)

    def loader() -> Any:
        sampler = MemoryBudgetBatchSampler([1] * 60, PaddedCost(unit_bytes=1), 4)
        return DataLoader(torch.ones(60, 1), batch_sampler=sampler)

    begun, resumed = loader(), loader()
    for _ in islice(begun.batch_sampler.tracked(begun), 6):
        pass
    resumed.batch_sampler.load_state_dict(begun.batch_sampler.state_dict())
    model = nn.Linear(1, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.0), model, steps=1)
    for one in (resumed, EpochLoader(loader=begun, epoch=0, seed=0), DataLoader(torch.ones(3, 1))):
        steps = train_epoch(model, one, lambda m, b: m(b).sum(), accumulator, progress=True)
        seen.append(len(steps))
    assert totals == seen == [9, 9, 3]  # a tracked loop that was broken off goes on


def test_a_batch_that_weighs_nothing_is_left_out() -> None:
    """Its mean is NaN; in training it is left out, too."""
    model = nn.Linear(3, 1)
    batches = [torch.ones(4, 3), torch.zeros(0, 3), 2 * torch.ones(2, 3)]

    def loss_of_rows(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    found = evaluate(model, batches, loss_of_rows, weight=len, mean=True)
    rows = torch.cat(batches)
    assert found == pytest.approx(loss_of_rows(model, rows).item(), rel=1e-6)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    """Of shape (1,), in training and in evaluation; one of several is refused in both."""
    model = nn.Linear(3, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.0), model, steps=2)
    batches = [torch.ones(4, 3), torch.zeros(2, 3)]

    def one(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum(0)

    [step] = train_epoch(model, batches, one, accumulator)
    assert evaluate(model, batches, one) == pytest.approx(step.loss, rel=1e-6)
    for run in (
        lambda: evaluate(model, batches, lambda m, batch: m(batch)),
        lambda: train_epoch(model, batches, lambda m, batch: m(batch), accumulator),
    ):
        with pytest.raises(OptionError, match="the loss must be a scalar"):
            run()
