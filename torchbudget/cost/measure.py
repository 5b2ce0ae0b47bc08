"""Measuring what a batch costs on the user's own training step."""

from __future__ import annotations

import hashlib
import math
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from torchbudget.budget import MemoryBudget
from torchbudget.cost.fit import (
    FloatArray,
    features,
    fit_peaks,
    fit_traces,
    non_negative,
    num_coefficients,
    total_cost,
)
from torchbudget.cost.measured import Form, MeasuredCost, Probe
from torchbudget.cost.padded import PaddedCost
from torchbudget.cost.run import ProbeOutOfMemoryError, StepRunner
from torchbudget.cost.table import TableCost
from torchbudget.cost.trace import StepTracer, Trace
from torchbudget.cost.training_state import TrainingState
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine import return_freed_memory
from torchbudget.units import format_bytes

Method: TypeAlias = Literal["auto", "trace", "run"]
Size: TypeAlias = tuple[int, ...]

# Short sizes of probes are one more than a multiple of this, where strides by powers of two round
# up most: what that comes to in each sample is seen where it counts.
_STRIDE: Final = 32
# Where a shape lies in the range of sizes, on every axis, and how many samples it has.
_TRACED_1: Final = ((2, 1 / 16), (3, 1.0), (8, 1 / 4), (16, 1 / 2), (5, 0.7), (24, 1 / 8))
_TRACED_2: Final = (
    (2, (1 / 8, 1 / 8)),
    (3, (1.0, 1.0)),
    (4, (1.0, 1 / 4)),
    (5, (1 / 4, 1.0)),
    (16, (1 / 2, 1 / 2)),
    (8, (1 / 3, 1 / 6)),
    (8, (1 / 8, 1 / 2)),
    (24, (1.0, 1 / 2)),
)
_HELD_OUT: Final = ((12, 1 / 3), (4, 0.85))
# Which share of the budget a run aims at, where in the range of sizes, and whether it is held out.
# The first one finds out how the trace and the machine go together, at a safe distance.
_RUN_1: Final = (
    (0.4, 1 / 2, False),
    (0.9, 1.0, False),
    (0.9, 1 / 8, False),
    (0.65, 1 / 3, False),
    (0.9, 1 / 2, True),
    (0.95, 1 / 5, True),
)
# For several axes: of every second one, and of the others.
_RUN_2: Final = (
    (0.4, (1 / 2, 1 / 2), False),
    (0.9, (1.0, 1.0), False),
    (0.9, (1.0, 1 / 8), False),
    (0.9, (1 / 8, 1.0), False),
    (0.9, (1 / 3, 1 / 4), True),
    (0.95, (1 / 3, 1.0), True),
)
# Traced forms that a factor and an offset bring this near to what was run need no more.
_SCALED: Final = 0.01
# A form that is off by more on what was held out is not the step's.
_FITS: Final = 0.1
_LEAST_TRACE_MARGIN: Final = 1e-3
_LEAST_RUN_MARGIN: Final = 1e-2


