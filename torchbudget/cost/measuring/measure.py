"""Measuring what a batch costs on the user's own training step."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import torch

from torchbudget.budget import MemoryBudget
from torchbudget.checks import HasSizeMultiple, size_multiple_of
from torchbudget.cost.measuring.autocast import autocast_is_active
from torchbudget.cost.measuring.fitting import fit_time
from torchbudget.cost.measuring.probing import margin_of, run_probes, trace_probes
from torchbudget.cost.measuring.shapes import BatchError, Domain, Subject
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.padded import PaddedCost
from torchbudget.errors import CostError

Method: TypeAlias = Literal["auto", "trace", "run"]

_LEAST_TRACE_MARGIN: Final = 1e-3
# One form and a floor, where the true peak is the maximum of several: a fit 1.6 % too low was seen,
# of a loop trained with SGD.
_LEAST_PEAKS_MARGIN: Final = 2e-2
_LEAST_RUN_MARGIN: Final = 1e-2
# Resident memory was seen to grow by this much under ever new shapes, without any tensor: compiled
# kernels, gaps in the heap.
_DRIFT_BYTES: Final = 12 * 2**20
# Without a trace, eight runs determine the eight coefficients of two axes: steps of 1.03 times the
# fit were seen.
_BLIND_MARGIN: Final = 0.1


def measure_cost(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    *,
    max_size: int | Sequence[int],
    budget: MemoryBudget | int | str | None = None,
    method: Method = "auto",
    device: str | torch.device | None = None,
    size_multiple: int | HasSizeMultiple = 1,
) -> MeasuredCost:
    """Measure the peak bytes of a training step as a function of its batch's shape.

    *Tracing* replays the step on fake tensors for at most 10 shapes, which takes no memory and no
    arithmetic; it counts the bytes of tensors. *Running* steps for real on at most 8 synthetic
    batches of up to 0.95 of the budget, twice each, and reads the machine's counters: resident
    memory on the CPU; on CUDA reserved memory, and what is used outside torch's allocator. "auto"
    traces to find the form and to choose the shapes, and runs to find offset and scale. On the CPU
    a run also counts what else the process has in memory (interpreter, libraries, data): measure in
    the process that will train, after everything is loaded.

    Model, optimizer, schedulers, gradient scalers and random generators are found in what the step
    refers to, and are restored bit for bit. Meanwhile the values of their tensors are in a file in
    the temporary folder.

    On the CPU, running calls `trim_malloc`, which lasts: otherwise the peak depends on all the
    shapes that came before.

    Args:
        step: the full training step: forward, loss, backward, optimizer step, gradients cleared; or
            forward only, for evaluation, as under `torch.no_grad()`, which the notes then say.
        make_batch: makes a batch of n samples padded to a size: `make_batch(n, size)`, with an int
            for one axis and a tuple of ints for several.
        max_size: the largest size on every axis.
        budget: the device's bytes, which no run may exceed; needed unless `method="trace"`.
        method: "trace", "run" or "auto"; where a step cannot be traced, "auto" runs only.
        device: the device that the parameters are expected on; checked.
        size_multiple: sizes of probes are multiples of it, as padded sizes are: an int, or the
            sampler or stream to read it from.

    Returns:
        A cost whose margin is twice the largest underestimate on shapes that were held out; at
        least 0.1 % if it was traced (2 % if only peaks were fitted), and 1 % and 12 MiB of the
        budget if it was run.

    Raises:
        CostError: the step cannot be measured, is only a part of a training step, or does not fit
            the budget with one sample of the smallest size; or `make_batch` ignores its arguments.
        OptionError: `size_multiple` is not an int of at least 1.

    Warns:
        MeasureWarning: the step leaks memory, returns a loss that is not finite, does not fit any
            form, or is forward only of a module in training mode.
    """
    if method not in ("auto", "trace", "run"):
        raise CostError(f"method must be 'auto', 'trace' or 'run', got {method!r}")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise CostError(f"device={str(device)!r}: this torch has no CUDA device to measure on")
    domain = Domain.of(max_size, size_multiple_of(size_multiple))
    room = None if budget is None else MemoryBudget.of(budget).device
    if method != "trace" and room is None:
        raise CostError(
            "budget is needed to run the step, which must not exceed it; or pass method='trace'"
        )
    state = TrainingState(step)
    state.check_parameters(contents=method != "trace")
    if device is not None and torch.device(device).type != state.device.type:
        raise CostError(f"device={str(device)!r}, but the step's parameters are on {state.device}")
    subject = Subject(step, make_batch, domain, state)
    if autocast_is_active():
        subject.notes.append("measured inside an autocast, without its cache of casts")
    if method == "trace" or room is None:
        forms, probes, aligned = trace_probes(subject)
        least = _LEAST_TRACE_MARGIN if aligned else _LEAST_PEAKS_MARGIN
    else:
        known = () if method == "run" else _traced_forms(subject)
        forms, probes = run_probes(subject, room, known)
        least = max(_LEAST_RUN_MARGIN, _DRIFT_BYTES / room)
        if not known and len(domain.largest) > 1:
            least = max(least, _BLIND_MARGIN)
            subject.notes.append("several axes without a trace: few runs separate them poorly")
    measured = MeasuredCost(
        forms=forms,
        margin=0,
        time_form=fit_time(probes),
        probes=probes,
        measured_on=describe_step(step),
        notes=(*subject.notes, *state.notes()),
    )
    return replace(measured, margin=margin_of(measured, least))


def describe_step(step: Callable[[Any], object]) -> dict[str, str]:
    """What a cost of this step depends on, beside the shapes: model, dtype, device, torch.

    >>> model = torch.nn.Linear(2, 3)
    >>> describe_step(lambda batch: model(batch))["model"]
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


def _traced_forms(subject: Subject) -> tuple[PaddedCost, ...]:
    """The forms of the trace; none if no form fits, or the step cannot be traced but only run."""
    try:
        forms, _, _ = trace_probes(subject)
    except BatchError:
        raise
    except CostError as error:
        subject.notes.append(f"only run, not traced: {error}")
        return ()
    return tuple(form for form in forms if isinstance(form, PaddedCost))
