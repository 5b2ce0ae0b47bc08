"""Hypothesis strategies for ragged samples, and the naive loops that collates are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import torch
from torch.utils._pytree import tree_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class FieldSpec:
    """What one field is in every sample: how it is written, its dtype and number of axes."""

    form: str  # "tensor", "array", "list", "number" or "text"
    dtype: torch.dtype
    ndim: int
    trailing: tuple[int, ...] | None = None  # equal in all samples; None: ragged too


_TENSOR_DTYPES = [
    torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64,
    torch.bfloat16, torch.complex64,
]  # fmt: skip
_ARRAY_DTYPES = [torch.int64, torch.int16, torch.uint16, torch.bool, torch.float32, torch.float64]
_LIST_DTYPES = [torch.int64, torch.float32, torch.bool]


@st.composite
def field_specs(
    draw: st.DrawFn, max_ndim: int = 3, same_trailing: bool = False, texts: bool = True
) -> FieldSpec:
    forms = ["tensor", "array", "list", "number"] + ["text"] * texts
    form = draw(st.sampled_from(forms))
    dtypes = {"tensor": _TENSOR_DTYPES, "array": _ARRAY_DTYPES}.get(form, _LIST_DTYPES)
    ndim = 0
    if form in ("tensor", "array"):
        ndim = draw(st.integers(0, max_ndim))
    elif form == "list":
        ndim = draw(st.integers(1, min(2, max_ndim)))
    trailing = None
    if same_trailing and ndim > 1:
        trailing = draw(st.tuples(*[st.integers(1, 3)] * (ndim - 1)))
    return FieldSpec(form, draw(st.sampled_from(dtypes)), ndim, trailing)


def _values(draw: st.DrawFn, spec: FieldSpec) -> Any:
    if spec.form == "text":
        return draw(st.text(max_size=4))
    # A list of no rows does not say how many axes it has.
    shortest = int(spec.form == "list" and spec.ndim == 2)
    if spec.trailing is not None:
        shape: tuple[int, ...] = (draw(st.integers(shortest, 5)), *spec.trailing)
    elif shortest:
        shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    else:
        shape = draw(st.tuples(*[st.integers(0, 5)] * spec.ndim))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    tensor = torch.from_numpy(rng.integers(0, 100, shape)).reshape(shape).to(spec.dtype)
    if spec.form == "tensor":
        return tensor
    if spec.form == "array":
        array = tensor.numpy()
        # Neither the layout nor the order of an array's bytes matters.
        return array.T.copy().T if draw(st.booleans()) else array
    return tensor.tolist()


@dataclass(frozen=True)
class Samples:
    """n samples, and the specs and flat values of their fields in order."""

    samples: list[Any]
    paths: list[tuple[Any, ...]]
    specs: list[FieldSpec]
    columns: list[list[Any]]  # per field, the value of each sample

    def rules(self, layout: str) -> dict[Any, str]:
        """A rule for every field with an axis but the first, since they are not equally long."""
        ragged = [path for path, spec in zip(self.paths, self.specs, strict=True) if spec.ndim]
        return dict.fromkeys(ragged[1:], layout)


_Build = Callable[[list[Any]], Any]


def _structures() -> list[tuple[list[tuple[Any, ...]], _Build]]:
    """Paths of the leaves, and how a sample is built of its leaves' values."""
    return [
        ([()], lambda v: v[0]),
        ([("a",), ("b",)], lambda v: {"a": v[0], "b": v[1]}),
        ([(0,), (1,), (2,)], tuple),
        ([(0,), (1,)], lambda v: Pair(*v)),
        ([("x", "u"), ("x", "v"), ("y",)], lambda v: {"x": {"u": v[0], "v": v[1]}, "y": v[2]}),
        ([(0,), (1, "k"), (1, "l")], lambda v: (v[0], {"k": v[1], "l": v[2]})),
    ]


@st.composite
def batches_of_samples(
    draw: st.DrawFn,
    max_ndim: int = 3,
    same_trailing: bool = False,
    texts: bool = True,
    max_samples: int = 6,
) -> Samples:
    """Samples of any structure, whose fields agree in form, dtype and number of axes."""
    paths, build = draw(st.sampled_from(_structures()))
    specs = [
        draw(field_specs(max_ndim=max_ndim, same_trailing=same_trailing, texts=texts))
        for _ in paths
    ]
    n = draw(st.integers(1, max_samples))
    columns = [[_values(draw, spec) for _ in range(n)] for spec in specs]
    if draw(st.booleans()) and len(specs) > 1:
        # Two fields of equal shapes, as a text's ids and its mask are: they share work inside.
        specs[1], columns[1] = specs[0], columns[0]
    for spec, column in zip(specs, columns, strict=True):
        if spec.form == "list" and not any(column):  # no list would say which dtype it is of
            column[0] = torch.ones(1, dtype=spec.dtype).tolist()
    samples = [build([column[i] for column in columns]) for i in range(n)]
    return Samples(samples, paths, specs, columns)


def expected_tensors(spec: FieldSpec, column: list[Any]) -> list[torch.Tensor]:
    """What each value of a field is as a tensor, read one by one."""
    tensors = [
        value.clone()
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.ascontiguousarray(value)).reshape(np.shape(value))
        if isinstance(value, np.ndarray)
        else torch.tensor(value)
        for value in column
    ]
    if spec.form == "list":  # an empty list has the dtype of the others
        full = [t.dtype for t in tensors if t.numel()]
        tensors = [t.to(full[0] if full else t.dtype) for t in tensors]
    return tensors


def pad_naively(
    tensors: list[torch.Tensor], value: Any, left_share: float, multiples: tuple[int, ...]
) -> torch.Tensor:
    """Element by element, and as slow as it looks."""
    ndim = tensors[0].ndim
    shape = [
        math.ceil(max(t.shape[axis] for t in tensors) / multiples[axis]) * multiples[axis]
        for axis in range(ndim)
    ]
    out = torch.full((len(tensors), *shape), value, dtype=tensors[0].dtype)
    for i, tensor in enumerate(tensors):
        first = [math.floor((shape[a] - tensor.shape[a]) * left_share) for a in range(ndim)]
        for position in np.ndindex(*tensor.shape):
            out[(i, *(p + f for p, f in zip(position, first, strict=True)))] = tensor[position]
    return out


def at(structure: Any, path: tuple[Any, ...]) -> Any:
    """The field of a sample, or of a batch's data, that a path leads to."""
    for key in path:
        structure = structure[key]
    return structure


sides = st.sampled_from(["right", "left", 0.5, 0.25, 1 / 3])


def left_share(side: str | float) -> float:
    return side if isinstance(side, float) else {"right": 0.0, "left": 1.0}[side]


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Every tensor of a batch."""
    return [leaf for leaf in tree_leaves(batch.data) if isinstance(leaf, torch.Tensor)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: dtype, shape and content."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
