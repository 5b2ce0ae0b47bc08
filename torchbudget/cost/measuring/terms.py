"""The terms that a form may have, and what they are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import FloatArray

Columns: TypeAlias = npt.NDArray[np.intp]


class Powers(NamedTuple):
    """What a coefficient is multiplied by: a `Term` without it."""

    samples: int
    sizes: tuple[int, ...]
    start: tuple[int, ...] = ()


def powers_of(axes: int) -> list[Powers]:
    """The powers of n and of the sizes on d axes that a form may have.

    For each power of n, first of the sizes: 1, Lᵢ, LᵢLⱼ for i ≤ j, and the product of all; on two
    axes then L₁²L₂, L₁L₂² and L₁²L₂².
    """
    units = np.eye(axes, dtype=int)
    sizes = [np.zeros(axes, int), *units]
    sizes += [units[i] + units[j] for i in range(axes) for j in range(i, axes)]
    if axes == 2:
        sizes += [np.array(one) for one in ((2, 1), (1, 2), (2, 2))]
    if axes > 2:
        sizes.append(np.ones(axes, int))
    return [Powers(n, tuple(map(int, one))) for n in range(3) for one in sizes]


def counted_from(start: tuple[int, ...], powers: Sequence[Powers]) -> list[Powers]:
    """The same powers of the sizes beyond a start."""
    return [one._replace(start=start) if any(one.sizes) else one for one in powers]


def features(n: npt.ArrayLike, sizes: npt.ArrayLike, powers: Sequence[Powers]) -> FloatArray:
    """What the coefficients of a form are multiplied by.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.
        powers: of n and of the sizes, c of them.

    Returns:
        Shape `(k, c)`.
    """
    number = np.asarray(n, np.float64)
    length = np.asarray(sizes, np.float64).reshape(len(number), -1)
    columns = []
    for samples, sizes_, start in powers:
        beyond = np.maximum(length - np.array(start), 0) if start else length
        columns.append(number**samples * np.prod(beyond ** np.array(sizes_), axis=1))
    return np.stack(columns, axis=1)


def plain_powers(axes: int) -> list[Powers]:
    """Those of a `PaddedCost`: 1, n, n·Lᵢ and n·LᵢLⱼ."""
    shares = [one for one in powers_of(axes) if one.samples == 1 and sum(one.sizes) < 3]
    return [Powers(0, (0,) * axes), *shares]


def powers_of_runs(axes: int) -> list[Powers]:
    """Those that few runs can show: the plain ones, and on more than two axes n·L₁⋯L_d."""
    product_of_all = [Powers(1, (1,) * axes)] if axes > 2 else []
    return plain_powers(axes) + product_of_all


def choices_of(powers: Sequence[Powers]) -> list[Columns]:
    """Which terms a form may have, from the simplest choice on, as indices of `powers`."""
    axes = len(powers[0].sizes)

    def is_plain(sizes: tuple[int, ...]) -> bool:
        return sum(sizes) < 3 or (axes > 2 and max(sizes) == 1)

    def is_one(sizes: tuple[int, ...]) -> bool:
        return not any(sizes)

    def is_any(_: tuple[int, ...]) -> bool:
        return True

    def is_none(_: tuple[int, ...]) -> bool:
        return False

    # For each power of n, which powers of the sizes come with it.
    choices: dict[tuple[int, ...], Columns] = {}
    for allowed in product([is_one, is_plain], [is_plain, is_any], [is_none, is_one, is_plain]):
        choice = [at for at, one in enumerate(powers) if allowed[one.samples](one.sizes)]
        choices[tuple(choice)] = np.array(choice)  # on one axis there are no higher powers
    return sorted(choices.values(), key=len)
