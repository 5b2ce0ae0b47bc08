"""The cost of samples of one fixed shape: the classical "how many fit"."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, is_int
from torchbudget.cost.batch_recipe import Recipe
from torchbudget.cost.padded import PaddedCost, whole_bytes
from torchbudget.cost.protocol import IntArray
from torchbudget.cost.tracing import Tracer
from torchbudget.errors import BudgetError, CostError, OversizeError
from torchbudget.restoring import TrainingState
from torchbudget.units import Amount, format_bytes

Shape: TypeAlias = Sequence[int]
OptimizerFactory: TypeAlias = Callable[[list[Any]], torch.optim.Optimizer]
# Rows and columns of the matrix that an optimizer's state is traced for: so large that a step count
# and factored moments, 516 bytes, are less than a byte for each element.
_ROWS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCost(PaddedCost):
    """`max(floor, fixed + n·sample)` bytes for n samples of one fixed shape.

    A `PaddedCost` whose samples cost the same whatever their size. It also computes how many
    samples fit the host, how many fit the device, and which batch size to take.

    Attributes:
        sample_bytes: what each sample adds to the peak of a training step on the device.
        fixed_bytes: bytes without any sample: parameters, gradients, optimizer state.
        floor_bytes: the least that a step costs, however small its batch: the optimizer's step.
        host_sample_bytes: bytes of a sample's input and target in main memory; 0: not known.
        variants_per_read: number of samples that one read yields, such as an image and its crops;
            batch sizes are multiples of it.

    Raises:
        CostError: as in `PaddedCost`; or `unit_bytes` or `pair_bytes` are given.
        OptionError: `variants_per_read` is not an int of at least 1.

    >>> cost = DenseCost(fixed_bytes=1000, sample_bytes=30, variants_per_read=4)
    >>> int(cost.batch_bytes(8, 0)), int(cost.capacity(0, 1240))
    (1240, 8)
    >>> cost.largest_batch(1359), cost.batch_for(6, "1 MiB")
    (8, 8)
    """

    host_sample_bytes: int = 0
    variants_per_read: int = 1

    def __post_init__(self) -> None:
        super(DenseCost, self).__post_init__()
        if not self.counts or self.is_constant:
            raise CostError("samples of one shape cost sample_bytes, not unit_bytes or pair_bytes")
        for name in ("sample_bytes", "host_sample_bytes"):
            object.__setattr__(self, name, whole_bytes(name, getattr(self, name)))
        at_least_one("variants_per_read", self.variants_per_read)

    @classmethod
    def of(
        cls,
        input_shape: Shape | Sequence[Shape],
        output_shape: Shape | Sequence[Shape],
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
        *,
        output_dtype: torch.dtype | Sequence[torch.dtype] | None = None,
        module: nn.Module | Callable[[], nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | OptimizerFactory | int | None = None,
        variants_per_read: int = 1,
    ) -> DenseCost:
        """Compute the cost of training `module` on samples of these shapes, without a device.

        The module runs forward and backward on fake tensors, which allocate no memory, and the
        living bytes are counted after every operation. The cost is the true peak at n = 1, and at
        least the true peak for larger batches. The module does not change.

        It counts tensors, but not the workspaces of kernels, the rounding of the allocator,
        autocast or the loss. Leave room for these, put the loss into the module, or measure the
        real step.

        Args:
            input_shape: the shape of one sample's input without the batch axis, or one shape for
                each positional argument of `module`.
            output_shape: the shape of one sample's target, or one for each target.
            dtype: dtype of the input, or one for each input.
            output_dtype: dtype of the target, or one for each. Default: that of the first input.
            module: the module to train; or its class, or a callable without arguments that makes
                it, which then allocates no memory. Without it, a sample costs the bytes of its
                input and target.
            optimizer: the optimizer that trains the module; or its class, or a callable that makes
                one from a list of parameters; or its number of states per parameter (Adam: 2).
            variants_per_read: see the class.

        Raises:
            CostError: a shape or dtype is invalid; the module does not run on fake tensors (its
                code depends on data, or its tensors are on several devices), is recurrent, or needs
                bytes that are not in proportion to the batch; or the size of the optimizer's state
                is unknown.

        >>> cost = DenseCost.of((784,), (), module=lambda: nn.Linear(784, 10),
        ...                     output_dtype=torch.int64, optimizer=torch.optim.Adam)
        >>> cost.sample_bytes == 784 * 4 + 8 + 10 * 4 + 10 * 4  # input, target, output, gradient
        True
        >>> cost.largest_batch("1 MiB")
        276
        """
        inputs = _sample("input", input_shape, dtype)
        targets = _sample(
            "output", output_shape, inputs[0].dtype if output_dtype is None else output_dtype
        )
        host_sample_bytes = _nbytes([*inputs, *targets])
        cost = partial(
            cls, host_sample_bytes=host_sample_bytes, variants_per_read=variants_per_read
        )
        if module is None:
            if optimizer is not None:
                raise CostError("optimizer= needs the module that it trains: pass module=")
            return cost(sample_bytes=host_sample_bytes)
        built, sample_bytes, constant_bytes = _traced(module, inputs, targets)
        trained = [p for p in built.parameters() if p.requires_grad]
        trained_bytes = _nbytes(trained)
        states = _state_bytes(optimizer, {p.dtype for p in trained})
        # Parameters, buffers, and a gradient and states for each that is trained.
        own_bytes = _nbytes(itertools.chain(built.parameters(), built.buffers())) + trained_bytes
        state_bytes = sum(states[p.dtype] * p.numel() for p in trained)
        # An optimizer that steps all parameters at once (foreach) needs about one more copy of
        # them; one that steps them in turn, two of the current one, at most of the largest.
        largest_bytes = max((_nbytes([parameter]) for parameter in trained), default=0)
        step_bytes = max(trained_bytes, 2 * largest_bytes) if any(states.values()) else 0
        return cost(
            sample_bytes=sample_bytes,
            fixed_bytes=max(own_bytes, constant_bytes) + state_bytes,
            floor_bytes=own_bytes + state_bytes + step_bytes,
        )

    def samples_in_host(self, budget: MemoryBudget | Amount) -> int:
        """Return the number of samples that fit main memory; plain bytes are the host's budget.

        Raises:
            BudgetError: the budget does not limit the host.
            CostError: `host_sample_bytes` is not known.

        >>> DenseCost.of((3, 32, 32), (10,)).samples_in_host("1 GiB")
        87097
        """
        if not isinstance(budget, MemoryBudget):
            budget = MemoryBudget(host=budget)
        if budget.host is None:
            raise BudgetError("this budget does not limit the host; give MemoryBudget(host=…)")
        if not self.host_sample_bytes:
            raise CostError("host_sample_bytes is unknown: pass it to count the samples that fit")
        return int(budget.host // self.host_sample_bytes)

    def largest_batch(self, budget: MemoryBudget | Amount) -> int:
        """Return the largest batch size that fits the device, a multiple of `variants_per_read`.

        Raises:
            BudgetError: the budget does not limit the device.
            OversizeError: not even one read fits; the message states the bytes of the model alone.
        """
        device_bytes = MemoryBudget.of(budget).device
        if device_bytes is None:
            raise BudgetError("this budget does not limit the device; give MemoryBudget(device=…)")
        reads = int(self.capacity(0, device_bytes)) // self.variants_per_read
        if not reads:
            alone = int(max(self.fixed_bytes, self.floor_bytes))
            raise OversizeError(
                f"raise the budget of {format_bytes(device_bytes)} ({device_bytes} bytes): the "
                f"model alone needs {format_bytes(alone)} ({alone} bytes), and a read of "
                f"{self.variants_per_read} adds {self.variants_per_read * self.sample_bytes} bytes"
            )
        return reads * self.variants_per_read

    def batch_for(self, preferred: int, budget: MemoryBudget | Amount) -> int:
        """Return the batch size that is nearest to a preferred one and fits.

        It is the nearest positive multiple of `variants_per_read` (the larger one of two that are
        equally near), and at most `largest_batch` if the budget limits the device.

        Raises:
            OptionError: `preferred` is no int or below 1.
            OversizeError: not even one read fits.

        >>> cost = DenseCost(sample_bytes=100, variants_per_read=4)
        >>> [cost.batch_for(preferred, 1700) for preferred in (1, 5, 6, 1000)]
        [4, 4, 8, 16]
        """
        variants = self.variants_per_read
        reads = (2 * at_least_one("preferred", preferred) + variants) // (2 * variants)
        batch = max(1, reads) * variants
        budget = MemoryBudget.of(budget)
        return batch if budget.device is None else min(batch, self.largest_batch(budget))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _sample(
    name: str, shape: Shape | Sequence[Shape], dtype: torch.dtype | Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """A meta tensor per shape; a sequence of ints is one shape, and so is the empty one."""
    with suppress(TypeError, ValueError, RuntimeError):
        shapes: list[Any] = [shape] if all(map(is_int, shape)) else list(shape)
        dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else list(dtype)
        pairs = zip(shapes, dtypes, strict=True)
        made = [torch.empty(tuple(one), dtype=kind, device="meta") for one, kind in pairs]
        if made and all(one.numel() for one in made):
            return made
    raise CostError(
        f"{name}_shape must be a shape without the batch axis, such as (3, 32, 32), or a sequence "
        "of shapes, with one dtype or one for each of them, got {shape!r} and {dtype!r}"
    )


def _state_bytes(
    optimizer: torch.optim.Optimizer | OptimizerFactory | int | None, dtypes: set[torch.dtype]
) -> dict[torch.dtype, int]:
    """How many bytes an optimizer keeps for each element that it trains, by the element's dtype.

    SGD 0, with momentum the element's, Adam twice that, states of integers as many as these take;
    the largest of all groups, without step counts and factored moments. It is found by a trace of
    one step on a matrix. An optimizer that is given is not stepped: another one is made of its
    class and the options of its groups.

    Raises:
        CostError: `optimizer` is not an optimizer, or it does not step on fake tensors.
    """
    if optimizer is None:
        return dict.fromkeys(dtypes, 0)
    if is_int(optimizer) and optimizer >= 0:
        return {dtype: optimizer * dtype.itemsize for dtype in dtypes}
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise CostError(
            "optimizer must be an optimizer, a class of one, or a number of states per parameter, "
            f"got {optimizer!r}"
        )
    make: Any = optimizer
    groups: list[dict[str, Any]] = [{}]
    if isinstance(optimizer, torch.optim.Optimizer):
        make = type(optimizer)
        anywhere = {"fused": False, "capturable": False}  # these options may ask for a GPU
        groups = [{**group, **anywhere} for group in optimizer.param_groups]
    try:
        return {
            dtype: max(_traced_state_bytes(make, group, dtype) for group in groups)
            for dtype in dtypes
        }
    except Exception as error:
        name = getattr(make, "__name__", repr(make))
        raise CostError(
            f"the size of the state of {name} is unknown, since it does not step on fake tensors; "
            "pass the number of states that it keeps per parameter, as in optimizer=2: "
            f"{type(error).__name__}: {error}"
        ) from error


def _traced_state_bytes(
    make: Callable[[list[Any]], torch.optim.Optimizer], group: dict[str, Any], dtype: torch.dtype
) -> int:
    """Bytes of a new optimizer's state for each element of a matrix, after its first step."""
    with torch.inference_mode(False), torch.enable_grad():
        matrix = nn.Parameter(torch.zeros(_ROWS, _ROWS, dtype=dtype))
        matrix.grad = torch.zeros_like(matrix)
        optimizer = make([{**group, "params": [matrix]}] if group else [matrix])

        def step(_: None) -> None:
            optimizer.step()

        tracer = Tracer(step, lambda _: None, TrainingState(step), complete=False)
        trace = tracer.concrete((1,))
    living_bytes = int(trace.living([(1,)])[trace.starts[0] - 1, 0])
    return (living_bytes - _nbytes([matrix, matrix.grad])) // matrix.numel()


