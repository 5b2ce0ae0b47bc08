"""The subject of a measurement: a step, its batches, and the shapes that they may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torchbudget.checks import is_int
from torchbudget.cost.batch_recipe import Shape, arrays_in, batch_bytes, products
from torchbudget.cost.protocol import IntArray
from torchbudget.cost.step_checks import StepChecks
from torchbudget.errors import BatchError, CostError, MeasureWarning, TorchBudgetError, warn
from torchbudget.machine.out_of_memory import is_out_of_memory
from torchbudget.restoring import TrainingState, modes_of

Size: TypeAlias = tuple[int, ...]

_MOST_AXES: Final = 8
# The smallest size, as a share of the largest one: a default, which `min_size` or `sizes` replace.
_SMALLEST: Final = 1 / 64
# Limits of the batch of a probe or a concrete trace: its bytes, and its number of samples.
_BATCH_BYTES: Final = 2**28
_MOST_SAMPLES: Final = 2**16
# Bytes that a sample may leave until the optimizer's step, such as its loss: of 65,536 samples in a
# step, the least margin, 16 MiB.
_LEFT_BYTES: Final = 2**8


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """The sizes that batches may have.

    Attributes:
        smallest: the smallest size on every axis.
        largest: the largest size on every axis.
        multiple: sizes are multiples of it.
        known: the different sizes of the data set, shape `(N, d)`; `None`: any size may occur.
        median: of the sizes of the data set, on each axis; `None`: it is not known.
        samples: in the data set; 0: it is not known.
    """

    smallest: Size
    largest: Size
    multiple: int
    known: IntArray | None = None
    median: Size | None = None
    samples: int = 0

    @classmethod
    def of(
        cls,
        max_size: int | Sequence[int] | None,
        multiple: int,
        *,
        min_size: int | Sequence[int] | None = None,
        sizes: npt.ArrayLike | None = None,
    ) -> Domain:
        """The domain from `min_size` to `max_size`, rounded up to a multiple.

        Raises:
            CostError: a size is not an int of at least 1, or several; they differ in their axes;
                or neither the largest size nor sizes are given.
        """
        known = None if sizes is None else _sizes_array(sizes)
        if max_size is None:
            if known is None:
                raise CostError("pass max_size=, or the data set's sizes=")
            max_size = known.max(axis=0).tolist()
        largest = _rounded(_size_of("max_size", max_size), multiple)
        if min_size is not None:
            smallest = _size_of("min_size", min_size)
        elif known is not None:
            smallest = tuple(np.maximum(known.min(axis=0), 1).tolist())
        else:
            smallest = tuple(max(round(_SMALLEST * one), 1) for one in largest)
        smallest = _rounded(smallest, multiple)
        if len(smallest) != len(largest) or (known is not None and known.shape[1] != len(largest)):
            raise CostError("max_size, min_size and sizes must have the same number of axes")
        if any(low > high for low, high in zip(smallest, largest, strict=True)):
            raise CostError(f"the smallest size, {smallest}, is above the largest one, {largest}")
        median, samples = None, 0
        if known is not None:
            samples = len(known)
            known = np.clip(-(-known // multiple) * multiple, smallest, largest)
            median = tuple(np.median(known, axis=0).astype(int).tolist())
            known = np.unique(known, axis=0)
        return cls(smallest, largest, multiple, known, median, samples)

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.largest)

    def between(self, fractions: npt.ArrayLike) -> Size:
        """The size at fractions of the way from smallest to largest, on a logarithmic scale.

        Where sizes are known, the nearest of them.
        """
        share = np.resize(np.asarray(fractions, float), self.axes)
        low, high = np.array(self.smallest, float), np.array(self.largest, float)
        wanted = low * (high / low) ** share
        if self.known is not None:
            off = np.abs(np.log(self.known / wanted)).sum(axis=1)
            return tuple(self.known[int(off.argmin())].tolist())
        return tuple(self.on_axis(axis, one) for axis, one in enumerate(wanted))

    def on_axis(self, axis: int, wanted: float) -> int:
        """The nearest size on an axis, on a logarithmic scale; of known sizes, one of them."""
        if self.known is not None:
            sizes = self.known[:, axis]
            return int(sizes[np.abs(np.log(sizes / wanted)).argmin()])
        rounded = -(-round(wanted) // self.multiple) * self.multiple
        return min(max(rounded, self.smallest[axis]), self.largest[axis])

    def nodes(self, count: int) -> list[list[int]]:
        """Up to a number of sizes on each axis, from the smallest to the largest."""
        return [
            sorted({self.on_axis(axis, one) for one in np.geomspace(low, high, count)})
            for axis, (low, high) in enumerate(zip(self.smallest, self.largest, strict=True))
        ]

    def occurring(self, shape: Shape) -> Shape:
        """The next larger shape that samples of the known sizes can have, padded together."""
        n, *wanted = shape
        size = np.array(wanted)
        while self.known is not None and self.axes > 1:
            below = self.known[(self.known <= size).all(axis=1)]
            short = np.flatnonzero(below.max(axis=0, initial=0) < size)
            if not len(short):
                alone = (below == size).all(axis=1).any()
                return (n if alone else max(n, self.axes), *size.tolist())
            larger = self.known[self.known[:, short[0]] >= size[short[0]]]
            grown = np.maximum(larger, size)
            size = grown[grown.prod(axis=1).argmin()]
        return shape

    def draw(self, count: int, most_samples: int) -> IntArray:
        """Draw shapes, `(S, 1 + d)`, geometrically in n and in sizes; corners are among them."""
        rng = np.random.default_rng(0)
        shares = rng.beta(0.7, 0.7, (count, self.axes))  # more at the ends than in between
        corners = list(product((0.0, 1.0), repeat=self.axes))
        sizes = np.array([self.between(one) for one in [*corners, *shares]])
        n = np.rint(most_samples ** rng.beta(0.7, 0.7, len(sizes))).astype(np.int64)
        drawn, ends = np.insert(sizes, 0, n, axis=1), sizes[: len(corners)]
        few, many = (np.insert(ends, 0, number, axis=1) for number in (1, most_samples))
        return np.unique(np.concatenate([drawn, few, many]), axis=0)

    def recipe_shapes(self) -> list[Shape]:
        """Small shapes that show how a batch's dimensions follow from its shape."""
        if self.known is not None:
            # Of many sizes, some from short to long; short ones take little memory.
            order = np.argsort(self.known.prod(axis=1), kind="stable")
            count = min(len(order), 3 * 2**self.axes)
            rows = self.known[order[np.linspace(0, len(order) - 1, count).astype(int)]]
            powers = list(product((0, 1), repeat=self.axes))
            terms = np.array([products(row, powers) for row in rows.tolist()], float)
            if np.linalg.matrix_rank(terms) == len(powers):
                return [(n, *row) for n in (3, 5) for row in rows.tolist()]
        each = []
        for low, high in zip(self.smallest, self.largest, strict=True):
            room = (high - low) // self.multiple
            steps = (0, 5, 12) if room > 12 else range(min(room + 1, 3))
            each.append([low + k * self.multiple for k in steps])
        shapes = [(n, *size) for n in (3, 5) for size in product(*each)]
        return [*shapes, (7, *(one[-1] for one in each))]


