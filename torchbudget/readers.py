"""Sources that read samples by identity or draw them endlessly, and hooks around a collate."""

from torchbudget.data.cache.reader import HookedCollate, ReaderDataset
from torchbudget.data.stream.forever import sample_forever

__all__ = ["HookedCollate", "ReaderDataset", "sample_forever"]
