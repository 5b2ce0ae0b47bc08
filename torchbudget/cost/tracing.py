"""A training step traced on fake tensors: its live bytes, without the memory and the arithmetic.

Two steps run, the first, in which optimizers allocate their state, and a later one. A dispatch mode
records when each storage is allocated and freed. With numbers for the batch's shape, this gives the
peak of that shape; with symbols, an expression of it, and the conditions under which it holds.
"""

from __future__ import annotations

import copy
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchbudget.cost.agree import reducing
from torchbudget.cost.as_on_cuda import (
    CUDA_BLOCK_BYTES,
    TEMPORARIES,
    as_on_cuda,
    check_not_recurrent,
    like,
)
from torchbudget.cost.batch_recipe import Recipe, Shape, leaves_of
from torchbudget.cost.expressions import Expressions, UntraceableError
from torchbudget.cost.mended import OPERATIONS, mended
from torchbudget.cost.pieces import Piece, Trace
from torchbudget.cost.step_checks import StepChecks
from torchbudget.distributed import plain_parts
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState, reachable

# Torch's allocators round a block up to this.
_BLOCKS: Final = {"cuda": CUDA_BLOCK_BYTES, "cpu": 64}

# Operations of a gradient scaler. The first one checks that gradients are finite, which the trace
# assumes; the second one sets the next scale.
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_UPDATE_SCALE: Final = torch.ops.aten._amp_update_scale_.default
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
# Kernels read a fake tensor's device by this operation: the step did not call it.
_DEVICE: Final = torch.ops.prim.device.default
# They wrap a tensor that was just made from Python numbers.
_LIFTS: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# Fake tensors of up to so many elements, as a shape has, remember values that were computed from
# Python numbers alone, as in torch.tensor(x.shape).min(). Larger ones may be masks that are drawn.
_REMEMBERED: Final = 8
# Traces of a step that draws outside torch. Of five layers that are each kept or not, a quarter of
# two traces keep as many.
_MOST_TRACES: Final = 4
# Other draws for each shape, beyond those of a step's layers or so.
_MOST_DRAWS: Final = 997
_INTEGERS: Final = (
    "an integer that the step reads from a tensor, as in int(lengths.max()), becomes a shape or a "
    "loop count, and a trace has no values; take it from a shape, or use "
    "measure_cost(method='run')"
)
DRAWS: Final = (
    "the step draws from a generator outside torch, as of random or numpy.random, and its memory "
    "may depend on the draws: let it make the choice that needs the most memory while "
    "torchbudget.is_measuring()"
)


# What a boolean and a floating-point tensor are taken to be where a step reads their values.
_VALUES: Final = (False, 1.0)
_OTHER_VALUES: Final = (True, 1e-3)  # an optimizer divides by powers of its steps, which are not 0


class ValueDependentError(CostError):
    """The step's allocations depend on values of tensors or on draws, not only on shapes."""