def measure_cost(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    *,
    max_size: int | Sequence[int],
    budget: MemoryBudget | int | str | None = None,
    method: Method = "auto",
    device: str | torch.device | None = None,
    size_multiple: int = 1,
) -> MeasuredCost:
    """Learn the peak bytes of a training step as a function of its batch's shape.

    *Tracing* replays the step on fake tensors for at most 10 shapes, without the memory and the
    arithmetic; it tells the bytes of tensors. *Running* steps for real on at most 8 synthetic
    batches of up to 0.95 of the budget, twice each, and reads what the machine counts: resident
    memory on the CPU, reserved memory and what lies outside torch's allocator on CUDA. "auto"
    traces to know the form and to choose the shapes, and runs to find offset and scale. What the
    process holds beside the step, and goes on holding (interpreter, libraries, data), is part of
    what was run on the CPU; so measure in the process that will train, once everything is loaded.

    Model, optimizer, schedulers, gradient scalers and random generators are found in what the step
    refers to, and are afterwards as they were, bit for bit.

    On the CPU, running makes glibc give freed blocks back at once (`return_freed_memory`), and
    leaves it so: without, the peak depends on all the shapes that came before.

    Args:
        step: the full training step: forward, loss, backward, optimizer step, gradients cleared.
        make_batch: makes a batch of n samples padded to a size: `make_batch(n, size)`, with an int
            for one axis and a tuple of ints for several.
        max_size: the largest size on every axis.
        budget: what a run may take: the device's bytes; needed unless `method="trace"`.
        method: "trace", "run" or "auto"; where a step cannot be traced, "auto" runs only.
        device: to be sure of: the device that the parameters are on.
        size_multiple: sizes of probes are multiples of it, as the sampler's padded sizes are.

    Returns:
        A cost whose margin is twice the largest underestimate on shapes that were held out, at
        least 0.1 % where it was traced and 1 % where it was run.

    Raises:
        CostError: the step cannot be measured, is no full training step, or does not fit the budget
            with one sample of the smallest size; or `make_batch` ignores what it is asked for.

    Warns:
        MeasureWarning: the step leaves memory behind, returns no finite loss, or does not take the
            form that is fitted.
    """
    if method not in ("auto", "trace", "run"):
        raise CostError(f"method must be 'auto', 'trace' or 'run', got {method!r}")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise CostError(f"device={str(device)!r}: this torch has no CUDA device to measure on")
    domain = _Domain.of(max_size, size_multiple)
    room = None if budget is None else MemoryBudget.of(budget).device
    if method != "trace" and room is None:
        raise CostError(
            "budget is needed to run the step: it must not take more; or pass method='trace'"
        )
    state = TrainingState(step)
    if device is not None and torch.device(device).type != state.device.type:
        raise CostError(f"device={str(device)!r}, but the step's parameters are on {state.device}")
    notes: list[str] = []
    if method == "trace" or room is None:
        traced = _trace(step, make_batch, state, domain)
        notes += traced.notes
        forms, probes, least = traced.forms, traced.probes, _LEAST_TRACE_MARGIN
    else:
        known = None if method == "run" else _trace_or_note(step, make_batch, state, domain, notes)
        forms, probes = _run(step, make_batch, state, domain, room, known, notes)
        least = _LEAST_RUN_MARGIN
    measured = MeasuredCost(
        forms=forms, margin=0, probes=probes, measured_on=measured_on(step), notes=tuple(notes)
    )
    return _with_margin(measured, least)


def measured_on(step: Callable[[Any], object]) -> dict[str, str]:
    """What a cost of this step depends on, beside the shapes: model, dtype, device, torch.

    >>> model = torch.nn.Linear(2, 3)
    >>> measured_on(lambda batch: model(batch))["model"]
    'Linear, 9 parameters, 2bfe5e49'
    """
    state = TrainingState(step)
    parameters = state.parameters()
    shapes = repr([(tuple(p.shape), p.requires_grad) for p in parameters])
    digest = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
    names = ", ".join(type(module).__name__ for module in state.modules) or "no module"
    device = state.device
    cuda = device.type == "cuda"
    return {
        "model": f"{names}, {sum(p.numel() for p in parameters):,} parameters, {digest}",
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in state.optimizers),
        "dtype": ", ".join(sorted({str(p.dtype) for p in parameters})),
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
    }


class _BatchError(CostError):
    """`make_batch` does not do what it is asked for, however the step is measured."""


