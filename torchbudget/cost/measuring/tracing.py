"""A training step traced on fake tensors: its live bytes, without the memory and the arithmetic."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchbudget.cost.measuring.allocator_blocks import BLOCK_BYTES
from torchbudget.cost.measuring.as_on_cuda import as_on_cuda, check_not_recurrent
from torchbudget.cost.measuring.joined import bucket_bytes, reducing
from torchbudget.cost.measuring.requests import Requests
from torchbudget.cost.measuring.step_checks import StepChecks
from torchbudget.cost.models.live_bytes import LiveBytes
from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState, reachable

# What torch's allocator on the CPU rounds a block up to.
_CPU_BLOCK: Final = 64
# Two steps on one shape that differ by no more do not depend on values.
_ROUNDING: Final = 4096

# A gradient scaler's: are the gradients finite, which the trace assumes, and the next scale.
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_UPDATE_SCALE: Final = torch.ops.aten._amp_update_scale_.default
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
# Asked of a fake tensor wherever a kernel looks at its device: no operation of the step.
_DEVICE: Final = torch.ops.prim.device.default
# They wrap a tensor that was just made from Python numbers; fake tensors remember such values,
_LIFTS: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# of as many elements as a shape may have, and what is computed from them alone, as in
# torch.tensor(x.shape).min(); larger ones may be masks that the step draws.
_REMEMBERED: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What one step did.

    Attributes:
        live_bytes: bytes that live after each operation, parameters, gradients, optimizer state and
            the batch included, shape `(operations,)`.
        operations: which operations they were.
        kept_bytes: bytes that live after the step and did not before.
        assumed: how often the step asked a tensor for a truth value, and got `False`.
        integers: how often it asked a tensor for an integer, and got 1.
        requests: what it asked of the device's allocator.
    """

    live_bytes: IntArray
    operations: tuple[Any, ...]
    kept_bytes: int
    assumed: int
    integers: int
    requests: Requests

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        return int(self.live_bytes.max())

    def check_same(self, other: Trace) -> None:
        """Check that another value of the integers that were read gave the same memory.

        Raises:
            ValueDependentError: it did not: such an integer is a shape, or a number of turns.
        """
        if self.integers and (
            self.operations != other.operations
            or np.abs(self.live_bytes - other.live_bytes).max() > _ROUNDING
        ):
            raise ValueDependentError(
                "an integer that the step reads from a tensor, as in int(lengths.max()), becomes a "
                "shape or a number of turns, which a trace cannot know; take it from a shape, or "
                "measure_cost(method='run')"
            )


class ValueDependentError(CostError):
    """What the step allocates depends on the values of tensors, not only on their shapes."""


@contextmanager
def tracing(
    step: Callable[[Any], object],
    state: TrainingState,
    target: torch.device | None = None,
    checks: StepChecks | None = None,
) -> Iterator[Callable[..., Trace]]:
    """Trace the user's own step, with the user's own model and optimizer.

    Every operation gets fake tensors instead of real ones, so that nothing is computed and no
    tensor changes; the references to tensors in modules and optimizers are restored at the end.

    Args:
        step: the full training step on a batch, or forward only.
        state: what it refers to.
        target: the device that the step is to run on, where that is another one.
        checks: of the step, where they are asked later; default: others.

    Yields:
        A function that traces the step on a batch; its argument `integer` is what integers are that
        the step reads from tensors. The first batch is stepped on twice, since optimizers allocate
        their state in the first step. It raises a `CostError` if the step has no parameters, whose
        device is to be traced, does not run on fake tensors, or is only a part of a training
        step.
    """
    checks = StepChecks(state) if checks is None else checks
    checks.check_parameters(contents=False)
    if state.device.type == "cuda":
        check_not_recurrent(state)
    live = _FakeBytes(state.device, state.device if target is None else target)
    warm = False

    def trace(batch: Any, integer: int = 1) -> Trace:
        nonlocal warm
        live.integer = integer
        if not warm:
            _trace(step, checks, live, batch)
            live.forget(batch)  # it arrives once more
            warm = True
        return _trace(step, checks, live, batch)

    with state.restored(contents=False), ExitStack() as stack:
        if target is not None and target.type == "cuda" and state.device.type == "cpu":
            stack.enter_context(as_on_cuda(state))
        # The compiler would remember that it cannot compile under fake tensors.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if gc.isenabled():  # which would free tensors at a moment that differs from step to step
            gc.disable()
            stack.callback(gc.enable)
        # Shared by all of the process's fake tensors, and unbounded.
        stack.callback(_forget_outputs, dict(FakeTensorMode.cache))
        buckets = [live.on_its_own(module) for module in reducing(state)]
        try:
            for tensor in state.tensors():
                live.stand_in(tensor)
        except Exception as error:  # of fake tensors, which do not know every layout
            raise CostError(f"{checks.name_of(tensor)} cannot be traced: {error}") from error
        live.num_loaded = len(live.living)
        yield trace
        del buckets


