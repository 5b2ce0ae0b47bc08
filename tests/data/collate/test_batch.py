"""Batches as containers: read, moved, pinned, split, and in the hands of frameworks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, methodcaller
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from tests.support.batches import Pair, tensors_of
from tests.support.batches import same as bitwise
from torchbudget import PackCollate, PackedBatch, PadCollate, PaddedBatch
from torchbudget.errors import CollateError, OptionError
from torchbudget.train.batches import halves, moved, num_samples

dicts = [{"x": [1, 2], "y": 1, "s": "a"}, {"x": [3], "y": 2, "s": "bc"}, {"x": [], "y": 3, "s": ""}]
tuples = [tuple(sample.values()) for sample in dicts]
bare = [sample["x"] for sample in dicts]
kinds = {PadCollate(): PaddedBatch, PackCollate(): PackedBatch}
collates = pytest.mark.parametrize("collate", kinds, ids=lambda c: type(c).__name__)
structures = pytest.mark.parametrize("samples", [dicts, tuples])


@collates
class TestReading:
    def test_a_mapping_a_sequence_or_neither(self, collate: Any) -> None:
        batch, row, plain = collate(dicts), collate(tuples), collate(bare)
        assert {type(one).__mro__[1] for one in (batch, row)} == {kinds[collate]}
        assert isinstance(batch, Mapping)
        assert isinstance(row, Sequence)
        assert (list(batch), len(batch), batch.get("z")) == (["x", "y", "s"], 3, None)
        assert str.format("{s}", **batch) == str(["a", "bc", ""])
        x, y, s = row
        assert x is row[0]
        assert (y.tolist(), s) == ([1, 2, 3], row[-1])
        assert type(plain) is kinds[collate]
        assert isinstance(plain.data, Tensor)
        assert collate(["a", "b"]).lengths.shape == (2, 0)

    def test_it_is_a_value_of_its_own_that_keeps_its_fields_and_their_shapes(
        self, collate: Any
    ) -> None:
        batch, other = collate(dicts), collate(dicts)
        assert batch == batch
        assert len({batch, other}) == 2
        assert "num_samples=3, {x: int64[" in repr(batch)
        assert "s: list[3]" in repr(batch)
        with pytest.raises(TypeError):
            batch["x"] = 1
        with pytest.raises(AttributeError):
            batch.num_samples = 1
        with pytest.raises(TypeError, match="cannot change its fields"):
            batch.update({"z": batch["x"]})
        for fields in ({"x": torch.zeros(2)}, {"x": 1}):
            with pytest.raises(CollateError, match="fields of other shapes"):
                batch.update(fields)
        with pytest.raises(CollateError, match="fields of other shapes"):
            collate(tuples)[0] = torch.zeros(2)

    def test_it_is_not_batched_again(self, collate: Any) -> None:
        """`default_collate` would make a plain dict or list of shape (1, n, L)."""
        for samples in (dicts, tuples):
            with pytest.raises(CollateError, match="batch_size=None"):
                list(DataLoader([collate(samples)]))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_loader_without_batches_lets_it_be(self, collate: Any, workers: int) -> None:
        """With `batch_size=None` torch converts each field; the batch keeps its type."""
        nested = [{"x": s, "in": {"y": s["x"]}} for s in dicts]
        batches = [collate(samples) for samples in (dicts, tuples, bare, nested)]
        loaded = DataLoader(batches, batch_size=None, num_workers=workers)
        for batch, found in zip(batches, loaded, strict=True):
            assert type(found) is type(batch)
            assert found.lengths.tolist() == batch.lengths.tolist()

    def test_measured_by_another_field(self, collate: Any) -> None:
        batch = collate([{"a": [1], "s": "x"}])
        assert batch.measured_by("a")["a"].data_ptr() == batch["a"].data_ptr()
        for name, match in (("s", "no ragged axis"), ("z", "measured_by names field 'z'")):
            with pytest.raises(CollateError, match=match):
                batch.measured_by(name)

    def test_split_copies_nothing_that_is_not_trimmed(self, collate: Any) -> None:
        batch = collate([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}])
        for name in ("x", "y"):
            assert batch.split(2)[0][name].data_ptr() == batch[name].data_ptr()
        for n in (0, 3, -1, True, 1.5, "2"):
            with pytest.raises(OptionError, match="splits into 1 to 2 batches"):
                batch.split(n)


def test_nbytes_counts_padding_and_texts() -> None:
    texts = PadCollate()(dicts).nbytes - 3 * 2 * 8 - 3 * 8
    assert texts == sum(map(len, ("a", "bc", ""))) + 3 * "".__sizeof__()


class TestMoving:
    @collates
    @structures
    @pytest.mark.parametrize("by_type", [False, True])
    def test_pinning(
        self, collate: Any, samples: list[Any], by_type: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pinning itself needs a device; what the loader's thread calls does not.

        torch 2.6 pins containers by their type: it copies the container, and gives it a pinned copy
        of each field. The copy is then the pinned batch, its layouts' tensors too.
        """
        pinned: dict[int, Tensor] = {}

        def pin(tensor: Tensor) -> Tensor:
            if id(tensor) not in pinned:
                tensor = tensor.clone()
                pinned[id(tensor)] = tensor
            return tensor

        monkeypatch.setattr(Tensor, "pin_memory", pin)
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: id(tensor) in pinned)
        batch = collate(samples)
        if not by_type:
            clone = pin_memory(batch)
        else:
            clone = copy.copy(batch)
            fields = batch.items() if samples is dicts else enumerate(batch)
            for key, field in fields:
                copied = pin(field) if isinstance(field, Tensor) else list(field)
                clone.update({key: copied}) if samples is dicts else clone.__setitem__(key, copied)
        assert type(clone) is type(batch)
        assert all(tensor.is_pinned() for tensor in tensors_of(clone))
        assert not any(tensor.is_pinned() for tensor in tensors_of(batch))
        assert all(map(bitwise, tensors_of(clone), tensors_of(batch)))

    def test_only_a_copy_to_cuda_may_return_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever reads a copy on the CPU would not wait for it."""
        batch, asked = PadCollate()(dicts), []

        def to(tensor: Tensor, *_: Any, non_blocking: bool) -> Tensor:
            asked.append(non_blocking)
            return tensor

        monkeypatch.setattr(Tensor, "to", to)
        for device in ("cuda", "cuda:1", 0, "cpu", "mps"):
            asked.clear()
            batch.to(device, non_blocking=True)
            moved({"x": batch["x"]}, device)
            assert set(asked) == {device in ("cuda", "cuda:1", 0)}

    @collates
    def test_only_floating_point_fields_are_cast(self, collate: Any) -> None:
        """Ids, masks and offsets are the same numbers in the same dtype: 40001 stays 40001."""
        batch = collate([{"ids": [40001, 7], "wave": [0.5, 2.5], "ok": [True, False]}] * 2)
        for arguments in ((torch.float16,), ("cpu", torch.float16)):
            for before, after in zip(
                tensors_of(batch), tensors_of(batch.to(*arguments)), strict=True
            ):
                assert bitwise(after, before.half() if before.is_floating_point() else before)
        with pytest.raises(OptionError, match="floating-point fields only"):
            batch.to(torch.int32)


NEED_SAMPLES: list[Callable[[Any], Any]] = [
    *map(attrgetter, ("num_samples", "lengths", "num_tokens")),
    methodcaller("split", 1), methodcaller("samples"), methodcaller("measured_by", "x"),
    methodcaller("present", "x"), num_samples, halves,
]  # fmt: skip
NEED_LAYOUT = {PadCollate: ("mask", "padded_size"), PackCollate: ("cu_seqlens", "position_ids")}


@collates
class TestRebuilt:
    """Hosts rebuild batches from their fields, and torch's trees map them."""

    def test_the_same_type_and_fields(self, collate: Any) -> None:
        batch, row, named = collate(dicts), collate(tuples), collate([Pair([1, 2], 3)])
        for fields in (dict(batch), MappingProxyType(dict(batch)), batch):
            assert {**type(batch)(fields)} == {**batch}
        assert [*type(row)(field for field in row)] == [*row]
        assert type(type(named)(named.data).data) is Pair

    @structures
    def test_what_it_no_longer_knows_raises_and_says_why(
        self, collate: Any, samples: list[Any]
    ) -> None:
        batch = collate(samples)
        again = type(batch)(dict(batch) if samples is dicts else list(batch))
        for read in (*NEED_SAMPLES, *map(attrgetter, NEED_LAYOUT[type(collate)])):
            with pytest.raises(CollateError, match=r"rebuilt it from its fields.*batch\.to\(\)"):
                read(again)
        assert "rebuilt" in repr(again)
        assert type(again.to("meta")) is type(batch)
        assert type(tree_map_only(Tensor, torch.neg, again)) is type(batch)

    def test_trees(self, collate: Any) -> None:
        """A function that changes the shapes gives a batch that claims no samples."""
        batch = collate([{"x": [1, 2]}, {"x": [3]}])
        both = tree_map(torch.add, batch, tree_map(torch.neg, batch))
        assert not both["x"].any()
        assert both.lengths.tolist() == [2, 1]
        for change in (lambda t: t[:1], lambda t: t[None], lambda t: t.shape):
            changed = tree_map_only(Tensor, change, collate(dicts))
            assert set(changed) == {"x", "y", "s"}
            with pytest.raises(CollateError, match="changed their shapes"):
                _ = changed.lengths
        function = torch.compile(lambda b: b["x"] * b["x"].sum(), backend="eager", fullgraph=True)
        assert bitwise(function(batch), batch["x"] * 6)