@dataclass(frozen=True, slots=True)
class _Domain:
    """The sizes that probes may have."""

    largest: Size
    multiple: int

    @classmethod
    def of(cls, max_size: int | Sequence[int], multiple: int) -> _Domain:
        largest = (max_size,) if isinstance(max_size, int) else tuple(max_size)
        if not largest or any(not isinstance(one, int) or one < 1 for one in largest):
            raise CostError(f"max_size must be an int of at least 1, or one per axis: {max_size!r}")
        if multiple < 1:
            raise CostError(f"size_multiple must be at least 1, got {multiple!r}")
        return cls(tuple(-(-one // multiple) * multiple for one in largest), multiple)

    def at(self, fractions: float | Sequence[float]) -> Size:
        """The size at a fraction of the largest one, on every axis."""
        each = [fractions] * len(self.largest) if isinstance(fractions, float) else fractions
        return tuple(map(self._snap, each, self.largest))

    def _snap(self, fraction: float, largest: int) -> int:
        size = max(round(fraction * largest), 1)
        if self.multiple > 1:
            return min(-(-size // self.multiple) * self.multiple, largest)
        if 2 * _STRIDE < size <= largest / 4:
            size -= (size - 1) % _STRIDE
        return size


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    forms: tuple[Form, ...]
    probes: tuple[Probe, ...]
    notes: tuple[str, ...]


# ---------------------------------------------------------------------- tracing


def _shapes(domain: _Domain) -> list[tuple[int, Size, bool]]:
    """Samples, size, and whether it is held out, of each traced shape."""
    axes = len(domain.largest)
    wanted: list[tuple[int, Any, bool]]
    if axes <= 2:
        wanted = [(n, where, False) for n, where in (_TRACED_1 if axes == 1 else _TRACED_2)]
    else:
        # Spread evenly by the fractional parts of multiples of roots of primes.
        steps = np.sqrt([2, 3, 5, 7, 11, 13, 17, 19][:axes])
        spread = np.outer(np.arange(1, num_coefficients(axes) + 3), steps) % 1
        wanted = [(2 + i % 7, 2.0 ** (3 * where - 3), False) for i, where in enumerate(spread)]
    wanted += [(n, where, True) for n, where in _HELD_OUT]
    found: dict[tuple[int, Size], tuple[int, Size, bool]] = {}
    for n, where, held_out in wanted:
        size = domain.at(where)
        found.setdefault((n, size), (n, size, held_out))
    return list(found.values())


def _trace_or_note(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    state: TrainingState,
    domain: _Domain,
    notes: list[str],
) -> _Traced | None:
    """A step that cannot be traced can still be run."""
    try:
        traced = _trace(step, make_batch, state, domain)
    except _BatchError:
        raise
    except CostError as error:
        notes.append(f"only run, not traced: {error}")
        return None
    notes += traced.notes
    return traced


def _trace(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    state: TrainingState,
    domain: _Domain,
) -> _Traced:
    shapes = _shapes(domain)
    seen: dict[Any, tuple[int, Size]] = {}

    def batches() -> Iterator[Any]:
        for n, size, _ in [*shapes, shapes[0]]:
            batch = make_batch(n, size if len(size) > 1 else size[0])
            _check_shape(batch, n, size, seen)
            yield batch
            del batch

    *traces, again = StepTracer(step, state).traces(batches())
    notes = []
    if any(trace.kept_bytes > 0 for trace in traces):
        kept = max(trace.kept_bytes for trace in traces)
        text = f"a step leaves up to {format_bytes(kept)} behind that nobody frees: a leak?"
        warnings.warn(text, MeasureWarning, stacklevel=3)
        notes.append(text)
    elif again.peak_bytes != traces[0].peak_bytes:
        text = (
            f"two steps on one shape took {format_bytes(traces[0].peak_bytes)} and "
            f"{format_bytes(again.peak_bytes)}: the step's memory does not depend on shapes alone"
        )
        warnings.warn(text, MeasureWarning, stacklevel=3)
        notes.append(text)
    if traces[0].assumed:
        notes.append(
            f"the step asked tensors for {traces[0].assumed} truth values; the trace takes all of "
            "them for False"
        )
    probes = tuple(
        Probe(n, size, trace.peak_bytes, held_out, "trace")
        for (n, size, held_out), trace in zip(shapes, traces, strict=True)
    )
    forms = _fit_traced(probes, traces, domain)
    if forms is None:
        notes.append("the step's operations depend on the shape: fitted to the peaks alone")
        forms = _fit_peaks(probes)
    return _Traced(_table_unless_it_fits(forms, probes, notes), probes, tuple(notes))


def _check_shape(batch: Any, n: int, size: Size, seen: dict[Any, tuple[int, Size]]) -> None:
    """Two shapes that were asked for must not come as one."""
    held = dict(batch) if isinstance(batch, Mapping) else batch
    shapes = tuple(tuple(t.shape) for t in tree_leaves(held) if isinstance(t, torch.Tensor))
    if not shapes:
        return  # some type of the user's own
    before = seen.setdefault(shapes, (n, size))
    if before != (n, size):
        raise _BatchError(
            f"make_batch ignores what it is asked for: n={before[0]}, size={before[1]} and n={n}, "
            f"size={size} both gave tensors of the shapes {list(shapes)}"
        )


def _columns(probes: Sequence[Probe]) -> tuple[list[int], list[Size], list[int]]:
    return [p.n for p in probes], [p.size for p in probes], [p.peak_bytes for p in probes]


def _fit_traced(
    probes: Sequence[Probe], traces: Sequence[Trace], domain: _Domain
) -> tuple[PaddedCost, ...] | None:
    fitted = [(p, t) for p, t in zip(probes, traces, strict=True) if not p.held_out]
    n, sizes, _ = _columns([p for p, _ in fitted])
    return fit_traces(n, sizes, [t for _, t in fitted], domain.largest)


def _fit_peaks(probes: Sequence[Probe]) -> tuple[PaddedCost, ...]:
    return fit_peaks(*_columns([p for p in probes if not p.held_out]))


# ---------------------------------------------------------------------- running


def _run(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    state: TrainingState,
    domain: _Domain,
    room: int,
    traced: _Traced | None,
    notes: list[str],
) -> tuple[tuple[Form, ...], tuple[Probe, ...]]:
    if state.device.type == "cpu" and not return_freed_memory():
        notes.append("this C library keeps freed memory: the peak depends on the shapes before")
    shapes = None
    if traced is not None and isinstance(traced.forms[0], PaddedCost):
        shapes = MeasuredCost(forms=traced.forms, margin=0)
    with state.kept(contents=True) as copied_bytes:
        runner = StepRunner(step, make_batch, state, copied_bytes)
        probes = _probes(runner, domain, room, shapes, notes)
    if runner.sampled:
        notes.append(
            "the peak of resident memory was sampled: /proc/self/clear_refs is not writable"
        )
    if runner.not_finite:
        text = "the step returned a loss that is not finite; is make_batch's batch a possible one?"
        warnings.warn(text, MeasureWarning, stacklevel=3)
        notes.append(text)
    forms = _fit_runs([p for p in probes if not p.held_out], shapes)
    return _table_unless_it_fits(forms, probes, notes), tuple(probes)


def _probes(
    runner: StepRunner,
    domain: _Domain,
    room: int,
    shapes: MeasuredCost | None,
    notes: list[str],
) -> list[Probe]:
    """Run a few shapes, none of which is predicted to pass the budget."""
    smallest = domain.at(1 / 64)
    try:
        probes = [runner.run(1, smallest)]
    except ProbeOutOfMemoryError as error:
        raise CostError(f"one sample of size {smallest} does not fit into memory") from error
    if probes[0].peak_bytes > room:
        raise CostError(
            "model, gradients, optimizer state and what the process holds need "
            f"{format_bytes(probes[0].peak_bytes)} with one sample of size {smallest}; the budget "
            f"is {format_bytes(room)}"
        )
    if shapes is None:  # nothing is known: two small steps give a first idea
        probes.append(runner.run(2, domain.at(1 / 8)))
    runs = [
        (share, domain.at(where), held_out)
        for share, where, held_out in (_RUN_1 if len(domain.largest) == 1 else _RUN_2)
    ]
    if shapes is None:  # feel the way upwards
        runs.sort(key=lambda one: math.prod(one[1]))
    for share, size, held_out in runs:
        target = probes[0].peak_bytes + share * (room - probes[0].peak_bytes)
        so_far = MeasuredCost(forms=_guess(probes, shapes), margin=0)
        n = int(so_far.capacity(size if len(size) > 1 else size[0], int(target)))
        if shapes is None:  # a form of few points is no guide far beyond them
            n = min(n, _reach(probes, size, runner.idle_bytes, int(target)))
        if n < 1 or any((p.n, p.size) == (n, size) for p in probes):
            continue
        try:
            probes.append(runner.run(n, size, held_out=held_out))
        except ProbeOutOfMemoryError:
            notes.append(f"out of memory at {n} samples of size {size}: half of them were run")
            if n > 1:
                probes.append(runner.run(n // 2, size, held_out=held_out))
    return probes


def _reach(probes: Sequence[Probe], size: Size, idle_bytes: int, target: int) -> int:
    """The most samples that cannot need more than the target, judged by each probe alone.

    With coefficients of at least 0, bytes grow at most as the feature does that grows most. All
    that is not there without a step is taken for the samples', which with few of them it is not:
    so this rises with every probe.
    """
    most = 1
    for probe in probes:
        above = max(probe.peak_bytes - idle_bytes, 1)
        new, old = features([1, probe.n], [size, probe.size])[:, 1:]
        most = max(most, int((target - idle_bytes) / (above * (new / old).max())))
    return most


def _guess(probes: Sequence[Probe], shapes: MeasuredCost | None) -> tuple[PaddedCost, ...]:
    """What is known between the runs."""
    fitted = [p for p in probes if not p.held_out]
    if shapes is None:
        return fit_peaks(*_columns(fitted))
    if len(fitted) == 1:  # kernels need something beside tensors: a third more, to be careful
        offset = fitted[0].peak_bytes - _predicted(shapes, fitted)[0]
        return tuple(
            total_cost(form, max(offset, 0), 4 / 3, np.zeros(0)) for form in _formulas(shapes)
        )
    return _fit_runs(fitted, shapes)


def _fit_runs(probes: Sequence[Probe], shapes: MeasuredCost | None) -> tuple[PaddedCost, ...]:
    """Offset, scale and what kernels need beside tensors, all at least 0, on the traced forms."""
    n, sizes, peaks = _columns(probes)
    if shapes is None:
        return fit_peaks(n, sizes, peaks)
    target = np.array(peaks, np.float64)
    tensors = _predicted(shapes, probes)
    # The tensors are there for certain: what is fitted is what comes on top of them.
    above = np.stack([np.ones(len(target)), tensors], axis=1)
    for matrix in (above, np.concatenate([above, features(n, sizes)[:, 1:]], axis=1)):
        offset, share, *beside = x = non_negative(matrix / target[:, None], 1 - tensors / target)
        if np.abs((tensors + matrix @ x) / target - 1).max() < _SCALED:
            break
    totals = (total_cost(form, offset, 1 + share, np.array(beside)) for form in _formulas(shapes))
    return tuple(dict.fromkeys(totals))  # kernels may outweigh what told the forms apart


def _formulas(cost: MeasuredCost) -> list[PaddedCost]:
    return [form for form in cost.forms if isinstance(form, PaddedCost)]


def _predicted(cost: MeasuredCost, probes: Sequence[Probe]) -> FloatArray:
    n, sizes, _ = _columns(probes)
    several = np.array(sizes) if cost.axes > 1 else np.array(sizes)[:, 0]
    return cost.fitted_bytes(n, several).astype(np.float64)


# ---------------------------------------------------------------------- judging


def _table_unless_it_fits(
    forms: tuple[PaddedCost, ...], probes: Sequence[Probe], notes: list[str]
) -> tuple[Form, ...]:
    errors = MeasuredCost(forms=forms, margin=0, probes=tuple(probes)).errors()
    worst = max(errors, key=abs)
    if abs(worst) <= _FITS:
        return forms
    probe = probes[errors.index(worst)]
    text = (
        f"no formula fits: {probe.n} samples of size {probe.size} took "
        f"{format_bytes(probe.peak_bytes)}, the fitted form says {worst:+.1%}; a table of what was "
        "measured is used instead, which is safe but coarse"
    )
    warnings.warn(text, MeasureWarning, stacklevel=4)
    notes.append(text)
    n, sizes, peaks = _columns(probes)
    return (TableCost(numbers=tuple(n), sizes=tuple(sizes), peak_bytes=tuple(peaks)),)


def _with_margin(cost: MeasuredCost, least: float) -> MeasuredCost:
    """Twice the largest underestimate of what was held out, at least that of anything measured."""
    under = [max(1 / (1 + error) - 1, 0) for error in cost.errors()]
    held_out = [u for u, probe in zip(under, cost.probes, strict=True) if probe.held_out]
    return replace(cost, margin=max([least, *under, *(2 * one for one in held_out)]))
