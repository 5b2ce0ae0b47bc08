"""The sizes of a dataset as a dataset of their own, for the workers of a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from torchbudget.data.map_style import MapStyle
from torchbudget.data.sizes.key import Size, SizeKey, size_of
from torchbudget.errors import SizesError


class SizeDataset(Dataset[npt.NDArray[np.int64]]):
    """Maps a list of indices to the sizes of those samples, `(n,)` or `(n, d)`."""

    def __init__(self, dataset: MapStyle, key: SizeKey) -> None:
        self.dataset = dataset
        self.key = key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        sizes: list[Size] = []
        for index, sample in self._samples(list(indices)):
            sizes.append(size_of(sample, self.key, index))
            check_axes(np.shape(sizes[-1]), index, np.shape(sizes[0]), indices[0])
        return np.array(sizes, dtype=np.int64)

    def _samples(self, indices: list[int]) -> Iterator[tuple[int, Any]]:
        rows: Any = getattr(self.dataset, "iloc", self.dataset)
        if hasattr(rows, "__getitems__"):  # many at once, as DataLoader reads them
            try:
                samples = rows.__getitems__(indices)
            except Exception:  # noqa: BLE001, S110  (the sample is found one by one, below)
                pass
            else:
                yield from zip(indices, samples, strict=True)
                return
        for index in indices:
            try:
                sample = rows[index]
            except Exception as error:
                raise SizesError(
                    f"sample {index} cannot be read: {type(error).__name__}: {error}"
                ) from error
            yield index, sample


def check_axes(shape: tuple[int, ...], index: int, expected: tuple[int, ...], before: int) -> None:
    """Raise a `SizesError` if the sizes of samples `index` and `before` differ in their axes."""
    if shape != expected:
        came, first = (f"a tuple of {s[0]}" if s else "an int" for s in (shape, expected))
        raise SizesError(
            f"every sample has the same ragged axes: the size of sample {index} is {came}, "
            f"of sample {before} {first}"
        )
