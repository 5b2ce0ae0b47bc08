"""Several ways to make a step: each batch is made in the fastest one that fits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchbudget.cost.agree import joined_ranks
from torchbudget.cost.batch_recipe import Shape, ShapeReader, leaves_of
from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.measured import WaysCost
from torchbudget.cost.subject import Subject
from torchbudget.distributed import plain_parts
from torchbudget.errors import CostError, OptionError
from torchbudget.restoring import TrainingState, parameters_of

# Samples in the batch that is compared: three, so that a loss in chunks of two gets unequal ones.
_COMPARED: Final = 3


class Alternatives:
    """A step that is made in one of several ways: see `alternatives`.

    Attributes:
        ways: functions of a batch.
    """

    def __init__(self, *ways: Callable[[Any], Any]) -> None:
        are_steps = all(callable(one) and not isinstance(one, Alternatives) for one in ways)
        if len(ways) < 2 or not are_steps:
            raise OptionError(
                "alternatives(plain, recomputed, …) takes at least two functions of a batch, each "
                f"of which makes the whole step in its own way: got {ways!r}"
            )
        self.ways = ways
        self._planned: Any = None

    def __call__(self, batch: Any) -> Any:
        """Make the step on a batch in the fastest way that fits, and return what it returns."""
        return self.ways[self.choose(batch)](batch)

    def choose(self, batch: Any) -> int:
        """The number of the way that is the fastest of those that fit, for a loop of one's own.

        It follows from the batch's shape, the budget, and the cost with its margin alone. A batch
        that fits in no way, as with `oversize="alone"`, is made in the one of the least bytes.

        Raises:
            OptionError: no plan was bound.
            BatchError: the batch has other numbers of tensors, or of axes, than `make_batch` made.
        """
        if self._planned is None:
            raise OptionError(
                "alternatives choose by the bytes of a plan: make the loader with this step, as in "
                "loader(dataset, step, budget, samples_per_step=256), or call step.bind(sampler)"
            )
        return int(self._planned.cost.way_of(batch))

    def bind(self, planned: Any) -> None:
        """Choose by the cost and the budget of a sampler, or of a `StepPlan`, from now on.

        Raises:
            OptionError: it is not planned by the measured cost of such a step.
        """
        if not isinstance(getattr(planned, "cost", None), WaysCost):
            raise OptionError(
                f"{type(planned).__name__} is not planned by a cost of alternatives: measure one "
                "with measure_cost(step, …), or make the loader with loader(dataset, step, …)"
            )
        self._planned = planned


def alternatives(*ways: Callable[[Any], Any]) -> Alternatives:
    """Make one step of several ways to make it, such as with and without recomputing activations.

    `measure_cost` and `loader` measure each way. A plan counts the least bytes of any way, and the
    time of the fastest way that fits. Each batch is then made in that fastest way, so batches that
    fit in it are not slowed down for the sake of those that do not.

    All ways must give the same gradient. Measuring compares the gradients once, on three samples
    of the smallest size, with the same random numbers; but not with `method="trace"`, which
    computes no values.

    Alternatives need steps whose samples are given, as with `samples_per_step`, in `plan_step` and
    in `predict`. Where each batch is a step, it is as full as fits, and so full it fits only in the
    way of the least bytes. They need padded batches, whose tensors show their shape.

    Args:
        ways: functions of a batch, the fastest one first. Each makes the whole step, and begins
            with switching what differs, so that the order of calls does not matter.

    Raises:
        OptionError: there are fewer than two.

    >>> step = alternatives(lambda batch: "plain", lambda batch: "recomputed")
    >>> len(step.ways)
    2
    """
    return Alternatives(*ways)


def reader_of(subject: Subject) -> ShapeReader:
    """The reader of shapes of the batches that `make_batch` makes.

    Raises:
        CostError: they cannot be.
    """
    largest: Shape = subject.domain.occurring((1, *subject.domain.between(1.0)))
    try:
        reader = ShapeReader.of(subject.batch, subject.domain.recipe_shapes())
        read = reader.shape_of(subject.batch(largest))
        if any(one < size for one, size in zip(read, largest, strict=True)):  # it is cropped
            raise UntraceableError(f"a batch of the shape {largest} looks like one of {read}")
    except UntraceableError as error:
        raise CostError(
            f"alternatives choose a way by the shape of a batch, which cannot be read: {error}"
        ) from error
    return reader


def check_same_gradients(step: Alternatives, subject: Subject) -> None:
    """Compare the gradients of the ways on one small batch; of forwards, what they return.

    Raises:
        CostError: they differ by more than `_Coarsest.allows`; or there is nothing to compare.
    """
    shape: Shape = subject.domain.occurring((_COMPARED, *subject.domain.between(0.0)))
    batch, coarsest = subject.batch(shape), _Coarsest()
    every: list[list[Tensor]] = []
    for way in step.ways:
        with subject.state.restored_after_runs(), nullcontext() if every else coarsest:
            every.append(_gradients(way, copy.deepcopy(batch), subject.state))
    other = next((k for k, one in enumerate(every) if not coarsest.allows(every[0], one)), 0)
    if max(joined_ranks(subject.state).gather_objects(other)):
        raise CostError(
            f"way {other} of alternatives gives another gradient than way 0, on a batch of shape "
            f"{shape}: all ways must make the same step, and differ in bytes and time alone"
        )


def _gradients(way: Callable[[Any], Any], batch: Any, state: TrainingState) -> list[Tensor]:
    """Gradients at the steps of optimizers, else those that are left; if all are 0, the outputs.

    Copies on the host.
    """
    found: list[Tensor] = []

    def keep(values: Iterable[Any]) -> None:
        for one in values:
            parts = [torch.zeros(())] if one is None else plain_parts(one.detach())
            found.extend(part.to("cpu", copy=True) for part in parts)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        keep(p.grad for p in parameters_of(optimizer))

    with register_optimizer_step_pre_hook(before):
        returned = way(batch)
    if not found:
        keep(p.grad for p in state.parameters())
    if not any(map(torch.count_nonzero, found)):
        outputs = [one for one in leaves_of(returned) if isinstance(one, Tensor)]
        if not outputs:
            raise CostError(
                "ways of alternatives cannot be compared: on a small batch they made no gradients, "
                "and returned no tensors; let a forward return its outputs"
            )
        keep(outputs)
    return found


class _Coarsest(TorchDispatchMode):
    """Records the precision of the coarsest floating-point type of any result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._precision = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.is_floating_point():
                self._precision = max(self._precision, torch.finfo(one.dtype).eps)
        return result

    def allows(self, values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether values agree to the root of the precision, and to the rounding of all together.

        With another kernel of attention, gradients were off by 4e-7 of their norms in float32, and
        by 6e-3 in bfloat16, which is 1e-3 and 0.07 of the root of the precision. The bias of keys,
        whose gradient is rounding alone, was off by 0.014 of that of all gradients together.
        """
        if [one.shape for one in values] != [one.shape for one in others]:
            return False
        pairs = [(a.double(), b.double()) for a, b in zip(values, others, strict=True)]
        rounding = self._precision * math.hypot(*(float(a.norm()) for a, _ in pairs))
        share = math.sqrt(self._precision)
        return all(float((a - b).norm()) <= share * float(a.norm()) + rounding for a, b in pairs)
