"""`PackCollate(layout="transformers")`: one row of samples, and its segments."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.support.batches import same as bitwise
from torchbudget import PackCollate
from torchbudget.errors import CollateError, OptionError

KEYS = {
    "input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "seq_idx", "use_cache",
}  # fmt: skip
SAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
texts = st.lists(st.lists(st.integers(1, 99), max_size=7), min_size=1, max_size=6).filter(any)


def collate(**options: Any) -> PackCollate:
    return PackCollate(layout="transformers", **options)


def expected_row(
    ids: list[list[int]], labels: list[list[int]], multiple: int, total: int, start: int
) -> dict[str, list[int]]:
    """Token by token, and segment by segment."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_idx": []}
    ends = [0]

    def add(tokens: list[int], targets: list[int]) -> None:
        row["input_ids"] += tokens
        row["labels"] += targets
        row["position_ids"] += range(start, start + len(tokens))
        row["seq_idx"] += [len(ends) - 1] * len(tokens)
        ends.append(ends[-1] + len(tokens))

    for i, (tokens, targets) in enumerate(zip(ids, labels, strict=True)):
        add(tokens, [-100, *targets[1:]] if tokens else [])
        padding = total - ends[-1] if i == len(ids) - 1 else -len(tokens) % multiple
        while padding:
            piece = min(padding, max(map(len, ids)))
            add([0] * piece, [-100] * piece)
            padding -= piece
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


