"""Running the step, and reading its peak."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from torchbudget.cost.measuring.joined import JoinedRanks
from torchbudget.cost.measuring.shapes import BatchLimit, Size, Subject
from torchbudget.cost.models.probe import Probe
from torchbudget.machine.device import device_memory
from torchbudget.machine.out_of_memory import failed_allocations, is_out_of_memory
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.machine.process_tree import process_memory

# Batches of a shape where the step's memory depends on their values.
_REPEATED: Final = 3


class ProbeOutOfMemoryError(Exception):
    """A probe did not fit into the device's or the process's memory.

    Args:
        reached_bytes: that the process had on the device before it failed; 0: unknown.
    """

    def __init__(self, reached_bytes: int = 0) -> None:
        super().__init__(reached_bytes)
        self.reached_bytes = reached_bytes


class StepRunner:
    """Runs the step and reads its peak; to be used inside `TrainingState.restored(contents=True)`.

    On CUDA the allocator's cache is emptied before each shape, so that the peak of reserved bytes
    is the shape's own. Ranks whose steps wait for each other must make the same calls; the worst of
    any rank counts on all.

    Args:
        subject: the step and its batches.

    Attributes:
        memory: of the device; `None` on the CPU.
        idle_bytes: memory in use while no step runs.
        sampled: whether a peak was only sampled.
        not_finite: whether a step returned a number that is not finite.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._state = subject.state
        self._device = subject.state.device
        self._ranks = JoinedRanks(subject.state)
        self.memory = None if self._device.type == "cpu" else device_memory(self._device)
        self.empty_cache()
        with peak_memory(self._device) as idle:
            pass
        [self.idle_bytes] = self._ranks.largest(idle.bytes)
        # Of each probe: resident before its second step; on CUDA, outside the allocator after it.
        self._beside_bytes: list[int] = []
        self.sampled = False
        self.not_finite = False
        self._limit = BatchLimit(subject)

    def most_samples(self, size: Size) -> int:
        """The most samples of a size that a batch of a probe may have."""
        return self._limit.most_samples(size)

    def run(self, n: int, size: Size, *, held_out: bool = False) -> Probe:
        """Step twice on batches of one shape; the first step loads kernels and fills caches.

        Where the step's memory depends on values, on more batches, of which the worst counts.

        Raises:
            ProbeOutOfMemoryError: it did not fit; all memory that it took is freed.
        """
        times = 1 + _REPEATED if self._subject.depends_on_values else 2
        peak, beside_bytes, seconds = self._peak([(n, size)] * times)
        self._beside_bytes.append(beside_bytes)
        return Probe(n, size, peak.bytes, held_out, "run", seconds)

    def peak_of(self, shapes: Sequence[tuple[int, Size]]) -> Peak:
        """The peak of a step on each shape in turn, without emptying the cache in between.

        Raises:
            ProbeOutOfMemoryError: one did not fit; all memory that it took is freed.
        """
        return self._peak(shapes)[0]

    def settled(self, probes: Sequence[Probe]) -> list[Probe]:
        """All probes so far, as if what is in use beside tensors had been so from the start.

        While probes are run, kernels are loaded or compiled for new shapes, libraries make their
        plans and buffers, and the heap gets gaps.
        """
        now_bytes = self._read_beside_bytes()
        added = self._ranks.largest(*(max(now_bytes - then, 0) for then in self._beside_bytes))
        return [
            replace(probe, peak_bytes=probe.peak_bytes + more)
            for probe, more in zip(probes, added, strict=True)
        ]

    def empty_cache(self) -> None:
        """Give free blocks back to the device."""
        gc.collect()
        if self.memory is not None:
            self.memory.source.empty_cache()

    def _peak(self, shapes: Sequence[tuple[int, Size]]) -> tuple[Peak, int, float]:
        """The peak of steps, what was in use beside tensors, and the seconds of the last one."""
        failed_before = failed_allocations()
        failed, peak, beside_bytes, seconds = False, Peak(), 0, 0.0
        try:
            peak, beside_bytes, seconds = self._run(shapes)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error, failed_before):
                raise
            failed, peak.bytes = True, self._reached_bytes()
        failed |= peak.failures > 0  # that a library went on without
        worst = self._ranks.largest(failed, peak.bytes, peak.retries, seconds)
        failed, peak.bytes, peak.retries, seconds = worst
        if not failed:
            return peak, beside_bytes, seconds
        # Outside the handler, the exception's frames no longer keep the step's tensors alive.
        for parameter in self._state.parameters():
            parameter.grad = None
        self.empty_cache()
        raise ProbeOutOfMemoryError(peak.bytes)

    def _run(self, shapes: Sequence[tuple[int, Size]]) -> tuple[Peak, int, float]:
        self.empty_cache()
        with self._subject.checks.checked(), peak_memory(self._device) as peak:
            for n, size in shapes:
                beside_bytes = self._read_beside_bytes()
                batch = self._subject.batch(n, size)
                self._wait()
                start_s = time.perf_counter()
                result = self._subject.step(batch)
                self._check_finite(result)
                self._wait()
                seconds = time.perf_counter() - start_s
                del batch, result
        self.sampled |= peak.sampled
        return peak, peak.outside_bytes if self.memory is not None else beside_bytes, seconds

    def _reached_bytes(self) -> int:
        if self.memory is None:
            return 0
        figures = self.memory.source.figures()
        return figures.peak_reserved_bytes + self.memory.outside_bytes(figures)

    def _wait(self) -> None:
        if self.memory is not None:
            self.memory.source.synchronize()

    def _read_beside_bytes(self) -> int:
        if self.memory is None:
            return process_memory().resident_bytes
        return self.memory.outside_bytes(self.memory.source.figures())

    def _check_finite(self, result: object) -> None:
        value = result.detach() if isinstance(result, torch.Tensor) else result
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            self.not_finite = True
