"""Options of padding: values, sides, multiples, axes and the mask; and hooks on batches."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support.batches import same as bitwise
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PackCollate,
    PadCollate,
    PaddedCost,
)
from torchbudget.errors import CollateError, OptionError

ragged = [{"x": [1, 2], "y": 1}, {"x": [3], "y": 2}]


class TestOptionsPerField:
    def test_sides_multiples_and_axes(self) -> None:
        collate = PadCollate(
            length_axes={"image": (1, 2)},
            size_multiple=4,
            side={"text": "left"},
            fields={"text": "padded"},
        )
        batch = collate([{"image": np.ones((3, 5, 6)), "text": [1, 2, 3]}])
        assert batch["image"].shape == (1, 3, 8, 8)
        assert batch["text"].tolist() == [[0, 1, 2, 3]]
        assert batch.lengths.tolist() == [[5, 6]]
        assert batch.measured_by("text").padded_size == (4,)

    def test_a_size_multiple_is_read_from_what_has_one(self) -> None:
        """From a sampler or a stream, whose number the collate keeps, and nothing else of it."""
        sizes, tokens = np.full(100_000, 9), PaddedCost(unit_bytes=1)
        sampler = MemoryBudgetBatchSampler(sizes, tokens, 64, size_multiple=8)
        stream = BudgetedIterableDataset(iter, tokens, 64, size_multiple=8)
        for source in (sampler, stream):
            collate = PadCollate(size_multiple=source)
            assert collate([{"x": [1, 2, 3]}])["x"].shape == (1, 8)
            assert len(pickle.dumps(collate)) < 1000
        assert PadCollate(size_multiple=sampler) == PadCollate(size_multiple=8)

    @pytest.mark.parametrize(
        "options",
        [
            {"padding_value": "0"}, {"padding_value": 1j}, {"padding_value": {"x": None}},
            {"side": "top"}, {"side": 1.5}, {"side": True}, {"side": float("nan")},
            {"size_multiple": 0}, {"size_multiple": (2, 2)},
            {"size_multiple": True}, {"size_multiple": {"x": 2}}, {"length_axes": 0.5},
            {"length_axes": (0, 0)}, {"mask": ""}, {"mask": True},
        ],
    )  # fmt: skip
    def test_wrong_options_fail_at_once(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(options))):
            PadCollate(**options)

    def test_options_that_do_not_fit_the_samples(self) -> None:
        with pytest.raises(CollateError, match=r"padding_value names field 'lables'.*'x', 'y'"):
            PadCollate(padding_value={"lables": 1})(ragged)

    def test_a_collate_is_a_value(self) -> None:
        options: dict[str, Any] = {"padding_value": {"x": 3}, "side": "left", "mask": "m"}
        collate = PadCollate(**options)
        options["padding_value"]["x"] = 4
        assert collate.padding_value == {"x": 3}
        collate(ragged)
        again = pickle.loads(pickle.dumps(collate))  # noqa: S301  (our own bytes)
        assert again == collate
        assert bitwise(again(ragged)["x"], collate(ragged)["x"])
        with pytest.raises(AttributeError):
            collate.side = "right"  # type: ignore[misc]


def test_a_mask_is_a_field_of_ones_and_zeros() -> None:
    collate = PadCollate(mask="attention_mask", side="left", size_multiple=4)
    batch = collate([{"ids": [1, 2, 3]}, {"ids": [4]}])
    assert bitwise(batch["attention_mask"], torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]]))
    assert bitwise(batch.split(2)[1]["attention_mask"], torch.tensor([[0, 0, 0, 1]]))
    assert batch.samples()[1]["attention_mask"].tolist() == [1]
    wrong: list[Any] = [([1], "dict samples"), ({"m": [1]}, "overwrite"), ({"a": 1}, "ragged axis")]
    for sample, match in wrong:
        with pytest.raises(CollateError, match=match):
            PadCollate(mask="m")([sample])


class Text(NamedTuple):
    ids: list[int]
    labels: Any


class TestPaddingValue:
    def test_labels_and_attention_mask_have_their_own(self) -> None:
        """In named tuples, and within labels, too; a mapping comes first."""
        samples = [{"ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]},
                   {"ids": [3], "labels": [3], "attention_mask": [1]}]  # fmt: skip
        batch = PadCollate(padding_value=7)(samples)
        assert [batch[k][1].tolist() for k in batch] == [[3, 7], [3, -100], [1, 0]]
        mapped = PadCollate(padding_value={"labels": -1, "ids": 5})(samples)
        assert [mapped[k][1].tolist() for k in mapped] == [[3, 5], [3, -1], [1, 0]]
        for form in (lambda row: row, lambda row: {"tags": row}, lambda row: (row,)):
            made = PadCollate()([Text(row, form(row)) for row in ([1, 2], [3])])
            ids, labels = tree_leaves(made.data)
            assert (ids[1].tolist(), labels[1].tolist()) == ([3, 0], [3, -100])
            packed = PackCollate(total_multiple=4)([Text(row, form(row)) for row in ([1, 2], [3])])
            parts = [tree_leaves(part.data)[1].tolist() for part in packed.split(2)]
            assert parts == [[1, 2, -100, -100], [3, -100, -100, -100]]

    @pytest.mark.parametrize(
        ("form", "function"),
        [
            (torch.tensor, torch.min), (np.array, np.min), (list, torch.min), (list, min),
            (np.array, functools.partial(np.min, axis=0)),
        ],
    )  # fmt: skip
    def test_a_function_of_the_sample(self, form: Any, function: Any) -> None:
        collate = pickle.loads(pickle.dumps(PadCollate(padding_value=function)))  # noqa: S301
        batch = collate([form([3, 2]), form([5, 6, 7]), form([4])])
        assert batch.data.tolist() == [[3, 2, 2], [5, 6, 7], [4, 4, 4]]

    def test_a_function_that_fails_is_named(self) -> None:
        with pytest.raises(CollateError, match=r"sample 1 of the batch, field 'x'.*shape \(0,\)"):
            PadCollate(padding_value={"x": np.min})([{"x": np.ones(2)}, {"x": np.ones(0)}])

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [(torch.uint8, -100), (torch.uint8, 256), (torch.int64, 0.5), (torch.int32, float("nan")),
         (torch.bool, 2), (torch.int64, float("inf")),
         (torch.float16, -1e9)],
    )  # fmt: skip
    def test_a_value_that_the_dtype_cannot_hold(self, dtype: torch.dtype, value: complex) -> None:
        with pytest.raises(CollateError, match="the sample: the padding value"):
            PadCollate(padding_value=value)([torch.ones(1, dtype=dtype)])


@pytest.mark.parametrize("length", [2, 100, 50_000])
@pytest.mark.parametrize("form", [torch.as_tensor, np.asarray, np.ndarray.tolist])
def test_long_and_short_samples_take_different_ways_to_the_same_batch(
    length: int, form: Callable[[Any], Any]
) -> None:
    """Copies without their graph: fields do not share memory with a sample."""
    arrays = [np.arange(length), np.arange(length // 3), np.arange(0)]
    batch = PadCollate(side="left", padding_value=-1)([form(a) for a in arrays])
    for i, array in enumerate(arrays):
        assert batch.data[i, : length - len(array)].eq(-1).all()
        assert np.array_equal(batch.data[i, length - len(array) :].numpy(), array)
    samples = [torch.ones(n, requires_grad=True) for n in (length, length // 2)]
    for chosen in (samples, samples[:1]):
        batch = PadCollate()(chosen)
        assert not batch.data.requires_grad
        assert batch.data.sum(dim=1).tolist() == list(map(len, chosen))
        batch.data.zero_()
        assert samples[0].sum() == length
