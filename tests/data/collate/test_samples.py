"""Samples of any structure and form: how their fields are read, and what forms no batch."""

from __future__ import annotations

from collections import UserDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.batches import Pair, tensors_of
from tests.support.batches import same as bitwise
from torchbudget import PackCollate, PadCollate
from torchbudget.errors import CollateError

ragged = [{"x": [1, 2], "y": 1}, {"x": [3], "y": 2}]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([np.float64(1)], torch.tensor([1], dtype=torch.float64)),
        ([[1, 0.5], [0.25]], torch.tensor([[1, 0.5], [0.25, 0]])),
        ([[np.int32(1)], [np.int32(2), np.int32(3)]], torch.tensor([[1, 0], [2, 3]])),
        ([[], [[1, 2]]], torch.tensor([[[0, 0]], [[1, 2]]])),
        (
            [np.arange(6, dtype=">i4")[::-2], np.arange(4, dtype=">i4")],
            torch.tensor([[5, 3, 1, 0], [0, 1, 2, 3]], dtype=torch.int32),
        ),
        ([np.broadcast_to(1, 2)], torch.tensor([[1, 1]])),  # read-only
    ],
)
def test_forms_of_fields(samples: list[Any], expected: torch.Tensor) -> None:
    assert bitwise(PadCollate()(samples).data, expected)


def test_the_default_dtype_is_that_of_floats() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        batch = PadCollate()([{"n": 0.1, "l": [0.1]}])
    finally:
        torch.set_default_dtype(torch.float32)
    assert batch["n"].item() == batch["l"].item() == 0.1


def test_structures() -> None:
    x, y = PadCollate()([[torch.ones(2), 1], [torch.ones(1), 2]])  # a list of something else
    assert (x.shape, y.tolist()) == ((2, 2), [1, 2])
    named = PadCollate()([Pair(1, [2]), Pair(3, [4])])
    assert isinstance(named.data, Pair)
    assert PadCollate()([UserDict(x=[1, 2]), UserDict(x=[3])])["x"].shape == (2, 2)
    assert PadCollate()([defaultdict(list, x=[1])])["x"].shape == (1, 1)


@pytest.mark.parametrize(
    ("third", "match"),
    [
        ({"x": [1.5], "y": 1}, "sample 2 of the batch, field 'x': expected dtype torch.int64 as"),
        ({"x": [[1]], "y": 1}, "sample 2 .*field 'x': expected 1 axes .*got 2 axes"),
        ({"x": [1], "y": 1.0}, "sample 2 .*field 'y': expected an int .*got a float"),
        ({"x": [1], "y": 2**63}, "sample 2 .*field 'y': expected a number of 64 bits"),
        ({"x": [2**63], "y": 1}, "sample 2 .*field 'x': .* list of bools, 64-bit ints"),
        ({"x": [1, None], "y": 1}, "sample 2 .*field 'x': expected a rectangular list"),
        ({"x": [1, [2]], "y": 1}, "sample 2 .*field 'x': expected a rectangular list"),
        ({"x": [1], "z": 1}, "sample 2 .*missing: \\['y'\\], unexpected: \\['z'\\]"),
        (defaultdict(int, x=[1], z=2), "sample 2 .*missing: \\['y'\\], unexpected: \\['z'\\]"),
        (([1], 1), "sample 2 of the batch, the sample: expected a mapping .*got a tuple"),
    ],
)  # fmt: skip
def test_a_sample_that_differs_is_named_with_its_field(third: Any, match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate()([*ragged, third, *ragged])


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([], "a list of at least one sample"),
        ({"x": torch.ones(3)}, "a list of at least one sample, got .*tensor"),
        (torch.ones(3, 2), "a list of at least one sample, got tensor"),
        ([(), ()], "at least one field"),
        ([(1,), (1, 2)], "sample 1 .*expected 1 fields .*got 2 fields"),
        ([{"a": {"b": None}}], "sample 0 .*field \\('a', 'b'\\).*got NoneType; convert it"),
        ([{"a": {"b": 1}}, {"a": {"c": 1}}], "sample 1 .*field 'a'.*missing: \\['b'\\]"),
        ([1j], "sample 0 .*got complex; convert it"),
        ([[], []], "the sample: all 2 lists .* are empty.*make tensors in the data set"),
        ([np.array(["a"])], "an array of numbers"),
        ([np.ma.masked_less(np.arange(4), 2)], "sample 0 .*got MaskedArray; convert it"),
        ([np.ones(1), np.ones(1, np.float32)], "sample 1 .*dtype float64.*got dtype float32"),
        ([torch.ones(1), torch.ones(1, 1)], "sample 1 .*expected 1 axes"),
        ([torch.ones(1), torch.ones(1).to_sparse()], "the sample: torch cannot join it"),
        ([torch.ones(1), torch.ones(1, device="meta")], "the sample: torch cannot join it"),
    ],
)
def test_what_forms_no_batch(samples: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate()(samples)


class Ragged(Dataset[dict[str, Any]]):
    """Every form of a field; sample 0 is empty."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "tokens": list(range(index)),
            "tensor": torch.arange(index * 2.0).reshape(index, 2),
            "array": np.arange(index, dtype=np.int16),
            "long": torch.arange(index * 3_000),
            "label": index,
            "name": f"sample {index}",
        } | ({"image": torch.ones(2, 2)} if index % 3 else {})


def every(samples: list[Any]) -> tuple[list[Any], bool]:
    """Every collate on the same samples, and whether their memory is shared and no larger."""
    rules = {"image": ("stacked", "optional")}
    pad = PadCollate(side="left", size_multiple=4, mask="mask", fields=rules | {"long": "padded"})
    pack = PackCollate(total_multiple=8, fields=rules | {"long": "joined"})
    batches: list[Any] = [pad(samples), pack(samples)]
    tensors = [tensor for batch in batches for tensor in tensors_of(batch) if tensor.numel()]
    tight = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    return batches, tight and all(tensor.is_shared() for tensor in tensors)


# From Python 3.12 on, to fork a process of several threads, as torch's are, warns.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "context", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_workers_make_the_same_batches_straight_in_shared_memory(context: str) -> None:
    dataset = Ragged()
    loader = DataLoader(
        dataset, 4, collate_fn=every, num_workers=2, multiprocessing_context=context
    )
    for number, (batches, shared) in enumerate(loader):
        assert shared
        here, _ = every([dataset[i] for i in range(number * 4, min(number * 4 + 4, 10))])
        for came, expected in zip(batches, here, strict=True):
            assert type(came) is type(expected)
            assert all(map(bitwise, tensors_of(came), tensors_of(expected)))
            assert bitwise(came.lengths, expected.lengths)
            assert (came["name"], came.nbytes) == (expected["name"], expected.nbytes)
    assert number == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_error_in_a_worker_names_field_and_position() -> None:
    samples: Any = [{"x": [1]}, {"x": [1.5]}]
    loader: Any = DataLoader(samples, 2, collate_fn=PadCollate(), num_workers=1)
    with pytest.raises(ValueError, match="sample 1 of the batch, field 'x'"):
        next(iter(loader))
