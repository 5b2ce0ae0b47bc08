"""An endless source of random samples of a dataset, with weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from torchbudget.checks import natural
from torchbudget.errors import OptionError
from torchbudget.plan.order import Order
from torchbudget.protocols import MapStyle

_CHUNK: Final = 1024


class sample_forever(IterableDataset[Any]):  # noqa: N801  (used as a function, as itertools.repeat)
    """Sample a dataset endlessly, with replacement.

    A source for `BudgetedIterableDataset(…, batches_per_epoch=…)`.

    Args:
        dataset: N samples.
        weights: relative frequencies, shape `(N,)`. Default: all equal.
        seed: the samples are a function of (seed, epoch, position).

    Raises:
        OptionError: the dataset is empty, or the weights are invalid.

    >>> from itertools import islice
    >>> set(islice(sample_forever("ab", weights=[0, 1]), 5))
    {'b'}
    """

    def __init__(
        self, dataset: MapStyle, *, weights: npt.ArrayLike | None = None, seed: int = 0
    ) -> None:
        if not len(dataset):
            raise OptionError("an empty dataset has no samples to draw")
        self._dataset = dataset
        self._epoch = self._position = 0
        self._order = Order(
            dataset_length=len(dataset),
            skipped=np.empty(0, np.int64),
            weights=np.ones(len(dataset)) if weights is None else weights,
            seed=natural("seed", seed),
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next `iter()`, and so its samples."""
        self._epoch, self._position = natural("epoch", epoch), 0

    def __iter__(self) -> Iterator[Any]:
        """Yield samples, from the beginning or from the loaded position."""
        key = self._epoch, 0
        while True:
            start = self._position
            for index in self._order.indices(key, start, start + _CHUNK).tolist():
                self._position += 1
                yield self._dataset[index]

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of samples so far."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position."""
        self._epoch, self._position = int(state_dict["epoch"]), int(state_dict["position"])
