"""Laws of all collates on samples of any structure, form and dtype."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.support.batches import Pair, tensors_of
from tests.support.batches import same as bitwise
from torchbudget import PackCollate, PadCollate

# ---------------------------------------------------------------------- samples, and naive loops

LISTS = [torch.int64, torch.float32, torch.bool]
DTYPES = {
    "tensor": [*LISTS, torch.int32, torch.uint8, torch.float64, torch.bfloat16, torch.complex64],
    "array": [*LISTS, torch.int16, torch.uint16, torch.float64],
    "list": LISTS,
    "number": LISTS,
}
NDIMS = {"list": st.integers(1, 2), "number": st.just(0)}
# Paths of the leaves, and how a sample is built of its leaves' values.
STRUCTURES: list[tuple[list[Any], Callable[[list[Any]], Any]]] = [
    ([()], lambda v: v[0]),
    ([("a",), ("b",)], lambda v: {"a": v[0], "b": v[1]}),
    ([(0,), (1,), (2,)], tuple),
    ([(0,), (1,)], lambda v: Pair(*v)),
    ([("x", "u"), ("x", "v"), ("y",)], lambda v: {"x": {"u": v[0], "v": v[1]}, "y": v[2]}),
    ([(0,), (1, "k"), (1, "l")], lambda v: (v[0], {"k": v[1], "l": v[2]})),
]
sides = st.sampled_from(["right", "left", 0.5, 0.25, 1 / 3])


@dataclass(frozen=True)
class Field:
    """A field of all samples: its place, its form, its number of axes and each sample's value."""

    path: tuple[Any, ...]
    form: str  # "tensor", "array", "list", "number" or "text"
    ndim: int
    column: list[Any]

    def tensors(self) -> list[Tensor]:
        """What each value is as a tensor, read one by one."""
        tensors = [
            torch.from_numpy(np.ascontiguousarray(value)).reshape(np.shape(value))
            if isinstance(value, np.ndarray)
            else value.clone()
            if isinstance(value, Tensor)
            else torch.tensor(value)
            for value in self.column
        ]
        if self.form == "list":  # an empty list has the dtype of the others
            full = [t.dtype for t in tensors if t.numel()]
            tensors = [t.to(full[0] if full else t.dtype) for t in tensors]
        return tensors


@dataclass(frozen=True)
class Samples:
    samples: list[Any]
    fields: list[Field]

    def rules(self, layout: str) -> dict[Any, str]:
        """A rule for every field with an axis but the first, since they are not equally long."""
        return dict.fromkeys([field.path for field in self.fields if field.ndim][1:], layout)


@st.composite
def drawn_fields(draw: st.DrawFn, path: Any, n: int, same_trailing: bool, texts: bool) -> Field:
    form = draw(st.sampled_from([*DTYPES, *["text"] * texts]))
    if form == "text":
        return Field(path, form, 0, [draw(st.text(max_size=4)) for _ in range(n)])
    dtype, ndim = draw(st.sampled_from(DTYPES[form])), draw(NDIMS.get(form, st.integers(0, 3)))
    # A list of no rows does not say how many axes it has.
    rows = int(form == "list" and ndim == 2)
    axes = [st.integers(rows, 5)] * ndim
    if same_trailing and ndim > 1:
        axes[1:] = [st.just(draw(st.integers(1, 3))) for _ in axes[1:]]
    column: list[Any] = []
    for _ in range(n):
        shape = draw(st.tuples(*axes))
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        value: Any = torch.from_numpy(rng.integers(0, 100, shape)).reshape(shape).to(dtype)
        if form == "array":  # neither the layout nor the order of its bytes matters
            value = value.numpy().T.copy().T if draw(st.booleans()) else value.numpy()
        column.append(value if form in ("tensor", "array") else value.tolist())
    if form == "list" and not any(column):  # no list would say which dtype it is of
        column[0] = torch.ones(1, dtype=dtype).tolist()
    return Field(path, form, ndim, column)


