"""Loops that are short enough to be read: an epoch, an evaluation, and a warm-up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torchbudget.display import counting
from torchbudget.distributed import Ranks
from torchbudget.errors import OptionError
from torchbudget.machine.device import device_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.protocols import (
    BatchMonitor,
    IndexSource,
    ResumableSource,
    SplittablePaddedBatch,
    Stateful,
)
from torchbudget.restoring import TrainingState, modes_of, reachable
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.batches import masked_rows, moved, num_samples, unmasked
from torchbudget.train.step import Pending, Step, check_scalar, in_float64

Criterion: TypeAlias = Callable[[nn.Module, Any], Tensor]
Weight: TypeAlias = Callable[[Any], float | Tensor]

USED_UP: Final = "an iterator is used up after one epoch: pass a DataLoader or a list of batches"


def train_epoch(
    model: nn.Module,
    loader: Iterable[Any],
    criterion: Criterion,
    accumulator: GradAccumulator,
    *,
    weight: Weight = num_samples,
    device: torch.device | str | None = None,
    when_stepped: Callable[[Step, bool], object] = lambda *_: None,
    monitor: BatchMonitor | None = None,
    progress: bool = False,
) -> None:
    """Train on every batch of a loader once, and flush.

    Args:
        model: the model; its training or evaluation mode is not changed.
        loader: a loader of batches. Its sampler or stream knows its position, as with `tracked`.
        criterion: `criterion(model, batch)` calls the model and returns the loss.
        accumulator: takes the steps; with its `mean=True` losses are means.
        weight: a function that returns the weight of a batch, as for `micro_batch`. Default: its
            number of samples.
        device: that batches are moved to; `None`: they are not moved.
        when_stepped: called with each step, and with true if no batch follows it. If it returns
            true, the epoch ends.
        monitor: a running `MemoryMonitor`, which measures every batch. With `replan=` all ranks
            need one, and batches must know their `padded_size`.
        progress: show a bar, if tqdm is installed and there is a terminal.

    Raises:
        OptionError: with the monitor's `replan=`, a batch does not know its padded size; or batches
            of a sampler come out of order.
        SampleError: the loader of a sampler or stream ended before the epoch did.
        StateError: the loader of a stream has persistent workers, which an untracked loop started.
    """
    # An error keeps this frame alive. Closing the iterator ends the workers now, and not when the
    # error is freed: then torch would wait five seconds for each.
    with closing(_each(loop_over(loader))) as batches:
        total = batches_left(loader) if progress else None
        shown = counting(total=total, unit="batches", leave=False, shown=progress)
        with shown as advance:
            for batch in batches:
                samples = num_samples(batch) if accumulator.needs_samples else None
                measured = _measured(batch, monitor)
                with measured, accumulator.micro_batch(weight(batch), samples=samples):
                    accumulator.backward(criterion(model, moved(batch, device)))
                advance(1)
                last = accumulator.last
                if accumulator.stepped and last is not None and when_stepped(last, False):
                    return
    accumulator.flush(lambda step: when_stepped(step, True))


def _measured(batch: Any, monitor: BatchMonitor | None) -> AbstractContextManager[object]:
    """The context in which the monitor measures a batch."""
    if monitor is None:
        return nullcontext()
    if not isinstance(batch, SplittablePaddedBatch):
        return monitor.batch()
    return monitor.batch(batch.num_samples + masked_rows(batch), batch.padded_size)


def _each(batches: Iterator[Any]) -> Generator[Any, None, None]:
    yield from batches


def loop_over(loader: Any) -> Iterator[Any]:
    """Begin a loop over a loader, whose sampler or stream knows the received batches.

    So it is an error if the loop ends before the epoch does, as after a `StopIteration` out of
    a `collate_fn`, and batches are compared with what was planned.
    """
    source = source_of(loader)
    if source is not None and not isinstance(loader, Stateful):
        return source.tracked(loader)  # type: ignore[no-any-return]
    if source is not None:
        source.check_ranks()
    return iter(loader)


def sources_of(loader: Any) -> dict[str, Any]:
    """The batch sampler, the sampler and the data set of a loader of any class, if it has them."""
    return {name: getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")}


def source_of(loader: Any) -> Any:
    """The budgeted sampler or stream that a loader reads, or `None`."""
    found = sources_of(loader).values()
    return next((one for one in found if isinstance(one, ResumableSource)), None)


def index_source_of(loader: Any, caller: str, options: str = "…") -> IndexSource:
    """The batch sampler of a loader, which must know the indices of each batch."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, IndexSource):
        raise OptionError(
            f"{caller} needs a DataLoader with batch_sampler=MemoryBudgetBatchSampler({options}), "
            f"which knows the indices of each batch: got {type(loader).__name__} with "
            f"batch_sampler={type(sampler).__name__}"
        )
    return sampler


def read_as_plain(loader: Any) -> Any:
    """Return a `DataLoader` for a `StatefulDataLoader` whose sampler or stream has the position.

    After the last batch of an epoch its own state would go on with the batches of the next epoch.
    """
    if source_of(loader) is None or not isinstance(loader, Stateful):
        return loader
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    vars(plain).update(vars(loader), _iterator=None)
    return plain