@dataclass(slots=True, eq=False)
class Subject:
    """A training step and the batches to measure it on.

    Attributes:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        domain: the sizes.
        state: what the step refers to.
        target: the device that the step is to run on.
        notes: what the user should know; appended to while measuring.
        advance: is called with 1 after each shape, to show progress.
        most_bytes: of a batch.
        draws: steps on each shape that is run, of which the largest peak counts.
        checks: of the step.
    """

    step: Callable[[Any], object]
    make_batch: Callable[[int, Any], Any]
    domain: Domain
    state: TrainingState
    target: torch.device
    notes: list[str] = field(default_factory=list)
    advance: Callable[[int], object] = lambda _: None
    most_bytes: int = _BATCH_BYTES
    draws: int = 1
    checks: StepChecks = field(init=False)
    _most: dict[Size, int] = field(default_factory=dict)
    _seen: dict[Any, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checks = StepChecks(self.state)

    def batch(self, shape: Shape) -> Any:
        """A batch of a shape; its size is an int for `make_batch` if it has one axis.

        Raises:
            BatchError: `make_batch` raised, or made the same tensors of another shape before.
        """
        n, *size = shape
        asked = size[0] if len(size) == 1 else tuple(size)
        try:
            batch = self.make_batch(n, asked)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, TorchBudgetError):
                raise
            raise BatchError(
                f"make_batch({n}, {asked}), or the collate_fn of loader, raised {error!r}; if no "
                "samples are this short, pass min_size"
            ) from error
        shapes = tuple(tuple(one.shape) for one in arrays_in(batch))
        # Of samples of several sizes together, totals say nothing.
        is_plain = bool(shapes) and self.domain.occurring((1, *size)) == (1, *size)
        before = self._seen.setdefault(shapes, shape) if is_plain else shape
        # Rows of the same total are the same tensors, one after the other.
        if [before[0] * one for one in before[1:]] != [n * one for one in size]:
            raise BatchError(
                f"batches must grow with n and size, but (n, size) = {before} and {shape} both "
                f"gave tensors of the shapes {list(shapes)}: make_batch must return n samples "
                "padded to size. A collate_fn of loader that tokenizes needs size=, a function "
                "that returns the number of tokens; or leave it out and pass tokenizer="
            )
        return batch

    def most_samples(self, size: Size) -> int:
        """The most samples of a size in a real batch: so many that it takes `most_bytes`."""
        if size not in self._most:
            shape = self.domain.occurring((2, *size))
            each = max(batch_bytes(self.batch(shape)) / shape[0], 1)
            self._most[size] = min(max(int(self.most_bytes / each), 2), _MOST_SAMPLES)
        return self._most[size]

    def take_larger_mode(self, attempt: Callable[[], Any]) -> None:
        """Put a module in evaluation mode that is trained into training mode, if it takes more.

        A model of transformers is in evaluation mode until its Trainer trains it. An encoder with
        dropout takes 2.69 times the bytes in training mode. Parts of a module in training mode, and
        modules without gradients, stay as they are.

        Args:
            attempt: makes a step on one sample of the largest size; returns what it takes, to be
                compared; `None` if that is unknown, and training mode counts.
        """
        idle = [one for one in self.state.modules if not one.training]
        found = attempt() if idle else None
        trained = [one for one in idle if one in self.checks.trained]
        if not trained:
            return
        put_back = modes_of(self.state.modules)
        for one in trained:
            one.train()
        try:
            larger = attempt()
        except CostError as error:
            put_back()
            why = f"measured in evaluation mode: in training mode the step fails, {error}"
            self.notes.append(why)
            return
        if larger is None or larger > found:
            self.warn(
                "the step trains a module that is in evaluation mode: it was measured in training "
                "mode, which takes more memory; let the step begin with model.train(), or with "
                "model.eval() if that is the mode to train in"
            )
        elif larger < found:
            put_back()

    def check_left(self, run: Callable[[Callable[[Any], object], Shape], object]) -> None:
        """Check that micro-batches leave nothing that grows with their samples until the step.

        Args:
            run: runs or traces a function of a batch on one of a shape.

        Raises:
            CostError: they do: no plan knows how many samples earlier micro-batches have.
        """
        if not self.state.has_several:
            return

        def left(shape: Shape) -> dict[str, float]:
            found: list[dict[str, float]] = []

            def micro_batch(batch: Any) -> None:
                with ExitStack() as stack:
                    for accumulator in self.state.accumulators:
                        stack.enter_context(accumulator.measured(steps=False))
                    self.step(batch)
                    found.append(TrainingState(self.step).bytes_by_kind())

            run(micro_batch, shape)
            return found[0]

        n, *size = self.domain.occurring((1, *self.domain.between(0.0)))
        few, many = left((n, *size)), left((2 * n, *size))
        # A graph has infinitely many bytes, whose difference is no number.
        grown = [kind for kind in many if not many[kind] - few[kind] <= n * _LEFT_BYTES]
        if grown:
            raise CostError(
                f"each micro-batch leaves {' and '.join(grown)} until the optimizer's step, and "
                "they grow with its samples: together they need memory that the cost of one "
                "micro-batch does not contain. Detach or drop them at the end of each micro-batch, "
                "use dense gradients, or take an optimizer step after each micro-batch"
            )

    def warn(self, text: str) -> None:
        """Note it, and warn of it."""
        self.notes.append(text)
        warn(text, MeasureWarning)


