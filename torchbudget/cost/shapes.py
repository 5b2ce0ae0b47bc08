"""Which shapes are probed, and whether `make_batch` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from torchbudget.cost.fit import num_coefficients
from torchbudget.errors import CostError

Size: TypeAlias = tuple[int, ...]

# Short sizes of probes are one more than a multiple of this, where strides by powers of two round
# up most: what that comes to in each sample is seen where it counts.
_STRIDE: Final = 32
# Where a shape lies in the range of sizes, on every axis, and how many samples it has.
_TRACED_1: Final = ((2, 1 / 16), (3, 1.0), (8, 1 / 4), (16, 1 / 2), (5, 0.7), (24, 1 / 8))
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
_HELD_OUT: Final = ((12, 1 / 3), (4, 0.85))
# Which share of the budget a run aims at, where in the range of sizes, and whether it is held out.
# The first one finds out how the trace and the machine go together, at a safe distance.
_RUN_1: Final = (
    (0.4, 1 / 2, False),
    (0.9, 1.0, False),
    (0.9, 1 / 8, False),
    (0.65, 1 / 3, False),
    (0.9, 1 / 2, True),
    (0.95, 1 / 5, True),
)
# For several axes: of every second one, and of the others.
_RUN_2: Final = (
    (0.4, (1 / 2, 1 / 2), False),
    (0.9, (1.0, 1.0), False),
    (0.9, (1.0, 1 / 8), False),
    (0.9, (1 / 8, 1.0), False),
    (0.9, (1 / 3, 1 / 4), True),
    (0.95, (1 / 3, 1.0), True),
)


class BatchError(CostError):
    """`make_batch` does not do what it is asked for, however the step is measured."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The sizes that probes may have.

    Attributes:
        largest: on every axis.
        multiple: which sizes are multiples of.
    """

    largest: Size
    multiple: int

    @classmethod
    def of(cls, max_size: int | Sequence[int], multiple: int) -> Domain:
        """Check what the user says.

        Raises:
            CostError: no sizes, or none of at least 1.
        """
        largest = (max_size,) if isinstance(max_size, int) else tuple(max_size)
        if not largest or any(not isinstance(one, int) or one < 1 for one in largest):
            raise CostError(f"max_size must be an int of at least 1, or one per axis: {max_size!r}")
        if multiple < 1:
            raise CostError(f"size_multiple must be at least 1, got {multiple!r}")
        return cls(tuple(-(-one // multiple) * multiple for one in largest), multiple)

    def at(self, fractions: float | Sequence[float]) -> Size:
        """The size at a fraction of the largest one, on every axis."""
        each = [fractions] * len(self.largest) if isinstance(fractions, float) else fractions
        return tuple(map(self._snap, each, self.largest))

    def _snap(self, fraction: float, largest: int) -> int:
        size = max(round(fraction * largest), 1)
        if self.multiple > 1:
            return min(-(-size // self.multiple) * self.multiple, largest)
        if 2 * _STRIDE < size <= largest / 4:
            size -= (size - 1) % _STRIDE
        return size


def traced_shapes(domain: Domain) -> list[tuple[int, Size, bool]]:
    """Samples, size, and whether it is held out, of each traced shape."""
    axes = len(domain.largest)
    wanted: list[tuple[int, Any, bool]]
    if axes <= 2:
        wanted = [(n, where, False) for n, where in (_TRACED_1 if axes == 1 else _TRACED_2)]
    else:
        # Spread evenly by the fractional parts of multiples of roots of primes.
        steps = np.sqrt([2, 3, 5, 7, 11, 13, 17, 19][:axes])
        spread = np.outer(np.arange(1, num_coefficients(axes) + 3), steps) % 1
        wanted = [(2 + i % 7, 2.0 ** (3 * where - 3), False) for i, where in enumerate(spread)]
    wanted += [(n, where, True) for n, where in _HELD_OUT]
    found: dict[tuple[int, Size], tuple[int, Size, bool]] = {}
    for n, where, held_out in wanted:
        size = domain.at(where)
        found.setdefault((n, size), (n, size, held_out))
    return list(found.values())


def run_shapes(domain: Domain) -> list[tuple[float, Size, bool]]:
    """Share of the budget, size, and whether it is held out, of each shape to run."""
    wanted: Sequence[tuple[float, Any, bool]] = _RUN_1 if len(domain.largest) == 1 else _RUN_2
    return [(share, domain.at(where), held_out) for share, where, held_out in wanted]


def check_shape(batch: Any, n: int, size: Size, seen: dict[Any, tuple[int, Size]]) -> None:
    """Two shapes that were asked for must not come as one."""
    held = dict(batch) if isinstance(batch, Mapping) else batch
    shapes = tuple(tuple(t.shape) for t in tree_leaves(held) if isinstance(t, torch.Tensor))
    if not shapes:
        return  # some type of the user's own
    before = seen.setdefault(shapes, (n, size))
    if before != (n, size):
        raise BatchError(
            f"make_batch ignores what it is asked for: n={before[0]}, size={before[1]} and n={n}, "
            f"size={size} both gave tensors of the shapes {list(shapes)}"
        )
