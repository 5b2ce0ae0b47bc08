from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate, PadCollate

COLLATES = (
    PadCollate(padding_value={"tokens": -1}, side="left", size_multiple=4, mask="mask"),
    PackCollate(),
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
        tensors = [tensor for batch in batches for tensor in batch._tensors() if tensor.numel()]
        shared = all(tensor.is_shared() for tensor in tensors)
        tight = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        return batches, shared and tight, get_worker_info() is not None


# From Python 3.12 on, to fork a process of several threads, as torch's are, warns.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
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
            assert all(map(bitwise, came._tensors(), here._tensors()))
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
