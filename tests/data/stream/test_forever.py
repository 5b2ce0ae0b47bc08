"""Endless draws with weights, as a source of streams."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.support.streams import make
from torchbudget import PadCollate
from torchbudget.readers import sample_forever


def test_weights_are_frequencies() -> None:
    found = Counter(islice(sample_forever("abc", weights=[1, 0, 3], seed=1), 4000))
    assert set(found) == {"a", "c"}
    assert abs(found["c"] / 4000 - 0.75) < 0.03


@pytest.mark.parametrize("workers", [0, 2])
def test_endless_batches(workers: int) -> None:
    """As many batches as asked for, other ones in another epoch, weighted."""
    dataset = [{"x": np.arange(n)} for n in range(1, 50)]
    source = sample_forever(dataset, weights=np.arange(49))
    stream = make(source, budget=500, size="x", batches_per_epoch=30, collate_fn=PadCollate())
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    assert len(loader) == 30
    first = [batch.lengths.tolist() for batch in stream.tracked(loader)]
    assert len(first) == 30
    assert min(length for batch in first for length in batch) > 1
    stream.set_epoch(1)
    second = [batch.lengths.tolist() for batch in stream.tracked(loader)]
    assert len(second) == 30
    assert second != first
    stream.close()
