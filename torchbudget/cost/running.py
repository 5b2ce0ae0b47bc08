"""Real steps, from the smallest shape up and never over the budget: bytes that no trace sees.

`run_steps` chooses between two ways. With a trace, `_Runs.scaled` runs up to six shapes that fill
the budget, and finds how many bytes are in use for each traced byte: a scale, and an offset.
Without a trace, `_Runs.climbed` runs ever more samples of a few sizes, and makes a grid of their
peaks. On a card, `reserve_of` then runs shapes in turn, which leave gaps between blocks.
"""

from __future__ import annotations

import gc
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules.conv import _ConvNd

from torchbudget.cost.agree import joined_ranks, reducing
from torchbudget.cost.measured import MeasuredCost
from torchbudget.cost.pieces import Grid, Probe
from torchbudget.cost.subject import Size, Subject
from torchbudget.cost.timing import optimizer_seconds, timed
from torchbudget.cost.tracing import DRAWS
from torchbudget.errors import CostError, TorchBudgetError
from torchbudget.machine.allocators import kernel_caches_are_stated, trim_malloc
from torchbudget.machine.device import DeviceMemory, device_memory
from torchbudget.machine.out_of_memory import ran_out_of_memory
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.units import format_bytes

# Shares that runs aim at, of the memory that one sample leaves in the budget. The first run shows
# how many bytes are in use for each traced byte: 1.32 in a U-Net, 1.69 in a 1-d convolution. The
# last share leaves room for a surprise: of 9 models under 1 GiB, the largest run took 0.954.
_OF_NEW_SIZE: Final = 0.5  # of which no batch was run: its kernels may take other bytes
_TO_COMPARE: Final = 0.25  # with runs of another size
_FULL: Final = 0.95
# Bytes in use for each traced byte, assumed before the first run.
_GUESSED_SCALE: Final = 4 / 3
_LEAST_MARGIN: Final = 1e-2
# Without a trace: steps of 1.03 times the fit were seen.
_LEAST_UNTRACED_MARGIN: Final = 3e-2
# Peaks of one shape were seen to grow by up to 14.8 MiB after 50 others, without any tensor:
# compiled kernels, gaps in the heap.
_DRIFT_BYTES: Final = 16 * 2**20
# Pages of kernels' code that a step loads: a step on images loaded 17 MiB of them from a library
# that was just installed, which counted twice.
_LOADED_BYTES: Final = 2**22
# A process gains and loses this much without a cause in the step.
_SEEN_BYTES: Final = 2**24
# Of a step on images, three runs that grew by 80 MiB gave a scale of 1.046, seven 0.999; of an
# encoder, three that grew by 580 MiB gave 1.008.
_TELLING_BYTES: Final = 2**29
# Steps of each shape if draws may decide: of 6 layers that are each dropped with a chance of 0.1, a
# step with all of them is among 8 in 999 of 1,000 cases.
_STEPS_OF_DRAWS: Final = 8
_MOST_RUNS: Final = 20  # of a size without a trace: routed experts took 8
# Sizes on each of one or two axes that are run without a trace. With five sizes of routed experts,
# other runs were off by 0.4 %, and with six by 0.7 %; five took 20 s of computing instead of 25.
_UNTRACED_SIZES: Final = {1: 5, 2: 4}


class ProbeOutOfMemoryError(Exception):
    """A probe did not fit into the device's or the process's memory."""