def _size_of(name: str, size: int | Sequence[int]) -> Size:
    each = tuple(size) if isinstance(size, Sequence) else (size,)
    if not 1 <= len(each) <= _MOST_AXES or not all(is_int(n) and n >= 1 for n in each):
        raise CostError(
            f"{name} must be an int of at least 1, or one for each of at most {_MOST_AXES} "
            f"axes, got {size!r}"
        )
    return tuple(map(int, each))


def _rounded(size: Size, multiple: int) -> Size:
    return tuple(-(-one // multiple) * multiple for one in size)


def _sizes_array(sizes: npt.ArrayLike) -> IntArray:
    try:
        array = np.asarray(sizes)
    except ValueError as error:
        raise CostError(f"sizes must be integers of shape (N,) or (N, d): {error}") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not len(array):
        raise CostError(
            f"sizes must be integers of shape (N,) or (N, d), got {array.dtype} {array.shape}"
        )
    if array.min() < 0 or array.max() < 1 or array.max() >= 2**53:
        raise CostError(
            f"sizes must be 0 to 2**53 and not all 0, got {array.min()} to {array.max()}"
        )
    rows = array.reshape(len(array), -1).astype(np.int64)
    whole = rows.all(axis=1)  # an empty sample is no sample of another size
    return rows[whole] if whole.any() else rows
