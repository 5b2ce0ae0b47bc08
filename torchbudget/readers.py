"""Data sets that read by identity or draw endlessly, and a collate with hooks."""

from torchbudget.data.cache.reader_dataset import ReaderDataset
from torchbudget.data.collate.collates import HookedCollate
from torchbudget.data.stream.forever import sample_forever

__all__ = ["HookedCollate", "ReaderDataset", "sample_forever"]
