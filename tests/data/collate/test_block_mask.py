from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate
from torchbudget.errors import CollateError, OptionError

PARTS = [
    f"{kind}{axis}_{name}"
    for kind in ("", "full_")
    for axis in ("kv", "q")
    for name in ("num_blocks", "indices")
]
# Samples that end in blocks, at their ends, and that have several blocks of their own.
lengths = st.one_of(st.integers(0, 40), st.integers(100, 400), st.sampled_from([128, 256]))


def packed(lengths: list[int]) -> Any:
    return PackCollate()([torch.zeros(length) for length in lengths])


@given(st.lists(lengths, min_size=1, max_size=6).filter(sum), st.booleans())
@example(lengths=[128, 128, 256], causal=True)
@example(lengths=[300, 0, 0, 84], causal=False)
@example(lengths=[1], causal=True)
def test_it_is_what_create_block_mask_makes(lengths: list[int], causal: bool) -> None:
    """Block by block, in both directions, full and partial ones apart; and position by position."""
    batch = packed(lengths)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def mask_mod(b: Any, h: Any, query: Any, key: Any) -> Any:
        same = segment[query] == segment[key]
        return same & (query >= key) if causal else same

    total = sum(lengths)
    expected = create_block_mask(mask_mod, None, None, total, total, device="cpu")
    mask = batch.block_mask(causal=causal)
    assert (mask.shape, mask.BLOCK_SIZE) == (expected.shape, expected.BLOCK_SIZE)
    for part in PARTS:
        assert bitwise(getattr(mask, part), getattr(expected, part)), part
        assert getattr(mask, part).is_contiguous()
    positions = torch.arange(total)
    rows, columns = positions[:, None], positions[None]
    assert bitwise(mask.mask_mod(0, 0, rows, columns), mask_mod(0, 0, rows, columns))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as is meant
def test_attention_with_it_is_that_over_each_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(n, 16, generator=generator) for n in (130, 1, 200)]
    batch = PackCollate()(samples)
    x = batch.data[None, None]
    for causal in (True, False):
        together = flex_attention(x, x, x, block_mask=batch.block_mask(causal=causal))
        alone = [
            scaled_dot_product_attention(s[None], s[None], s[None], is_causal=causal)[0]
            for s in samples
        ]
        torch.testing.assert_close(together[0, 0], torch.cat(alone))


def test_it_is_that_of_the_measured_field_and_of_the_part() -> None:
    batch = PackCollate(length_field="a")([{"a": [1] * 200, "b": [1]}, {"a": [1] * 9, "b": [2]}])
    assert batch.block_mask().shape == (1, 1, 209, 209)
    assert batch.measured_by("b").block_mask().shape == (1, 1, 2, 2)
    assert batch.split(2)[1].block_mask().shape == (1, 1, 9, 9)


def test_it_is_on_the_batch_s_device() -> None:
    mask = packed([200, 9]).to("meta").block_mask()
    assert isinstance(mask, BlockMask)
    assert {getattr(mask, part).device.type for part in PARTS} == {"meta"}


def test_where_there_is_none() -> None:
    with pytest.raises(CollateError, match="without positions"):
        packed([0, 0]).block_mask()
    with pytest.raises(CollateError, match="no field of this batch is ragged"):
        PackCollate()([1, 2]).block_mask()
    with pytest.raises(OptionError, match="causal must be a bool"):
        packed([3]).block_mask(causal=1)
