"""How the sizes in a batch follow from its shape: learned from `make_batch` at a few shapes."""

from __future__ import annotations

import io
import math
import pickle
import types
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.protocol import FloatArray
from torchbudget.distributed import part_bytes
from torchbudget.errors import BatchError

Shape: TypeAlias = tuple[int, ...]  # (n, size) or (n, size_1, size_2, …)

_NUMBERS: Final = (int, float, complex)
_LEAVES: Final = (*_NUMBERS, torch.Tensor, torch.SymInt, np.ndarray, np.generic)
_SHARED: Final = (torch.nn.Module, types.FunctionType, types.MethodType, types.ModuleType, type)
_MOST_DIVISOR: Final = 64  # strides of several layers


class _Parts(pickle.Pickler):
    """Pickles a batch without its tensors, arrays and numbers, and what a copy of it shares.

    Attributes:
        kept: these parts.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kept: list[Any] = []
        self._known: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The place of a part; numbers that are equal by chance are parts of their own."""
        if isinstance(value, bool) or not isinstance(value, (*_LEAVES, *_SHARED)):
            return None
        place = len(self.kept)
        if not isinstance(value, _NUMBERS):
            place = self._known.setdefault(id(value), place)
        if place == len(self.kept):
            self.kept.append(value)
        return place


