"""Data sets that read by identity or draw endlessly."""

from torchbudget.data.cache import ReaderDataset
from torchbudget.data.stream.forever import sample_forever

__all__ = ["ReaderDataset", "sample_forever"]
