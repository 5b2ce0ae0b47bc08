"""The extreme batches of a plan, run once before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from torchbudget.errors import OptionError
from torchbudget.machine.device import device_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.protocols import IndexSource
from torchbudget.restoring import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """One batch that was run.

    Attributes:
        name: "largest", "longest" or "shortest".
        samples: in the batch.
        predicted_bytes: what the sampler's cost predicts for it.
        peak_bytes: the peak of the device's memory; of resident memory on the CPU.
    """

    name: str
    samples: int
    predicted_bytes: int
    peak_bytes: int


def warm_up(step: Callable[[Any], object], loader: DataLoader[Any]) -> list[WarmUp]:
    """Run the largest, the longest and the shortest batch of the coming epoch.

    A step that would run out of memory does so now rather than after hours, and an allocator meets
    the largest blocks first. On CUDA what earlier work left reserved is returned before; the blocks
    of the first batch stay reserved, so that the peaks of the others are at least that one's. The
    first batch is run twice, since optimizers allocate their state at the first step. They are the
    extremes over all ranks, so that every rank runs the same ones. Model, optimizer and random
    generators are restored afterwards, bit for bit, and the sampler stays where it is.

    Args:
        step: the full training step on a batch of the loader's.
        loader: with a `MemoryBudgetBatchSampler` as its `batch_sampler`, over a map-style data set.

    Returns:
        What was run, with predicted and real bytes.

    Raises:
        OptionError: the loader has another sampler.
    """
    sampler: Any = loader.batch_sampler
    if not isinstance(sampler, IndexSource):
        raise OptionError(
            "warm_up needs a DataLoader with batch_sampler=MemoryBudgetBatchSampler(…), got "
            f"batch_sampler={type(sampler).__name__}"
        )
    state = TrainingState(step)
    runs: list[WarmUp] = []
    if state.device.type == "cuda":
        device_memory(state.device).source.empty_cache()
    with state.restored(contents=True):
        for name, indices in sampler.extremes().items():
            batch = loader.collate_fn([loader.dataset[index] for index in indices.tolist()])
            if not runs:
                step(batch)
            with peak_memory(state.device) as peak:
                step(batch)
            del batch  # before the next one is made
            predicted = sampler.batch_bytes(indices)
            run = WarmUp(
                name=name, samples=len(indices), predicted_bytes=predicted, peak_bytes=peak.bytes
            )
            runs.append(run)
    return runs
