"""Laws of all collates on samples of any structure, form and dtype."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.support.sample_strategies import (
    Samples,
    at,
    batches_of_samples,
    expected_tensors,
    left_share,
    pad_naively,
    sides,
    tensors_of,
)
from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate, PadCollate
from torchbudget.errors import CollateError


def pad(drawn: Samples, **options: Any) -> PadCollate:
    return PadCollate(fields=drawn.rules("padded"), **options)


def pack(drawn: Samples, **options: Any) -> PackCollate:
    return PackCollate(fields=drawn.rules("joined"), **options)


def check_same_samples(drawn: Samples, came: list[Any]) -> None:
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        values = [at(sample, path) for sample in came]
        if spec.form == "text":
            assert values == column
        else:
            assert all(map(bitwise, values, expected_tensors(spec, column)))


@given(batches_of_samples(), sides, st.integers(1, 4), st.sampled_from([0, 1]))
def test_a_padded_field_is_what_the_naive_loop_makes(
    drawn: Samples, side: str | float, multiple: int, value: int
) -> None:
    batch = pad(drawn, padding_value=value, side=side, size_multiple=multiple)(drawn.samples)
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        field = at(batch.data, path)
        if spec.form == "text":
            assert field == column
            continue
        multiples = (multiple, 1, 1)[: spec.ndim]
        tensors = expected_tensors(spec, column)
        assert bitwise(field, pad_naively(tensors, value, left_share(side), multiples))
    check_same_samples(drawn, batch.samples())


@given(batches_of_samples(same_trailing=True))
def test_packed_fields_are_concatenated_and_numbers_stacked(drawn: Samples) -> None:
    batch = pack(drawn)(drawn.samples)
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        if spec.form != "text":
            tensors = expected_tensors(spec, column)
            joined = torch.cat(tensors) if spec.ndim else torch.stack(tensors)
            assert bitwise(at(batch.data, path), joined)
        if spec.form != "text" and spec.ndim:
            own, lengths = batch.measured_by(path), [len(value) for value in column]
            assert own.lengths.tolist() == lengths
            assert own.cu_seqlens.diff().tolist() == lengths
            assert own.max_seqlen == max(lengths)
            assert own.num_tokens == sum(lengths)
            assert own.position_ids.tolist() == [i for n in lengths for i in range(n)]
    check_same_samples(drawn, batch.samples())


@given(batches_of_samples(same_trailing=True, texts=False))
def test_padded_and_packed_turn_into_each_other(drawn: Samples) -> None:
    padded, packed = pad(drawn)(drawn.samples), pack(drawn)(drawn.samples)
    for path in drawn.paths:
        assert bitwise(at(pad(drawn)(packed.samples()).data, path), at(padded.data, path))
        assert bitwise(at(pack(drawn)(padded.samples()).data, path), at(packed.data, path))


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
        [*dict.fromkeys(a % s.ndim for a in named if -s.ndim <= a < s.ndim)] for s in drawn.specs
    ]
    field = next((i for i, axes_ in enumerate(present) if axes_), None)
    rules = {p: "padded" for i, p in enumerate(drawn.paths) if i != field}
    batch = PadCollate(side=side, size_multiple=multiple, length_axes=axes, fields=rules)(
        drawn.samples
    )
    if field is None:
        assert batch.lengths.shape == (len(drawn.samples), 0)
        assert batch.padded_size == ()
        return
    own = present[field]
    shapes = [t.shape for t in expected_tensors(drawn.specs[field], drawn.columns[field])]
    lengths = torch.tensor([[shape[a] for a in own] for shape in shapes], dtype=torch.int64)
    assert bitwise(batch.lengths, lengths[:, 0] if len(own) == 1 else lengths)
    assert batch.num_tokens == lengths.prod(dim=1).sum()
    ones = [torch.ones(row, dtype=torch.bool) for row in lengths.tolist()]
    mask = pad_naively(ones, False, left_share(side), (multiple,) * len(own))
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
        for path, spec in zip(drawn.paths, drawn.specs, strict=True):
            field, expected = at(part.data, path), at(alone.data, path)
            if spec.form == "text":
                assert field == expected
            elif side == 0.5:  # rounding may put neighbours one position apart
                pairs = zip(field.shape, expected.shape, strict=True)
                assert all(a <= b + multiple for a, b in pairs)
            else:
                assert field.is_contiguous()
                assert bitwise(field, expected)


@given(batches_of_samples(same_trailing=True), st.booleans())
def test_batches_pickle_move_and_map(drawn: Samples, packed: bool) -> None:
    """Samples stay where they are, in copies, on devices and in trees; offsets are not mapped."""
    collate: Any = (pack if packed else pad)(drawn)
    batch = pickle.loads(pickle.dumps(collate))(drawn.samples)  # noqa: S301  (our own bytes)
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
    if isinstance(batch.data, (dict, tuple)):
        rebuilt: Any = type(batch)(batch.data)
        assert rebuilt.nbytes > 0
        assert rebuilt.sample_shapes() == []
        with pytest.raises(CollateError, match=r"rebuilt from its fields.*batch\.to\(\)"):
            rebuilt.split(1)
