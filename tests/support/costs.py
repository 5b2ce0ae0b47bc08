"""Measured costs that are stated in the numbers of a padded one."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np

from torchbudget import MeasuredCost, PaddedCost
from torchbudget.cost.batch_recipe import Place, ShapeReader
from torchbudget.cost.measured import WaysCost
from torchbudget.cost.pieces import Piece


class Nodes(list[Any]):
    """Expressions that are written down by their operations."""

    def make(self, name: str, *arguments: Any) -> int:
        self.append([name, *arguments])
        return len(self) - 1

    def number(self, value: float) -> int:
        kind = "int" if float(value).is_integer() else "float"
        return self.make(kind, int(value) if kind == "int" else float(value))

    def in_blocks(self, size: int) -> int:
        block = self.number(64)
        return self.make("Mul", block, self.make("CeilDiv", size, block))


def piece(nodes: Nodes, *sums: int, axes: int = 1, **options: Any) -> Piece:
    """Of these expressions, the largest of which is the peak."""
    given = {"conditions": (), "flops": 0}
    symbols, numbers = range(axes + 1), range(1, axes + 2)
    given["harmless"] = tuple(chain.from_iterable(combinations(symbols, k) for k in numbers))
    two = nodes.number(2)
    ends = tuple(nodes.make("GreaterThan", nodes.make("symbol", k), two) for k in symbols)
    options["conditions"] = (*ends, *options.get("conditions", ()))
    return Piece(nodes=tuple(nodes), sums=sums, **given | options)


def piece_of(cost: PaddedCost) -> Piece:
    """The cost's polynomial and its floor."""
    nodes, d = Nodes(), cost.axes
    n, *lengths = (nodes.make("symbol", k) for k in range(d + 1))
    item = [nodes.number(cost.sample_bytes)]
    for unit, length in zip(np.reshape(cost.unit_bytes, d).tolist(), lengths, strict=True):
        item.append(nodes.make("Mul", nodes.number(unit), length))
    pairs = np.reshape(np.asarray(cost.pair_bytes, float), (d, d))
    for i, j in zip(*np.nonzero(pairs), strict=True):
        item.append(nodes.make("Mul", nodes.number(pairs[i, j]), lengths[i], lengths[j]))
    whole = nodes.make("CeilToInt", nodes.make("Add", *item))
    fixed = nodes.number(cost.fixed_bytes)
    total = nodes.make("Add", fixed, nodes.make("Mul", n, whole))
    sums = [total, nodes.number(cost.floor_bytes)] if cost.floor_bytes else [total]
    return piece(nodes, *sums, axes=d)


def measured(cost: PaddedCost | None = None, *, margin: float = 0, **options: Any) -> MeasuredCost:
    """By default a thousand bytes a unit."""
    cost = cost or PaddedCost(unit_bytes=1000)
    given = {"pieces": (piece_of(cost),), "grid": None, "smallest": (0,) * cost.axes}
    given["largest"] = (2**13 - 1,) * cost.axes
    given["empty"] = int(max(cost.fixed_bytes, cost.floor_bytes))
    return MeasuredCost(margin=margin, **given | options)


READER = ShapeReader((2,), (Place(0, 0, 0, 1, 1), Place(0, 1, 0, 1, 1)))


def way(unit_bytes: int, fixed_s: float, unit_s: float, **options: Any) -> MeasuredCost:
    """It takes `fixed_s` and `unit_s` for each position of a padded batch."""
    seconds = (fixed_s, 0.0, 0.0, unit_s, 0.0, 0.0, 0.0)
    cost = PaddedCost(fixed_bytes=1000, unit_bytes=unit_bytes)
    return measured(cost, seconds=seconds, **{"largest": (800,)} | options)


def two_ways(budget: int = 100_000, *, axes: int = 2, **options: Any) -> WaysCost:
    """Plain, and recomputed: a fifth of the bytes in 1.4 times the time.

    Args:
        budget: under which a way is chosen.
        axes: of the tensor that a batch is, `(n, L, …)`.
        options: of both costs.
    """
    ways = way(100, 1e-3, 1e-5, **options), way(20, 1e-3, 1.4e-5, **options)
    return replace(WaysCost.of(ways, READER._replace(dims=(axes,))), room=budget)
