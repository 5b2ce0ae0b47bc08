"""Map-style data sets as sources of a stream."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from torchbudget import (
    BudgetedIterableDataset,
    PaddedCost,
)
from torchbudget.errors import SampleError

TOKENS = PaddedCost(unit_bytes=1)


class Broken:
    """A map-style data set with one index that cannot be read."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise OSError("unreadable")
        return torch.full((1 + index % 5,), index)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_map_style_data_set_is_a_source(workers: int) -> None:
    """Shuffled as a whole; one that cannot be read is skipped and counted, or named."""
    stream = BudgetedIterableDataset(Broken(), TOKENS, 20, window=8, on_error="skip")
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    order = [one for batch in loader for one in batch.data[:, 0].tolist()]
    assert sorted(order) == [n for n in range(50) if n != 13]
    assert stream.skipped_samples.failed == 1
    first = order[:8]
    assert max(first) - min(first) > 8  # not the first window of the data set's own order
    with pytest.raises(SampleError, match="OSError: unreadable"):
        list(BudgetedIterableDataset(Broken(), TOKENS, 20, window=8))


def test_a_map_style_data_set_seeks() -> None:
    stream = BudgetedIterableDataset(Broken(), TOKENS, 20, window=8, on_error="skip")
    next(iter(stream))
    assert stream.state_dict()["goes_on_by"] == "seeking"