class Tracer:
    """Traces a step; leaves no trace in what the step refers to.

    Args:
        step: the full training step on a batch, or forward only.
        make: makes a batch of a shape.
        state: what the step refers to.
        checks: of the step.
        target: the device that the step will run on, if that is another one.
        complete: whether it must be a whole training step, or forward only.

    Attributes:
        state: what the step refers to.
        checks: of the step.
        target: the device that it will run on.
        values: of a boolean and of a floating-point tensor that the step reads.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        make: Callable[[Shape], Any],
        state: TrainingState,
        *,
        checks: StepChecks | None = None,
        target: torch.device | None = None,
        complete: bool = True,
    ) -> None:
        self._complete, self.values = complete, _VALUES
        self._step, self._make, self.state = step, make, state
        self.checks = StepChecks(state) if checks is None else checks
        self.target = state.device if target is None else target
        self.checks.check_parameters(contents=False)
        if self.target.type == "cuda":
            check_not_recurrent(state)
        if any(isinstance(one, torch.optim.LBFGS) for one in state.optimizers):
            raise ValueDependentError("values decide what an LBFGS keeps; use method='run'")

    def concrete(self, shape: Shape, most_seconds: float = math.inf) -> Trace:
        """Trace the step on a batch of a shape, without any symbol and any mended function.

        Raises:
            UntraceableError: it takes more than `most_seconds` of computing.
            ValueDependentError: its memory depends on the values in the batch.
            CostError: it does not run on fake tensors, or is only a part of a training step.
        """
        batch = self._make(shape)

        def fresh(_: _Counter) -> Any:  # a step may take items out of its batch
            return copy.copy(batch) if isinstance(batch, (dict, list)) else batch

        return self._traced(fresh, shape, None, most_seconds, shape)

    def symbolic(self, recipe: Recipe, shape: Shape, most_seconds: float = math.inf) -> Trace:
        """Trace the step with symbols in place of the coordinates of `shape` that are above 1.

        Raises:
            UntraceableError: an operation does not run on symbols, or the trace takes more than
                `most_seconds` of computing.
            CostError: as `concrete`.
        """
        from torch._dynamo import source as sources
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        env = ShapeEnv(
            duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        # Sizes keep a symbol that the step turns into a number, as the turns of a loop.
        env._set_replacement = lambda *_: None  # type: ignore[method-assign]
        env.quotients = {}  # type: ignore[attr-defined]
        coordinates: list[Any] = []
        for at, value in enumerate(shape):
            source: Any = sources.ConstantSource(f"c{at}")
            if value > 1:
                symbol: Any = env.create_symbol(value, source, DimDynamic.DYNAMIC, None)
                coordinates.append(env.create_symintnode(symbol, hint=value, source=source))
            else:
                coordinates.append(value)

        def build(counter: _Counter) -> Any:
            with counter.fakes:
                return recipe.build(coordinates, counter.ignore)

        return self._traced(build, shape, env, most_seconds, coordinates)

    def _traced(
        self,
        batch_of: Callable[[_Counter], Any],
        shape: Shape,
        env: Any,
        most_seconds: float,
        coordinates: Sequence[Any],
    ) -> Trace:
        begun = time.process_time()
        symbols = [one.node.expr if isinstance(one, torch.SymInt) else None for one in coordinates]
        traces: list[Trace] = []
        for integer in range(1, 1 + _MOST_TRACES):
            counter = _Counter(self, env, integer, until=begun + most_seconds)
            draws = (integer - 1) * (1 + math.prod(shape) % _MOST_DRAWS)
            starts = self._two_steps(batch_of, counter, draws)
            traces.append(counter.trace(symbols, shape, starts))
            first, last = (one.living([shape]) for one in (traces[0], traces[-1]))
            if not np.array_equal(first, last):
                raise ValueDependentError(DRAWS if counter.drew else _INTEGERS)
            if not counter.drew and (integer > 1 or not counter.integers):
                break
        return replace(traces[0], seconds=time.process_time() - begun)

    def with_larger_values(self, shape: Shape) -> Trace:
        """Trace with the values of tensors with which the step takes more, where it branches.

        As of `if torch.rand(()) < 0.9: x = layer(x)`, and of a warning if a loss is not finite.
        Later traces have these values, too.
        """
        trace = self.concrete(shape)
        if trace.assumed:
            self.values = _OTHER_VALUES
            with suppress(CostError):
                other = self.concrete(shape)
                if other.weight(shape) > trace.weight(shape):
                    return other
            self.values = _VALUES
        return trace

    def _two_steps(
        self, batch_of: Callable[[_Counter], Any], counter: _Counter, draws: int
    ) -> tuple[int, int]:
        """Run two steps, after so many draws outside torch; the number of events after each."""
        with self._undisturbed():
            self.state.draw(draws)
            before = self.state.draws()
            buckets = [counter.on_its_own(module) for module in reducing(self.state)]
            try:
                for tensor in self.state.tensors():
                    counter.arrive([tensor])
            except Exception as error:  # fake tensors do not support every layout
                where = self.checks.name_of(tensor)
                raise CostError(f"{where} cannot be traced: {error}") from error
            starts = []
            for _ in range(2):
                counter.flops = 0
                self.state.rewind()
                batch = batch_of(counter)
                # A symbolic batch is not searched: its symbols refer to the shape environment.
                found = reachable(batch) if counter.env is None else leaves_of(batch)
                tensors = [one for one in found if isinstance(one, torch.Tensor)]
                try:
                    self._run(batch, tensors, counter)
                finally:
                    counter.leave(tensors)
                del batch, found, tensors
                starts.append(len(counter.events))
            counter.drew = self.state.draws() != before
            del buckets
        return starts[0], starts[1]

    def _run(self, batch: Any, tensors: Sequence[torch.Tensor], counter: _Counter) -> None:
        try:
            counter.arrive(tensors)  # NumPy arrays become tensors when they are used
            with ExitStack() as stack:
                if self._complete:
                    stack.enter_context(self.checks.checked())
                stack.enter_context(counter.fakes)
                stack.enter_context(counter)
                stack.enter_context(counter.assigning())
                if counter.env is not None:
                    stack.enter_context(mended(counter.env))
                self._step(batch)
        except CostError:
            raise
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ValueDependentError(
                f"the shapes in the step depend on values of tensors ({error.func}), and a trace "
                "has only shapes; measure_cost(method='run') runs the real step"
            ) from error
        except Exception as error:
            if counter.env is not None:
                first = str(error).partition("\n")[0]
                raise UntraceableError(f"with symbols: {type(error).__name__}: {first}") from error
            shapes = [(*one.shape,) for one in reachable(batch) if isinstance(one, torch.Tensor)]
            raise CostError(
                "the step does not run on fake tensors, which have shapes but no values; "
                f"measure_cost(method='run') runs the real one: {type(error).__name__}: {error}, "
                f"on tensors of the shapes {shapes}"
            ) from error

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Restore references at the end; free tensors by reference counts only."""
        state = self.state
        with state.restored_after_traces(), ExitStack() as stack:
            if self.target.type == "cuda" and state.device.type == "cpu":
                stack.enter_context(as_on_cuda(state))
            # The compiler would remember that it cannot compile under fake tensors.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if gc.isenabled():  # which would free tensors at a moment that differs
                gc.disable()
                stack.callback(gc.enable)
            # Shared by all of the process's fake tensors, and unbounded.
            stack.enter_context(patch.dict(FakeTensorMode.cache))
            yield


