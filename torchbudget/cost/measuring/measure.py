"""Measuring what a batch costs on the user's own training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy.typing as npt
import torch

from torchbudget.budget import MemoryBudget
from torchbudget.checks import HasSizeMultiple, size_multiple_of
from torchbudget.cost.measuring.assumed_device import AssumedDevice
from torchbudget.cost.measuring.describe_step import describe_step
from torchbudget.cost.measuring.fragmentation import warn_of_kept
from torchbudget.cost.measuring.joined import JoinedRanks
from torchbudget.cost.measuring.judging import fits, judged_cost
from torchbudget.cost.measuring.peaks import fit_time
from torchbudget.cost.measuring.reserving import reserved
from torchbudget.cost.measuring.running import run_probes
from torchbudget.cost.measuring.shapes import BatchError, Domain, Subject
from torchbudget.cost.measuring.traced import Traced, trace_probes
from torchbudget.cost.measuring.tracing import ValueDependentError, check_values, tracing
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.errors import CostError
from torchbudget.machine.device import device_memory
from torchbudget.progress import counting
from torchbudget.restoring import TrainingState, autocast_is_active

Method: TypeAlias = Literal["auto", "trace", "run"]

# Of 37 classes of models on 42 shapes each, 0.42 % was the most that a trace was above the fit.
_LEAST_TRACE_MARGIN: Final = 5e-3
# One form and a floor, where the true peak is the maximum of several: a fit 7.9 % too low was seen,
# of a step that takes its batch in four parts.
_LEAST_PEAKS_MARGIN: Final = 9e-2
# Shapes that were not traced were missed from below by up to 0.4 of what traced ones were from
# above, where kernels are twice their stride, and by 0.31 in all classes of models that were
# compared. Padding to multiples of strides and blocks makes forms exact.
_UNSEEN: Final = 1 / 2
_LEAST_RUN_MARGIN: Final = 1e-2
# Resident memory was seen to grow by this much under ever new shapes, without any tensor: compiled
# kernels, gaps in the heap.
_DRIFT_BYTES: Final = 12 * 2**20
# Where the step's memory depends on values, or on several axes and was not traced: a few runs do
# not show all. Steps of 1.03 times the fit were seen.
_BLIND_MARGIN: Final = 0.1


def measure_cost(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    *,
    max_size: int | Sequence[int] | None = None,
    min_size: int | Sequence[int] | None = None,
    sizes: npt.ArrayLike | None = None,
    budget: MemoryBudget | int | str | None = None,
    method: Method = "auto",
    device: str | torch.device | None = None,
    size_multiple: int | HasSizeMultiple = 1,
) -> MeasuredCost:
    """Measure the peak bytes of a training step as a function of its batch's shape.

    *Tracing* replays the step on fake tensors for 14 shapes (28 for two axes), which takes no
    memory and no arithmetic; it counts the bytes of tensors. *Running* steps for real on about 8
    synthetic batches of up to 0.95 of the budget, twice each, and reads the machine's counters:
    resident memory on the CPU; on CUDA what torch's allocator reserves, and what this process uses
    outside it (`peak_memory`). There the cache is emptied before each shape, and at the end all
    shapes are run in turn, with the allocator limited to the budget: what they keep reserved beyond
    the largest one is added. "auto" traces to find the form and to choose the shapes, and runs to
    find offset and scale. On the CPU a run also counts what else the process has in memory
    (interpreter, libraries, data): measure in the process that will train, after everything is
    loaded.

    For CUDA, tracing predicts bytes of the device, without one at hand: an epoch of mixed shapes is
    replayed through a model of torch's caching allocator, with the settings that the environment
    states. The notes say what is assumed. Where a device is at hand, "auto" measures there.

    The cost is judged where it will be used: at batches that just fit the budget, from the smallest
    size to the largest; without a budget, all over the range of sizes. Where a prediction is off by
    more than a percent, that shape is fitted to as well. A cost whose every moment was traced holds
    for every number of samples. Any other one predicts `MAX_BYTES` beyond what measured batches
    have reached; see `MeasuredCost.vouched`.

    Model, optimizer, schedulers, gradient scalers and random generators are found in what the step
    refers to, and are restored bit for bit. Meanwhile the values of their tensors are in a file in
    the temporary folder.

    On the CPU, running calls `trim_malloc`, which lasts: otherwise the peak depends on all the
    shapes that came before.

    Where ranks step together, under `DistributedDataParallel` or FSDP2, all of them call it: they
    run the same shapes, the worst peak of any rank counts, and all get the same cost.

    Args:
        step: the full training step: forward, loss, backward, optimizer step, gradients cleared; or
            forward only, for evaluation, as under `torch.no_grad()`, which the notes then say.
        make_batch: makes a batch of n samples padded to a size: `make_batch(n, size)`, with an int
            for one axis and a tuple of ints for several. Batches have up to 65,536 samples, and
            about 256 MiB.
        max_size: the largest size on every axis; may be left out where `sizes` are given.
        min_size: the smallest size on every axis, for models that refuse shorter samples; by
            default that of `sizes`, else 1/64 of the largest one.
        sizes: of the data set, shape `(N,)` or `(N, d)`: which of them occur, and are judged.
        budget: the device's bytes, which no run may exceed; needed unless `method="trace"`.
        method: "trace", "run" or "auto"; where a step cannot be traced, "auto" runs only.
        device: the device that the parameters are expected on; checked. With `method="trace"` it
            may be `"cuda"` while they are on the CPU: the cost is then predicted for CUDA.
        size_multiple: sizes of probes are multiples of it, as padded sizes are: an int, or the
            sampler or stream to read it from.

    Returns:
        A cost whose margin is twice the largest underestimate on shapes that were held out; at
        least 0.5 % if it was traced (9 % if only peaks were fitted), and 1 % and 12 MiB of the
        budget if it was run; a tenth where the step's memory depends on the values in the batch.

    Raises:
        CostError: the step cannot be measured, is only a part of a training step, or does not fit
            the budget with one sample of the smallest size; or `make_batch` ignores its arguments.
        OptionError: `size_multiple` is not an int of at least 1.

    Warns:
        MeasureWarning: the step leaks memory, returns a loss that is not finite, does not fit any
            form, never steps one of its optimizers, or is forward only of a module in training
            mode.
    """
    if method not in ("auto", "trace", "run"):
        raise CostError(f"method must be 'auto', 'trace' or 'run', got {method!r}")
    domain = Domain.of(max_size, size_multiple_of(size_multiple), min_size=min_size, sizes=sizes)
    room = None if budget is None else MemoryBudget.of(budget).device
    if method != "trace" and room is None:
        raise CostError(
            "budget is needed to run the step, which must not exceed it; or pass method='trace'"
        )
    state = TrainingState(step)
    target = _target_of(device, state.device, method)
    predicted = method == "trace" and target.type == "cuda"
    subject = Subject(step, make_batch, domain, state, target)
    subject.checks.check_parameters(contents=method != "trace")
    if autocast_is_active():
        subject.notes.append("measured inside an autocast, without its cache of casts")
    with counting(unit="shapes", description="measuring", leave=False, delay_s=2) as advance:
        subject.advance = advance
        cost = _measured(subject, method, room)
    for idle in subject.checks.idle_optimizers():
        subject.warn(
            f"{type(idle).__name__} did not step in any measured step, while another optimizer "
            "did: its state and the memory of its step are not in the cost; let the step step all "
            "that training steps"
        )
    return replace(
        cost,
        time_form=fit_time(cost.probes),
        measured_on=describe_step(step) | (_predicted_on() if predicted else {}),
        predicted_for=room if predicted else None,
        notes=(*subject.notes, *subject.checks.notes()),
    )


def _target_of(
    device: str | torch.device | None, own: torch.device, method: Method
) -> torch.device:
    """The device that the step is to run on: that of its parameters, or CUDA where it is predicted.

    Raises:
        CostError: the parameters are on another device, or there is none.
    """
    target = own if device is None else torch.device(device)
    if target.type == "cuda" and own.type == "cpu" and method == "trace":
        return target
    if target.type == "cuda" and own.type != "cuda" and not torch.cuda.is_available():
        raise CostError(
            f"device={str(device)!r}: this torch has no CUDA device to measure on; method='trace' "
            "predicts its bytes from a trace of the model on the CPU"
        )
    if target.type != own.type:
        raise CostError(f"device={str(device)!r}, but the step's parameters are on {own}")
    return target


def _measured(subject: Subject, method: Method, room: int | None) -> MeasuredCost:
    """The cost without its time, its notes and what it was measured on."""
    ranks = JoinedRanks(subject.state)
    room = None if room is None else ranks.least(room)
    if method == "trace" or room is None:
        traced = ranks.of_first(partial(_traced_on_target, subject, room))
        return judged_cost(
            traced.forms,
            traced.probes,
            _LEAST_TRACE_MARGIN if traced.aligned else _LEAST_PEAKS_MARGIN,
            subject,
            everywhere=traced.aligned,
            misfit=traced.margin,
        )
    known = ranks.of_first(partial(_traced, subject, method, room))
    subject.depends_on_values = ranks.of_first(lambda: subject.depends_on_values)
    forms, probes = run_probes(subject, room, () if known is None else known.forms)
    least = max(_LEAST_RUN_MARGIN, _DRIFT_BYTES / room)
    if subject.depends_on_values:
        least = max(least, _BLIND_MARGIN)
        subject.notes.append("memory depends on values: the worst of 3 batches a shape counts")
    elif known is None and subject.domain.axes > 1:
        least = max(least, _BLIND_MARGIN / 2)
        subject.notes.append("several axes without a trace: few runs separate them poorly")
    everywhere = known is not None and known.aligned
    misfit = known.margin if known is not None and everywhere else 0.0
    return judged_cost(forms, probes, least, subject, everywhere=everywhere, misfit=misfit)


def _traced_on_target(subject: Subject, room: int | None) -> Traced:
    """Bytes of tensors; on CUDA, what its allocator reserves for them."""
    if subject.target.type != "cuda":
        return trace_probes(subject, room)
    device = AssumedDevice.detect()
    own = subject.state.device
    warn_of_kept(subject, device_memory(own) if own.type == "cuda" else None)
    return reserved(trace_probes(subject, device.room_for_tensors(room)), subject, device, room)


def _predicted_on() -> dict[str, str]:
    return {"device": "cuda, predicted", "allocator": f"native, {AssumedDevice.detect().segments}"}


def _traced(subject: Subject, method: Method, room: int) -> Traced | None:
    """What traces show; `None` if no form fits, or the step cannot be traced but only run."""
    try:
        if method == "auto":
            traced = trace_probes(subject, room)
            cost = MeasuredCost(forms=traced.forms, margin=0, probes=traced.probes)
            return traced if fits(cost, everywhere=traced.aligned) else None
        with tracing(subject.step, subject.state, checks=subject.checks) as trace:
            check_values(trace, subject.batch(2, subject.domain.smallest))
    except BatchError:
        raise
    except ValueDependentError as error:
        subject.depends_on_values = True
        subject.notes.append(f"only run, not traced: {error}")
    except CostError as error:
        if method == "auto":
            subject.notes.append(f"only run, not traced: {error}")
    return None