def _traced(
    module: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> tuple[nn.Module, int, int]:
    """Trace a module forward and backward, with n as a symbol.

    In training mode, and with gradients allocated, as when micro-batches accumulate. The module,
    its mode and the random state do not change.

    Args:
        module: a module, or what builds one (without memory, on the meta device).
        inputs: its positional arguments: one sample's meta tensors, without the batch axis.
        targets: what else lives until the step ends, likewise.

    Returns:
        The module; bytes per sample; and constant bytes, with those of the module and gradients.

    Raises:
        CostError: the module does not run on fake tensors, is recurrent, or needs bytes that are
            not in proportion to the batch.
    """
    try:
        if not isinstance(module, nn.Module):
            with torch.device("meta"):
                module = module()
        parameters, forward = list(module.parameters()), module
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            # Fused kernels (oneDNN, cuDNN) have workspaces that plain cells do not: an LSTM on a
            # CPU was seen to take 2.4 times the bytes that are counted here.
            raise CostError("the memory of an RNN depends on its device's kernel")

        def step(batch: Any) -> None:
            if not forward.training:  # else parts that are frozen in evaluation mode stay so
                forward.train()
            outputs = tree_leaves(forward(*batch["inputs"]))
            tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
            roots = [one for one in tensors if one.requires_grad]
            if any(p.requires_grad for p in parameters) and not roots:
                raise CostError(
                    "the module's output contains no tensor that depends on its parameters; it "
                    "must be a tensor, or a tuple, list or dict of tensors"
                )
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])

        def make(shape: tuple[int, ...]) -> Any:
            device = parameters[0].device
            return {
                name: [one.new_empty((shape[0], *one.shape), device=device) for one in samples]
                for name, samples in (("inputs", inputs), ("targets", targets))
            }

        state = TrainingState(step)
        if not parameters:
            raise CostError("the module must have parameters that require gradients")
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            tracer = Tracer(step, make, state, target=torch.device("meta"), complete=False)
            trace = tracer.symbolic(Recipe(make, [(2,), (3,), (5,)]), (7,))
        if trace.assumed:
            raise CostError("fake tensors have no values to branch on")
        return module, *_line(trace.living([(2,), (4,), (8,)]).T)
    except Exception as error:
        raise CostError(
            "the module does not run on fake tensors, as needed to count its bytes: "
            f"{type(error).__name__}: {error}; state them by hand, as in "
            "DenseCost(fixed_bytes=…, sample_bytes=…), or measure the real step"
        ) from error


def _line(living: IntArray) -> tuple[int, int]:
    """Bytes per sample and constant bytes, of the line that is at or above every moment's.

    Each moment's bytes are a line over n, and the peak is the largest of them. The steepest slope
    through that peak at n = 1 is the lowest line that is nowhere below it.
    """
    at_2, at_4, at_8 = living
    if not np.array_equal(at_8 - at_4, 2 * (at_4 - at_2)):
        raise CostError("the module's bytes are not in proportion to the batch")
    sample_bytes = -(-int((at_4 - at_2).max()) // 2)
    at_1 = -(-int((3 * at_2 - at_4).max()) // 2)
    return sample_bytes, at_1 - sample_bytes
