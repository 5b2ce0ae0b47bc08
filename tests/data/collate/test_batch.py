from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from tests.support.sample_strategies import Samples, at, batches_of_samples, tensors_of
from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate, PackedBatch, PadCollate, PaddedBatch
from torchbudget.errors import CollateError, OptionError
from torchbudget.train.batches import moved

dicts = [{"x": [1, 2], "y": 1, "s": "a"}, {"x": [3], "y": 2, "s": "bc"}, {"x": [], "y": 3, "s": ""}]
tuples = [tuple(sample.values()) for sample in dicts]
bare = [sample["x"] for sample in dicts]
kinds = {PadCollate(): PaddedBatch, PackCollate(): PackedBatch}
collates = pytest.mark.parametrize("collate", kinds, ids=lambda c: type(c).__name__)


class TestReading:
    @collates
    def test_a_batch_of_dicts_is_a_mapping(self, collate: Any) -> None:
        batch = collate(dicts)
        assert isinstance(batch, kinds[collate])
        assert isinstance(batch, Mapping)
        assert list(batch) == ["x", "y", "s"]
        assert len(batch) == 3
        assert "x" in batch
        assert "z" not in batch
        assert dict(batch) == batch.data
        assert str.format("{s}", **batch) == str(["a", "bc", ""])
        assert batch.get("z") is None

    @collates
    def test_a_batch_of_tuples_is_a_sequence(self, collate: Any) -> None:
        batch = collate(tuples)
        assert isinstance(batch, kinds[collate])
        assert isinstance(batch, Sequence)
        x, y, s = batch
        assert x is batch[0]
        assert y.tolist() == [1, 2, 3]
        assert s == batch[-1] == ["a", "bc", ""]
        assert len(batch) == 3

    @collates
    def test_a_bare_batch_is_neither(self, collate: Any) -> None:
        batch = collate(bare)
        assert type(batch) is kinds[collate]
        assert isinstance(batch.data, torch.Tensor)
        assert collate(["a", "b"]).data == ["a", "b"]

    @collates
    def test_it_cannot_be_changed(self, collate: Any) -> None:
        batch = collate(dicts)
        with pytest.raises(TypeError):
            batch["x"] = 1
        with pytest.raises(AttributeError):
            batch.num_samples = 1
        with pytest.raises(TypeError, match="cannot be changed"):
            batch.update({"x": torch.zeros(3)})
        with pytest.raises(TypeError, match="cannot be changed"):
            collate(tuples)[0] = torch.zeros(3)

    @collates
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_loader_without_batches_lets_it_be(self, collate: Any, workers: int) -> None:
        """With `batch_size=None` torch converts each field; the batch keeps its type."""
        for samples in (dicts, tuples, bare, [{"x": s, "in": {"y": s["x"]}} for s in dicts]):
            batch = collate(samples)
            [found] = DataLoader([batch], batch_size=None, num_workers=workers)
            assert type(found) is type(batch)
            assert found.lengths.tolist() == batch.lengths.tolist()

    @collates
    def test_it_equals_itself_alone_and_can_be_a_key(self, collate: Any) -> None:
        batch, other = collate(dicts), collate(dicts)
        assert batch == batch
        assert batch != other
        assert len({batch, other}) == 2

    @collates
    def test_its_text_says_what_it_holds(self, collate: Any) -> None:
        text = repr(collate(dicts))
        assert "num_samples=3" in text
        assert "x: int64[" in text
        assert "s: text[3]" in text

    @collates
    def test_texts_alone_have_no_lengths(self, collate: Any) -> None:
        batch = collate([{"s": "a"}])
        with pytest.raises(CollateError, match="only texts"):
            _ = batch.lengths

    def test_lengths_are_a_copy(self) -> None:
        batch = PadCollate()(bare)
        batch.lengths.zero_()
        assert batch.lengths.tolist() == [2, 1, 0]

    @collates
    def test_measured_by_another_field(self, collate: Any) -> None:
        named = replace(
            collate, fields={"b": "padded" if isinstance(collate, PadCollate) else "joined"}
        )
        batch = named([{"a": [1], "b": [1, 2], "n": 1, "s": "x"}])
        assert batch.num_tokens == 1
        other = batch.measured_by("b")
        assert type(other) is type(batch)
        assert other.num_tokens == 2
        assert other["a"].data_ptr() == batch["a"].data_ptr()
        for name in ("n", "s"):
            with pytest.raises(CollateError, match="no ragged axis"):
                batch.measured_by(name)
        with pytest.raises(CollateError, match="measured_by names field 'z'"):
            batch.measured_by("z")

    def test_nbytes_counts_padding_and_texts(self) -> None:
        batch = PadCollate()(dicts)
        texts = batch.nbytes - 3 * 2 * 8 - 3 * 8
        assert texts == sum(map(len, ("a", "bc", ""))) + 3 * "".__sizeof__()