def _forget_outputs(known: dict[Any, Any]) -> None:
    """Leave in the cache of fake tensors' outputs what was there before."""
    FakeTensorMode.cache.clear()
    FakeTensorMode.cache.update(known)


def _trace(
    step: Callable[[Any], object], checks: StepChecks, live: _FakeBytes, batch: Any
) -> Trace:
    live.begin()
    before, resident = live.num_bytes, tuple(live.living.values())
    try:
        for one in reachable(batch):
            if isinstance(one, torch.Tensor):
                live.stand_in(one)  # it is there from the beginning, even if it is used late
        with checks.checked(), live.fakes, live:
            step(batch)
    except CostError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ValueDependentError(
            f"the shapes in the step depend on values of tensors ({error.func}), and a trace has "
            "only shapes; measure_cost(method='run') runs the real step"
        ) from error
    except Exception as error:
        raise CostError(
            "the step does not run on fake tensors, which have shapes but no values; "
            f"measure_cost(method='run') runs the real one: {type(error).__name__}: {error}"
        ) from error
    kept_bytes = live.num_bytes - before - live.arrived_bytes
    history = np.asarray(live.history, np.int64)
    loaded = live.num_loaded
    requests = Requests.of(resident[:loaded], resident[loaded:], live.events)
    return Trace(history, tuple(live.operations), kept_bytes, live.assumed, live.integers, requests)


def trace_peak_bytes(step: Callable[[Any], object], batch: Any) -> int:
    """The most bytes of tensors that live at once in a training step on `batch`.

    The step is traced, not run: it takes neither the memory nor the time of a real one, and model,
    optimizer and random generators do not change. The second step counts, when the optimizer has
    its state. Blocks are rounded up as the device's allocator does; kernels' workspaces, and what
    the allocator keeps beside living tensors, are not counted.

    In the trace, `item()` of a floating-point tensor is 1.0, and of a boolean one `False`, as in
    `if loss.isnan()` or `if mask.all()`. An integer may be computed with, as in
    `loss / int(mask.sum())`, but if it becomes a shape, the step cannot be traced, nor can one that
    indexes by a boolean mask. What is computed of Python's numbers alone, as in
    `torch.div(x.shape[1], 2)`, has its true value.

    Args:
        step: the full training step: forward, loss, backward, optimizer step, gradients cleared;
            or forward only, for evaluation. Model and optimizer are found in what it refers to.
        batch: what it is called with; its tensors may be real ones.

    Raises:
        CostError: no parameters are found, the step does not run on fake tensors, or it is only a
            part of a training step.

    >>> import torch
    >>> model = torch.nn.Linear(100, 10)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step(batch):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> trace_peak_bytes(step, torch.zeros(1000, 100)) // 1000  # the batch alone is 400,000 bytes
    444
    """
    with tracing(step, TrainingState(step)) as trace:
        return check_values(trace, batch).peak_bytes


def check_values(trace: Callable[..., Trace], batch: Any) -> Trace:
    """Trace a step, and check that its memory does not depend on values.

    Raises:
        ValueDependentError: it does.
    """
    traced: Trace = trace(batch)
    if traced.integers:
        trace(batch, integer=2).check_same(traced)
    return traced