def run_steps(
    subject: Subject, room: int, traced: MeasuredCost | None, *, time_too: bool
) -> MeasuredCost:
    """Run the step on a few shapes, and find an offset and a scale, or a grid, from its peaks.

    Args:
        subject: the step and its batches.
        room: bytes that no run may exceed.
        traced: the cost of the traced bytes; `None`: the step cannot be traced.
        time_too: also find how long steps take.

    Raises:
        CostError: not even one sample of the smallest size fits.
    """
    begun_s = time.perf_counter()
    if subject.state.device.type == "cpu":
        trim_malloc()
        _warn_of_kernels(subject)
    with subject.state.restored_after_runs(), ExitStack() as stack:
        gc.collect()
        # Collections then search only newer objects: one took 0.15 s with what torch imports, and
        # 0.35 s with transformers.
        if not gc.get_freeze_count():
            gc.freeze()
            stack.callback(gc.unfreeze)
        runs = _Runs(subject, StepRunner(subject), room)
        cost = runs.climbed() if traced is None else runs.scaled(traced)
        reserve = reserve_of(cost, runs.runner, subject, room)
        cost = replace(cost, offset=cost.offset + reserve)
        if time_too:
            runner, samples = runs.runner, subject.domain.samples
            measured_s, samples = runner.largest(time.perf_counter() - begun_s, samples)
            cost = timed(cost, subject, runs.room, runner.seconds_of, measured_s, samples)
    largest = subject.domain.between(1.0)
    if all(probe.size != largest for probe in cost.probes):
        subject.notes.append(
            f"no batch of the largest size, {largest}, was run: one sample of it is predicted to "
            "exceed the budget"
        )
    if traced is not None:
        cost = replace(cost, probes=(*cost.probes, *traced.probes))
    runs.runner.empty_cache()  # otherwise reserved memory would count as needed by the next step
    if runs.runner.not_finite:
        subject.warn(
            "the step returned a loss that is not finite: check that make_batch makes valid batches"
        )
    return cost


def _warn_of_kernels(subject: Subject) -> None:
    """Warn of convolutions whose kernels are cached by the thousand, more than any probe shows."""
    parts = subject.state.parts()
    if not kernel_caches_are_stated() and any(isinstance(part, _ConvNd) for part in parts):
        subject.warn(
            "convolutions on the CPU keep compiled kernels of up to 1,024 shapes, so later steps "
            "may exceed the budget: call configure_allocators() first in this script, and in that "
            "of the training"
        )