def default_pin(field: Any, pin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor pinned, a list of texts as another list."""
    return pin(field) if isinstance(field, torch.Tensor) else list(field)


class TestMoving:
    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples, bare])
    def test_to_another_device(self, collate: Any, samples: list[Any]) -> None:
        batch = collate(samples).to("meta", non_blocking=True)
        assert type(batch) is type(collate(samples))
        assert {tensor.device.type for tensor in tensors_of(batch)} == {"meta"}
        assert batch.lengths.device.type == "cpu"
        assert batch.lengths.tolist() == [2, 1, 0]
        if collate == PadCollate():
            assert batch.mask.device.type == "meta"
        if collate == PackCollate():
            assert batch.cu_seqlens.device.type == batch.position_ids.device.type == "meta"

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples, bare])
    def test_dataloader_pins_every_tensor_and_keeps_the_type(
        self, collate: Any, samples: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pinning itself needs a device; what the loader's thread calls does not."""
        pinned: list[int] = []

        def record(tensor: torch.Tensor) -> torch.Tensor:
            pinned.append(id(clone := tensor.clone()))
            kept.append(clone)
            return clone

        kept: list[torch.Tensor] = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", record)
        batch = pin_memory(collate(samples))
        assert type(batch) is type(collate(samples))
        assert {id(t) for t in tensors_of(batch)} == set(pinned)

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples])
    def test_a_loader_that_pins_a_container_by_its_type(
        self, collate: Any, samples: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As torch 2.6 does: it copies the container, and gives it a pinned copy of each field.

        The copy is then the pinned batch, its layouts' tensors too, and the batch is what it was.
        """
        pinned: dict[int, torch.Tensor] = {}

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in pinned:
                tensor = tensor.clone()
                pinned[id(tensor)] = tensor
            return tensor

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: id(tensor) in pinned)
        batch = collate(samples)
        clone = copy.copy(batch)
        if samples is dicts:
            clone.update({name: default_pin(field, pin) for name, field in batch.items()})
        else:
            for index, field in enumerate(batch):
                clone[index] = default_pin(field, pin)
        assert all(tensor.is_pinned() for tensor in tensors_of(clone))
        assert not any(tensor.is_pinned() for tensor in tensors_of(batch))
        assert all(map(bitwise, tensors_of(clone), tensors_of(batch)))
        key = "x" if samples is dicts else 0
        for other in (batch[key] + 1, pin(batch[key][:1])):
            with pytest.raises(TypeError, match="a batch cannot be changed"):
                clone.update({key: other}) if samples is dicts else clone.__setitem__(key, other)

    @pytest.mark.parametrize(
        ("device", "early"),
        [("cuda", True), ("cuda:1", True), (0, True), ("cpu", False), ("mps", False)],
    )
    def test_only_a_copy_to_cuda_may_return_early(
        self, device: Any, early: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever reads a copy on the CPU would not wait for it."""
        asked = []

        def to(tensor: torch.Tensor, *_: Any, non_blocking: bool) -> torch.Tensor:
            asked.append(non_blocking)
            return tensor

        monkeypatch.setattr(torch.Tensor, "to", to)
        batch = PadCollate()(dicts)
        batch.to(device, non_blocking=True)
        moved(batch, device)
        moved({"x": batch["x"]}, device)
        assert set(asked) == {early}
        batch.to(device)
        assert not asked[-1]

    @collates
    @pytest.mark.parametrize("arguments", [(torch.float16,), ("cpu", torch.float16)])
    def test_only_floating_point_fields_are_cast(self, collate: Any, arguments: Any) -> None:
        """Ids, masks and offsets are the same numbers in the same dtype: 40001 stays 40001."""
        samples = [{"ids": [40001, 7], "wave": [0.5, 2.5], "ok": [True, False]}]
        batch = collate(samples * 2)
        moved = batch.to(*arguments)
        assert moved["wave"].dtype is torch.float16
        for before, after in zip(tensors_of(batch), tensors_of(moved), strict=True):
            if before.is_floating_point():
                assert bitwise(after, before.half())
            else:
                assert bitwise(after, before)

    @collates
    def test_a_cast_to_integers_is_refused(self, collate: Any) -> None:
        with pytest.raises(OptionError, match="floating-point fields only"):
            collate(dicts).to(torch.int32)

    @collates
    @pytest.mark.parametrize("samples", [dicts, tuples, bare])
    def test_pickling(self, collate: Any, samples: list[Any]) -> None:
        batch = collate(samples)
        again = pickle.loads(pickle.dumps(batch))  # noqa: S301  (our own bytes)
        assert type(again) is type(batch)
        assert all(map(bitwise, tensors_of(again), tensors_of(batch)))
        assert bitwise(again.lengths, batch.lengths)


class TestSplit:
    @given(batches_of_samples(same_trailing=True), st.data())
    def test_it_covers_all_samples_once_in_order(self, drawn: Samples, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(drawn.samples)))
        name = drawn.length_field
        several = [
            PadCollate(fields=drawn.rules("padded")),
            PadCollate(fields=drawn.rules("padded"), side=0.3, size_multiple=3),
            PackCollate(fields=drawn.rules("joined")),
        ]
        collate: Any = data.draw(st.sampled_from(several))
        batch = collate(drawn.samples)
        parts = batch.split(n)
        counts = [part.num_samples for part in parts]
        assert len(parts) == n
        assert sum(counts) == batch.num_samples
        assert max(counts) - min(counts) <= 1
        assert {type(part) for part in parts} == {type(batch)}
        came = [sample for part in parts for sample in part.samples()]
        for path in drawn.paths:
            for a, b in zip(came, batch.samples(), strict=True):
                x, y = at(a, path), at(b, path)
                assert bitwise(x, y) if isinstance(x, torch.Tensor) else x == y

    def test_what_is_not_trimmed_is_not_copied(self) -> None:
        batch = PadCollate()([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}])
        for name in ("x", "y"):
            assert batch.split(2)[0][name].data_ptr() == batch[name].data_ptr()
        packed = PackCollate()([{"x": [1, 2]}, {"x": [3]}])
        assert packed.split(2)[0]["x"].data_ptr() == packed["x"].data_ptr()

    def test_a_part_can_be_split_again(self) -> None:
        parts = PackCollate()(dicts).split(2)
        assert [p["x"].tolist() for part in parts for p in part.split(part.num_samples)] == bare
        assert parts[1].cu_seqlens.tolist() == [0, 1, 1]

    @pytest.mark.parametrize("n", [0, 4, -1, True, 1.5, "2"])
    def test_into_no_sensible_number(self, n: Any) -> None:
        with pytest.raises(OptionError, match="splits into 1 to 3 batches"):
            PadCollate()(bare).split(n)