def rebuilt(batch: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of a batch with its tensors, arrays and numbers replaced.

    Args:
        batch: a tensor, a container, or an object of any class that can be pickled; nested.
        replace: is called with each leaf once, in the same order for batches of one structure.
    """
    file = io.BytesIO()
    parts = _Parts(file)
    parts.dump(batch)
    made = [one if isinstance(one, _SHARED) else replace(one) for one in parts.kept]
    reader = pickle.Unpickler(io.BytesIO(file.getvalue()))  # noqa: S301  (what was just written)
    reader.persistent_load = made.__getitem__  # type: ignore[method-assign]
    return reader.load()


def leaves_of(batch: Any) -> list[Any]:
    """The leaves of a batch; see `rebuilt`."""
    parts = _Parts(io.BytesIO())
    parts.dump(batch)
    return [one for one in parts.kept if not isinstance(one, _SHARED)]


def arrays_in(batch: Any) -> list[Any]:
    """The tensors and arrays of NumPy in a batch."""
    return [one for one in leaves_of(batch) if isinstance(one, (torch.Tensor, np.ndarray))]


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch."""
    arrays = arrays_in(batch)
    return sum(part_bytes(a) if isinstance(a, torch.Tensor) else a.nbytes for a in arrays)


class _Size(NamedTuple):
    """The whole part of a sum of products of coordinates, over a divisor."""

    weights: tuple[int, ...]
    divisor: int


def _size_of(terms: FloatArray, column: FloatArray) -> _Size | None:
    solved = np.linalg.lstsq(terms, column, rcond=None)[0]
    for divisor in range(1, _MOST_DIVISOR + 1):
        weights = np.rint(solved * divisor)
        whole = divisor * np.floor(solved[0])
        for rest in range(2 * divisor):
            weights[0] = whole + rest if divisor > 1 else weights[0]
            if np.array_equal(np.floor(terms @ weights / divisor), column):
                return _Size(tuple(map(int, weights)), divisor)
    return None


class Recipe:
    """How the sizes of a batch's tensors, and its ints, follow from the shape.

    Each must be linear in each coordinate, such as L, 2·L + 1 or n·L, or the whole part of that
    over a divisor, such as L // 4. The coefficients are solved from some shapes and checked at all.

    Args:
        make: makes a batch of a shape.
        shapes: that differ enough to tell all products of coordinates apart, and some more.

    Raises:
        UntraceableError: the batch is no such function of the shape; the message says where.
    """

    def __init__(self, make: Callable[[Shape], Any], shapes: Sequence[Shape]) -> None:
        batches = [make(shape) for shape in shapes]
        # On an axis with one size only, every coordinate is a number, not a symbol.
        ends = [(0, 1) if len({*column}) > 1 else (0,) for column in zip(*shapes, strict=True)]
        self._powers = list(product(*ends))
        kinds = [tuple(map(type, leaves_of(batch))) for batch in batches]
        # Fields that are equally long by chance may share their lengths in the batch.
        [(kind, _)] = Counter(kinds).most_common(1)
        shapes = [shape for shape, one in zip(shapes, kinds, strict=True) if one == kind]
        every = [leaves_of(one) for one, its in zip(batches, kinds, strict=True) if its == kind]
        self._batch = batches[kinds.index(kind)]
        terms = np.array([products(shape, self._powers) for shape in shapes], float)
        if np.linalg.matrix_rank(terms) < len(self._powers):
            raise UntraceableError(
                "the batch's structure changes with its shape, as a list of n tensors does, or the "
                "samples have too few different sizes"
            )
        self._sizes: list[list[_Size]] = []  # of each leaf
        for leaves in zip(*every, strict=True):
            columns = np.array([_numbers(leaf, leaves[0]) for leaf in leaves], float).T
            found = [_size_of(terms, column) for column in columns]
            if None in found and isinstance(leaves[0], np.ndarray):
                found = []  # it keeps one batch's value: concrete traces show whether that matters
            for one, column in zip(found, columns, strict=False):
                if one is None:
                    pairs = [*zip(shapes, column.astype(int).tolist(), strict=True)][:4]
                    raise UntraceableError(
                        "a number in the batch depends on more than n and the padded size, as in "
                        + ", ".join(f"{shape}: {found}" for shape, found in pairs)
                        + "; if another field of the samples is ragged, pass its size as well, as "
                        "in size=('audio', 'text')"
                    )
            self._sizes.append([one for one in found if one is not None])

    def build(self, coordinates: Sequence[Any], uncounted: Callable[[torch.Tensor], Any]) -> Any:
        """Make a batch of symbolic coordinates, inside a fake mode.

        Args:
            coordinates: in place of those of a shape.
            uncounted: is called with tensors that stand for arrays of NumPy.
        """
        terms = products(coordinates, self._powers)
        sizes = iter(self._sizes)

        def value(size: _Size) -> Any:
            pairs = zip(terms, size.weights, strict=True)
            total = sum(term * weight for term, weight in pairs if weight)
            return total // size.divisor if size.divisor > 1 else total

        def replace(leaf: Any) -> Any:
            own = next(sizes)
            if isinstance(leaf, torch.Tensor):
                options: Any = {"dtype": leaf.dtype, "device": leaf.device}
                shape = [value(one) for one in own]
                return torch.empty(shape, requires_grad=leaf.requires_grad, **options)
            if isinstance(leaf, np.ndarray) and any(any(one.weights[1:]) for one in own):
                dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
                array = torch.empty([value(one) for one in own], dtype=dtype)
                uncounted(array)
                return array
            return value(own[0]) if own and not isinstance(leaf, np.ndarray) else leaf

        return rebuilt(self._batch, replace)


class Place(NamedTuple):
    """A length in a batch that shows a coordinate c of its shape.

    It is `(constant + weight · c) // divisor`.

    Attributes:
        array: index of the tensor or array among the batch's; −1: c is always `constant`, as on an
            axis with one size only.
        axis: its axis with that length.
    """

    array: int
    axis: int
    constant: int
    weight: int
    divisor: int


class ShapeReader(NamedTuple):
    """Reads the shape (n, size) off a batch, as `make_batch` showed it at a few shapes.

    Attributes:
        dims: the number of axes of each tensor and array in a batch.
        places: one for each coordinate.
    """

    dims: tuple[int, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, make: Callable[[Shape], Any], shapes: Sequence[Shape]) -> ShapeReader:
        """Find, for each coordinate, the length that follows from it alone and tells it best.

        Raises:
            UntraceableError: there is none, or the batch's structure changes with its shape.
        """
        batches = [arrays_in(make(shape)) for shape in shapes]
        dims = [tuple(one.ndim for one in arrays) for arrays in batches]
        if len({*dims}) > 1:
            raise UntraceableError("the batch's structure changes with its shape")
        places = []
        for number, coordinate in enumerate(np.array(shapes, float).T):
            found = [Place(-1, 0, int(coordinate[0]), 0, 1)] if not np.ptp(coordinate) else []
            terms = np.stack([np.ones(len(shapes)), coordinate], axis=1)
            for array, axis in ((k, axis) for k, dim in enumerate(dims[0]) for axis in range(dim)):
                size = _size_of(terms, np.array([one[array].shape[axis] for one in batches], float))
                if size is not None and size.weights[1] > 0:
                    constant, weight = size.weights
                    found.append(Place(array, axis, constant, weight, size.divisor))
            if not found:
                what = f"size on axis {number - 1}" if number else "number of samples"
                raise UntraceableError(f"no length in the batch follows from its {what} alone")
            places.append(min(found, key=lambda one: one.divisor / max(one.weight, 1)))
        return cls(dims[0], tuple(places))

    def shape_of(self, batch: Any) -> Shape:
        """The largest shape that has the lengths of a batch.

        Raises:
            BatchError: it has other numbers of tensors, or of axes, than `make_batch` made.
        """
        arrays = arrays_in(batch)
        dims = tuple(one.ndim for one in arrays)
        if dims != self.dims:
            raise BatchError(
                f"the batch has tensors of {dims} axes, but those of make_batch have {self.dims}: "
                "its shape cannot be read; let make_batch make batches as the loader does"
            )

        def coordinate(place: Place) -> int:
            if place.array < 0:
                return place.constant
            above = (arrays[place.array].shape[place.axis] + 1) * place.divisor
            return int((above - 1 - place.constant) // place.weight)

        return tuple(map(coordinate, self.places))


def products(shape: Sequence[Any], powers: Sequence[tuple[int, ...]]) -> list[Any]:
    """The products of the coordinates whose power is 1."""
    pairs = (zip(shape, power, strict=True) for power in powers)
    return [math.prod(one for one, exponent in some if exponent) for some in pairs]


def _numbers(leaf: Any, first: Any) -> tuple[int, ...]:
    """The numbers of a leaf that may follow from the shape."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or not leaf.is_contiguous():
            raise UntraceableError("the batch has a tensor that is not contiguous")
        if leaf.dim() != first.dim():
            raise UntraceableError("a tensor's number of axes changes with the batch's shape")
        return tuple(leaf.shape)
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return (leaf,)
    if isinstance(leaf, np.ndarray) and leaf.ndim == first.ndim and leaf.dtype.kind in "iufb":
        return tuple(leaf.shape)
    if isinstance(leaf, (float, complex, np.generic)) and leaf != first:
        raise UntraceableError("a number in the batch depends on its shape and is not an int")
    return ()
