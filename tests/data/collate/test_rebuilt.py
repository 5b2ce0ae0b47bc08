"""Batches that hosts rebuild from their fields, and that torch's trees map."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_map,
    tree_map_only,
)

from tests.support.sample_strategies import Pair, tensors_of
from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate, PadCollate
from torchbudget.errors import CollateError
from torchbudget.train.batches import halves, num_samples

dicts = [{"x": [1, 2], "y": 1, "s": "a"}, {"x": [3], "y": 2, "s": "bc"}]
tuples = [tuple(sample.values()) for sample in dicts]
collates = pytest.mark.parametrize(
    "collate", [PadCollate(), PackCollate()], ids=lambda c: type(c).__name__
)

NEED_SAMPLES: dict[str, Callable[[Any], Any]] = {
    "num_samples": lambda batch: batch.num_samples,
    "lengths": lambda batch: batch.lengths,
    "num_tokens": lambda batch: batch.num_tokens,
    "split": lambda batch: batch.split(1),
    "samples": lambda batch: batch.samples(),
    "measured_by": lambda batch: batch.measured_by("x"),
    "its number for training": num_samples,
    "its halves for training": halves,
}
NEED_PADDING = {
    "mask": lambda batch: batch.mask,
    "padded_size": lambda batch: batch.padded_size,
}
NEED_OFFSETS = {
    "cu_seqlens": lambda batch: batch.cu_seqlens,
    "max_seqlen": lambda batch: batch.max_seqlen,
    "position_ids": lambda batch: batch.position_ids,
}


def rebuilt(batch: Any) -> Any:
    """As hosts do it: a mapping from a dict, a sequence from a list."""
    return type(batch)(dict(batch) if hasattr(batch, "keys") else list(batch))


class TestRebuilt:
    @collates
    def test_a_mapping_of_the_same_type_and_fields(self, collate: Any) -> None:
        batch = collate(dicts)
        for fields in (dict(batch), MappingProxyType(dict(batch)), batch):
            again = type(batch)(fields)
            assert type(again) is type(batch)
            assert dict(again) == dict(batch)
            assert {**again} == {**batch}
        assert list(type(batch)({"other": batch["x"]})) == ["other"]

    @collates
    def test_a_sequence_of_the_same_type_and_fields(self, collate: Any) -> None:
        batch = collate(tuples)
        again = type(batch)(field for field in batch)
        assert type(again) is type(batch)
        assert all(mine is other for mine, other in zip(again, batch, strict=True))
        named = collate([Pair([1, 2], 3)])
        assert type(type(named)(named.data).data) is Pair

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples])
    def test_what_it_no_longer_knows_raises_and_says_why(
        self, collate: Any, samples: list[Any]
    ) -> None:
        batch = rebuilt(collate(samples))
        own = NEED_PADDING if isinstance(collate, PadCollate) else NEED_OFFSETS
        for read in (NEED_SAMPLES | own).values():
            with pytest.raises(CollateError, match=r"rebuilt from its fields.*batch\.to\(\)"):
                read(batch)

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples])
    def test_what_needs_no_samples_goes_on_working(self, collate: Any, samples: list[Any]) -> None:
        batch = rebuilt(collate(samples))
        assert "rebuilt" in repr(batch)
        assert batch.nbytes > 0
        assert type(batch.to("meta")) is type(batch)
        for again in (copy.copy(batch), pickle.loads(pickle.dumps(batch))):  # noqa: S301  (our own)
            assert all(map(bitwise, tensors_of_fields(again), tensors_of_fields(batch)))
        assert type(tree_map_only(Tensor, torch.neg, batch)) is type(batch)

    @collates
    def test_of_something_else(self, collate: Any) -> None:
        with pytest.raises(CollateError, match="a mapping from field to tensor, got list"):
            type(collate(dicts))([1])
        for fields in ({"x": 1}, torch.zeros(2), 3):
            with pytest.raises(CollateError, match="the fields in their order"):
                type(collate(tuples))(fields)


def tensors_of_fields(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]


class TestTrees:
    @collates
    def test_two_batches_at_once(self, collate: Any) -> None:
        batch = collate([{"x": [1, 2]}, {"x": [3]}])
        both = tree_map(torch.add, batch, tree_map(torch.neg, batch))
        assert not both["x"].any()
        assert both.lengths.tolist() == [2, 1]

    def test_offsets_go_where_the_fields_go_and_stay_what_they_are(self) -> None:
        """A function of the ids is not one of the offsets."""
        batch = PackCollate()(dicts)
        assert tree_map_only(Tensor, lambda t: t * 2, batch).cu_seqlens.tolist() == [0, 2, 3]
        assert tree_map_only(Tensor, Tensor.float, batch).cu_seqlens.dtype is torch.int32
        moved = tree_map_only(Tensor, lambda t: t.to("meta"), batch)
        assert moved.cu_seqlens.device.type == "meta"
        assert moved.lengths.tolist() == [2, 1]

    @collates
    @pytest.mark.parametrize("change", [lambda t: t[:1], lambda t: t[None], lambda t: t.shape])
    def test_a_function_that_changes_the_shapes(self, collate: Any, change: Any) -> None:
        """The result has its fields, and does not claim to know where samples are in them."""
        changed = tree_map_only(Tensor, change, collate(dicts))
        assert set(changed) == {"x", "y", "s"}
        with pytest.raises(CollateError, match="changed their shapes"):
            _ = changed.lengths

    @collates
    def test_a_compiled_function_reads_its_fields(self, collate: Any) -> None:
        function = torch.compile(lambda b: b["x"] * b["y"].sum(), backend="eager", fullgraph=True)
        batch = collate(dicts)
        assert bitwise(function(batch), batch["x"] * 3)


@pytest.mark.peer
class TestHosts:
    """The functions with which frameworks move and change batches, as they are released."""

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples])
    def test_accelerate(self, collate: Any, samples: list[Any]) -> None:
        operations = pytest.importorskip("accelerate.utils.operations")
        batch = collate(samples)
        moved = operations.send_to_device(batch, "meta")
        assert type(moved) is type(batch)
        assert moved.lengths.tolist() == [2, 1]
        assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
        assert type(operations.recursively_apply(torch.neg, batch)) is type(batch)

    def test_accelerate_rebuilds_mappings(self) -> None:
        operations = pytest.importorskip("accelerate.utils.operations")
        batch = PadCollate()([{"x": [1, 2]}, {"x": [3]}])
        assert operations.recursively_apply(torch.neg, batch)["x"].tolist() == [[-1, -2], [-3, 0]]
        assert operations.slice_tensors(batch, slice(1))["x"].tolist() == [[1, 2]]
        assert operations.concatenate([batch, batch])["x"].shape == (4, 2)

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples])
    def test_lightning(self, collate: Any, samples: list[Any]) -> None:
        pytest.importorskip("lightning")
        from lightning.fabric.utilities.apply_func import move_data_to_device
        from lightning_utilities.core.apply_func import apply_to_collection

        batch = collate(samples)
        moved = move_data_to_device(batch, torch.device("meta"))
        assert type(moved) is type(batch)
        assert moved.lengths.tolist() == [2, 1]
        changed = apply_to_collection(batch, Tensor, torch.neg)
        assert type(changed) is type(batch)
        field = "x" if samples is dicts else 0
        assert bitwise(changed[field], -batch[field])

    @collates
    def test_transformers(self, collate: Any, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        from transformers import Trainer, TrainingArguments

        trainer = Trainer(
            torch.nn.Linear(1, 1), TrainingArguments(tmp_path, report_to=[], use_cpu=True)
        )
        batch = collate(dicts)
        prepared = trainer._prepare_inputs(batch)
        assert type(prepared) is type(batch)
        assert {**prepared} == {**batch}
        with pytest.raises(CollateError, match="transformers"):
            _ = prepared.lengths
