"""For each class of errors and warnings, an action of a user that meets it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchbudget as tb
from tests.support.steps import step_of
from torchbudget import errors
from torchbudget.observe.figures import plot_sizes

BYTE_EACH: Final = tb.PaddedCost(unit_bytes=1)


def collected(name: str, folder: Path) -> list[tuple[str, str]]:
    """Class names and messages of our warnings, in order, and of our error; others pass."""
    found: list[tuple[str, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PROVOCATIONS[name](folder)
        except errors.TorchBudgetError as error:
            found.append((type(error).__name__, str(error)))
    warned = [one for one in caught if issubclass(one.category, errors.TorchBudgetWarning)]
    return [(one.category.__name__, str(one.message)) for one in warned] + found


def sampler_of(sizes: Any = (3,) * 8, budget: Any = 12, **options: Any) -> Any:
    return tb.MemoryBudgetBatchSampler(sizes, BYTE_EACH, budget, **options)


def loop_over(sizes: Any, collate: Any, samples: Any = None) -> None:
    """A tracked epoch of tensors of the sizes, or of other samples."""
    sampler = sampler_of(sizes)
    samples = [torch.ones(size) for size in sizes] if samples is None else samples
    list(sampler.tracked(DataLoader(samples, batch_sampler=sampler, collate_fn=collate)))


class Trained:
    """A small model and its accumulator, whose step ends after `steps` micro-batches."""

    def __init__(self, *, steps: int = 1, of: nn.Module | None = None) -> None:
        self.model = nn.Linear(3, 1) if of is None else of
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accumulator = tb.GradAccumulator(self.optimizer, self.model, steps=steps)

    def run(self, loss_of: Callable[[Tensor], Tensor] = Tensor.sum, *, times: int = 1) -> None:
        for _ in range(times):
            with self.accumulator.micro_batch(weight=4):
                self.accumulator.backward(loss_of(self.model(torch.ones(4, 3)).square()))


def dealt_twice() -> None:
    """As what `Accelerator.prepare` makes does on the first of two processes."""
    from accelerate.data_loader import BatchSamplerShard

    sampler = sampler_of(num_replicas=2, rank=0)
    next(iter(BatchSamplerShard(sampler, num_processes=2, even_batches=False)))


def state_of_another_seed() -> None:
    sampler = sampler_of(seed=1)
    next(iter(sampler))
    sampler_of(seed=2).load_state_dict(sampler.state_dict())


def source_that_raises(folder: Path) -> None:
    shards = [(folder / "missing.txt").open]
    next(iter(tb.BudgetedIterableDataset(shards, BYTE_EACH, 12, size=len, collate_fn=list)))


def micro_batch_without_a_backward() -> None:
    with Trained().accumulator.micro_batch(weight=1):
        pass


def figure_without_matplotlib() -> None:
    plan = sampler_of().plan
    with patch.dict(sys.modules, {"matplotlib.figure": None}):  # as if it were not installed
        plot_sizes(plan)


def loop_that_counts_from_zero_again() -> None:
    saved, sampler = sampler_of(), sampler_of()
    saved.set_epoch(1)
    next(iter(saved))
    sampler.load_state_dict(saved.state_dict())
    sampler.set_epoch(0)


def measured_step_without_an_optimizer(*, clears: bool = False) -> None:
    model = nn.Linear(3, 3)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        if clears:
            model.zero_grad()

    tb.trace_peak_bytes(step, torch.ones(2, 3))


def step_on_batches_of_one_shape() -> None:
    model = nn.Linear(3, 1)
    step = step_of(lambda x: model(x).sum(), model)

    tb.measure_cost(step, lambda *_: torch.ones(5, 3), max_size=64, method="trace")


def monitored(*arguments: Any, **options: Any) -> None:
    with tb.MemoryMonitor(*arguments, **options):
        pass


def backward_beside_the_accumulator() -> None:
    trained = Trained()
    trained.model(torch.ones(4, 3)).sum().backward()
    trained.run()


def forward_outside() -> None:
    trained = Trained(of=DistributedDataParallel(nn.Linear(3, 1)))
    loss = trained.model(torch.ones(4, 3)).sum()
    with trained.accumulator.micro_batch(weight=4):
        trained.accumulator.backward(loss)


class Codebook(nn.Linear):
    """It keeps a running mean of its batches."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


PROVOCATIONS: Final[dict[str, Callable[[Path], object]]] = {
    "BudgetError": lambda _: tb.MemoryBudget(device="8 parsecs"),
    "CostError": lambda _: measured_step_without_an_optimizer(clears=True),
    "CostOverflowError": lambda _: tb.MemoryBudgetBatchSampler(
        [1_700_000_000_000], tb.PaddedCost(unit_bytes=1e6), "8GiB"
    ),
    "BatchError": lambda _: step_on_batches_of_one_shape(),
    "SizesError": lambda _: sampler_of([1.5, 2.5]),
    "OptionError": lambda _: next(iter(DataLoader(range(8), sampler=sampler_of(), batch_size=4))),
    "OversizeError": lambda _: sampler_of([3, 13, 3]),
    "UnevenRanksError": lambda _: len(sampler_of([3, 3], num_replicas=4, rank=0)),
    "ShardedTwiceError": lambda _: dealt_twice(),
    "StateError": lambda _: sampler_of().load_state_dict({"epoch": 0}),
    "StateMismatchError": lambda _: state_of_another_seed(),
    "CollateError": lambda _: tb.PadCollate()([{"x": torch.ones(2)}, {"x": torch.ones(2, 2)}]),
    "SampleError": source_that_raises,
    "MachineError": lambda _: tb.MemoryBudget.detect(device=f"cuda:{torch.cuda.device_count()}"),
    "StepError": lambda _: micro_batch_without_a_backward(),
    "RankError": lambda _: next(iter(sampler_of(seed=dist.get_rank()))),
    "SampleTooLargeError": lambda _: Trained().accumulator.run_or_split(
        lambda _: torch.ones(2**60), torch.ones(4, 3)
    ),
    "MissingExtraError": lambda _: figure_without_matplotlib(),
    "DiscardedStateWarning": lambda _: loop_that_counts_from_zero_again(),
    "OtherNumbersWarning": lambda _: loop_over([3] * 8, lambda batch: tb.PadCollate()(batch[1:])),
    "PaddedSizeWarning": lambda _: loop_over([3] * 8, tb.PadCollate(size_multiple=64)),
    "OtherSizesWarning": lambda _: loop_over(
        [2, 3] * 600,
        tb.PadCollate(),
        [torch.ones(9 if n == 700 else 2 + n % 2) for n in range(1200)],
    ),
    "MeasureWarning": lambda _: measured_step_without_an_optimizer(),
    "MemoryLimitWarning": lambda _: monitored(tb.MemoryBudget(host="1MiB")),
    "MonitorWarning": lambda _: monitored(path="/dev/full"),
    "ForgottenStepWarning": lambda _: Trained(steps=2).run(),
    "ForeignStepWarning": lambda _: backward_beside_the_accumulator(),
    "UnsynchronizedWarning": lambda _: forward_outside(),
    "ReductionWarning": lambda _: Trained().run(Tensor.mean),
    "BatchNormWarning": lambda _: Trained(
        steps=2, of=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ).run(times=2),
    "MovingStateWarning": lambda _: Trained(steps=2, of=Codebook()).run(times=2),
}
# Numbers of ranks, processes in a group of gloo, that run an action.
RANKS: Final = {"RankError": 2, "UnsynchronizedWarning": 2, "ShardedTwiceError": 1}
