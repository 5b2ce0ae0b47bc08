"""The real training step, run on synthetic batches, and the memory that it really takes."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from torchbudget.cost.measuring.shapes import one_size
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.cost.models.measured import Probe
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.machine.process import process_memory

# What is said without a class of its own: by torch's allocator on the CPU, and by CUDA's libraries.
_TELLS: Final = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


class ProbeOutOfMemoryError(Exception):
    """A probe did not fit into the device's or the process's memory."""


class StepRunner:
    """Runs the step and reads the peak; to be used inside `TrainingState.kept(contents=True)`.

    Args:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        state: what the step trains.

    Attributes:
        idle_bytes: what is held while no step runs.
        sampled: whether a peak was only looked for now and then.
        not_finite: whether a step returned what is no finite number.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        make_batch: Callable[[int, Any], Any],
        state: TrainingState,
    ) -> None:
        self._step = step
        self._make_batch = make_batch
        self._state = state
        if state.device.type == "cuda":
            torch.cuda.empty_cache()  # what other work has left reserved is none of the step's
        with peak_memory(state.device) as idle:
            pass
        self.idle_bytes = idle.bytes
        self._held: list[int] = []
        # Reserved over allocated bytes of the largest batch: smaller ones find its blocks reserved.
        self._reserved: Peak | None = None
        self.sampled = False
        self.not_finite = False

    def run(self, n: int, size: tuple[int, ...], *, held_out: bool = False) -> Probe:
        """Step twice on a batch of one shape; the first time loads kernels and fills caches.

        Raises:
            ProbeOutOfMemoryError: it did not fit; everything that it held is given back.
        """
        try:
            return self._run(n, size, held_out=held_out)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Here the exception is gone, and with it the frames that held the step's tensors.
        for parameter in self._state.parameters():
            parameter.grad = None
        gc.collect()
        if self._state.device.type == "cuda":
            torch.cuda.empty_cache()
        raise ProbeOutOfMemoryError

    def _run(self, n: int, size: tuple[int, ...], *, held_out: bool) -> Probe:
        gc.collect()
        with self._state.watched(), peak_memory(self._state.device) as peak:
            for _ in range(2):
                held_bytes = self._held_bytes()
                batch = self._make_batch(n, one_size(size))
                self._wait()
                start_s = time.perf_counter()
                result = self._step(batch)
                self._note(result)
                self._wait()
                seconds = time.perf_counter() - start_s
                del batch, result
        if peak.retries:
            raise ProbeOutOfMemoryError
        self.sampled |= peak.sampled
        self._held.append(held_bytes)
        peak_bytes = self._without_reserve(peak)
        return Probe(n, size, peak_bytes, held_out, "run", seconds)

    def settled(self, probes: Sequence[Probe]) -> list[Probe]:
        """All probes so far, as if what the process holds by now had been there from the start.

        Kernels are compiled for new shapes, and the heap gets its gaps, while probes are run.
        """
        now_bytes = self._held_bytes()
        return [
            replace(probe, peak_bytes=probe.peak_bytes + max(now_bytes - held_bytes, 0))
            for probe, held_bytes in zip(probes, self._held, strict=True)
        ]

    def _wait(self) -> None:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)

    def _held_bytes(self) -> int:
        cpu = self._state.device.type == "cpu"
        return process_memory().resident_bytes if cpu else 0

    def _note(self, result: object) -> None:
        value = result.detach() if isinstance(result, torch.Tensor) else result
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            self.not_finite = True

    def _without_reserve(self, peak: Peak) -> int:
        if not peak.allocated_bytes:
            return peak.bytes
        largest = self._reserved
        if largest is None or peak.allocated_bytes > largest.allocated_bytes:
            self._reserved = largest = peak
        share = peak.allocated_bytes / largest.allocated_bytes
        return peak.bytes - peak.reserved_bytes + round(share * largest.reserved_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: on CUDA, on the CPU, or Python's own."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TELLS)
