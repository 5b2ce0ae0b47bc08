"""A training step traced on fake tensors: its live bytes, without the memory and the arithmetic."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import CostError

# What an allocator rounds a block up to: CUDA's caching one, and torch's on the CPU.
_CUDA_BLOCK: Final = 512
_CPU_BLOCK: Final = 64

# A gradient scaler's: whether gradients are finite, which they are, and what follows for the scale.
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_UPDATE_SCALE: Final = torch.ops.aten._amp_update_scale_.default
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
# They wrap a tensor that was just made from Python numbers, whose values fake tensors then know.
_LIFTS: Final = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What one step did.

    Attributes:
        live_bytes: bytes that live after each operation, parameters, gradients, optimizer state and
            the batch included, shape `(operations,)`.
        operations: which operations they were.
        kept_bytes: bytes that the step leaves behind beyond those that it found.
        assumed: how many truth values the step asked tensors for, and got `False`.
    """

    live_bytes: IntArray
    operations: tuple[Any, ...]
    kept_bytes: int
    assumed: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        return int(self.live_bytes.max())


class StepTracer:
    """Traces the user's own step, on the user's own model and optimizer.

    Every operation meets fake tensors in the place of real ones, so that nothing is computed and no
    tensor changes; which tensors the modules and the optimizers hold is put back at the end.

    Args:
        step: the full training step on a batch.
        state: what it trains.

    Raises:
        CostError: there is nothing to trace on: no device that the step's parameters are on.
    """

    def __init__(self, step: Callable[[Any], object], state: TrainingState) -> None:
        self._step = step
        self._state = state
        self.device = state.device

    def traces(self, batches: Iterable[Any]) -> Iterator[Trace]:
        """Trace a step on each batch, which may be made as it is asked for.

        The first batch is stepped on once before, as optimizers make their state at the first step.
        The iterator must be exhausted or closed, or else nothing is put back.

        Raises:
            CostError: the step does not run on fake tensors, or is no full training step.
        """
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        live = _LiveBytes(fakes, self.device)
        first = True
        with self._state.kept(contents=False), _no_garbage_collection():
            for tensor in self._state.tensors():
                live.hold(tensor)
            for batch in batches:
                if first:
                    self._run(fakes, live, batch)
                    first = False
                yield self._run(fakes, live, batch)
                del batch

    def _run(self, fakes: FakeTensorMode, live: _LiveBytes, batch: Any) -> Trace:
        live.begin()
        before = live.live_bytes
        try:
            with self._state.watched(), fakes, live:
                self._step(batch)
        except CostError:
            raise
        except Exception as error:
            raise CostError(
                "the step does not run on fake tensors, which have shapes but no values; "
                f"measure_cost(method='run') runs the real one: {type(error).__name__}: {error}"
            ) from error
        return Trace(
            np.asarray(live.history, np.int64),
            tuple(live.operations),
            live.live_bytes - before - live.arrived_bytes,
            live.assumed,
        )


def trace_peak_bytes(step: Callable[[Any], object], batch: Any) -> int:
    """The most bytes of tensors that live at once in a training step on `batch`.

    The step is traced, not run: it takes neither the memory nor the time of a real one, and model,
    optimizer and random generators stay as they are. It is the second step that is counted, when
    the optimizer has its state. Blocks are rounded up as the device's allocator does; what kernels
    use inside themselves, and what the allocator holds beside living tensors, is not seen.

    To the step, `item()` of a floating-point tensor is 1.0, and of a boolean one `False`, as in
    `if loss.isnan()` or `if mask.all()`. Where other values decide what it does (lengths, indexing
    by a boolean mask), it cannot be traced.

    Args:
        step: the full training step: forward, loss, backward, optimizer step, gradients cleared.
            Model and optimizer are found in what it refers to.
        batch: what it is called with. Any tensors in it may be real ones.

    Raises:
        CostError: no parameters are found, the step does not run on fake tensors, or it is no full
            training step.

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
    [trace] = StepTracer(step, TrainingState(step)).traces([batch])
    return trace.peak_bytes


# torch leaves the dispatch mode's class and constructor without types.
class _LiveBytes(TorchDispatchMode):
    """The bytes that live on a device after each operation, each storage counted once."""

    def __init__(self, fakes: FakeTensorMode, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not
        self.live_bytes = 0
        self.begin()
        self._fakes = fakes
        self._device = device.type
        self._block = _CUDA_BLOCK if device.type == "cuda" else _CPU_BLOCK
        self._storages: set[int] = set()
        self._no_infinity: set[int] = set()
        # A real tensor's fake must live as long as the real one does, which it stands for.
        self._stand_ins = WeakIdKeyDictionary()

    def begin(self) -> None:
        """Begin a new history."""
        self.history: list[int] = []
        self.operations: list[Any] = []
        self.arrived_bytes = 0
        self.assumed = 0

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a real tensor as long as it lives, and give its fake."""
        fake: torch.Tensor | None = self._stand_ins.get(tensor)
        if fake is None:
            fake = self._stand_ins[tensor] = self._fakes.from_tensor(tensor)
            before = self.live_bytes
            self._count(fake)
            self.arrived_bytes += self.live_bytes - before
        return fake

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            num_bytes = -(-storage.nbytes() // self._block) * self._block
            self._storages.add(id(storage))
            self.live_bytes += num_bytes
            weakref.finalize(storage, self._forget, id(storage), num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._storages.remove(key)
        self._no_infinity.discard(key)
        self.live_bytes -= num_bytes

    def _stand_in(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument if isinstance(argument, FakeTensor) else self.hold(argument)
        if isinstance(argument, (list, tuple)):
            return [self._stand_in(one) for one in argument]
        return argument

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _ITEM:
            if args[0].dtype.is_floating_point:
                if id(args[0].untyped_storage()) in self._no_infinity:
                    return 0.0
                return 1.0  # of a loss that is logged, of an optimizer's count of steps
            if args[0].dtype is torch.bool:
                self.assumed += 1
                return False  # is a loss NaN, does a mask hide nothing
        if func is _UPDATE_SCALE:
            return args[0]
        kwargs = kwargs or {}
        if func not in _LIFTS:
            # Fake mode computes some operations for real whose tensors are all real ones.
            args = tuple(self._stand_in(one) for one in args)
            kwargs = {name: self._stand_in(one) for name, one in kwargs.items()}
        if func is _UNSCALE:
            self._no_infinity.add(id(args[1].untyped_storage()))
        result = func(*args, **kwargs)
        for one in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(one, FakeTensor):
                self._count(one)
        self.history.append(self.live_bytes)
        self.operations.append(func)
        return result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Let no collection fall into a step at a moment that is another one in every run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
