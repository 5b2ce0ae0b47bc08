from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.nn.functional import scaled_dot_product_attention

from tests.support.sample_strategies import Samples, at, batches_of_samples, expected_tensors
from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate, PadCollate
from torchbudget.errors import CollateError


@given(batches_of_samples(same_trailing=True, texts=False))
def test_offsets_positions_and_lengths_agree(drawn: Samples) -> None:
    batch = PackCollate(fields=drawn.rules("joined"))(drawn.samples)
    ragged = [i for i, spec in enumerate(drawn.specs) if spec.ndim]
    if not ragged:
        assert batch.lengths.shape == (batch.num_samples, 0)
        assert batch.num_tokens == batch.num_samples
        with pytest.raises(CollateError, match="no field of this batch is ragged"):
            _ = batch.cu_seqlens
        return
    lengths = [len(value) for value in drawn.columns[ragged[0]]]
    assert bitwise(batch.lengths, torch.tensor(lengths))
    assert bitwise(batch.cu_seqlens, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32))
    assert batch.max_seqlen == max(lengths)
    assert batch.num_tokens == sum(lengths)
    positions = [i for length in lengths for i in range(length)]
    assert bitwise(batch.position_ids, torch.tensor(positions, dtype=torch.int64))
    for i in ragged:
        own = batch.measured_by(drawn.paths[i])
        assert own.lengths.tolist() == [len(value) for value in drawn.columns[i]]
        assert own.cu_seqlens[-1] == len(at(own.data, drawn.paths[i]))


@given(batches_of_samples(same_trailing=True))
def test_unpacking_gives_the_samples_back(drawn: Samples) -> None:
    samples = PackCollate(fields=drawn.rules("joined"))(drawn.samples).samples()
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        came = [at(sample, path) for sample in samples]
        if spec.form == "text":
            assert came == column
        else:
            assert all(map(bitwise, came, expected_tensors(spec, column)))


@given(batches_of_samples(same_trailing=True, texts=False))
def test_padded_and_packed_turn_into_each_other(drawn: Samples) -> None:
    pad = PadCollate(fields=drawn.rules("padded"))
    pack = PackCollate(fields=drawn.rules("joined"))
    padded, packed = pad(drawn.samples), pack(drawn.samples)
    for path in drawn.paths:
        assert bitwise(at(pad(packed.samples()).data, path), at(padded.data, path))
        assert bitwise(at(pack(padded.samples()).data, path), at(packed.data, path))


def test_attention_over_segments_is_that_over_each_sample() -> None:
    """What cu_seqlens is for: no sample sees another."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(n, 8, generator=generator) for n in (3, 1, 5)]
    batch = PackCollate()(samples)
    segment = torch.repeat_interleave(torch.arange(3), batch.cu_seqlens.diff())
    x = batch.data[None]
    together = scaled_dot_product_attention(x, x, x, attn_mask=segment[:, None] == segment)[0]
    alone = [scaled_dot_product_attention(s[None], s[None], s[None])[0] for s in samples]
    torch.testing.assert_close(together, torch.cat(alone))
