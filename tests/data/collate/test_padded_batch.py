from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn.utils.rnn import pack_padded_sequence

from tests.support.sample_strategies import (
    Samples,
    at,
    batches_of_samples,
    expected_tensors,
    left_share,
    pad_naively,
    sides,
)
from tests.support.sample_strategies import same as bitwise
from torchbudget import PadCollate
from torchbudget.errors import OptionError


@given(batches_of_samples(), sides, st.integers(1, 4))
def test_unpadding_gives_the_samples_back(drawn: Samples, side: str | float, multiple: int) -> None:
    collate = PadCollate(side=side, size_multiple=multiple, fields=drawn.rules("padded"))
    batch = collate(drawn.samples)
    samples = batch.samples()
    assert len(samples) == len(drawn.samples) == batch.num_samples
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        came = [at(sample, path) for sample in samples]
        if spec.form == "text":
            assert came == column
        else:
            assert all(map(bitwise, came, expected_tensors(spec, column)))


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
    if axes == (0, -1) and any(spec.ndim == 1 for spec in drawn.specs):
        with pytest.raises(OptionError, match="twice"):
            PadCollate(length_axes=axes)(drawn.samples)
        return
    present = [[a % s.ndim for a in named if -s.ndim <= a < s.ndim] for s in drawn.specs]
    field = next((i for i, axes_ in enumerate(present) if axes_), 0)
    collate = PadCollate(
        side=side,
        size_multiple=multiple,
        length_axes=axes,
        length_field=drawn.paths[field] if present[field] else None,
    )
    batch = collate(drawn.samples)
    spec, own = drawn.specs[field], present[field]
    shapes = [t.shape for t in expected_tensors(spec, drawn.columns[field])]
    lengths = torch.tensor([[shape[a] for a in own] for shape in shapes], dtype=torch.int64)
    lengths = lengths.reshape(len(shapes), len(own))
    expected = lengths[:, 0] if len(own) == 1 else lengths
    assert bitwise(batch.lengths, expected)
    assert batch.num_tokens == lengths.prod(dim=1).sum()
    ones = [torch.ones(row, dtype=torch.bool) for row in lengths.tolist()]
    mask = pad_naively(ones, False, left_share(side), (multiple,) * len(own))
    assert bitwise(batch.mask, mask)
    assert batch.padded_size == tuple(mask.shape[1:])


@given(batches_of_samples(texts=False))
def test_the_samples_of_a_batch_collate_to_the_batch(drawn: Samples) -> None:
    collate = PadCollate(fields=drawn.rules("padded"))
    batch = collate(drawn.samples)
    again = collate(batch.samples())
    for path in drawn.paths:
        assert bitwise(at(again.data, path), at(batch.data, path))


@given(
    batches_of_samples(texts=False),
    st.sampled_from(["right", "left", 0.5]),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_parts_are_trimmed_to_what_they_would_be_alone(
    drawn: Samples, side: str | float, multiple: int, n: int
) -> None:
    collate = PadCollate(
        side=side, size_multiple=multiple, padding_value=1, fields=drawn.rules("padded")
    )
    batch = collate(drawn.samples)
    start = 0
    for part in batch.split(min(n, batch.num_samples)):
        alone = collate(batch.samples()[start : start + part.num_samples])
        start += part.num_samples
        assert bitwise(part.lengths, alone.lengths)
        assert part.mask.sum() == part.num_tokens
        for path in drawn.paths:
            field, expected = at(part.data, path), at(alone.data, path)
            assert field.is_contiguous()
            if side == 0.5:  # rounding may put neighbours one position apart
                assert all(
                    a <= b + multiple for a, b in zip(field.shape, expected.shape, strict=True)
                )
            else:
                assert bitwise(field, expected)
        if side != 0.5:
            assert bitwise(part.mask, alone.mask)


def test_pack_padded_sequence_takes_the_lengths() -> None:
    batch = PadCollate()([torch.ones(3, 2), torch.ones(1, 2)])
    packed = pack_padded_sequence(batch.data, batch.lengths, batch_first=True)
    assert packed.data.shape == (4, 2)