def trace_peak_bytes(step: Callable[[Any], object], batch: Any) -> int:
    """Trace the peak bytes of tensors in a training step on one batch.

    The step is traced, not run: it takes neither the memory nor the time of a real step, and model,
    optimizer and random generators do not change. Two steps are traced, since optimizers make their
    state in the first one; the larger peak counts. Blocks are rounded up as by the device's
    allocator. Workspaces of kernels, and free blocks that the allocator keeps, are not counted.

    In the trace, `item()` of a floating-point tensor is 1.0, and a boolean tensor is `False`, as in
    `if loss.isnan()` or `if mask.all()`; or, if the step takes more so, 0.001 and `True`. An
    integer from a tensor can be used in arithmetic, as in `loss / int(mask.sum())`. If it becomes a
    shape, or if the step indexes by a boolean mask, the step cannot be traced. Results of Python's
    numbers alone, as in `torch.div(x.shape[1], 2)`, have their true values.

    Args:
        step: the complete training step: forward, loss, backward, optimizer step, gradients
            cleared; or, for evaluation, a forward. Model and optimizer are found among the objects
            that it refers to.
        batch: the batch that the step is called with; its tensors may be real ones.

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
    tracer = Tracer(step, lambda _: batch, TrainingState(step))
    return tracer.with_larger_values((1, 1)).peak((1, 1))


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of a class consist of tensors, as `plain_parts` finds them."""
    return hasattr(kind, "__tensor_flatten__")


