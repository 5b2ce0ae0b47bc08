from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.support.sample_strategies import same as bitwise
from tests.support.sample_strategies import tensors_of
from torchbudget import PackCollate, PadCollate
from torchbudget.errors import CollateError, OptionError


class TestFields:
    def test_python_numbers_become_what_torch_makes_of_them(self) -> None:
        samples = [{"i": 1, "f": 0.5, "b": True, "c": 1j, "s": "x"}] * 2
        batch = PadCollate()(samples)
        assert [batch[k].dtype for k in "ifbc"] == [
            torch.int64, torch.float32, torch.bool, torch.complex64,
        ]  # fmt: skip
        assert batch["s"] == ["x", "x"]

    def test_the_default_dtype_is_that_of_floats(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            batch = PadCollate()([{"n": 0.1, "l": [0.1]}])
        finally:
            torch.set_default_dtype(torch.float32)
        assert batch["n"].item() == batch["l"].item() == 0.1

    def test_a_list_of_ints_and_floats_holds_floats(self) -> None:
        batch = PadCollate()([[1, 0.5], [0.25]])
        assert bitwise(batch.data, torch.tensor([[1, 0.5], [0.25, 0]]))

    def test_numbers_of_numpy_may_stand_in_lists(self) -> None:
        batch = PadCollate()([[np.int32(1)], [np.int32(2), np.int32(3)]])
        assert bitwise(batch.data, torch.tensor([[1, 0], [2, 3]]))

    def test_numpy_scalars_keep_their_dtype(self) -> None:
        batch = PadCollate()([np.float64(1), np.float64(2)])
        assert bitwise(batch.data, torch.tensor([1, 2], dtype=torch.float64))

    def test_empty_lists_have_the_dtype_and_axes_of_the_others(self) -> None:
        collate = PadCollate(length_field="a")
        batch = collate([{"a": [], "b": [[1, 2], [3, 4]]}, {"a": [True], "b": []}])
        assert bitwise(batch["a"], torch.tensor([[False], [True]]))
        assert bitwise(batch["b"], torch.tensor([[[1, 2], [3, 4]], [[0, 0], [0, 0]]]))

    @pytest.mark.parametrize("collate", [PadCollate, PackCollate])
    def test_a_field_of_lists_has_one_dtype_in_every_batch(self, collate: Any) -> None:
        """Where all its lists are empty it is `dtype`; without that, an error asks for it."""
        empty = [{"a": [], "b": [0.5], "c": [[], []]}, {"a": [], "b": [], "c": []}]
        full = [{"a": [3], "b": [0.5], "c": [[True]]}, *empty]
        named = collate(dtype={"a": torch.int64, "c": torch.bool}, length_field="b")
        for samples in (empty, full):
            if collate is PackCollate:  # which needs equal axes after the first
                samples = [{"a": one["a"], "b": one["b"], "c": []} for one in samples]
            dtypes = [named(samples)[name].dtype for name in "abc"]
            assert dtypes == [torch.int64, torch.float32, torch.bool]
        samples = [{"a": one["a"]} for one in empty]
        batch = collate(dtype=torch.int64)(samples)
        assert batch["a"].dtype is torch.int64
        assert batch.lengths.tolist() == [0, 0]
        with pytest.raises(CollateError, match=r"field 'a': all 2 lists .* dtype=torch.int64"):
            collate()(samples)

    @pytest.mark.parametrize("collate", [PadCollate, PackCollate])
    def test_lists_of_another_dtype_than_the_named_one(self, collate: Any) -> None:
        with pytest.raises(CollateError, match=r"lists of torch.int64, .* got lists of torch.fl"):
            collate(dtype={"a": torch.int64})([{"a": [1.5]}])
        with pytest.raises(CollateError, match="dtype names field 'z'"):
            collate(dtype={"z": torch.int64})([{"a": [1.5]}])
        with pytest.raises(OptionError, match="dtype must be"):
            collate(dtype=int)

    def test_arrays_of_any_byte_order_and_stride(self) -> None:
        samples = [np.arange(6, dtype=">i4")[::-2], np.arange(4, dtype=">i4")]
        expected = torch.tensor([[5, 3, 1, 0], [0, 1, 2, 3]], dtype=torch.int32)
        assert bitwise(PadCollate()(samples).data, expected)
        assert bitwise(PadCollate(size_multiple=4)(samples[:1]).data, expected[:1])

    def test_read_only_arrays_are_read(self) -> None:
        array = np.arange(3)
        array.flags.writeable = False
        assert PadCollate()([array, array[:2]]).data.tolist() == [[0, 1, 2], [0, 1, 0]]


COLLATES = (
    PadCollate(
        padding_value={"tokens": -1},
        side="left",
        size_multiple=4,
        mask="mask",
        fields={"long": "padded"},
    ),
    PackCollate(fields={"long": "joined"}),
)


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
        }


class Every:
    """Every collate on the same samples, and what each says about its own memory."""

    def __call__(self, samples: list[Any]) -> tuple[list[Any], bool, bool]:
        batches = [collate(samples) for collate in COLLATES]
        tensors = [tensor for batch in batches for tensor in tensors_of(batch) if tensor.numel()]
        shared = all(tensor.is_shared() for tensor in tensors)
        tight = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        return batches, shared and tight, get_worker_info() is not None


# From Python 3.12 on, to fork a process of several threads, as torch's are, warns.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "context", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_workers_make_the_same_batches_straight_in_shared_memory(context: str | None) -> None:
    loader = DataLoader(
        Ragged(),
        batch_size=4,
        collate_fn=Every(),
        num_workers=0 if context is None else 2,
        multiprocessing_context=context,
    )
    dataset = Ragged()
    seen = 0
    for number, (batches, shared, in_worker) in enumerate(loader):
        assert shared == in_worker == (context is not None)
        indices = range(number * 4, min(number * 4 + 4, len(dataset)))
        expected = [collate([dataset[i] for i in indices]) for collate in COLLATES]
        for came, here in zip(batches, expected, strict=True):
            assert type(came) is type(here)
            assert all(map(bitwise, tensors_of(came), tensors_of(here)))
            assert bitwise(came.lengths, here.lengths)
            assert came["name"] == here["name"]
            assert came.nbytes == here.nbytes
        assert batches[0].mask.sum() == batches[0].num_tokens
        seen += batches[0].num_samples
    assert seen == len(dataset)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_error_in_a_worker_names_field_and_position() -> None:
    samples = [{"x": [1]}, {"x": [1.5]}]
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=PadCollate(),
        num_workers=1,
    )
    with pytest.raises(ValueError, match="sample 1 of the batch, field 'x'"):
        next(iter(loader))
