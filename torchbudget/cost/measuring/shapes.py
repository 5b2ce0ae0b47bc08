"""What is measured: a step, on batches of which shapes, and whether `make_batch` makes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from torchbudget.checks import is_int
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.cost.models.padded import num_coefficients
from torchbudget.errors import CostError, MeasureWarning

Size: TypeAlias = tuple[int, ...]
_Runs: TypeAlias = tuple[tuple[float, float | tuple[float, float], bool], ...]

# Short sizes of probes are one more than a multiple of this: layers with strides of 2, 4, …, 32
# round such sizes up most, so that the fit includes the most that rounding adds to a sample.
_STRIDE: Final = 32
# Number of samples, and size as a fraction of the largest one, on every axis. No two have the same
# n·L, so that packed batches of n samples differ in shape.
_TRACED_1: Final = ((2, 1 / 16), (3, 1.0), (8, 1 / 4), (16, 1 / 2), (5, 0.7), (25, 1 / 8))
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
# As many as there are primes in `traced_shapes`.
_MOST_AXES: Final = 8
_HELD_OUT: Final = ((12, 1 / 3), (4, 0.85))
# Share of the budget that a run aims at, fraction of the largest size, and whether it is held out.
# The first one shows, at a safe distance, how the machine's bytes relate to the trace's.
_RUN_1: Final[_Runs] = (
    (0.4, 1 / 2, False),
    (0.9, 1.0, False),
    (0.9, 1 / 8, False),
    (0.65, 1 / 3, False),
    (0.9, 1 / 2, True),
    (0.95, 1 / 5, True),
)
# For several axes: the fractions of every second axis, and of the others.
_RUN_2: Final[_Runs] = (
    (0.4, (1 / 2, 1 / 2), False),
    (0.9, (1.0, 1.0), False),
    (0.9, (1.0, 1 / 8), False),
    (0.9, (1 / 8, 1.0), False),
    (0.9, (1 / 3, 1 / 4), True),
    (0.95, (1 / 3, 1.0), True),
)
# For several axes without a trace. No sample needs more than one of the largest size, so the first
# run bounds the number of samples in the next ones, and each of these the number in a later, larger
# batch of its own size.
_CLIMB_2: Final[_Runs] = (
    (0.05, (1.0, 1.0), False),
    (0.6, (1.0, 1.0), False),
    (0.6, (1.0, 1 / 8), False),
    (0.6, (1 / 8, 1.0), False),
    (0.6, (1 / 3, 1 / 4), False),
    (0.9, (1.0, 1 / 8), False),
    (0.9, (1 / 8, 1.0), True),
)


class BatchError(CostError):
    """`make_batch` ignores its arguments, so that the step cannot be measured in any way."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The sizes that probes may have.

    Attributes:
        largest: the largest size on every axis.
        multiple: sizes are multiples of it.
    """

    largest: Size
    multiple: int

    @classmethod
    def of(cls, max_size: int | Sequence[int], multiple: int) -> Domain:
        """The domain up to `max_size`, rounded up to a multiple.

        Raises:
            CostError: `max_size` is not an int of at least 1, or several.
        """
        largest = tuple(max_size) if isinstance(max_size, Sequence) else (max_size,)
        if not 1 <= len(largest) <= _MOST_AXES or not all(is_int(n) and n >= 1 for n in largest):
            raise CostError(
                f"max_size must be an int of at least 1, or one for each of at most {_MOST_AXES} "
                f"axes, got {max_size!r}"
            )
        return cls(tuple(-(-int(one) // multiple) * multiple for one in largest), multiple)

    def at(self, fractions: float | Sequence[float]) -> Size:
        """The size at a fraction of the largest one on every axis; several take turns."""
        each = np.resize(fractions, len(self.largest)).tolist()
        return tuple(self._snap(*one) for one in zip(each, self.largest, strict=True))

    def _snap(self, fraction: float, largest: int) -> int:
        size = max(round(fraction * largest), 1)
        if self.multiple > 1:
            return min(-(-size // self.multiple) * self.multiple, largest)
        if 2 * _STRIDE < size <= largest / 4:
            size -= (size - 1) % _STRIDE
        return size


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A training step and the batches to measure it on.

    Attributes:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        domain: the range of sizes.
        state: what the step trains.
        notes: what the user should know; appended to while measuring.
    """

    step: Callable[[Any], object]
    make_batch: Callable[[int, Any], Any]
    domain: Domain
    state: TrainingState
    notes: list[str] = field(default_factory=list)

    def batch(self, n: int, size: Size) -> Any:
        """A batch of n samples of a size, which is an int for `make_batch` if it has one axis."""
        return self.make_batch(n, size if len(size) > 1 else size[0])

    def warn(self, text: str) -> None:
        """Note it, and warn of it."""
        self.notes.append(text)
        warnings.warn(text, MeasureWarning, stacklevel=4)


def traced_shapes(domain: Domain) -> list[tuple[int, Size, bool]]:
    """Samples, size, and whether it is held out, of each traced shape."""
    axes = len(domain.largest)
    wanted: list[tuple[int, Any, bool]]
    if axes <= 2:
        wanted = [(n, where, False) for n, where in (_TRACED_1 if axes == 1 else _TRACED_2)]
    else:
        # Evenly spread: the fractional parts of multiples of square roots of primes.
        steps = np.sqrt([2, 3, 5, 7, 11, 13, 17, 19][:axes])
        spread = np.outer(np.arange(1, num_coefficients(axes) + 3), steps) % 1
        wanted = [(2 + i % 7, 2.0 ** (3 * where - 3), False) for i, where in enumerate(spread)]
    wanted += [(n, where, True) for n, where in _HELD_OUT]
    found: dict[tuple[int, Size], bool] = {}
    for n, where, held_out in wanted:
        found.setdefault((n, domain.at(where)), held_out)
    return [(*shape, held_out) for shape, held_out in found.items()]


def run_shapes(domain: Domain, *, traced: bool) -> list[tuple[float, Size, bool]]:
    """Share of the budget, size, and whether it is held out, of each shape to run.

    Args:
        domain: the range of sizes.
        traced: whether a trace has shown how bytes grow; otherwise the runs go up step by step.
    """
    one_axis = len(domain.largest) == 1
    shapes = _RUN_1 if one_axis else _RUN_2 if traced else _CLIMB_2
    runs = [(share, domain.at(where), held_out) for share, where, held_out in shapes]
    if one_axis and not traced:  # a second small batch, for a first fit
        runs = sorted([(0.4, domain.at(1 / 8), False), *runs], key=lambda one: one[1])
    return runs


def check_shape(batch: Any, n: int, size: Size, seen: dict[Any, tuple[int, Size]]) -> None:
    """Raise a `BatchError` if two shapes that were asked for gave tensors of the same shapes."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
    if not shapes:
        return  # a batch type of the user's own
    before = seen.setdefault(shapes, (n, size))
    if before != (n, size):
        raise BatchError(
            f"make_batch ignores what it is asked for: n={before[0]}, size={before[1]} and n={n}, "
            f"size={size} both gave tensors of the shapes {list(shapes)}"
        )
