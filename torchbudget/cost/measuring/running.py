"""Running the real training step on synthetic batches, and reading the memory that it takes."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from torchbudget.cost.measuring.shapes import Subject
from torchbudget.cost.models.probe import Probe
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.machine.process import process_memory

# Messages of errors without a class of their own: torch's allocator on the CPU, CUDA's libraries.
_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


class ProbeOutOfMemoryError(Exception):
    """A probe did not fit into the device's or the process's memory."""


class StepRunner:
    """Runs the step and reads its peak; to be used inside `TrainingState.restored(contents=True)`.

    Args:
        subject: the step and its batches.

    Attributes:
        idle_bytes: memory in use while no step runs.
        sampled: whether a peak was only sampled.
        not_finite: whether a step returned a number that is not finite.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._state = subject.state
        self._device = subject.state.device
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # blocks that earlier work left reserved do not count
        with peak_memory(self._device) as idle:
            pass
        self.idle_bytes = idle.bytes
        self._resident_bytes: list[int] = []  # before the second step of each probe
        # The peak of the largest batch, whose blocks stay reserved under smaller ones.
        self._largest: Peak | None = None
        self.sampled = False
        self.not_finite = False

    def run(self, n: int, size: tuple[int, ...], *, held_out: bool = False) -> Probe:
        """Step twice on batches of one shape; the first step loads kernels and fills caches.

        Raises:
            ProbeOutOfMemoryError: it did not fit; all memory that it took is freed.
        """
        try:
            return self._run(n, size, held_out=held_out)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler, the exception's frames no longer keep the step's tensors alive.
        for parameter in self._state.parameters():
            parameter.grad = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise ProbeOutOfMemoryError

    def _run(self, n: int, size: tuple[int, ...], *, held_out: bool) -> Probe:
        gc.collect()
        with self._state.checked(), peak_memory(self._device) as peak:
            for _ in range(2):
                resident_bytes = self._read_resident_bytes()
                batch = self._subject.batch(n, size)
                self._wait()
                start_s = time.perf_counter()
                result = self._subject.step(batch)
                self._check_finite(result)
                self._wait()
                seconds = time.perf_counter() - start_s
                del batch, result
        if peak.retries:
            raise ProbeOutOfMemoryError
        self.sampled |= peak.sampled
        self._resident_bytes.append(resident_bytes)
        peak_bytes = self._without_reserve(peak)
        return Probe(n, size, peak_bytes, held_out, "run", seconds)

    def settled(self, probes: Sequence[Probe]) -> list[Probe]:
        """All probes so far, as if resident memory had been from the start what it is now.

        While probes are run, kernels are compiled for new shapes, and the heap gets gaps.
        """
        now_bytes = self._read_resident_bytes()
        return [
            replace(probe, peak_bytes=probe.peak_bytes + max(now_bytes - then_bytes, 0))
            for probe, then_bytes in zip(probes, self._resident_bytes, strict=True)
        ]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _read_resident_bytes(self) -> int:
        cpu = self._device.type == "cpu"
        return process_memory().resident_bytes if cpu else 0

    def _check_finite(self, result: object) -> None:
        value = result.detach() if isinstance(result, torch.Tensor) else result
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            self.not_finite = True

    def _without_reserve(self, peak: Peak) -> int:
        """On CUDA, the peak had its blocks been reserved for it alone.

        The ratio of reserved to allocated bytes is taken to be that of the largest batch.
        """
        if not peak.allocated_bytes:
            return peak.bytes
        largest = self._largest
        if largest is None or peak.allocated_bytes > largest.allocated_bytes:
            self._largest = largest = peak
        share = peak.allocated_bytes / largest.allocated_bytes
        return peak.bytes - peak.reserved_bytes + round(share * largest.reserved_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: on CUDA, on the CPU, or Python's own."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
