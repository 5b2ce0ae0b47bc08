"""Data sets that read by identity or draw endlessly."""

from torchbudget.data.cache.reader_dataset import ReaderDataset
from torchbudget.data.stream.forever import sample_forever

__all__ = ["ReaderDataset", "sample_forever"]
