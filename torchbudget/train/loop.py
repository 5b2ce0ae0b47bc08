"""Loops that are short enough to be read: an epoch, and an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torchbudget.progress import with_bar
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.process_group import Ranks
from torchbudget.train.retry import num_samples
from torchbudget.train.stepping import Step

Criterion: TypeAlias = Callable[[nn.Module, Any], Tensor]
Weight: TypeAlias = Callable[[Any], float]


def train_epoch(
    model: nn.Module,
    loader: Iterable[Any],
    criterion: Criterion,
    accumulator: GradAccumulator,
    *,
    weight: Weight = num_samples,
    device: torch.device | str | None = None,
    when_begun: Callable[[], object] | None = None,
    when_stepped: Callable[[Step, int | None], object] | None = None,
    progress: bool = False,
) -> list[Step]:
    """Train on every batch of a loader once, and flush.

    Args:
        model: in whatever mode it is.
        loader: of batches.
        criterion: `criterion(model, batch)` calls the model and gives the loss.
        accumulator: that steps; its `mean` says whether losses are means.
        weight: of a batch in the loss of a step. Default: its samples.
        device: where batches are taken; `None`: where they are.
        when_begun: called once the loader's iteration has begun, before its first batch.
        when_stepped: called with each step and the number of batches done, `None` behind the last
            one; if what it returns is true, the epoch ends there.
        progress: show a bar, where tqdm is installed and there is a terminal.

    Returns:
        The steps that were taken.
    """
    steps: list[Step] = []

    def note(step: Step, done: int | None) -> object:
        steps.append(step)
        return when_stepped is not None and when_stepped(step, done)

    batches = iter(loader)
    if when_begun is not None:
        when_begun()
    if progress:
        batches = with_bar(batches, total=_length(loader), unit="batches", leave=False)
    for done, batch in enumerate(batches, 1):
        samples = num_samples(batch) if accumulator.needs_samples else None
        with accumulator.micro_batch(weight(batch), samples=samples):
            accumulator.backward(criterion(model, _moved(batch, device)))
        if accumulator.stepped and accumulator.last is not None and note(accumulator.last, done):
            return steps
    accumulator.flush(lambda step: note(step, None))
    return steps


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
    """Σ loss / Σ weight over a loader and all ranks, in evaluation mode and without gradients.

    Every module is put back into the mode that it was in.

    Args:
        model: to be evaluated.
        loader: of batches, which ranks share as a `MemoryBudgetBatchSampler` does.
        criterion: `criterion(model, batch)` calls the model and gives the loss.
        weight: of a batch. Default: its samples.
        mean: the criterion gives means, to be multiplied by their weights.
        device: where batches are taken; `None`: where they are.
        group: of processes. Default: all, where `torch.distributed` is initialized.

    Returns:
        The loss; NaN where nothing weighs.
    """
    ranks = Ranks(group)
    modes = [(module, module.training) for module in model.modules()]
    # DDP's forward may share buffers, which is a collective: ranks may have no batch.
    shares = [m for m in model.modules() if getattr(m, "require_forward_param_sync", False)]
    for module in shares:
        module.require_forward_param_sync = False  # type: ignore[assignment]  # DDP's
    near = next(model.parameters(), torch.empty(0)).device
    losses = torch.zeros((), dtype=torch.float64, device=near)
    weighs = 0.0
    model.eval()
    try:
        for batch in loader:
            each = float(weight(batch))
            losses += criterion(model, _moved(batch, device)).double() * (each if mean else 1)
            weighs += each
    finally:
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        for module in shares:
            module.require_forward_param_sync = True  # type: ignore[assignment]  # DDP's
    total = torch.stack([losses, losses.new_tensor(weighs)]).to(ranks.device(near))
    loss, weighed = ranks.summed(total).tolist()
    return loss / weighed if weighed else math.nan


def _moved(batch: Any, device: torch.device | str | None) -> Any:
    if device is None:
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of a stream, whose length is not known in advance
        return None