class _Fakes(FakeTensorMode):
    """Fake tensors that remember what was computed from Python's numbers alone."""

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether the values of a real tensor are remembered."""
        if type(t) is torch.Tensor and 1 < t.numel() <= _REMEMBERED:
            return t.layout is torch.strided and t.device.type == "cpu"
        return bool(super().may_turn_const(t))


# torch leaves the dispatch mode's class and constructor without types.
class _Counter(TorchDispatchMode):
    """Records when storages of fake tensors on a device are allocated and freed."""

    def __init__(self, tracer: Tracer, env: Any, integer: int, until: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not
        # Reads the environment when imported, so it is imported only with an optimizer.
        from torch._functorch import config as functorch_config
        from torch.utils.flop_counter import flop_registry

        target, self._device = tracer.target.type, tracer.state.device.type
        self.env, self._integer, self._until = env, integer, until
        self._checks, (self._bool, self._float) = tracer.checks, tracer.values
        self._granularity = _BLOCKS.get(target, 1)
        self._temporaries = {"cuda": TEMPORARIES, "cpu": _ON_CPU}.get(target, {})
        self._formulas = {**flop_registry}
        self._formulas |= {on_cpu: flop_registry[counted] for counted, on_cpu in _FLASH.items()}
        self._mended = {} if env is None else OPERATIONS
        # Below autograd, so that the step's own decompositions stay: what torch infers of shapes in
        # Python may ask for more, as `expand`, whose C++ takes only numbers.
        self._python = nullcontext if env is None else enable_python_dispatcher
        # Bytes, an int or an expression; sign; the event that allocated the storage.
        self.events: list[tuple[Any, int, int]] = []
        self.flops: Any = 0
        self.assumed = self.integers = 0
        self.drew = False  # whether generators outside torch have moved
        self._living: dict[int, weakref.ref[Any]] = {}
        # A kernel that the step launches itself must not get the null pointer of a fake tensor.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self.fakes = _Fakes(shape_env=env, allow_non_fake_inputs=True)
        # Of each operation: may its outputs come from a cache? Without one, a trace of an encoder
        # took 1.62 s instead of 0.97 s.
        self._apart: dict[Any, bool] = {}
        self._no_infinity = WeakIdKeyDictionary()  # storages of flags that a scaler has written
        # The fake of a real tensor must live as long as the real one.
        self._stand_ins = WeakIdKeyDictionary()

    def trace(self, symbols: Sequence[Any], shape: Shape, starts: tuple[int, int]) -> Trace:
        """Return the recorded trace."""
        expressions = Expressions()
        node = expressions.node
        known = {one: node("symbol", at) for at, one in enumerate(symbols) if one is not None}
        guards: Iterable[Any] = ()
        if self.env is not None:
            for meaning, one in self.env.quotients.items():
                known[one.expr] = expressions.add(meaning, known)
            guards = dict.fromkeys(one.expr for one in self.env.guards)
        numbers: dict[Any, int] = {}
        events = [numbers.setdefault(size, len(numbers)) for size, *_ in self.events]
        flops = self.flops.node.expr if isinstance(self.flops, torch.SymInt) else self.flops
        sizes = [expressions.add(size, known) for size in numbers]
        blocks = tuple(expressions.rounded_up(size, self._granularity) for size in sizes)
        bounds = []  # a symbol stands for numbers above 1
        for at, (symbol, value) in enumerate(zip(symbols, shape, strict=True)):
            name, end = ("LessThan", value) if symbol is None else ("GreaterThan", 2)
            bounds.append(node(name, node("symbol", at), node("int", end)))
        base = Piece(
            conditions=(*bounds, *(expressions.add(guard, known) for guard in guards)),
            flops=expressions.add(flops, known),
            nodes=tuple(expressions.nodes),
            sums=(),
            harmless=(),
        )
        signs, made = np.array([one[1:] for one in self.events], np.int64).T
        return Trace(base, blocks, np.array(events, np.int64), signs, made, starts, self.assumed)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storages of a fake tensor until each is freed."""
        if tensor.device.type == self._device:
            for part in plain_parts(tensor):
                self._count_storage(part.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._living:
            return
        size: Any = storage.nbytes()
        size = size.node.expr if isinstance(size, torch.SymInt) else int(size)
        living, events, made = self._living, self.events, len(self.events)

        def freed(_: Any) -> None:
            del living[key]
            events.append((size, -1, made))

        living[key] = weakref.ref(storage, freed)
        events.append((size, +1, made))

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count a fake tensor, which stands for an array of NumPy."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self._living[key] = weakref.ref(storage, lambda _: self._living.pop(key))

    def on_its_own(self, module: DistributedDataParallel) -> torch.Tensor:
        """Keep a module from summing gradients and buffers over ranks, as inside `no_sync`.

        Returns:
            A fake of its buckets: a second copy of the gradients, for as long as the module lives.
        """
        module.require_backward_grad_sync = module.require_forward_param_sync = False
        size = sum(p.nbytes for p in module.module.parameters() if p.requires_grad)
        with self.fakes:
            buckets = torch.empty(size, dtype=torch.uint8, device=module.device)
        self.count(buckets)
        return buckets

    def arrive(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there from the beginning, even if they are used late."""
        for one in tensors:
            # Operations on a wrapper arrive as operations on the tensors in it.
            for part in plain_parts(one) if _is_wrapper(type(one)) else [one]:
                self.count(self.stand_in(part))

    def leave(self, batch: Iterable[torch.Tensor]) -> None:
        """Drop the fakes of a batch."""
        for one in batch:
            for part in plain_parts(one) if _is_wrapper(type(one)) else [one]:
                self._stand_ins.pop(part, None)

    @contextmanager
    def assigning(self) -> Iterator[None]:
        """Let `tensor.data` read and write the fake of a real tensor, which stays as it is."""
        own: Any = torch.Tensor.data

        def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
            own.__set__(self.stand_in(tensor), self.stand_in(value))

        data = property(lambda tensor: own.__get__(self.stand_in(tensor)), write)
        with patch.object(torch.Tensor, "data", data):
            yield

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor, which counts as long as the real one lives."""
        if isinstance(tensor, FakeTensor) or _is_wrapper(type(tensor)):
            return tensor
        fake: torch.Tensor | None = self._stand_ins.get(tensor)
        if fake is None:
            fake = self._stand_ins[tensor] = self.fakes.from_tensor(tensor, static_shapes=True)
            self.count(fake)
        return fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return func(*args)
        if any(map(_is_wrapper, types)):
            return NotImplemented  # its own operations on the tensors in it will arrive
        if time.process_time() > self._until:
            raise UntraceableError("a trace takes too long: does the step loop?")
        if func is _ITEM:
            value = self._value_of(args[0])
            if value is not None:
                return value
        if func is _UPDATE_SCALE:
            return args[0]
        kwargs = kwargs or {}
        if func not in _LIFTS:
            # Fake mode computes some operations for real if all of their tensors are real.
            args, kwargs = tree_map_only(torch.Tensor, self.stand_in, (args, kwargs))
        if func is _UNSCALE:
            self._no_infinity[args[1].untyped_storage()] = True
        self.fakes.cache_enabled = self._apart.get(func, False)
        replaced = self._mended.get(func) or _WITHOUT_VALUES.get(func, func)
        temporary = self._temporaries.get(func)
        with self._python():
            beside = temporary(*args) if temporary is not None else None  # freed on return
            outputs = replaced(*args, **kwargs)
            if isinstance(outputs, FakeTensor) and outputs.layout is torch.sparse_coo:
                raise ValueDependentError("values decide how many values a sparse tensor has")
        leaves = [one for one in tree_leaves((outputs, beside)) if isinstance(one, FakeTensor)]
        for one in leaves:
            self.count(one)
        if func not in self._apart:
            # A cache would turn a tensor that is returned twice into two tensors.
            parts = [part for one in leaves for part in plain_parts(one)]
            storages = [part.untyped_storage()._cdata for part in parts]
            self._apart[func] = len(set(storages)) == len(storages)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops = self.flops + formula(*args, **kwargs, out_val=outputs)
        return outputs

    def _value_of(self, tensor: torch.Tensor) -> float | None:
        """The value that a tensor of one element is taken to have; `None` of a complex one."""
        constant = getattr(tensor, "constant", None)
        if constant is not None and tensor.untyped_storage() not in self._no_infinity:
            value: float = constant.item()  # of Python's numbers, as in torch.div(x.shape[1], 2)
            return value
        if tensor.dtype.is_floating_point:
            if tensor.untyped_storage() in self._no_infinity:
                return 0.0
            self.assumed += not self._checks.in_optimizer  # which counts its steps
            return self._float  # as of a loss that is logged
        if tensor.dtype is torch.bool:
            self.assumed += 1
            return self._bool  # as of loss.isnan() and mask.all()
        if not tensor.dtype.is_complex:
            self.integers += 1
            return self._integer  # as of mask.sum()
        return None


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, _: Any, lengths: Any, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shapes of `F.ctc_loss`, for targets that are as long as their padding."""
    turns, n, _ = log_probs.shape
    # torch turns a list of lengths into a tensor whose memory no mode can replace.
    if (targets.dim() == 1 and n > 1) or not isinstance(lengths, torch.Tensor):
        raise ValueDependentError(
            "the memory of a CTC loss grows with its longest target, and a trace has only padded "
            "lengths: pass ctc_loss targets of shape (n, S), not concatenated, and lengths as "
            "tensors, not lists; or use measure_cost(method='run')"
        )
    return log_probs.new_empty(n), log_probs.new_empty(n, turns, 2 * targets.shape[-1] + 1)


def _grouped_mm(
    one: torch.Tensor,
    other: torch.Tensor,
    groups: torch.Tensor | None = None,
    _: Any = None,
    out_dtype: torch.dtype | None = None,
    **__: Any,
) -> torch.Tensor:
    """The shape of a product of each group of rows, or of columns."""
    shape = [one.shape[-2], other.shape[-1]]
    if one.dim() == other.dim():
        shape.insert(0, one.shape[0] if groups is None or one.dim() == 3 else groups.shape[0])
    return one.new_empty(shape, dtype=out_dtype)


def _reduced(loss: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """A loss; torch keeps its mean or its sum in the storage of the losses of all elements."""
    reduced = loss(*arguments)
    return reduced if reduced.dim() else (arguments[0] + arguments[1]).as_strided((), ())


def _bincount(input: torch.Tensor, weights: Any = None, minlength: Any = 0) -> torch.Tensor:  # noqa: A002
    """The counts of `minlength` values."""
    if not isinstance(minlength, torch.SymInt) and not minlength:
        raise ValueDependentError("the shape of bincount depends on values: pass minlength")
    if weights is None:
        return input.new_empty(minlength)
    return input.new_empty(minlength, dtype=torch.float64)  # torch's meta kernel says float32


_workspaces: Final[dict[str, int]] = {}


def _mkldnn_rnn_layer(*arguments: Any) -> list[torch.Tensor]:
    """The outputs of a recurrent layer of oneDNN, with its workspace, which the backward needs.

    torch's fake kernel says that the workspace has 0 bytes, and only a real layer knows them.
    """
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    outputs = [*layer(*arguments)]
    shapes = tree_map_only(torch.Tensor, lambda one: (*map(int, one.shape), one.dtype), arguments)
    known = repr((*shapes[:7], *shapes[8:]))  # both directions have the same
    if known not in _workspaces:
        with unset_fake_temporarily():
            _workspaces[known] = layer(*tree_map_only(torch.Tensor, _zeros, arguments))[3].nbytes
    outputs[3] = outputs[3].new_empty(_workspaces[known])
    return outputs


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros([*map(int, fake.shape)], dtype=fake.dtype)


def _attention_inside(heads_at: int, given: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Scores, their softmax, and queries, keys and values twice."""
    n, length, width = given.shape
    return given.new_empty(n, length, 2 * arguments[heads_at] * length + 6 * width)


def _in_int64(given: torch.Tensor, *_: Any) -> torch.Tensor:
    """A copy in int64: sums of bools and of short integers make one of their input."""
    is_copied = not given.is_floating_point() and given.itemsize < torch.int64.itemsize
    return given.new_empty(given.shape if is_copied else (0,), dtype=torch.int64)


# Tensors that CPU kernels allocate while they run, and fake kernels do not: without them, an
# encoder in evaluation mode took 3 times its budget while it was measured, and by torch's profiler
# traces were too low by 46 % (CTC), 25 % (batch normalisation) and 55 % (a count of bools).
_ON_CPU: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    torch.ops.aten._native_multi_head_attention.default: partial(_attention_inside, 3),
    torch.ops.aten._transformer_encoder_layer_fwd.default: partial(_attention_inside, 1),
    torch.ops.aten._ctc_loss_backward.Tensor: partial(like, 6),
    torch.ops.aten.native_batch_norm_backward.default: partial(like, 1),
    torch.ops.aten.sum.default: _in_int64,
    torch.ops.aten.sum.dim_IntList: _in_int64,
    torch.ops.aten.cumsum.default: _in_int64,
}
# Attention on a card, whose floating-point operations torch counts, and the same on the CPU.
_FLASH: Final[dict[Any, Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention: (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    ),
}
# Operations whose shapes torch's fake tensors read from values, or do not know on the CPU.
_WITHOUT_VALUES: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.aten.bincount.default: _bincount,
    torch.ops.aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.Tensor: partial(like, 1),
    **{
        loss: partial(_reduced, loss)
        for loss in (
            *(torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default),
            torch.ops.aten.binary_cross_entropy.default,
            torch.ops.aten.soft_margin_loss.default,
        )
    },
}
if hasattr(torch.ops.aten, "_grouped_mm"):  # since torch 2.8
    _WITHOUT_VALUES[torch.ops.aten._grouped_mm.default] = _grouped_mm
