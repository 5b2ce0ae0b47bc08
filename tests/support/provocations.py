"""For each class of errors and warnings what a user does that meets it, in a few lines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchbudget as tb
from tests.support.ranks import run_ranks
from torchbudget import errors

BYTE_EACH: Final = tb.PaddedCost(unit_bytes=1)


Met = list[tuple[str, str]]  # names of classes, and messages
Provoking = Callable[[Path], object]


def collected(run: Provoking, folder: Path) -> Met:
    """Torchbudget's warnings, in order, and its error at the end; what others raise passes."""
    found: Met = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(folder)
        except errors.TorchBudgetError as error:
            found.append((type(error).__name__, str(error)))
    warned = [one for one in caught if issubclass(one.category, errors.TorchBudgetWarning)]
    return [(one.category.__name__, str(one.message)) for one in warned] + found


ON_RANKS = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from tests.support.provocations import PROVOCATIONS, collected

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
found = collected(PROVOCATIONS[sys.argv[2]].run, folder)
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
"""


@dataclass(frozen=True)
class Provocation:
    """What raises or warns.

    Attributes:
        name: of the class.
        run: does it, with an empty folder.
        ranks: processes of their own that run it, in a group of gloo; 0: this one does.
        package: that must be installed, or None.
    """

    name: str
    run: Provoking
    ranks: int
    package: str | None

    def met(self, folder: Path) -> list[Met]:
        """What each rank has met."""
        if not self.ranks:
            return [collected(self.run, folder)]
        return run_ranks(ON_RANKS, folder, self.ranks, self.name)


PROVOCATIONS: Final[dict[str, Provocation]] = {}


def provokes(
    kind: type[Exception], *, ranks: int = 0, package: str | None = None
) -> Callable[[Provoking], Provoking]:
    """Enter a function into the table."""

    def entered(run: Provoking) -> Provoking:
        PROVOCATIONS[kind.__name__] = Provocation(kind.__name__, run, ranks, package)
        return run

    return entered


# What the functions below begin with.


def sampler_of(sizes: Any = (3,) * 8, budget: Any = 12, **options: Any) -> Any:
    return tb.MemoryBudgetBatchSampler(sizes, BYTE_EACH, budget, **options)


def loop_over(sampler: Any, dataset: Any, collate: Any) -> Iterator[Any]:
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    return iter(sampler.tracked(loader))


class Trained:
    """A small model and its accumulator, whose step ends after `steps` micro-batches."""

    def __init__(self, *, steps: int = 1, of: nn.Module | None = None) -> None:
        self.model = nn.Linear(3, 1) if of is None else of
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accumulator = tb.GradAccumulator(self.optimizer, self.model, steps=steps)

    def run(self, loss_of: Callable[[Tensor], Tensor] = Tensor.sum) -> None:
        with self.accumulator.micro_batch(weight=4):
            self.accumulator.backward(loss_of(self.model(torch.ones(4, 3)).square()))


# ---------------------------------------------------------------------- errors


@provokes(errors.BudgetError)
def a_budget_that_is_no_number(folder: Path) -> None:
    tb.MemoryBudget(device="8 parsecs")


@provokes(errors.CostError)
def a_cost_of_floats(folder: Path) -> None:
    class Halves:
        def batch_bytes(self, n: Any, padded_size: Any) -> Any:
            return n * np.asarray(padded_size) / 2

        def capacity(self, padded_size: Any, budget_bytes: Any) -> Any:
            return 2 * budget_bytes // np.asarray(padded_size)

    tb.MemoryBudgetBatchSampler([3] * 8, Halves(), 12)


@provokes(errors.CostOverflowError)
def sizes_that_are_time_stamps(folder: Path) -> None:
    cost = tb.PaddedCost(unit_bytes=1e6)
    tb.MemoryBudgetBatchSampler([1_700_000_000_000], cost, "8GiB")


@provokes(errors.SizesError)
def sizes_that_are_floats(folder: Path) -> None:
    sampler_of([1.5, 2.5])


@provokes(errors.OptionError)
def batches_that_are_batched_again(folder: Path) -> None:
    next(iter(DataLoader(range(8), sampler=sampler_of(), batch_size=4)))  # type: ignore[arg-type]


@provokes(errors.OversizeError)
def a_sample_over_the_budget(folder: Path) -> None:
    sampler_of([3, 13, 3])


@provokes(errors.UnevenRanksError)
def fewer_samples_than_ranks(folder: Path) -> None:
    len(sampler_of([3, 3], num_replicas=4, rank=0))


@provokes(errors.ShardedTwiceError, ranks=1, package="accelerate")
def batches_that_are_dealt_twice(folder: Path) -> None:
    """As what `Accelerator.prepare` makes does on the first of two processes."""
    from accelerate.data_loader import BatchSamplerShard

    sampler = sampler_of(num_replicas=2, rank=0)
    next(iter(BatchSamplerShard(sampler, num_processes=2, even_batches=False)))


@provokes(errors.StateError)
def a_state_of_something_else(folder: Path) -> None:
    sampler_of().load_state_dict({"epoch": 0})


@provokes(errors.StateMismatchError)
def a_state_of_another_seed(folder: Path) -> None:
    sampler = sampler_of(seed=1)
    next(iter(sampler))
    sampler_of(seed=2).load_state_dict(sampler.state_dict())


@provokes(errors.CollateError)
def samples_of_different_types(folder: Path) -> None:
    tb.PadCollate()([{"x": torch.ones(2)}, {"x": torch.ones(2, 2)}])


@provokes(errors.SampleError)
def a_source_that_raises(folder: Path) -> None:
    shards = [(folder / "missing.txt").open]
    next(iter(tb.BudgetedIterableDataset(shards, BYTE_EACH, 12, size=len, collate_fn=list)))


@provokes(errors.MachineError)
def a_device_that_is_not_there(folder: Path) -> None:
    tb.MemoryBudget.detect(device=f"cuda:{torch.cuda.device_count()}")


@provokes(errors.StepError)
def a_micro_batch_without_a_backward(folder: Path) -> None:
    with Trained().accumulator.micro_batch(weight=1):
        pass


@provokes(errors.RankError, ranks=2)
def ranks_of_different_seeds(folder: Path) -> None:
    next(iter(sampler_of(seed=dist.get_rank())))


@provokes(errors.SampleTooLargeError)
def a_sample_beyond_all_memory(folder: Path) -> None:
    Trained().accumulator.run_or_split(lambda _: torch.ones(2**60), torch.ones(4, 3))


@provokes(errors.MissingExtraError)
def a_figure_without_matplotlib(folder: Path) -> None:
    from torchbudget.observe.figures import plot_sizes

    plan = sampler_of().plan
    with patch.dict(sys.modules, {"matplotlib.figure": None}):  # as if it were not installed
        plot_sizes(plan)


# ---------------------------------------------------------------------- warnings


@provokes(errors.DiscardedStateWarning)
def a_loop_that_counts_from_zero_again(folder: Path) -> None:
    saved, sampler = sampler_of(), sampler_of()
    saved.set_epoch(1)
    next(iter(saved))
    sampler.load_state_dict(saved.state_dict())
    sampler.set_epoch(0)


@provokes(errors.OtherNumbersWarning)
def a_collate_that_drops_samples(folder: Path) -> None:
    collate = tb.PadCollate()
    samples = [torch.ones(3)] * 8
    list(loop_over(sampler_of(), samples, lambda batch: collate(batch[1:])))


@provokes(errors.PaddedSizeWarning)
def a_collate_that_rounds_up(folder: Path) -> None:
    samples = [torch.ones(3)] * 8
    list(loop_over(sampler_of(), samples, tb.PadCollate(size_multiple=64)))


@provokes(errors.OtherSizesWarning)
def sizes_of_other_samples(folder: Path) -> None:
    sizes = [2, 3] * 600
    samples = [torch.ones(size) for size in sizes]
    samples[700] = torch.ones(9)
    list(loop_over(sampler_of(sizes), samples, tb.PadCollate()))


@provokes(errors.MeasureWarning)
def a_measured_step_without_an_optimizer(folder: Path) -> None:
    model = nn.Linear(3, 3)
    tb.trace_peak_bytes(lambda x: model(x).sum().backward(), torch.ones(2, 3))


@provokes(errors.MemoryLimitWarning)
def a_host_that_is_nearly_full(folder: Path) -> None:
    with tb.MemoryMonitor(tb.MemoryBudget(host="1MiB")):
        pass


@provokes(errors.MonitorWarning)
def a_disk_that_is_full(folder: Path) -> None:
    with tb.MemoryMonitor(path="/dev/full"):
        pass


@provokes(errors.ForgottenStepWarning)
def a_loop_without_flush(folder: Path) -> None:
    Trained(steps=2).run()


@provokes(errors.ForeignStepWarning)
def a_backward_beside_the_accumulator(folder: Path) -> None:
    trained = Trained()
    trained.model(torch.ones(4, 3)).sum().backward()
    trained.run()


@provokes(errors.UnsynchronizedWarning, ranks=2)
def a_forward_outside(folder: Path) -> None:
    trained = Trained(of=DistributedDataParallel(nn.Linear(3, 1)))
    loss = trained.model(torch.ones(4, 3)).sum()
    with trained.accumulator.micro_batch(weight=4):
        trained.accumulator.backward(loss)


@provokes(errors.ReductionWarning)
def a_mean_for_a_sum(folder: Path) -> None:
    Trained().run(Tensor.mean)


@provokes(errors.BatchNormWarning)
def batch_normalisation(folder: Path) -> None:
    trained = Trained(steps=2, of=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    trained.run()
    trained.run()


class Codebook(nn.Linear):
    """It keeps a running mean of its batches."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


@provokes(errors.MovingStateWarning)
def a_codebook(folder: Path) -> None:
    trained = Trained(steps=2, of=Codebook())
    trained.run()
    trained.run()
