"""Whose lengths are a batch's: what is named decides, never which samples share a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from torchbudget import (
    BudgetedIterableDataset,
    PackCollate,
    PadCollate,
    PaddedCost,
)
from torchbudget.data.collate.hooked_collate import HookedCollate
from torchbudget.errors import CollateError, OptionError

TOKENS = PaddedCost(unit_bytes=1)
SAMPLES = [{"image": torch.ones(256), "ids": [1] * n} for n in (1, 3)]
collates = pytest.mark.parametrize("collate", [PadCollate, PackCollate])


@collates
def test_a_field_of_one_fixed_shape_is_not_taken_for_the_ragged_one(collate: Any) -> None:
    """It stands first, and its length is in every sample the same: nothing says which it is."""
    with pytest.raises(CollateError, match=r"'image' has the length 256, and field 'ids' 1.*'ids'"):
        collate()(SAMPLES)


def test_fields_that_differ_on_a_later_axis_are_told_apart() -> None:
    """Of an image and a mask of another width, neither has the other's lengths."""
    collate = PadCollate(length_axes=(0, 1))
    alike = {"image": torch.ones(5, 3), "mask": torch.ones(5, 3)}
    with pytest.raises(CollateError, match=r"sample 1 .*'image' has the length 4 by 2, .* 4 by 9"):
        collate([alike, {"image": torch.ones(4, 2), "mask": torch.ones(4, 9)}])
    assert collate([alike, alike]).lengths.tolist() == [[5, 3], [5, 3]]


@pytest.mark.parametrize("options", [{"length_field": "ids"}, {"length_axes": {"image": ()}}])
def test_a_padded_batch_has_the_lengths_of_the_named_field(options: dict[str, Any]) -> None:
    batch = PadCollate(**options)(SAMPLES)
    assert batch.lengths.tolist() == [1, 3]
    assert batch.num_tokens == 4
    assert batch.mask.shape == (2, 3)
    assert batch["image"].shape == (2, 256)


def test_a_field_without_a_length_is_stacked_when_packed() -> None:
    collate = PackCollate(length_axes={"image": ()})
    batch = collate(SAMPLES)
    assert batch["image"].shape == (2, 256)
    assert batch["ids"].shape == (4,)
    assert (batch.num_tokens, batch.max_seqlen) == (4, 3)
    assert batch.cu_seqlens.tolist() == [0, 1, 4]
    again = collate(batch.samples())
    assert again["image"].equal(batch["image"])
    assert [part["image"].shape for part in batch.split(2)] == [(1, 256)] * 2
    for form in (np.ones((2, 0)), torch.ones(2, 3), [[1, 2], [3, 4]]):
        assert collate([{"image": form, "ids": [1]}] * 3)["image"].shape == (3, *np.shape(form))
    with pytest.raises(
        CollateError, match=r"sample 1 .*'image': expected the fixed shape \(256,\)"
    ):
        collate([SAMPLES[0], {"image": torch.ones(255), "ids": [1]}])
    with pytest.raises(OptionError, match="packed along their first axis"):
        PackCollate(length_axes=1)


@collates
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_lengths_are_those_of_any_field_or_there_is_an_error(
    collate: Any, drawn: list[tuple[int, int]]
) -> None:
    """What a batch reports does not depend on the order of its fields."""
    samples = [{"a": torch.ones(a), "b": torch.ones(b, 2)} for a, b in drawn]
    turned = [{"b": one["b"], "a": one["a"]} for one in samples]
    if all(a == b for a, b in drawn):
        expected = [a for a, _ in drawn]
        assert collate()(samples).lengths.tolist() == expected
        assert collate()(turned).lengths.tolist() == expected
        return
    position = next(i for i, (a, b) in enumerate(drawn) if a != b)
    for one in (samples, turned):
        with pytest.raises(CollateError, match=f"sample {position} of the batch.*length_field="):
            collate()(one)
        assert collate(length_field="b")(one).lengths.tolist() == [b for _, b in drawn]


@pytest.mark.parametrize("key", ["ids", ("ids", "image")])
@pytest.mark.parametrize(
    "collate", [None, PadCollate(side="left"), HookedCollate(collate_fn=PadCollate())]
)
def test_a_stream_gives_its_size_key(key: Any, collate: Any) -> None:
    """The field that its sizes are taken of is the one that its batches report."""
    cost = TOKENS if key == "ids" else PaddedCost(unit_bytes=[1, 0])
    stream = BudgetedIterableDataset(
        [SAMPLES * 4], cost, 8, size=key, shuffle=False, collate_fn=collate
    )
    batches = list(DataLoader(stream, batch_size=None, num_workers=0))
    assert sum(batch.num_tokens for batch in batches) == 4 * 4


def test_a_length_field_goes_before_the_size_key() -> None:
    stream = BudgetedIterableDataset(
        [SAMPLES], TOKENS, 8, size="ids", collate_fn=PadCollate(length_field="image")
    )
    assert {int(one) for batch in stream for one in batch.lengths} == {256}


def test_a_size_key_that_is_no_field_with_a_length_decides_nothing() -> None:
    """Sizes of a text, which the batch has no lengths of."""
    texts = [{"text": "ab", "ids": [1, 2, 3]}, {"text": "c", "ids": [4]}]
    for key in ("text", lambda sample: len(sample["text"])):
        stream = BudgetedIterableDataset([texts], TOKENS, 8, size=key, shuffle=False)
        assert [batch.lengths.tolist() for batch in stream] == [[3, 1]]
