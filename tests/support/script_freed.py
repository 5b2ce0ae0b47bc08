"""Print the largest growth of the resident memory of a stream whose items are freed."""

import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from torchbudget import BudgetedIterableDataset, PaddedCost

torch.set_num_threads(1)
KIND = sys.argv[1]


class Items:
    """300 tensors of 8 MB."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(300):
            yield torch.zeros(2_000_000) + number


def small(item: torch.Tensor) -> Any:
    return [float(item[0])] * 50 if KIND == "lengths" else item[:100]


def resident(batch: Any) -> int:
    return psutil.Process().memory_info().rss


stream = BudgetedIterableDataset(
    Items(), PaddedCost(unit_bytes=1), "1MiB", size=len, transforms=[small], window=200,
    look_ahead="1MiB", collate_fn=resident,
)  # fmt: skip
loader = DataLoader(stream, batch_size=None, num_workers=int(KIND == "worker"))
before = resident(None)
sys.stdout.write(str(max(loader) - before))
