"""Bytes and conditions as expressions of a batch's shape: a list of operations, never run as code.

An expression is a number into `Expressions.nodes`, where each node is an operation with its
arguments: `["int", 64]`, `["symbol", 1]` (a coordinate of the shape, n first), `["Mul", 3, 7]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import FloatArray
from torchbudget.errors import CostError

Node: TypeAlias = list[Any]


class UntraceableError(CostError):
    """A trace fails or takes too long, or an expression of it cannot be evaluated."""


def _power(base: Any, exponent: Any) -> Any:
    is_whole = np.all(np.asarray(exponent) >= 0)  # of ints
    return base**exponent if is_whole else np.asarray(base, float) ** exponent


def _to_int64(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
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
    "CeilToInt": _to_int64(np.ceil),
    "FloorToInt": _to_int64(np.floor),
    "TruncToInt": _to_int64(np.trunc),
    "RoundToInt": _to_int64(np.rint),
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


_LEAVES: Final[dict[str, Any]] = {"int": int, "float": (int, float), "symbol": int}


@dataclass(slots=True)
class Expressions:
    """Expressions that share their parts.

    Attributes:
        nodes: see the module.
    """

    nodes: list[Node] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict, repr=False)

    def node(self, *node: Any) -> int:
        """The number of a node, which is added if it is new.

        Raises:
            UntraceableError: the operation is unknown.
        """
        if node not in self._numbers:
            _check([*node], len(self.nodes))
            self._numbers[node] = len(self.nodes)
            self.nodes.append([*node])
        return self._numbers[node]

    def rounded_up(self, at: int, multiple: int) -> int:
        """An expression, rounded up to a multiple."""
        one = self.node("int", multiple)
        return self.node("Mul", one, self.node("CeilDiv", at, one))

    def total(self, parts: Sequence[int], numbers: Sequence[int]) -> int:
        """The sum of each of some expressions, so many times."""
        pairs = zip(parts, numbers, strict=True)
        return self.node(
            "Add", *(self.node("Mul", self.node("int", n), at) for at, n in pairs if n)
        )

    def add(self, expression: Any, known: Mapping[Any, int]) -> int:
        """Return the number of an expression of sympy.

        Args:
            expression: of integers, or a condition; or an int.
            known: the number of the expression that each symbol stands for.

        Raises:
            UntraceableError: it has an unknown operation, or another symbol.
        """
        if isinstance(expression, int) or getattr(expression, "is_Integer", False):
            return self.node("int", int(expression))
        if expression in known:
            return known[expression]
        if expression.is_Float or expression.is_Rational:
            return self.node("float", float(expression))
        arguments = (self.add(one, known) for one in expression.args)
        return self.node(type(expression).__name__, *arguments)

    def form(self, at: int, *, integers: bool = False) -> tuple[Any, ...]:
        """An expression as nested tuples, without or with its integers."""
        name, *arguments = self.nodes[at]
        if name in _LEAVES:
            return (name, *(arguments if integers or name != "int" else ()))
        return (name, *(self.form(one, integers=integers) for one in arguments))

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Expressions:
        """Read what a file contains.

        Raises:
            UntraceableError: an operation is unknown, or an argument comes after it.
        """
        for at, node in enumerate(nodes):
            _check(node, at)
        return cls([list(node) for node in nodes], {(*node,): at for at, node in enumerate(nodes)})

    def evaluate(self, shapes: npt.ArrayLike, wanted: Sequence[int]) -> list[Any]:
        """The wanted expressions at each shape, `(S, 1 + d)`: arrays of shape `(S,)`."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        found = self._bounded([*shapes.T], wanted)
        return [np.broadcast_to(most, len(shapes)) for _, most in found]

    def in_n(self, sizes: npt.NDArray[Any], wanted: Sequence[int]) -> FloatArray:
        """Each wanted expression as a polynomial in n that is nowhere smaller.

        Bytes of a step are polynomials of degree 2 but for rounding: `64 · ⌈n · L / 64⌉` of a
        block. Rounding is bounded first: here by `n · L + 63`. The bound at n = 2, 3 and 4 gives
        the coefficients, and its values at other n show that it is a polynomial.

        Args:
            sizes: shape `(S, d)`.
            wanted: numbers of expressions.

        Returns:
            Coefficients of n⁰, n¹ and n² at each size, shape `(wanted, 3, S)`.

        Raises:
            UntraceableError: one is not bounded by such a polynomial.
        """
        n = np.array([2, 3, 4, 1, 2**6, 2**12, 2**20], float)[:, None]  # the last four: a check
        found = self._bounded([n, *sizes.T], wanted, moving=0)
        most = np.array([np.broadcast_to(high, (len(n), len(sizes))) for _, high in found])
        two, three, four = most[:, 0], most[:, 1], most[:, 2]
        square = (four - 2 * three + two) / 2
        each = three - two - 5 * square
        rows = np.stack([two - 2 * each - 4 * square, each, square], axis=1)
        whole = np.rint(rows)
        rows = np.where(np.abs(rows - whole) <= 1e-6 + 1e-14 * np.abs(four[:, None]), whole, rows)
        constant, each, square = rows[:, :, None].swapaxes(0, 1)
        if not np.allclose(constant + n * (each + n * square), most, 1e-9, 1e-3):
            raise UntraceableError("bytes that are no polynomial of degree 2 in n")
        return rows

    def _bounded(
        self, columns: Sequence[npt.NDArray[Any]], wanted: Sequence[int], moving: int | None = None
    ) -> list[tuple[Any, Any]]:
        """Lower and upper bounds of the wanted nodes.

        Both are the value itself, but of a node that rounds the coordinate `moving`. Of such a node
        they are polynomials, of which the value is never outside.
        """
        needed = set(wanted)
        for at in range(max(needed, default=-1), -1, -1):
            if at in needed and self.nodes[at][0] not in _LEAVES:
                needed.update(self.nodes[at][1:])
        values: dict[int, tuple[Any, Any]] = {}
        moved: set[int] = set()
        with np.errstate(all="ignore"):
            for at in sorted(needed):
                name, *arguments = self.nodes[at]
                if name in _LEAVES:
                    value = columns[arguments[0]] if name == "symbol" else arguments[0]
                    moved.update([at] if name == "symbol" and arguments[0] == moving else [])
                    values[at] = value, value
                elif moved.isdisjoint(arguments):
                    value = _OPERATIONS[name](*(values[one][0] for one in arguments))
                    values[at] = value, value
                else:
                    moved.add(at)
                    divisor = None if arguments[-1] in moved else values[arguments[-1]][0]
                    values[at] = _bounds(name, [values[one] for one in arguments], divisor)
        return [values[at] for at in wanted]


