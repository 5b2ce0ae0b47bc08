from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from tests.support.sample_strategies import same as bitwise
from torchbudget import MemoryBudgetBatchSampler, PackCollate, PackedCost
from torchbudget.errors import CollateError, OptionError

KEYS = {
    "input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "seq_idx", "use_cache",
}  # fmt: skip
SAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]

tokens = st.integers(1, 99)
texts = st.lists(st.lists(tokens, max_size=7), min_size=1, max_size=6).filter(any)


def collate(**options: Any) -> PackCollate:
    return PackCollate(layout="transformers", **options)


def expected_row(
    ids: list[list[int]], labels: list[list[int]], multiple: int, total: int | None, start: int
) -> dict[str, list[int]]:
    """Token by token, and segment by segment."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_idx": []}
    ends = [0]
    longest = max(map(len, ids))

    def add(tokens: list[int], targets: list[int]) -> None:
        row["input_ids"] += tokens
        row["labels"] += targets
        row["position_ids"] += range(start, start + len(tokens))
        row["seq_idx"] += [len(ends) - 1] * len(tokens)
        ends.append(ends[-1] + len(tokens))

    for i, (tokens, targets) in enumerate(zip(ids, labels, strict=True)):
        add(tokens, [-100, *targets[1:]] if tokens else [])
        padding = -len(tokens) % multiple
        if i == len(ids) - 1 and total is not None:
            padding = total - ends[-1]
        while padding:
            piece = min(padding, longest)
            add([0] * piece, [-100] * piece)
            padding -= piece
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


class TestRow:
    @given(texts, st.data(), st.integers(1, 5), st.integers(0, 3))
    def test_it_is_every_sample_and_its_padding_in_segments_of_their_own(
        self, ids: list[list[int]], data: st.DataObject, multiple: int, start: int
    ) -> None:
        least = sum(-(-len(tokens) // multiple) * multiple for tokens in ids)
        total = data.draw(st.one_of(st.none(), st.integers(least, least + 20)))
        labels = [data.draw(st.lists(tokens, min_size=len(t), max_size=len(t))) for t in ids]
        given_labels = data.draw(st.booleans())
        samples = [
            {"input_ids": np.array(t, dtype=np.int64)}
            | ({"labels": np.array(y, dtype=np.int64)} if given_labels else {})
            for t, y in zip(ids, labels, strict=True)
        ]
        batch = collate(size_multiple=multiple, total=total, position_ids_start=start)(samples)
        expected = expected_row(ids, labels if given_labels else ids, multiple, total, start)
        assert set(batch) == KEYS
        assert "attention_mask" not in batch
        for name, values in expected.items():
            narrow = name == "seq_idx" or name.startswith("cu_")
            tensor = torch.tensor(values, dtype=torch.int32 if narrow else torch.int64)
            assert bitwise(batch[name], tensor if name.startswith("cu_") else tensor[None]), name
        longest = max(map(len, ids))
        assert (batch["max_length_q"], batch["max_length_k"]) == (longest, longest)
        assert batch["use_cache"] is False
        assert batch.lengths.tolist() == list(map(len, ids))
        assert batch.num_tokens == sum(map(len, ids))
        assert [sample["input_ids"].tolist() for sample in batch.samples()] == ids

    def test_fields_of_a_sample_s_tokens_are_in_the_row_and_others_are_stacked(self) -> None:
        samples = [
            {"input_ids": [1, 2], "weights": [0.5, 1.0], "id": 7, "name": "a"},
            {"input_ids": [3], "weights": [2.0], "id": 8, "name": "b"},
        ]
        batch = collate(size_multiple=4)(samples)
        assert batch["weights"].tolist() == [[0.5, 1.0, 0, 0, 2.0, 0, 0, 0]]
        assert (batch["id"].tolist(), batch["name"]) == ([7, 8], ["a", "b"])
        assert batch.samples()[1]["name"] == "b"
        assert batch.split(2)[1]["id"].tolist() == [8]

    def test_a_mask_of_ones_is_left_out(self) -> None:
        batch = collate()([{"input_ids": [1, 2], "attention_mask": [1, 1]}])
        assert set(batch) == KEYS

    def test_labels_that_models_do_not_shift(self) -> None:
        samples = [{"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [3], "labels": [3]}]
        batch = collate(causal_labels=False)(samples)
        assert batch["labels"].tolist() == [[1, -100, 3]]
        assert "labels" not in collate(causal_labels=False)(SAMPLES)
        whole = collate(causal_labels=False)([{"input_ids": [1, 2], "labels": 3}])
        assert whole["labels"].tolist() == [3]

    def test_a_sampler_s_multiple(self) -> None:
        """The sampler counts the rounded sizes, and every row is at most its budget."""
        sizes = [3, 9, 4, 1, 7, 2]
        samples = [{"input_ids": [1] * size} for size in sizes]
        sampler = MemoryBudgetBatchSampler(sizes, PackedCost(unit_bytes=1), 16, size_multiple=4)
        loader = DataLoader(
            samples,  # type: ignore[arg-type]  # a list is a data set
            batch_sampler=sampler,
            collate_fn=collate(size_multiple=sampler, total=16),
        )
        assert {batch["input_ids"].shape for batch in loader} == {(1, 16)}
        assert sum(batch.num_samples for batch in loader) == len(sizes)


class TestBatch:
    def test_its_segments(self) -> None:
        batch = collate(size_multiple=4)(SAMPLES)
        assert batch.cu_seqlens is batch["cu_seq_lens_q"]
        assert batch.cu_seqlens.tolist() == [0, 3, 4, 5, 8, 10, 12]
        assert batch.max_seqlen == 3
        assert bitwise(batch.position_ids, batch["position_ids"][0])
        segment = batch["seq_idx"][0]
        mask = batch.block_mask()
        positions = torch.arange(12)
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), positions[:, None], positions)
        causal = positions[:, None] >= positions
        assert bitwise(seen, (segment[:, None] == segment) & causal)

    @given(texts, st.data(), st.integers(1, 4), st.booleans())
    def test_parts_are_what_their_samples_make_without_the_total(
        self, ids: list[list[int]], data: st.DataObject, multiple: int, padded: bool
    ) -> None:
        total = 64 if padded else None
        samples = [{"input_ids": np.array(t, dtype=np.int64), "id": i} for i, t in enumerate(ids)]
        batch = collate(size_multiple=multiple, total=total, position_ids_start=2)(samples)
        n = data.draw(st.integers(1, len(ids)))
        alone = collate(size_multiple=multiple, position_ids_start=2)
        starts = itertools.accumulate((part.num_samples for part in batch.split(n)), initial=0)
        for part, start in zip(batch.split(n), starts, strict=False):
            expected = alone(samples[start : start + part.num_samples])
            assert type(part) is type(batch)
            for name, value in expected.items():
                mine = part[name]
                assert bitwise(mine, value) if isinstance(value, Tensor) else mine == value

    def test_trees_and_devices(self) -> None:
        batch = collate(size_multiple=4)(SAMPLES)
        moved = batch.to("meta")
        assert {v.device.type for v in moved.values() if isinstance(v, Tensor)} == {"meta"}
        assert moved.block_mask().kv_indices.device.type == "meta"
        for same in (moved, tree_map_only(Tensor, torch.clone, batch)):
            assert type(same) is type(batch)
            assert same.lengths.tolist() == [3, 1, 2]
        assert batch.measured_by("labels").lengths.tolist() == [3, 1, 2]

    def test_rebuilt_it_knows_its_segments_and_not_its_samples(self) -> None:
        """As the trainer rebuilds it; `block_mask` is then read from `cu_seq_lens_q`."""
        batch = collate(total=12)(SAMPLES)
        rebuilt = type(batch)(dict(batch))
        assert rebuilt.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
        assert bitwise(rebuilt.position_ids, batch.position_ids)
        assert bitwise(rebuilt.block_mask().kv_indices, batch.block_mask().kv_indices)
        for read in (lambda b: b.lengths, lambda b: b.split(2), lambda b: b.samples()):
            with pytest.raises(CollateError, match="rebuilt from its fields"):
                read(rebuilt)

    def test_it_comes_from_workers_as_it_was_made(self) -> None:
        loader = DataLoader(SAMPLES, 3, collate_fn=collate(size_multiple=4), num_workers=1)  # type: ignore[arg-type]
        [batch] = loader
        expected = collate(size_multiple=4)(SAMPLES)
        assert repr(batch) == repr(expected)
        assert batch["labels"].tolist() == expected["labels"].tolist()
        assert batch.lengths.tolist() == [3, 1, 2]

    def test_the_samples_are_not_changed(self) -> None:
        sample = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([3, 4])}
        batch = collate()([sample])
        assert batch["labels"].tolist() == [[-100, 4]]
        assert sample["labels"].tolist() == [3, 4]


class TestRefused:
    @pytest.mark.parametrize(
        ("samples", "match"),
        [
            ([[1, 2]], "dict samples with a field 'input_ids'.* got samples of the sample"),
            ([{"ids": [1, 2]}], "got samples of field 'ids'"),
            ([{"input_ids": 1}], "one token id per position"),
            (
                [{"input_ids": [[1, 2]]}],
                r"got samples of field 'input_ids' of shape \[1, 1, 2\]",
            ),
            ([{"input_ids": [1, 2], "seq_idx": [0, 0]}], "leave field 'seq_idx' out"),
            ([{"input_ids": [1], "x": {"y": [1]}}], r"leave field \('x', 'y'\) out"),
            ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], "tokenize without padding"),
            ([{"input_ids": [1], "labels": 3}], "causal_labels=False"),
            ([{"input_ids": [1], "labels": [True]}], "causal_labels=False"),
            ([{"input_ids": [1], "labels": [0.5]}], "causal_labels=False"),
        ],
    )
    def test_samples_that_no_model_takes(self, samples: list[Any], match: str) -> None:
        with pytest.raises(CollateError, match=match):
            collate()(samples)

    @pytest.mark.parametrize("options", [{"size_multiple": 4}, {"total": 8}])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.complex64])
    def test_padded_labels_that_cannot_be_ignored(
        self, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        """-100 would be True, or 156; without padding they are taken as they are."""
        samples = [{"input_ids": [1, 2], "labels": torch.ones(2, dtype=dtype)}]
        with pytest.raises(CollateError, match=f"'labels'.* -100 does not fit {dtype}"):
            collate(causal_labels=False, **options)(samples)
        assert collate(causal_labels=False)(samples)["labels"].dtype is dtype

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bfloat16, torch.float32])
    def test_padded_labels_that_can_be_ignored(self, dtype: torch.dtype) -> None:
        samples = [{"input_ids": [1, 2], "labels": torch.ones(2, dtype=dtype)}]
        batch = collate(causal_labels=False, total=3)(samples)
        assert bitwise(batch["labels"], torch.tensor([[1, 1, -100]], dtype=dtype))

    def test_fields_of_other_lengths(self) -> None:
        samples = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}]
        with pytest.raises(CollateError, match=r"sample 1 .*'labels' 1: give a rule"):
            collate()(samples)
        with pytest.raises(CollateError, match=r"'labels' is not as long as field 'input_ids'"):
            collate().of_sized_field("input_ids")(samples)

    def test_more_than_the_total(self) -> None:
        with pytest.raises(CollateError, match="have 12 positions, more than total=11"):
            collate(size_multiple=4, total=11)(SAMPLES)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"layout": "flat"}, 'layout must be "transformers" or None'),
            ({"layout": "transformers", "total": 0}, "total must be an int of at least 1"),
            ({"layout": "transformers", "size_multiple": 0}, "size_multiple"),
            ({"layout": "transformers", "position_ids_start": -1}, "position_ids_start"),
            ({"layout": "transformers", "causal_labels": 1}, "causal_labels must be a bool"),
            ({"causal_labels": False}, 'options of layout="transformers"'),
        ],
    )
    def test_options_that_make_no_sense(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(OptionError, match=match):
            PackCollate(**options)


def test_the_collate_is_a_value() -> None:
    made = collate(size_multiple=8, total=64)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301  (our own bytes)