@given(texts, st.data(), st.integers(1, 5), st.integers(0, 3))
def test_it_is_every_sample_and_its_padding_in_segments_of_their_own(
    ids: list[list[int]], data: st.DataObject, multiple: int, start: int
) -> None:
    """And a part of it is what its samples make alone."""
    least = sum(-(-len(tokens) // multiple) * multiple for tokens in ids)
    rounded = data.draw(st.integers(1, least + 20))
    total = -(-least // rounded) * rounded
    labels = [[token + 1 for token in t] for t in ids] if data.draw(st.booleans()) else ids
    samples: list[dict[str, Any]] = [{"input_ids": np.array(t, dtype=np.int64)} for t in ids]
    if labels is not ids:
        for sample in samples:
            sample["labels"] = sample["input_ids"] + 1
    made = collate(size_multiple=multiple, total_multiple=rounded, position_ids_start=start)
    batch = made(samples)
    assert set(batch) == KEYS
    for name, values in expected_row(ids, labels, multiple, total, start).items():
        narrow = name == "seq_idx" or name.startswith("cu_")
        tensor = torch.tensor(values, dtype=torch.int32 if narrow else torch.int64)
        assert bitwise(batch[name], tensor if name.startswith("cu_") else tensor[None]), name
    assert (batch["max_length_q"], batch["max_length_k"]) == (max(map(len, ids)),) * 2
    assert batch.lengths.tolist() == list(map(len, ids))
    assert [sample["input_ids"].tolist() for sample in batch.samples()] == ids
    parts = batch.split(data.draw(st.integers(1, len(ids))))
    starts = itertools.accumulate((part.num_samples for part in parts), initial=0)
    for part, first in zip(parts, starts, strict=False):
        assert type(part) is type(batch)
        for name, value in made(samples[first : first + part.num_samples]).items():
            mine = part[name]
            assert bitwise(mine, value) if isinstance(value, Tensor) else mine == value


@given(texts, st.data(), st.integers(1, 5), st.integers(0, 3))
def test_positions_of_three_axes_are_below_those_in_each_text(
    ids: list[list[int]], data: st.DataObject, multiple: int, start: int
) -> None:
    """Four rows, of which the first one is that of samples without positions of their own.

    Padding has zeros. Samples and parts have their own positions again.
    """
    axis = st.integers(0, 500)
    rows = [[data.draw(st.lists(axis, min_size=3, max_size=3)) for _ in one] for one in ids]
    own = [torch.tensor(one, dtype=torch.int64).reshape(-1, 3).T for one in rows]
    samples: list[dict[str, Any]] = [{"input_ids": np.array(t, dtype=np.int64)} for t in ids]
    placed = [s | {"position_ids": p} for s, p in zip(samples, own, strict=True)]
    made = collate(size_multiple=multiple, total_multiple=4, position_ids_start=start)
    batch, plain = made(placed), made(samples)
    positions = batch["position_ids"]
    assert positions.shape == (4, 1, plain["input_ids"].shape[1])
    assert bitwise(positions[0], plain["position_ids"])
    joined = torch.zeros_like(positions[1:, 0])
    for one, (_, place) in zip(own, plain._known.layouts["input_ids",].places, strict=True):
        joined[:, place] = one
    assert bitwise(positions[1:, 0], joined)
    for sample, one in zip(batch.samples(), own, strict=True):
        assert bitwise(sample["position_ids"], one)
    parts = batch.split(data.draw(st.integers(1, len(ids))))
    starts = itertools.accumulate((part.num_samples for part in parts), initial=0)
    for part, first in zip(parts, starts, strict=False):
        expected = made(placed[first : first + part.num_samples])
        assert set(part) == set(expected)
        assert bitwise(part["position_ids"], expected["position_ids"])


def test_fields_of_tokens_are_in_the_row_and_others_are_stacked() -> None:
    samples = [
        {"input_ids": [1, 2], "labels": torch.tensor([3, 4]), "w": [0.5, 1.0], "id": 7},
        {"input_ids": [3], "labels": torch.tensor([5]), "w": [2.0], "id": 8},
    ]  # fmt: skip
    batch = collate(size_multiple=4)(
        [one | {"attention_mask": [1] * len(one["w"])} for one in samples]
    )
    assert "attention_mask" not in batch
    assert batch["w"].tolist() == [[0.5, 1.0, 0, 0, 2.0, 0, 0, 0]]
    assert batch["id"].tolist() == [7, 8]
    assert batch.split(2)[1]["id"].tolist() == [8]
    assert samples[0]["labels"].tolist() == [3, 4]  # not changed
    plain = collate(causal_labels=False)
    assert plain(samples)["labels"].tolist() == [[3, 4, 5]]
    assert "labels" not in plain(SAMPLES)
    assert plain([{"input_ids": [1, 2], "labels": 3}])["labels"].tolist() == [3]


def test_its_segments_go_where_it_goes() -> None:
    batch = collate(size_multiple=4)(SAMPLES)
    assert bitwise(batch.cu_seqlens, batch["cu_seq_lens_q"])
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 5, 8, 10, 12]
    assert (batch.max_seqlen, batch.num_tokens) == (3, 6)
    moved = batch.to("meta")
    assert {v.device.type for v in moved.values() if isinstance(v, Tensor)} == {"meta"}
    for same in (moved, tree_map_only(Tensor, torch.clone, batch), batch.measured_by("labels")):
        assert same.lengths.tolist() == [3, 1, 2]
    rebuilt = type(batch)(dict(batch))  # as the trainer does
    with pytest.raises(CollateError, match="rebuilt it from its fields"):
        rebuilt.split(2)


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([[1, 2]], "dict samples with a field 'input_ids'.* got samples of the sample"),
        ([{"ids": [1, 2]}], "got samples of field 'ids'"),
        ([{"input_ids": 1}], "one token id per position"),
        ([{"input_ids": [[1, 2]]}], r"got samples of field 'input_ids' of shape \[1, 1, 2\]"),
        ([{"input_ids": [1, 2], "seq_idx": [0, 0]}], "leave field 'seq_idx' out"),
        ([{"input_ids": [1, 2], "position_ids": [0, 1]}], r"shape \(3, L\), .* of shape \(2,\)"),
        ([{"input_ids": [1], "position_ids": torch.ones(3, 1, 1).long()}], r"shape \(3, 1, 1\)"),
        (
            [{"input_ids": [1], "position_ids": torch.ones(4, 1).long()}],
            r"got .* of shape \(4, 1\)",
        ),
        (
            [{"input_ids": [1], "position_ids": torch.ones(3, 1)}],
            "integers .* got torch.float32",
        ),
        ([{"input_ids": [1], "position_ids": [[0, 1]] * 3}], "'input_ids' has the length 1, and"),
        (
            [{"input_ids": [1], "mm_token_type_ids": [1], "image_grid_thw": [1]}],
            "grids of images, but no 'position_ids'",
        ),
        ([{"input_ids": [1], "x": {"y": [1]}}], r"leave field \('x', 'y'\) out"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], "tokenize without padding"),
        ([{"input_ids": [1], "labels": 3}], "causal_labels=False"),
        ([{"input_ids": [1], "labels": [0.5]}], "causal_labels=False"),
        ([{"input_ids": [1], "labels": [1, 2]}], "sample 0 .*'labels' 2: give a rule"),
    ],
)
def test_samples_that_no_model_takes(samples: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        collate()(samples)


@pytest.mark.parametrize("options", [{"size_multiple": 4}, {"total_multiple": 3}])
def test_padded_labels_must_be_able_to_be_ignored(options: dict[str, Any]) -> None:
    """-100 would be True, or 156; without padding they are taken as they are."""
    for dtype in (torch.bool, torch.uint8, torch.int8):
        samples = [{"input_ids": [1, 2], "labels": torch.ones(2, dtype=dtype)}]
        assert collate(causal_labels=False)(samples)["labels"].dtype is dtype
        if dtype is torch.int8:
            batch = collate(causal_labels=False, **options)(samples)
            assert batch["labels"][0, 2] == -100
            continue
        with pytest.raises(CollateError, match=f"'labels'.* -100 does not fit {dtype}"):
            collate(causal_labels=False, **options)(samples)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layout": "flat"}, 'layout must be "transformers" or None'),
        ({"size_multiple": 0}, "size_multiple"),
        ({"layout": "transformers", "position_ids_start": -1}, "position_ids_start"),
        ({"layout": "transformers", "causal_labels": 1}, "causal_labels must be a bool"),
        ({"causal_labels": False}, 'need layout="transformers"'),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        PackCollate(**options)