class StepRunner:
    """Runs the step and reads its peak; to be used inside `TrainingState.restored_after_runs()`.

    On CUDA the allocator's cache is emptied before each shape, so that the peak of reserved bytes
    is the shape's own. Ranks whose steps wait for each other must make the same calls; the worst of
    any rank counts on all.

    Args:
        subject: the step and its batches.

    Attributes:
        memory: of the device; `None` on the CPU.
        idle_bytes: memory in use while no step runs.
        not_finite: whether a step returned a number that is not finite.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject, self._state = subject, subject.state
        self._device = subject.state.device
        self._ranks = joined_ranks(subject.state)
        self.memory = None if self._device.type == "cpu" else device_memory(self._device)
        self.empty_cache()
        with peak_memory(self._device) as idle:
            pass
        [self.idle_bytes] = self.largest(idle.bytes)
        # Of each probe: resident before its last step; on CUDA, outside the allocator after it.
        self._beside_bytes: list[int] = []
        self._begins_anew = True  # the next step makes gradients, the first one optimizers' state
        self.not_finite = False

    def run(self, n: int, size: Size, *, held_out: bool = False) -> Probe:
        """Step on batches of one shape, once more if there are no state and gradients yet.

        On the CPU once more if the process then has more memory than before, beside tensors.

        Raises:
            ProbeOutOfMemoryError: it did not fit; all memory that it took is freed.
        """
        times = self._subject.draws + self._begins_anew
        self._begins_anew = False
        peak, beside_bytes, seconds = self.peak_of([(n, size)] * times)
        if self.memory is None:
            [loaded] = self.largest(self._read_beside_bytes() - beside_bytes)
            if loaded > _LOADED_BYTES:  # of which the peak has some: once more, with all of them
                peak, beside_bytes, seconds = self.peak_of([(n, size)])
        self._beside_bytes.append(beside_bytes)
        self._subject.advance(1)
        return Probe(n, size, peak.bytes, held_out, "run", seconds)

    def seconds_of(self, shape: tuple[int, Size]) -> float:
        """The seconds of a step on a shape, on the slowest rank; infinite if it did not fit.

        Optimizers' steps, and DDP's sums of gradients over ranks, are left out.
        """
        found = [0.0]
        with ExitStack() as stack:
            for module in reducing(self._state):
                stack.enter_context(module.no_sync())
            spent_s = stack.enter_context(optimizer_seconds(self._wait))
            failed = self._ran_out(lambda: found.append(self._step(*shape)), shape)
        failed, seconds = self.largest(failed, found[-1] - spent_s())
        if failed:
            self._free()
        return math.inf if failed else float(seconds)

    def attempt(self, shape: tuple[int, Size]) -> None:
        """Make a step on a shape, whether or not it fits.

        Raises:
            CostError: it raised an error.
        """
        with suppress(ProbeOutOfMemoryError):
            self.peak_of([shape])

    def settled(self, probes: Sequence[Probe]) -> list[Probe]:
        """All probes, as if what is in use beside tensors had been so from the start.

        While probes are run, kernels are loaded or compiled for new shapes, libraries make their
        plans and buffers, and the heap gets gaps.
        """
        now_bytes = self._read_beside_bytes()
        added = self.largest(*(max(now_bytes - then, 0) for then in self._beside_bytes))
        return [
            replace(probe, peak_bytes=probe.peak_bytes + more)
            for probe, more in zip(probes, added, strict=True)
        ]

    def largest(self, *values: float) -> list[Any]:
        """The largest value on any rank, of each."""
        return [max(same) for same in zip(*self._ranks.gather_objects(values), strict=True)]

    def empty_cache(self) -> None:
        """Give free blocks back to the device."""
        gc.collect()
        if self.memory is not None:
            self.memory.source.empty_cache()

    def peak_of(self, shapes: Sequence[tuple[int, Size]]) -> tuple[Peak, int, float]:
        """Make a step on each shape in turn, without emptying the cache in between.

        Returns:
            The peak of all, the memory in use outside tensors, and the seconds of the last one.

        Raises:
            ProbeOutOfMemoryError: one did not fit; all memory that it took is freed.
        """
        found = [(Peak(), 0, 0.0)]
        failed = self._ran_out(lambda: found.append(self._run(shapes)), shapes[-1])
        peak, beside_bytes, seconds = found[-1]
        failed |= peak.failures > 0  # a library continued without that memory
        worst = self.largest(failed, peak.bytes, peak.retries, seconds)
        failed, peak.bytes, peak.retries, seconds = worst
        if not failed:
            return peak, beside_bytes, seconds
        self._free()
        raise ProbeOutOfMemoryError

    def _ran_out(self, run: Callable[[], object], shape: tuple[int, Size]) -> bool:
        """Whether steps ran out of memory.

        Raises:
            CostError: they raised another error.
        """
        try:
            return ran_out_of_memory(run)
        except TorchBudgetError:
            raise
        except Exception as error:
            n, size = shape
            raise CostError(
                f"the step raised {type(error).__name__}: {error}, on {n} samples of size {size}: "
                "it must take batches of one sample and more, of all sizes (for a U-Net and others "
                "that halve sizes, pass size_multiple=), and make_batch, or the collate_fn of "
                "loader, must give all fields that it reads, labels included"
            ) from error

    def _free(self) -> None:
        """Free what a step has left that ran out of memory."""
        for parameter in self._state.parameters():
            parameter.grad = None
        self._begins_anew = True
        self.empty_cache()

    def _run(self, shapes: Sequence[tuple[int, Size]]) -> tuple[Peak, int, float]:
        self.empty_cache()
        with peak_memory(self._device) as peak:
            for n, size in shapes:
                beside_bytes = self._read_beside_bytes()
                with self._subject.checks.checked():
                    seconds = self._step(n, size)
        peak.bytes -= self._state.replaced_bytes()
        return peak, peak.outside_bytes if self.memory is not None else beside_bytes, seconds

    def _step(self, n: int, size: Size) -> float:
        """A step on a batch; its seconds."""
        self._state.rewind()
        batch = self._subject.batch((n, *size))
        self._wait()
        start_s = time.perf_counter()
        self._check_finite(self._subject.step(batch))
        self._wait()
        return time.perf_counter() - start_s

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


@dataclass(slots=True)
class _Runs:
    """The runs of a step so far, none of which was predicted to exceed the budget.

    Attributes:
        subject: the step and its batches.
        runner: makes the runs.
        room: bytes that no run may exceed; less than the budget once a run did not fit.
        known: the cost that predicts the next run: of traces, or of the runs so far.
        probes: the runs and their peaks.
    """

    subject: Subject
    runner: StepRunner
    room: int
    known: MeasuredCost = field(init=False)
    probes: list[Probe] = field(default_factory=list)

    # With a trace: an offset and a scale.

    def scaled(self, traced: MeasuredCost) -> MeasuredCost:
        """Run shapes that fill the budget, and fit an offset and a scale to them.

        The first three runs are one sample of the smallest size, half a budget of the largest size,
        and a quarter of a size between them. Unless these agree, three more are a full budget of
        the largest size, half of the smallest, and half of another size between them. Runs of the
        sizes in between are held out of the fit.
        """
        self.known, domain = traced, self.subject.domain
        smallest, largest = map(domain.between, (0.0, 1.0))
        short, long = (0.25, 0.8) if domain.axes == 1 else ((0.25, 0.8), (0.8, 0.25))
        self._run_first(smallest)
        self._reach_for(largest)
        self._reach_for(domain.between(short), _TO_COMPARE, held_out=True)
        # On the CPU, runs that fill the budget take most of the time, and could only raise a scale
        # above 1: none if these agree so closely that their error is small at twice the bytes, and
        # grew so much that changes without a cause hardly count.
        cost = self._fitted()
        errors, small = cost.errors(), _LEAST_MARGIN / 2
        agree = min(errors) > -small and (cost.scale > 1 or max(errors) < small)
        grown = max(probe.peak_bytes for probe in self.probes) - self.probes[0].peak_bytes
        agree &= len(self.probes) == 3 and grown >= _TELLING_BYTES
        if self.runner.memory is not None or not agree:
            self._reach_for(largest)
            self._reach_for(smallest)
            self._reach_for(domain.between(long), held_out=True)
        cost = self._fitted()
        self.probes = [*cost.probes]
        return replace(cost, margin=self._margin(cost, _LEAST_MARGIN))

    def _fitted(self) -> MeasuredCost:
        """The traced cost with the offset and the scale of the runs so far."""
        probes = self.runner.settled(self.probes)
        offset, scale = self._fit([probe for probe in probes if not probe.held_out])
        return replace(self.known, offset=offset, scale=scale, probes=tuple(probes))

    def _margin(self, cost: MeasuredCost, least: float) -> float:
        """Twice the worst underestimate of any run, but at least some bytes and a share."""
        worst = max(0.0, *(1 / (1 + error) - 1 for error in cost.errors()))
        return max(least, _DRIFT_BYTES / self.room, 2 * worst)

    def _fit(self, probes: Sequence[Probe]) -> tuple[float, float]:
        """The offset and the scale of traced bytes of a line that no run is above.

        It is as steep as the largest run of any size rose from the first: smaller runs show what is
        fixed, rather than what grows. A scale is below 1 only if two later runs of one size rose so
        little, too: a kernel does not touch all that it allocates (0.6 in an LSTM). In the first
        run alone, garbage may be the reason.
        """
        peaks = np.array([probe.peak_bytes for probe in probes], float)
        largest = {probe.size: probe for probe in sorted(probes[1:], key=lambda probe: probe.n)}
        twins = [(a, b) for a, b in combinations(probes[1:], 2) if a.size == b.size]
        shown = max((one for pair in twins for one in self._grown(pair)), default=1.0)
        scale = max([*self._grown([probes[0], *largest.values()]), min(shown, 1.0)])
        return max(float((peaks - scale * self._tensors(probes)).max()), 0.0), scale

    def _grown(self, probes: Sequence[Probe]) -> list[float]:
        """Bytes in use for each traced byte, of runs that took more than the first one."""
        tensors = self._tensors(probes)
        return [
            float((probe.peak_bytes - probes[0].peak_bytes) / (one - tensors[0]))
            for probe, one in zip(probes[1:], tensors[1:], strict=True)
            if one - tensors[0] > _SEEN_BYTES
        ]

    def _tensors(self, probes: Sequence[Probe]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        sizes = [probe.asked for probe in probes]
        return self.known.batch_bytes([probe.n for probe in probes], sizes).astype(float)

    def _run_first(self, smallest: Size) -> None:
        try:
            first = self.runner.run(1, smallest)
        except ProbeOutOfMemoryError as error:
            raise CostError(f"one sample of size {smallest} does not fit into memory") from error
        if first.peak_bytes > self.room:
            raise CostError(
                f"one sample of size {smallest} needs {format_bytes(first.peak_bytes)}, with "
                "model, gradients, optimizer state and all other memory of the process; raise the "
                f"budget, {format_bytes(self.room)}"
            )
        self.probes.append(first)

    def _reach_for(self, size: Size, most: float = _FULL, *, held_out: bool = False) -> None:
        """Run a batch of a size that takes a share of the budget, by the largest scale seen."""
        share = (
            most
            if any(probe.size == size for probe in self.probes[1:])
            else min(most, _OF_NEW_SIZE)
        )
        first, tensors = self.probes[0].peak_bytes, self._tensors(self.probes[:1])
        scale = max(1.0, max(self._grown(self.probes), default=_GUESSED_SCALE))
        # A process may take most of a budget, so shares are of the rest.
        target = min(first + share * (self.room - first), _FULL * self.room)
        wanted = int((target - first) / scale + tensors[0])
        n = int(self.known.capacity(size if len(size) > 1 else size[0], max(wanted, 0)))
        n = min(n, self.subject.most_samples(size))
        if n < 1 or any(probe.size == size and probe.n >= n for probe in self.probes):
            return
        self._run(n, size, held_out=held_out)

    def _run(self, n: int, size: Size, *, held_out: bool = False) -> bool:
        """Run a batch; if less memory than the budget is free, later ones aim at half of the rest.

        Returns:
            Whether it fitted.
        """
        try:
            self.probes.append(self.runner.run(n, size, held_out=held_out))
        except ProbeOutOfMemoryError:
            self.subject.notes.append(
                f"out of memory at {n} samples of size {size}, below the budget"
            )
            floor = min(probe.peak_bytes for probe in self.probes)
            self.room = floor + (self.room - floor) // 2
            return False
        return True

    # Without a trace: a grid of runs.

    def climbed(self) -> MeasuredCost:
        """Run ever larger batches of several sizes, until the budget is nearly filled.

        From the smallest size to the largest, `_climb` runs each. The peaks are the columns of a
        grid. Two sizes in between are held out of it, and give its margin.
        """
        domain = self.subject.domain
        nodes = domain.nodes(_UNTRACED_SIZES.get(domain.axes, 2))
        smallest = domain.between(0.0)
        self.subject.take_larger_mode(lambda: self.runner.attempt((1, smallest)))
        before = self.subject.state.draws()
        self._run_first(smallest)
        if self.subject.state.draws() != before:
            self.subject.draws = _STEPS_OF_DRAWS
            self.subject.warn(f"{_STEPS_OF_DRAWS} steps are run on each shape: {DRAWS}")
        if 2 * self.probes[0].peak_bytes - self.runner.idle_bytes <= self.room:
            self.subject.check_left(lambda step, shape: step(self.subject.batch(shape)))
            # If the first run was at a floor, the bytes of its sample are unknown. Two samples
            # fit all the same: they need at most twice the bytes.
            self._run(2, smallest)
        shapes = {domain.occurring((1, *size)) for size in product(*nodes)}
        for least, *size in sorted(shapes, key=lambda one: (math.prod(one[1:]), one)):
            self._climb((*size,), least)
        self.known = self._grid_cost(nodes)
        for share in (0.3, 0.7):
            self._reach_for(domain.between(share), held_out=True)
        self.probes = self.runner.settled(self.probes)
        cost = self._grid_cost(nodes)
        return replace(cost, margin=self._margin(cost, _LEAST_UNTRACED_MARGIN))

    def _climb(self, size: Size, least: int) -> None:
        """Run ever more samples of a size, until still more could take over 0.95 of the budget."""
        runs = [probe for probe in self.probes if probe.size == size]
        most = self.subject.most_samples(size)
        n = min(self._first_number(size, least), most)
        for _ in range(_MOST_RUNS):
            if runs:
                numbers, fewest, bound = range(most + 1), runs[-1].n, partial(self._bound, runs)
                n = bisect_right(numbers, _FULL * self.room, lo=fewest, key=bound) - 1
            if n < 1 or (runs and n <= runs[-1].n * 1.05) or not self._run(n, size):
                return
            runs.append(self.probes[-1])

    def _first_number(self, size: Size, least: int) -> int:
        """The most samples of a new size that cannot need more than a run of another size did.

        A size that is twice as long is taken to need up to four times the bytes. The number is at
        least `least`, the fewest samples that the data has, if those bytes fit the budget.
        Otherwise it is 0, and the size is not run.
        """
        idle, found = self.runner.idle_bytes, 0
        for probe in self.probes:
            pairs = zip(size, probe.size, strict=True)
            larger = math.prod(max(a / b, 1.0) for a, b in pairs) ** 2
            grown = max(probe.peak_bytes - idle, _SEEN_BYTES) / probe.n * larger
            if idle + least**2 * grown <= _FULL * self.room:
                found = max(found, least, int(probe.n / larger))
        return found

    def _bound(self, runs: Sequence[Probe], n: int) -> float:
        """The most bytes that n samples of a size need, at least as many as in its last run.

        Bytes are taken to grow as n² after the last but one run, or after no sample at all where a
        floor hides the bytes of that run. Three runs show more, the slope and how it rises: they
        are continued as a parabola, or as a line if they bend down.
        """
        last, few, fewer_bytes = runs[-1], 0, self.runner.idle_bytes
        if len(runs) > 2 and runs[-2].peak_bytes - runs[-3].peak_bytes >= _SEEN_BYTES:
            before, slope = map(_slope, runs[-3:], runs[-2:])
            rise = max(slope - before, 0.0) / (last.n - runs[-3].n)
            return last.peak_bytes + (n - last.n) * (max(slope, before) + rise * (n - runs[-2].n))
        if len(runs) > 1 and runs[-2].peak_bytes - self.probes[0].peak_bytes >= _SEEN_BYTES:
            few, fewer_bytes = runs[-2].n, runs[-2].peak_bytes
        each = max(last.peak_bytes - fewer_bytes, _SEEN_BYTES) / (last.n**2 - few**2)
        return float(last.peak_bytes + each * (n**2 - last.n**2))

    def _grid_cost(self, nodes: Sequence[Sequence[int]]) -> MeasuredCost:
        domain, fitted = self.subject.domain, [p for p in self.probes if not p.held_out]
        # A column that no samples make is that of the next larger size.
        made = {size: domain.occurring((1, *size))[1:] for size in product(*nodes)}
        run = [size for size in made if any(p.size == made[size] for p in fitted)]
        sizes = [tuple(sorted({one[k] for one in run})) for k in range(domain.axes)]
        floor = min(probe.peak_bytes for probe in fitted)
        most, reached = 2 * max(p.n for p in fitted), max(p.peak_bytes for p in fitted)
        columns = []
        for size in product(*sizes):
            runs = sorted((p for p in fitted if p.size == made[size]), key=lambda p: p.n)
            n = [0, *(probe.n for probe in runs)]
            peaks = [floor, *(float(probe.peak_bytes) for probe in runs)]
            while runs and n[-1] < most:  # a size continues by the bound of the climb
                n.append(2 * n[-1])
                peaks.append(self._bound(runs, n[-1]))
            rising = np.maximum.accumulate(peaks).tolist()
            columns.append((tuple(n), tuple(rising)) if runs else ((), ()))
        numbers, values = zip(*columns, strict=True)
        grid = Grid(tuple(sizes), numbers, values, (most,) * len(columns), reached)
        return MeasuredCost(
            pieces=(), grid=grid, smallest=domain.smallest, largest=tuple(x[-1] for x in sizes),
            multiple=domain.multiple, median=domain.median, empty=floor, probes=tuple(self.probes),
        )  # fmt: skip


def _slope(one: Probe, other: Probe) -> float:
    """Bytes for each further sample, between two runs of one size."""
    return (other.peak_bytes - one.peak_bytes) / (other.n - one.n)


# Shapes that take turns on a card. One step's blocks leave gaps, up to a quarter of the tensors'
# bytes, and more in some shapes than in others: of 160 shapes of a decoder, replayed by the rules
# of torch's allocator, the first 20 reserve 0.99 of the most.
_SHAPES_IN_TURN: Final = 24
# Shares of the budget that alternating shapes aim at: smaller ones if larger ones do not fit.
_SHARES_IN_TURN: Final = (1.0, 0.85, 0.7, 0.5)


def reserve_of(cost: MeasuredCost, runner: StepRunner, subject: Subject, room: int) -> int:
    """Bytes that torch's allocator reserves on a card when shapes take turns, beyond the cost's.

    A probe's peak is that of its shape on an empty cache. In training shapes take turns, and blocks
    that one has left may not fit the next, above all in segments of fixed sizes.
    """
    memory = runner.memory
    if memory is None:
        return 0
    drawn = np.random.default_rng(0).permutation(subject.domain.draw(_SHAPES_IN_TURN, 1)[:, 1:])
    sizes = [(*size,) for size in drawn.tolist()]
    asked = drawn if cost.axes > 1 else drawn[:, 0]
    most = [subject.most_samples(size) for size in sizes]
    fraction = memory.source.figures().fraction
    memory.limit(room)
    try:
        for share in _SHARES_IN_TURN:
            n = np.minimum(cost.capacity(asked, int(share * room)), most)
            shapes = [(one, size) for one, size in zip(n.tolist(), sizes, strict=True) if one]
            with suppress(ProbeOutOfMemoryError):
                together, *_ = runner.peak_of(shapes)
                if not together.retries:  # after one, the cache was flushed: try a smaller share
                    predicted = int(cost.batch_bytes(n, asked).max())
                    reserve = max(room - room * predicted // max(together.bytes, 1), 0)
                    break
        else:
            reserve = room // 2
            subject.warn(
                "batches of different shapes in turn do not fit the budget, although each does "
                "alone: half of it is left free for gaps between blocks; call "
                "configure_allocators(), for expandable segments, before CUDA is first used"
            )
    finally:
        memory.source.set_fraction(fraction)
    figures = memory.source.figures()
    outside = format_bytes(memory.outside_bytes(figures))
    allocator = memory.source.allocator()
    subject.notes += [
        f"{format_bytes(reserve)} are added for alternating shapes: {allocator}",
        f"outside torch's allocator this process uses {outside}: {memory.told_apart_by(figures)}",
    ]
    warn_of_kept(subject, memory)
    return reserve


def warn_of_kept(subject: Subject, memory: DeviceMemory | None) -> None:
    """Warn of what keeps memory of its own on CUDA for every new shape.

    Args:
        subject: that is warned.
        memory: of the device; `None`: this process does not use it, so that it has no graphs there.
    """
    if torch.backends.cudnn.benchmark:
        subject.warn(
            "torch.backends.cudnn.benchmark is on: for every new shape, cuDNN tries algorithms "
            "with workspaces of any size, and keeps a plan. Ragged batches often have new shapes: "
            "set it to False, or give the sampler a coarse size_multiple"
        )
    graphs = 0 if memory is None else memory.source.graph_bytes()
    if graphs:
        subject.warn(
            f"CUDA graphs, or other memory pools, keep {format_bytes(graphs)} reserved, and more "
            "for every new shape; the cost counts those of the measured shapes at most. Compile "
            "without mode='reduce-overhead', or give the sampler a coarse size_multiple"
        )
