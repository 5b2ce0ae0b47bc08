"""Map-style datasets whose sizes are known, and that count how often they are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.data import Dataset

from torchbudget.data.sizes import sizes_of

WHY = "a quick way for this library; it is in the test dependency group"

texts = st.text(st.characters(codec="utf-8"), max_size=12)


fields = st.one_of(
    texts,
    st.binary(max_size=6),
    st.lists(st.integers(), max_size=6),
    st.lists(st.integers(), max_size=6).map(tuple),
    st.integers(0, 5).map(lambda n: np.zeros((n, 2))),
    st.integers(0, 5).map(lambda n: torch.zeros(n, 2)),  # as many columns as arrays have
)


class Samples(Dataset):
    """A map-style dataset that no quick way knows."""

    def __init__(self, samples):
        self.samples = samples
        self.reads = 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample


class Bulk(Samples):
    """One that reads many at once, as a Hugging Face dataset or a `Subset` does."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def of(dataset, key=None, **options):
    """`sizes_of` without a bar."""
    return sizes_of(dataset, key, progress=False, **options)


def hugging_face(rows):
    datasets = pytest.importorskip("datasets", reason=WHY)
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "large": datasets.Value("large_string"),
            "raw": datasets.Value("binary"),
            "ids": datasets.Sequence(datasets.Value("int64")),
            "nested": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
            "pair": datasets.Sequence(datasets.Value("int32"), length=2),
            "words": datasets.Sequence(datasets.Value("string")),
            "number": datasets.Value("int64"),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


def example(rows=100):
    return hugging_face(
        [
            {
                "text": "é🙂x" * (i % 5),
                "large": "x" * i,
                "raw": b"1" * i,
                "ids": [0] * (i % 9),
                "nested": [[1.0]] * (i % 4),
                "pair": [1, 2],
                "words": ["a"] * (i % 3),
                "number": i,
            }
            for i in range(rows)
        ]
    )
