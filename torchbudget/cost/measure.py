"""Measuring what a batch costs on the user's own training step."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchbudget.budget import MemoryBudget
from torchbudget.checks import HasSizeMultiple, size_multiple_of
from torchbudget.cost.agree import joined_ranks, unsharded_gradient_bytes
from torchbudget.cost.alternatives import Alternatives, check_same_gradients, reader_of
from torchbudget.cost.as_on_cuda import (
    ASSUMED,
    BESIDE_BYTES,
    EXPANDABLE_SCALE,
    caution_of_segments,
)
from torchbudget.cost.covering import Covering
from torchbudget.cost.measured import MeasuredCost, WaysCost
from torchbudget.cost.pieces import Probe
from torchbudget.cost.running import (
    ProbeOutOfMemoryError,
    StepRunner,
    run_steps,
    warn_of_kept,
)
from torchbudget.cost.subject import Domain, Subject
from torchbudget.cost.tracing import Tracer
from torchbudget.display import counting
from torchbudget.distributed import part_bytes
from torchbudget.errors import BatchError, CostError
from torchbudget.machine.allocators import settle_malloc
from torchbudget.machine.device import device_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.random_state import RandomState
from torchbudget.restoring import TrainingState, autocast_is_active, modes_of
from torchbudget.units import format_bytes

Method: TypeAlias = Literal["auto", "trace", "run"]

# Seconds of computing for a grid: for its own sake, and where real steps show its errors as well.
_SECONDS: Final = 60.0
_SECONDS_BESIDE_RUNS: Final = 5.0
# The process's memory outside tensors is rounded up to this, so that small changes do not count.
_ROUNDED_BYTES: Final = 2**26
_UNSEEN_ON_CPU: Final = (
    "the cost was traced, not run: workspaces of kernels are not counted; they took up to 2% of "
    "the tensors' bytes in steps on text, and up to 70% in convolutions; "
    "measure_cost(method='auto') measures them"
)


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
    time: bool = True,
    accumulate: bool = False,
) -> MeasuredCost:
    """Measure the peak bytes of a training step as a function of its batch's shape.

    *Tracing* runs the step on fake tensors whose ragged dimensions are symbols. It allocates no
    memory and computes no values. The peak is then an expression of n and the sizes, exact for all
    shapes that take the same branches as the trace; concrete traces check it. Loops whose turns are
    alike are traced with two numbers of turns and tested with others. If symbols cannot describe
    the step, some shapes are traced one by one, and others are interpolated. *Running* executes
    real steps on 3 to 6 batches of up to 0.95 of the budget, and reads the machine's counters:
    resident memory on the CPU; on CUDA the bytes that torch's allocator reserves, and those that
    this process uses outside it (`peak_memory`). "auto" does both: the runs give an offset and a
    scale. On the CPU a run also counts everything else in the process (interpreter, libraries,
    data): measure in the process that will train, after everything is loaded.

    For CUDA, `method="trace"` predicts the bytes of a device without having one; `notes` list the
    assumptions. With the model on a GPU, "auto" runs the step.

    Everything that the step refers to is restored bit for bit: model, optimizer, schedulers,
    gradient scalers, random generators and tensors. Meanwhile their values are in a file in the
    temporary folder. Python counters that steps advance are restored after a trace, but not after
    runs. Effects on the world, such as a log, are not: see `is_measuring`. A module in evaluation
    mode that the step trains is measured in training mode if that takes more, with a warning.

    On the CPU it calls `trim_malloc`, whose effect lasts: without it, the peak would depend on all
    earlier shapes. `load_cost` and `loader` set the same.

    Under `DistributedDataParallel` or FSDP2 all ranks must call it. They run the same shapes, the
    highest peak of any rank counts, and all ranks get the same cost.

    Args:
        step: the complete training step: forward, loss, backward, optimizer step, gradients
            cleared; or, for evaluation, a forward under `torch.no_grad()`. Of `alternatives` each
            way is measured, after their gradients were compared.
        make_batch: makes a batch of n samples padded to a size: `make_batch(n, size)`, with an int
            for one axis and a tuple of ints for several. Batches have up to 65,536 samples, and
            about 256 MiB, or a quarter of the bytes that the budget leaves for tensors.
        max_size: the largest size on every axis; not needed with `sizes`.
        min_size: the smallest size on every axis, for models that refuse shorter samples. Default:
            that of `sizes`, else 1/64 of the largest size.
        sizes: sizes of the data set, shape `(N,)` or `(N, d)`. Steps are then measured at sizes
            that occur.
        budget: the device's bytes, which no run may exceed; needed unless `method="trace"`. Without
            a trace, two of the smallest samples are run if twice the bytes of one fit.
        method: "trace", "run" or "auto". If a step cannot be traced, "auto" only runs it.
        device: the device of the parameters; if given, it is checked. With `method="trace"` and
            parameters on the CPU, `"cuda"` predicts the cost on CUDA.
        size_multiple: measured sizes are multiples of it, as padded sizes are: an int, or the
            sampler or stream to read it from.
        time: also time steps: for three seconds, for a tenth of the measuring, or for as long as
            nine shapes take. `cost.time` cuts optimizer steps of given samples. Traces have none.
        accumulate: several micro-batches will make an optimizer step, as with `samples_per_step`.
            Then `zero_grad` leaves gradients allocated, as those of earlier micro-batches are.

    Returns:
        The cost. Without runs its margin is 0; interpolated bytes are raised by the largest error
        on other shapes, and up to 1 % more. With runs the margin is twice the largest underestimate
        of a run, at least 1 %, at least 16 MiB at the budget, and at least 3 % without a trace.

    Raises:
        CostError: the step cannot be measured, is only a part of a training step, or does not fit
            the budget with one sample of the smallest size; micro-batches leave tensors until the
            step that grow with their samples; `make_batch` ignores its arguments; ways of
            `alternatives` give different gradients; or the step drops gradients that are to stay.
        OptionError: `size_multiple` is not an int of at least 1.
        RankError: another rank failed.

    Warns:
        MeasureWarning: the step leaks memory, returns a loss that is not finite, never steps one of
            its optimizers, is a forward of a module in training mode, trains a module in evaluation
            mode, or cannot be traced and draws from a generator outside torch.
    """
    if method not in ("auto", "trace", "run"):
        raise CostError(f"method must be 'auto', 'trace' or 'run', got {method!r}")
    if not callable(step) or (isinstance(step, nn.Module) and step.training):
        raise CostError(
            "step must be a function of a batch that makes a whole training step, as in "
            "def step(batch): loss_of(model, batch).backward(); optimizer.step(); "
            f"optimizer.zero_grad(); got {type(step).__name__}"
            + (" in training mode: to evaluate, call eval() first" if callable(step) else "")
        )
    if not callable(make_batch):
        raise CostError(
            "make_batch must be a function (n, size) that returns a batch of n samples padded to a "
            f"size, as in measure_cost(step, make_batch, sizes=sizes, budget=budget), got "
            f"{type(make_batch).__name__}; loader(dataset, step, budget) measures on real samples"
        )
    domain = Domain.of(max_size, size_multiple_of(size_multiple), min_size=min_size, sizes=sizes)
    room = None if budget is None else MemoryBudget.of(budget).device
    if method != "trace" and room is None:
        raise CostError(
            "to run the step, pass a budget that it must not exceed; or pass method='trace'"
        )

    def subject_of(step: Callable[[Any], object]) -> Subject:
        state = TrainingState(step, accumulates=accumulate)
        return Subject(step, make_batch, domain, state, _target_of(device, state.device, method))

    if not isinstance(step, Alternatives):
        return _cost_of(subject_of(step), method, room, time)
    with RandomState.take():  # `make_batch` may draw
        subject = subject_of(step)
        reader = reader_of(subject)
        if method != "trace":
            check_same_gradients(step, subject)
        ways = [_cost_of(subject_of(way), method, room, time) for way in step.ways]
    return replace(WaysCost.of(ways, reader), measured_on=describe_step(step))


def _cost_of(subject: Subject, method: Method, room: int | None, time_too: bool) -> MeasuredCost:
    """The cost of a step that is made in one way."""
    step, state, target = subject.step, subject.state, subject.target
    subject.checks.check_parameters(contents=method != "trace")
    if autocast_is_active():
        subject.notes.append("measured under autocast, without its cache of weights")
    with ExitStack() as stack:
        stack.callback(RandomState.take().restore)  # `make_batch` may draw
        stack.callback(modes_of(state.modules))
        subject.advance = stack.enter_context(
            counting(unit="shapes", description="measuring", leave=False)
        )
        cost = _measured(subject, method, room, time_too)
    for idle in subject.checks.idle_optimizers():
        subject.warn(
            f"{type(idle).__name__} did not step in any measured step, but another optimizer did: "
            "its state and the memory of its step are not in the cost; let the step call every "
            "optimizer that training calls"
        )
    unsharded = unsharded_gradient_bytes(state) if state.accumulates else 0
    if unsharded:
        subject.notes.append(
            f"{format_bytes(unsharded)} are added for gradients that FSDP2 keeps unsharded until a "
            "step's last micro-batch"
        )
        cost = replace(cost, offset=cost.offset + unsharded)
    described = describe_step(step)
    if method == "trace" and target.type == "cuda":
        described |= {"device": "cuda, predicted", "allocator": "expandable segments, assumed"}
    notes = (*subject.notes, *subject.checks.notes())
    return replace(
        cost,
        room=room,
        parts=_parts(state, cost),
        measured_on=described,
        notes=notes,
        keeps_gradients=subject.checks.keeps_gradients,
    )


def why_not(
    cost: MeasuredCost,
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    sizes: npt.ArrayLike,
    room: int,
) -> str:
    """Return why a saved cost does not hold for a step any more; empty if it holds.

    Traces of a small, a middle and a large batch must have the bytes that they had, and one real
    step, on the most of the largest samples that fit, may need no more than predicted. A step that
    cannot be traced makes two more real steps. Everything that the step refers to is restored.
    Ranks that step together all call it.

    Args:
        cost: saved before, in another process.
        step: the step that it was measured on.
        make_batch: makes its batches.
        sizes: sizes of the data set, shape `(N,)` or `(N, d)`.
        room: the budget, in bytes.

    Raises:
        CostError: the step cannot be measured any more.
    """
    if isinstance(step, Alternatives) and isinstance(cost, WaysCost):
        each = (
            why_not(one, way, make_batch, sizes, room)
            for one, way in zip(cost.ways, step.ways, strict=True)
        )
        return next(filter(None, each), "")
    state = TrainingState(step, accumulates=cost.keeps_gradients)
    domain = Domain.of(None, cost.multiple, sizes=sizes)
    subject = Subject(step, make_batch, domain, state, state.device)
    rows: Any = domain.known
    asked = rows if cost.axes > 1 else rows[:, 0]
    fitting = np.where(cost.capacity(asked, room) > 0, cost.batch_bytes(1, asked), 0)
    full = Probe(1, (*rows[fitting.argmax()].tolist(),), 0, held_out=True, how="run")
    n = min(int(cost.capacity(full.asked, room)), subject.most_samples(full.size))
    if n < 1:
        return "no sample fits"
    runs = [replace(full, n=n)]
    traced = [probe for probe in cost.probes if probe.how == "trace"]
    some = sorted(traced or cost.probes, key=lambda probe: (math.prod(probe.size), probe.n))
    some = [some[0], some[len(some) // 2], some[-1]]
    with ExitStack() as stack:
        stack.callback(modes_of(state.modules))
        if traced:
            tracer = Tracer(step, subject.batch, state, checks=subject.checks)
            largest = (1, *some[-1].size)
            subject.take_larger_mode(lambda: tracer.concrete(largest).weight(largest))
            for shape, before in (((one.n, *one.size), one.peak_bytes) for one in some):
                now = tracer.concrete(shape).peak(shape)
                if now != before:
                    return f"a trace of {shape} has {now:,} bytes, and had {before:,}"
        else:
            runs += some[:2]
        with state.restored_after_runs():
            runner = StepRunner(subject)
            for probe in runs:
                try:
                    peak = runner.run(probe.n, probe.size).peak_bytes
                except ProbeOutOfMemoryError:
                    return f"a step on {(probe.n, *probe.size)} ran out of memory"
                if peak > (predicted := int(cost.batch_bytes(probe.n, probe.asked))):
                    needed, most = map(format_bytes, (peak, predicted))
                    shape = (probe.n, *probe.size)
                    return f"a step on {shape} needed {needed}, not {most} at most"
    return ""


def _parts(state: TrainingState, cost: MeasuredCost) -> dict[str, int]:
    """Bytes in every peak, by name."""
    parameters = sum(part_bytes(p) for p in state.parameters())
    gradients = sum(part_bytes(p) for p in state.parameters() if p.requires_grad)
    rest = max(cost.empty - parameters, 0) if cost.pieces else 0
    return {
        "parameters": parameters,
        "gradients": gradients if state.optimizers else 0,
        "optimizer state and buffers": rest,
    }


def _target_of(
    device: str | torch.device | None, own: torch.device, method: Method
) -> torch.device:
    """The device that the step will run on: that of its parameters, or CUDA if it is predicted.

    Raises:
        CostError: the parameters are on another device, or there is none.
    """
    target = own if device is None else torch.device(device)
    if target.type == "cuda" and own.type == "cpu" and method == "trace":
        return target
    if target.type != own.type:
        raise CostError(
            f"device={str(device)!r} must be that of the step's parameters, {own}; "
            "method='trace' predicts the bytes of CUDA for a model on the CPU"
        )
    return target


def _measured(subject: Subject, method: Method, room: int | None, time_too: bool) -> MeasuredCost:
    """The cost without what it was measured on."""
    ranks = joined_ranks(subject.state)
    is_predicted = method == "trace" and subject.target.type == "cuda"
    find_beside = partial(_beside_tensors, subject)
    left = math.inf
    if room is not None:
        beside = BESIDE_BYTES if is_predicted else ranks.each(find_beside)[0]  # the first rank's
        room = min(ranks.gather_objects(room))
        left = max(room - beside, 1)
        # Its samples are in memory as well, and a budget may be smaller than that of any batch.
        subject.most_bytes = min(subject.most_bytes, int(left) // 4)
        if method != "trace":
            find = partial(_traced_if_possible, subject, left)
            traced = ranks.each(find)[0] if method == "auto" else None
            return run_steps(subject, room, traced, time_too=time_too)
    cost = ranks.each(partial(_traced, subject, left, _SECONDS))[0]
    if is_predicted:
        return _on_cuda(subject, cost)
    if room is None:
        return cost
    beside = ranks.each(find_beside)[0]  # what tracing left included
    subject.notes += [
        f"{format_bytes(beside)} are added for all other memory of the process",
        _UNSEEN_ON_CPU,
    ]
    return replace(cost, offset=float(beside), caution=_UNSEEN_ON_CPU)


def _traced(subject: Subject, room: float, seconds: float) -> MeasuredCost:
    """The cost of traced bytes alone, with a grid that takes so many seconds of computing."""
    if subject.state.is_compiled:
        subject.notes.append(
            "compiled functions were traced as eager code; only runs measure them compiled"
        )
    domain = subject.domain
    tracer = Tracer(
        subject.step, subject.batch, subject.state, checks=subject.checks, target=subject.target
    )
    largest = domain.occurring((1, *domain.between(1.0)))
    subject.take_larger_mode(lambda: tracer.concrete(largest).weight(largest))
    subject.check_left(
        lambda step, shape: Tracer(
            step, subject.batch, subject.state, target=subject.target, complete=False
        ).concrete(shape)
    )
    covering = Covering(subject, tracer, room, seconds)
    covering.cover()
    return MeasuredCost(
        pieces=tuple(covering.pieces),
        grid=covering.grid,
        smallest=domain.smallest,
        largest=domain.largest,
        multiple=domain.multiple,
        median=domain.median,
        empty=covering.empty,
        probes=tuple(covering.probes),
    )


def _traced_if_possible(subject: Subject, room: float) -> MeasuredCost | None:
    """The cost of traced bytes; `None` if the step cannot be traced but only run."""
    try:
        return _traced(subject, room, _SECONDS_BESIDE_RUNS)
    except BatchError:
        raise
    except CostError as error:
        subject.notes.append(f"only run, not traced, with the values of make_batch: {error}")
    return None


def _beside_tensors(subject: Subject) -> int:
    """Bytes of the process beside the step's own tensors, in whole 64 MiB."""
    if subject.target.type == "cuda":
        return 0
    settle_malloc()
    from torch.export import _trace  # noqa: F401  # the first symbol imports it: 32 MiB, which stay

    own = sum(part_bytes(tensor) for tensor in subject.state.tensors())
    beside = max(process_memory().resident_bytes - own, 0)
    return -(-beside // _ROUNDED_BYTES) * _ROUNDED_BYTES


def _on_cuda(subject: Subject, cost: MeasuredCost) -> MeasuredCost:
    """The cost of traced bytes and of all other memory on a CUDA device, if no step ran."""
    own = subject.state.device
    warn_of_kept(subject, device_memory(own) if own.type == "cuda" else None)
    caution = caution_of_segments()
    subject.notes += filter(None, [ASSUMED, caution])
    return replace(cost, offset=float(BESIDE_BYTES), scale=EXPANDABLE_SCALE, caution=caution)


def describe_step(step: Callable[[Any], object]) -> dict[str, str]:
    """Describe the model, dtype, device and torch version that a cost of this step depends on.

    The description of the model includes activation checkpointing, as transformers and torch's
    `CheckpointWrapper` mark it, and the attention implementation of a model of transformers. It
    does not include checkpointing in a model's own `forward`.

    On CUDA it includes the kind of the allocator's segments, since segments of fixed sizes reserve
    more than expandable ones. On the CPU it includes the number of threads, on which the time of a
    step depends, and the setting of malloc, and sets the latter.

    >>> model = torch.nn.Linear(2, 3)
    >>> describe_step(lambda batch: model(batch))["model"]
    'Linear, 9 parameters, 2bfe5e49'
    """
    state = TrainingState(step)
    parameters = state.parameters()
    shapes = repr([(tuple(p.shape), p.requires_grad) for p in parameters])
    digest = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
    names = ", ".join(type(module).__name__ for module in state.modules) or "no module"
    every = {id(one): one for module in state.modules for one in module.modules()}.values()
    return {
        "model": f"{names}, {sum(p.numel() for p in parameters):,} parameters, {digest}",
        # Ways switch it themselves: what is found is what the last one left.
        "checkpointing": f"in {len(step.ways)} ways"
        if isinstance(step, Alternatives)
        else _checkpointing(every),
        "attention": _attention(every),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in state.optimizers),
        "dtype": ", ".join(sorted({str(p.dtype) for p in parameters})),
        **_describe_device(state.device),
        "torch": torch.__version__,
    }


def _checkpointing(modules: Iterable[nn.Module]) -> str:
    """How many modules are marked to compute their activations again."""
    marked = sum(
        getattr(module, "gradient_checkpointing", False) is True
        or type(module).__name__ == "CheckpointWrapper"
        for module in modules
    )
    return f"of {marked} modules" if marked else "none seen"


def _attention(modules: Iterable[nn.Module]) -> str:
    """Attention as configurations of transformers' models state it; parts of a model may differ."""
    configs = (getattr(module, "config", None) for module in modules)
    # Configurations have no public name for the attention in use.
    found = {getattr(config, "_attn_implementation", None) for config in configs}
    return ", ".join(sorted(str(name) for name in found if name)) or "not stated"


def _describe_device(own: torch.device) -> dict[str, str]:
    if own.type == "cpu":
        device, threads = f"cpu ({platform.machine()})", str(torch.get_num_threads())
        return {"device": device, "threads": threads, "allocator": settle_malloc()}
    if own.type != "cuda":
        return {"device": str(own)}  # cannot be measured, but its name differs from those
    source = device_memory(own).source
    return {"device": source.name(), "allocator": source.allocator()}