def batches_left(loader: Any) -> int | None:
    """Number of batches in a loop over a loader; `None` if it is unknown in advance.

    The length of a loader is that of the whole epoch, also if its sampler continues within it.
    """
    sampler = getattr(loader, "batch_sampler", None)
    left = sampler.batches_left if isinstance(sampler, ResumableSource) else None
    return left or length_hint(loader) or None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    criterion: Criterion,
    *,
    weight: Weight = num_samples,
    mean: bool = False,
    device: torch.device | str | None = None,
    group: Any = None,
) -> float:
    """Compute Σ loss / Σ weight over a loader and all ranks, without gradients.

    The modules are in evaluation mode meanwhile, and afterwards in the mode that they were in.

    Args:
        model: the model.
        loader: a loader of this rank's share of the batches, as with a `MemoryBudgetBatchSampler`.
        criterion: `criterion(model, batch)` calls the model and returns the loss. The modules that
            it refers to, such as a head, are in evaluation mode, too.
        weight: a function that returns the weight of a batch. Default: its number of samples.
        mean: the criterion returns means, which are multiplied by their weights.
        device: that batches are moved to; `None`: they are not moved.
        group: process group. Default: all ranks, if `torch.distributed` is initialized.

    Returns:
        The loss.

    Raises:
        OptionError: a loss is not a scalar tensor, or a weight is not a number of at least 0; all
            weights are 0 on all ranks; or batches of a sampler come out of order.
        SampleError: the loader of a sampler or stream ended before the epoch did.
        StateError: the loader of a stream has persistent workers, which an untracked loop started.
    """
    ranks = Ranks(group)
    near = next(model.parameters(), torch.empty(0)).device
    losses = torch.zeros((), dtype=torch.float64, device=near)
    weights = Pending()
    with evaluation_mode([*modules_of(model), *modules_of(criterion)]):
        for batch in loop_over(loader):
            batch = unmasked(batch)
            own = Pending.of(weight(batch), read=mean)
            loss = criterion(model, moved(batch, device))
            check_scalar(loss)
            if own.weight or not mean:  # the mean of nothing is NaN, and counts for nothing
                losses += in_float64(loss.reshape(())) * (own.weight if mean else 1)
            weights += own
    total = torch.stack([losses, losses.new_full((), weights.total_weight())])
    loss, weight_sum = ranks.sum(total.to(ranks.device(near))).tolist()
    if not weight_sum:
        raise OptionError(f"no batch had a weight above 0: {USED_UP}")
    mean_loss: float = loss / weight_sum
    return mean_loss


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function or a module refers to, itself and those in lists included."""
    return [one for one in reachable(function) if isinstance(one, nn.Module)]


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Modules are in evaluation mode inside, and then each part in the mode that it was in."""
    put_back = modes_of(models)
    # A forward of DDP may broadcast buffers: a collective that a rank without a batch would
    # never join.
    broadcasting = [
        part
        for part in {part for model in models for part in model.modules()}
        if isinstance(part, DistributedDataParallel) and part.require_forward_param_sync
    ]
    for replicated in broadcasting:
        replicated.require_forward_param_sync = False
    try:
        for model in models:
            model.eval()
        yield
    finally:
        # Before 2.11, an open autocast has cached casts that were made without a graph.
        torch.clear_autocast_cache()
        put_back()
        for replicated in broadcasting:
            replicated.require_forward_param_sync = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """One batch that was run.

    Attributes:
        name: "largest", "longest" or "shortest".
        samples: number of samples in the batch.
        predicted_bytes: bytes that the sampler's cost predicts.
        peak_bytes: real peak of the device's memory; on the CPU of resident memory.
    """

    name: str
    samples: int
    predicted_bytes: int
    peak_bytes: int


def warm_up(step: Callable[[Any], object], loader: DataLoader[Any]) -> list[WarmUp]:
    """Run the largest, the longest and the shortest batch of the coming epoch.

    If a step would run out of memory, it does so now rather than after hours. The allocator also
    gets the largest blocks first. On CUDA memory that earlier work left reserved is returned
    before; the blocks of the first batch stay reserved, so the peaks of the other batches are at
    least as high. The first batch runs twice, since optimizers allocate their state at the first
    step. The batches are the extremes over all ranks, so every rank runs the same ones. Afterwards
    model, optimizer and random generators are as they were, bit for bit, and the sampler has not
    moved.

    Args:
        step: the complete training step on a batch of the loader.
        loader: a loader whose `batch_sampler` is a `MemoryBudgetBatchSampler`, over a map-style
            data set.

    Returns:
        The three batches, with predicted and real bytes.

    Raises:
        OptionError: the loader has another sampler.
    """
    sampler = index_source_of(loader, "warm_up")
    state = TrainingState(step)
    runs: list[WarmUp] = []
    if state.device.type == "cuda":
        device_memory(state.device).source.empty_cache()
    with state.restored_after_runs():
        for name, indices in sampler.extremes().items():
            batch = loader.collate_fn([loader.dataset[index] for index in indices.tolist()])
            if not runs:
                step(batch)
            state.rewind()
            with peak_memory(state.device) as peak:
                step(batch)
            del batch  # before the next one is made
            predicted = sampler.batch_bytes(indices)
            run = WarmUp(
                name=name,
                samples=len(indices),
                predicted_bytes=predicted,
                peak_bytes=peak.bytes - state.replaced_bytes(),
            )
            runs.append(run)
    return runs
