"""Map-style datasets, as in `torch.utils.data`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class MapStyle(Protocol):
    """A dataset that has a length and returns a sample for each index below it."""

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...