class _Fakes(FakeTensorMode):
    """Fake tensors that remember what was computed from Python's numbers alone."""

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether the values of a real tensor are remembered."""
        if 1 < t.numel() <= _REMEMBERED:
            return type(t) is torch.Tensor and t.layout is torch.strided and t.device.type == "cpu"
        return bool(super().may_turn_const(t))


class _FakeBytes(LiveBytes):
    """The bytes of fake tensors that live on a device."""

    def __init__(self, device: torch.device, target: torch.device) -> None:
        # Reads the environment, and is imported by no one where there is no optimizer.
        from torch._functorch import config as functorch_config

        block_bytes = BLOCK_BYTES if target.type == "cuda" else _CPU_BLOCK
        super().__init__(device.type, block_bytes=block_bytes, kind=FakeTensor)
        self.begin()
        self.integer = 1
        self.num_loaded = 0  # storages that live before the first step
        # A kernel that the step launches itself must not get the null pointer of a fake tensor.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self.fakes = _Fakes(allow_non_fake_inputs=True)
        # Of each operation: whether its outputs may come from a cache.
        self._apart: dict[Any, bool] = {}
        self._no_infinity = WeakIdKeyDictionary()  # storages of flags that a scaler has written
        # The fake of a real tensor must live as long as the real one.
        self._stand_ins = WeakIdKeyDictionary()

    def begin(self) -> None:
        """Start the history of another step."""
        self.history, self.events = [], []
        self.operations: list[Any] = []
        self.arrived_bytes = 0
        self.assumed = self.integers = 0

    def on_its_own(self, module: DistributedDataParallel) -> torch.Tensor:
        """Keep a module from summing gradients and buffers over ranks, as inside `no_sync`.

        Returns:
            A fake of its buckets.
        """
        module.require_backward_grad_sync = module.require_forward_param_sync = False
        with self.fakes:
            buckets = torch.empty(bucket_bytes(module), dtype=torch.uint8, device=module.device)
        self.count(buckets)
        return buckets

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor, which counts as long as the real one lives."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: torch.Tensor | None = self._stand_ins.get(tensor)
        if fake is None:
            fake = self._stand_ins[tensor] = self.fakes.from_tensor(tensor)
            self.arrived_bytes += self.count(fake)
        return fake

    def forget(self, batch: Any) -> None:
        """Drop the fakes of a batch."""
        for one in reachable(batch):
            if isinstance(one, torch.Tensor):
                self._stand_ins.pop(one, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return func(*args)
        if func is _ITEM:
            value = self._value_of(args[0])
            if value is not None:
                return value
        if func is _UPDATE_SCALE:
            return args[0]
        kwargs = kwargs or {}
        if func not in _LIFTS and (_has_real(args) or _has_real(kwargs.values())):
            # Fake mode computes some operations for real if all of their tensors are real.
            args, kwargs = tree_map_only(torch.Tensor, self.stand_in, (args, kwargs))
        if func is _UNSCALE:
            self._no_infinity[args[1].untyped_storage()] = True
        self.operations.append(func)
        self.fakes.cache_enabled = self._apart.get(func, False)
        outputs = super().__torch_dispatch__(_WITHOUT_VALUES.get(func, func), types, args, kwargs)
        if func not in self._apart:
            # Of one tensor that is returned twice, a cache would make two.
            leaves = (one for one in tree_leaves(outputs) if isinstance(one, FakeTensor))
            storages = [one.untyped_storage()._cdata for one in leaves]
            self._apart[func] = len(set(storages)) == len(storages)
        return outputs

    def _value_of(self, tensor: torch.Tensor) -> float | None:
        """What a tensor of one element is taken to be; `None` of a complex one."""
        constant = getattr(tensor, "constant", None)
        if constant is not None and tensor.untyped_storage() not in self._no_infinity:
            value: float = constant.item()  # of Python's numbers, as in torch.div(x.shape[1], 2)
            return value
        if tensor.dtype.is_floating_point:
            # 1.0 of a loss that is logged, of an optimizer's count of steps.
            return 0.0 if tensor.untyped_storage() in self._no_infinity else 1.0
        if tensor.dtype is torch.bool:
            self.assumed += 1
            return False  # is a loss NaN, does a mask hide nothing
        if not tensor.dtype.is_complex:
            self.integers += 1
            return self.integer  # how many tokens are not padding
        return None


def _has_real(values: Iterable[Any]) -> bool:
    """Whether any of the arguments of an operation is a real tensor."""
    for one in values:
        if isinstance(one, torch.Tensor):
            if not isinstance(one, FakeTensor):
                return True
        elif isinstance(one, (list, tuple)) and _has_real(one):
            return True
    return False


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, _: Any, lengths: Any, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shapes of `F.ctc_loss`, for targets that are as long as their padding."""
    turns, n, _ = log_probs.shape
    # Of lengths in a list, torch makes a tensor whose memory no mode can replace.
    if (targets.dim() == 1 and n > 1) or not isinstance(lengths, torch.Tensor):
        raise ValueDependentError(
            "the memory of a CTC loss grows with its longest target, and a trace knows only what "
            "targets are padded to: pass ctc_loss targets of shape (n, S), not one after another, "
            "and tensors of lengths, not lists; or measure_cost(method='run')"
        )
    return log_probs.new_empty(n), log_probs.new_empty(n, turns, 2 * targets.shape[-1] + 1)


def _ctc_loss_backward(_: torch.Tensor, log_probs: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


# Operations whose shapes torch's own fake tensors take from values.
_WITHOUT_VALUES: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