@st.composite
def batches_of_samples(draw: st.DrawFn, same_trailing: bool = False, texts: bool = True) -> Samples:
    """Samples of any structure, whose fields agree in form, dtype and number of axes."""
    paths, build = draw(st.sampled_from(STRUCTURES))
    n = draw(st.integers(1, 6))
    fields = [draw(drawn_fields(path, n, same_trailing, texts)) for path in paths]
    if draw(st.booleans()) and len(fields) > 1:
        # Two fields of equal shapes, as a text's ids and its mask are: they share work inside.
        fields[1] = replace(fields[0], path=paths[1])
    return Samples([build([field.column[i] for field in fields]) for i in range(n)], fields)


def pad_naively(
    tensors: list[Tensor], value: Any, side: str | float, multiples: tuple[int, ...]
) -> Tensor:
    """One after the other."""
    share = side if isinstance(side, float) else float(side == "left")
    most = np.max([tensor.shape for tensor in tensors], axis=0)
    shape = (-(-most // multiples) * multiples).astype(int).tolist()
    out = torch.full((len(tensors), *shape), value, dtype=tensors[0].dtype)
    for row, tensor in zip(out, tensors, strict=True):
        first = [math.floor((a - b) * share) for a, b in zip(shape, tensor.shape, strict=True)]
        ends = zip(first, tensor.shape, strict=True)
        row[tuple(slice(start, start + own) for start, own in ends)] = tensor
    return out


def at(structure: Any, path: tuple[Any, ...]) -> Any:
    """The field of a sample, or of a batch's data, that a path leads to."""
    return reduce(getitem, path, structure)


# ---------------------------------------------------------------------- laws


def pad(drawn: Samples, **options: Any) -> PadCollate:
    return PadCollate(fields=drawn.rules("padded"), **options)


def pack(drawn: Samples, **options: Any) -> PackCollate:
    return PackCollate(fields=drawn.rules("joined"), **options)


def check_same_samples(drawn: Samples, came: list[Any]) -> None:
    for field in drawn.fields:
        values = [at(sample, field.path) for sample in came]
        if field.form == "text":
            assert values == field.column
        else:
            assert all(map(bitwise, values, field.tensors()))


@given(batches_of_samples(), sides, st.integers(1, 4), st.sampled_from([0, 1]))
def test_a_padded_field_is_what_the_naive_loop_makes(
    drawn: Samples, side: str | float, multiple: int, value: int
) -> None:
    batch = pad(drawn, padding_value=value, side=side, size_multiple=multiple)(drawn.samples)
    for field in drawn.fields:
        found, multiples = at(batch.data, field.path), (multiple, 1, 1)[: field.ndim]
        if field.form == "text":
            assert found == field.column
        else:
            assert bitwise(found, pad_naively(field.tensors(), value, side, multiples))
    check_same_samples(drawn, batch.samples())


@given(batches_of_samples(same_trailing=True))
def test_packed_fields_are_concatenated_and_numbers_stacked(drawn: Samples) -> None:
    batch = pack(drawn)(drawn.samples)
    for field in drawn.fields:
        if field.form != "text":
            joined = (torch.cat if field.ndim else torch.stack)(field.tensors())
            assert bitwise(at(batch.data, field.path), joined)
        if field.ndim:
            own, lengths = batch.measured_by(field.path), [len(value) for value in field.column]
            assert own.lengths.tolist() == lengths
            assert own.cu_seqlens.diff().tolist() == lengths
            assert own.max_seqlen == max(lengths)
            assert own.num_tokens == sum(lengths)
            assert own.position_ids.tolist() == [i for n in lengths for i in range(n)]
    check_same_samples(drawn, batch.samples())


@given(
    batches_of_samples(texts=False),
    sides,
    st.integers(1, 4),
    st.sampled_from([0, (0, 1), (1, 2), -1, (0, -1), ()]),
)
def test_the_mask_marks_what_lengths_and_samples_say(
    drawn: Samples, side: str | float, multiple: int, axes: int | tuple[int, ...]
) -> None:
    named = axes if isinstance(axes, tuple) else (axes,)
    present = [
        [*dict.fromkeys(a % f.ndim for a in named if -f.ndim <= a < f.ndim)] for f in drawn.fields
    ]
    field = next((i for i, axes_ in enumerate(present) if axes_), None)
    rules = {f.path: "padded" for i, f in enumerate(drawn.fields) if i != field}
    batch = PadCollate(side=side, size_multiple=multiple, length_axes=axes, fields=rules)(
        drawn.samples
    )
    if field is None:
        assert batch.lengths.shape == (len(drawn.samples), 0)
        assert batch.padded_size == ()
        return
    own = present[field]
    shapes = [t.shape for t in drawn.fields[field].tensors()]
    lengths = torch.tensor([[shape[a] for a in own] for shape in shapes], dtype=torch.int64)
    assert bitwise(batch.lengths, lengths[:, 0] if len(own) == 1 else lengths)
    assert batch.num_tokens == lengths.prod(dim=1).sum()
    ones = [torch.ones(row, dtype=torch.bool) for row in lengths.tolist()]
    mask = pad_naively(ones, False, side, (multiple,) * len(own))
    assert bitwise(batch.mask, mask)
    assert batch.padded_size == tuple(mask.shape[1:])


@given(
    batches_of_samples(same_trailing=True),
    st.sampled_from(["right", "left", 0.5, "packed"]),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_parts_are_what_their_samples_are_alone(
    drawn: Samples, side: Any, multiple: int, n: int
) -> None:
    """All samples once, in order; a padded part is trimmed to its own longest sample."""
    options: dict[str, Any] = {"size_multiple": multiple}
    if side != "packed":
        options |= {"side": side, "padding_value": 1}
    collate: Any = (pack if side == "packed" else pad)(drawn, **options)
    batch = collate(drawn.samples)
    parts = batch.split(min(n, batch.num_samples))
    counts = [part.num_samples for part in parts]
    assert sum(counts) == batch.num_samples
    assert max(counts) - min(counts) <= 1
    check_same_samples(drawn, [sample for part in parts for sample in part.samples()])
    start = 0
    for part in parts:
        alone = collate(batch.samples()[start : start + part.num_samples])
        start += part.num_samples
        assert type(part) is type(batch)
        assert bitwise(part.lengths, alone.lengths) if tensors_of(batch) else True
        for field in drawn.fields:
            found, expected = at(part.data, field.path), at(alone.data, field.path)
            if field.form == "text":
                assert found == expected
            elif side == 0.5:  # rounding may put neighbours one position apart
                pairs = zip(found.shape, expected.shape, strict=True)
                assert all(a <= b + multiple for a, b in pairs)
            else:
                assert found.is_contiguous()
                assert bitwise(found, expected)


@given(batches_of_samples(same_trailing=True), st.booleans())
def test_batches_pickle_move_and_map(drawn: Samples, packed: bool) -> None:
    """Samples stay where they are, in copies, on devices and in trees; offsets are not mapped."""
    collate: Any = (pack if packed else pad)(drawn)
    batch = pickle.loads(pickle.dumps(collate))(drawn.samples)  # noqa: S301  (our own bytes)
    again = batch
    if torch.uint16 not in {one.dtype for one in tensors_of(batch)}:  # which torch cannot read back
        again = pickle.loads(pickle.dumps(batch))  # noqa: S301  (our own bytes)
    leaves, structure = tree_flatten(batch)
    same = tree_unflatten(leaves, structure)
    for one in (again, same):
        assert type(one) is type(batch)
        assert all(map(bitwise, tensors_of(one), tensors_of(batch)))
        check_same_samples(drawn, one.samples())
    twice = tree_map_only(Tensor, lambda t: torch.stack([t, t], dim=-1), batch)
    for mine, other in zip(twice.samples(), batch.samples(), strict=True):
        for a, b in zip(tree_flatten(mine)[0], tree_flatten(other)[0], strict=True):
            assert a == b if isinstance(b, str) else bitwise(a, torch.stack([b, b], dim=-1))
    for moved in (batch.to("meta", non_blocking=True), tree_map_only(Tensor, Tensor.cpu, batch)):
        assert type(moved) is type(batch)
        if tensors_of(batch):
            assert bitwise(moved.lengths, batch.lengths)
    assert {t.device.type for t in tensors_of(batch.to("meta"))} <= {"meta"}