def _check(node: Node, at: int) -> None:
    name, *arguments = node
    if name in _LEAVES:
        known = len(arguments) == 1 and isinstance(arguments[0], _LEAVES[name])
    else:
        known = name in _OPERATIONS and all(
            isinstance(one, int) and 0 <= one < at for one in arguments
        )
    if not known:
        raise UntraceableError(f"no rule to evaluate the operation {node!r:.200}")


# Operations that round: the operation without rounding, and the most that rounding changes it.
_ROUNDED: Final = {
    "FloorDiv": ("IntTrueDiv", -1, 0),
    "CleanDiv": ("IntTrueDiv", 0, 0),
    "CeilDiv": ("IntTrueDiv", 0, 1),
    "CeilToInt": ("ToFloat", 0, 1),
    "FloorToInt": ("ToFloat", -1, 0),
    "TruncToInt": ("ToFloat", -1, 0),
    "RoundToInt": ("ToFloat", -1, 1),
}
_DIVISIONS: Final = ("IntTrueDiv", "FloatTrueDiv", "Mod", "PythonMod")
_BOUNDED: Final = (*_DIVISIONS, "Add", "Mul", "Pow", "PowByNatural", "ToFloat", "Max", "Min")


def _bounds(name: str, parts: list[tuple[Any, Any]], divisor: Any) -> tuple[Any, Any]:
    """The bounds of an operation on the number of samples, from those of its arguments.

    Example: `n · L // 64` is at least `n · L / 64 − 63 / 64`, and at most `n · L / 64`; if L is a
    multiple of 64, it is exactly that. `n · L % 64` is 0 to 63.

    Args:
        name: of the operation.
        parts: a lower and an upper bound of each argument; the same object twice if it is exact.
        divisor: the last argument; `None` if it depends on the number of samples.

    Raises:
        UntraceableError: no bound is a polynomial, as of a division by the number of samples.
    """
    unrounded, taken, added = _ROUNDED.get(name, (name, 0, 0))
    if unrounded not in _BOUNDED:
        raise UntraceableError(f"{name} of the number of samples is no polynomial of it")
    if unrounded in _DIVISIONS and (divisor is None or np.any(np.asarray(divisor) <= 0)):
        raise UntraceableError("a division by the number of samples")
    is_exact = taken == added
    if name in ("FloorDiv", "CeilDiv", "Mod", "PythonMod"):  # the same remainder for every n
        is_exact = not np.ptp(parts[0][0] % divisor, axis=0).any()
    if is_exact and all(low is high for low, high in parts):
        return (_OPERATIONS[name](*(low for low, _ in parts)),) * 2
    if name in ("Mod", "PythonMod"):
        return 0, divisor - 1
    ends = [one[:1] if one[0] is one[1] else one for one in parts]
    if name == "Mul":
        corners = [reduce(np.multiply, one) for one in product(*ends)]
        return reduce(np.minimum, corners), reduce(np.maximum, corners)
    rule = _OPERATIONS[unrounded]
    # Rounding changes a quotient of whole numbers by (divisor - 1) / divisor at most.
    share = (divisor - 1) / divisor if name in ("FloorDiv", "CeilDiv") else 1
    low, high = rule(*(one[0] for one in ends)), rule(*(one[-1] for one in ends))
    return low + share * taken, high + share * added
