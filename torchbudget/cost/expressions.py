"""Bytes and conditions as expressions of a batch's shape: a list of operations, never run as code.

An expression is a number into `Expressions.nodes`, where each node is an operation with its
arguments: `["int", 64]`, `["symbol", 1]` (a coordinate of the shape, n first), `["Mul", 3, 7]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import FloatArray
from torchbudget.errors import CostError

Node: TypeAlias = list[Any]
_MOST_DEGREE: Final = 2  # of a polynomial in n


class UntraceableError(CostError):
    """The step or its batch cannot be traced with symbols, or not evaluated."""


def _power(base: Any, exponent: Any) -> Any:
    whole = np.all(np.asarray(exponent) >= 0)
    return base**exponent if whole else np.asarray(base, float) ** exponent


def _whole(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: rounded(np.asarray(value, float)).astype(np.int64)


# The names are those of the classes of sympy and of torch.utils._sympy.functions.
_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "Add": lambda *a: reduce(np.add, a),
    "Mul": lambda *a: reduce(np.multiply, a),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "ToFloat": lambda a: np.asarray(a, float),
    "CeilToInt": _whole(np.ceil),
    "FloorToInt": _whole(np.floor),
    "TruncToInt": _whole(np.trunc),
    "RoundToInt": _whole(np.rint),
    "OpaqueUnaryFn_sqrt": np.sqrt,
    "OpaqueUnaryFn_log2": np.log2,
    "Max": lambda *a: reduce(np.maximum, a),
    "Min": lambda *a: reduce(np.minimum, a),
    "Abs": np.abs,
    "Where": np.where,
    "Equality": np.equal,
    "Unequality": np.not_equal,
    "StrictLessThan": np.less,
    "LessThan": np.less_equal,
    "StrictGreaterThan": np.greater,
    "GreaterThan": np.greater_equal,
    "And": lambda *a: reduce(np.logical_and, a),
    "Or": lambda *a: reduce(np.logical_or, a),
    "Not": np.logical_not,
}


@dataclass(frozen=True, slots=True, eq=False)
class InN:
    """An expression as a polynomial in n for each of several sizes, bounded from both sides.

    Attributes:
        low: coefficients of n⁰, n¹, n² of a polynomial that is nowhere larger, shape `(3, sizes)`.
        high: of one that is nowhere smaller; the same array where the expression is exact.
    """

    low: FloatArray
    high: FloatArray

    @property
    def is_exact(self) -> bool:
        """Whether it is known exactly, not only bounded."""
        return self.low is self.high

    @property
    def is_constant(self) -> bool:
        """Whether it is known exactly, and does not depend on n."""
        return self.is_exact and not self.high[1:].any()

    def spread(self, below: float, above: float) -> InN:
        """The same with a constant added to each bound."""
        unit = np.array([[1.0], [0.0], [0.0]])
        return InN(self.low + below * unit, self.high + above * unit)


@dataclass(slots=True)
class Expressions:
    """Expressions that share their parts.

    Attributes:
        nodes: see the module.
    """

    nodes: list[Node] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict, repr=False)

    def add(self, expression: Any, symbols: Sequence[Any]) -> int:
        """Return the number of an expression of sympy.

        Args:
            expression: of integers, or a condition; or an int.
            symbols: one for each coordinate.

        Raises:
            UntraceableError: it has an unknown operation, or another symbol.
        """
        if expression in self._numbers:
            return self._numbers[expression]
        node: Node
        if isinstance(expression, int) or getattr(expression, "is_Integer", False):
            node = ["int", int(expression)]
        elif expression in symbols:
            node = ["symbol", list(symbols).index(expression)]
        elif expression.is_Boolean and not expression.args:
            node = ["int", int(bool(expression))]
        elif expression.is_number and not expression.args:
            infinite = 2**62 * (-1 if expression.is_negative else 1)
            node = ["int", infinite] if expression.is_infinite else ["float", float(expression)]
        else:
            arguments = [self.add(one, symbols) for one in expression.args]
            node = [type(expression).__name__, *arguments]
        _check(node, len(self.nodes))
        self.nodes.append(node)
        self._numbers[expression] = len(self.nodes) - 1
        return len(self.nodes) - 1

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Expressions:
        """Read what a file contains.

        Raises:
            UntraceableError: an operation is unknown, or an argument comes after it.
        """
        for at, node in enumerate(nodes):
            _check(node, at)
        return cls([list(node) for node in nodes])

    def evaluate(self, shapes: npt.ArrayLike, wanted: Sequence[int]) -> list[Any]:
        """The wanted expressions at each shape, `(S, d)`: arrays of shape `(S,)`, or scalars."""
        columns = np.atleast_2d(np.asarray(shapes, np.int64)).T
        values: dict[int, Any] = {}
        with np.errstate(all="ignore"):
            for at in self._needed(wanted):
                name, *arguments = self.nodes[at]
                if name in ("int", "float"):
                    values[at] = arguments[0]
                elif name == "symbol":
                    values[at] = columns[arguments[0]]
                else:
                    values[at] = _OPERATIONS[name](*(values[one] for one in arguments))
        return [values[at] for at in wanted]

    def _needed(self, wanted: Sequence[int]) -> list[int]:
        """The nodes that the wanted ones are made of, in their order."""
        needed = set(wanted)
        for at in range(max(needed, default=-1), -1, -1):
            if at in needed and self.nodes[at][0] not in ("int", "float", "symbol"):
                needed.update(self.nodes[at][1:])
        return sorted(needed)

    def in_n(self, sizes: npt.NDArray[Any], wanted: Sequence[int]) -> dict[int, InN]:
        """The wanted expressions as polynomials in n, for each of `sizes`, shape `(S, d - 1)`.

        Raises:
            UntraceableError: one is no polynomial of degree 2 in n, nor bounded by one.
        """
        found: dict[int, InN] = {}
        for at in self._needed(wanted):
            name, *arguments = self.nodes[at]
            if name in ("int", "float"):
                found[at] = _constant(np.full(len(sizes), float(arguments[0])))
            elif name == "symbol" and arguments[0] == 0:
                rows = np.zeros((3, len(sizes)))
                rows[1] = 1
                found[at] = InN(rows, rows)
            elif name == "symbol":
                found[at] = _constant(sizes[:, arguments[0] - 1].astype(float))
            else:
                found[at] = _combined(name, [found[one] for one in arguments])
        return {at: found[at] for at in wanted}


def _check(node: Node, at: int) -> None:
    name, *arguments = node
    leaf = {"int": int, "float": (int, float), "symbol": int}.get(name)
    if leaf is not None:
        known = len(arguments) == 1 and isinstance(arguments[0], leaf)  # type: ignore[arg-type]
    else:
        known = name in _OPERATIONS and all(
            isinstance(one, int) and 0 <= one < at for one in arguments
        )
    if not known:
        raise UntraceableError(f"no rule to evaluate the operation {node!r:.200}")


def _constant(values: FloatArray) -> InN:
    rows = np.zeros((3, len(values)))
    rows[0] = values
    return InN(rows, rows)


def _combined(name: str, parts: list[InN]) -> InN:
    """One operation on polynomials in n."""
    if all(part.is_constant for part in parts):
        arguments = [_as_ints(part.high[0]) for part in parts]
        with np.errstate(all="ignore"):
            value = np.asarray(_OPERATIONS[name](*arguments), float)
        return _constant(np.broadcast_to(value, parts[0].high[0].shape))
    rule = _IN_N.get(name)
    if rule is None:
        raise UntraceableError(f"{name} of the number of samples is no polynomial of it")
    return rule(*parts)


def _as_ints(values: FloatArray) -> Any:
    return values.astype(np.int64) if (values == np.floor(values)).all() else values


def _sum(*parts: InN) -> InN:
    high = reduce(np.add, (part.high for part in parts))
    exact = all(part.is_exact for part in parts)
    return InN(high if exact else reduce(np.add, (part.low for part in parts)), high)


def _product(*parts: InN) -> InN:
    return reduce(_times, parts)


def _times(one: InN, other: InN) -> InN:
    if other.is_constant:
        one, other = other, one
    if one.is_constant:
        factor = one.high[0]
        high = factor * np.where(factor >= 0, other.high, other.low)
        if other.is_exact:
            return InN(high, high)
        return InN(factor * np.where(factor >= 0, other.low, other.high), high)
    # Both are sizes: at least 0.
    high = _convolved(one.high, other.high)
    exact = one.is_exact and other.is_exact
    return InN(
        high if exact else _convolved(np.maximum(one.low, 0), np.maximum(other.low, 0)), high
    )


def _convolved(one: FloatArray, other: FloatArray) -> FloatArray:
    rows = np.zeros_like(one)
    for i in range(len(one)):
        for j in range(len(other)):
            product = one[i] * other[j]
            if i + j <= _MOST_DEGREE:
                rows[i + j] += product
            elif product.any():
                raise UntraceableError("bytes that grow with the third power of n")
    return rows


def _divided(part: InN, by: InN) -> InN:
    if not by.is_constant or (by.high[0] <= 0).any():
        raise UntraceableError("a division by the number of samples")
    high = part.high / by.high[0]
    return InN(high if part.is_exact else part.low / by.high[0], high)


def _floor_divided(part: InN, by: InN) -> InN:
    quotient = _divided(part, by)
    if part.is_exact and not (part.high[1:] % by.high[0]).any():
        rows = quotient.high.copy()
        rows[0] = np.floor(rows[0])
        return InN(rows, rows)
    low = quotient.low.copy()
    low[0] -= 1 - 1 / by.high[0]
    return InN(low, quotient.high)


def _remainder(part: InN, by: InN) -> InN:
    if not by.is_constant:
        raise UntraceableError("a remainder by the number of samples")
    if part.is_exact and not (part.high[1:] % by.high[0]).any():
        return _constant(part.high[0] % by.high[0])
    return InN(_constant(np.zeros_like(by.high[0])).low, _constant(by.high[0] - 1).high)


def _largest(*parts: InN) -> InN:
    # Coefficient by coefficient, since n is at least 0.
    return InN(parts[0].low, reduce(np.maximum, (part.high for part in parts)))


def _smallest(*parts: InN) -> InN:
    def less(one: FloatArray, other: FloatArray) -> FloatArray:
        """The rows of the one that is less for many samples."""
        differ = np.where(one != other, np.sign(other - one), 0)
        first = np.where(differ[2] != 0, differ[2], np.where(differ[1] != 0, differ[1], differ[0]))
        return np.where(first >= 0, one, other)

    low = reduce(np.minimum, (part.low for part in parts))
    return InN(low, reduce(less, (part.high for part in parts)))


def _raised(part: InN, exponent: InN) -> InN:
    power = exponent.high[0]
    if not exponent.is_constant or (power != power[0]).any() or power[0] not in (1, 2):
        raise UntraceableError("a power of the number of samples")
    return part if power[0] == 1 else _times(part, part)


_IN_N: Final[dict[str, Callable[..., InN]]] = {
    "Add": _sum,
    "Mul": _product,
    "Pow": _raised,
    "PowByNatural": _raised,
    "FloorDiv": _floor_divided,
    "CleanDiv": _divided,
    "CeilDiv": lambda a, b: _divided(a, b).spread(0, 1),
    "Mod": _remainder,
    "PythonMod": _remainder,
    "IntTrueDiv": _divided,
    "FloatTrueDiv": _divided,
    "ToFloat": lambda a: a,
    "CeilToInt": lambda a: a.spread(0, 1),
    "FloorToInt": lambda a: a.spread(-1, 0),
    "TruncToInt": lambda a: a.spread(-1, 0),
    "RoundToInt": lambda a: a.spread(-1, 1),
    "Max": _largest,
    "Min": _smallest,
}
