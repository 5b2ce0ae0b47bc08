"""An endless source of a dataset's samples, drawn with weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from torchbudget.checks import natural
from torchbudget.data.map_style import MapStyle
from torchbudget.errors import OptionError
from torchbudget.plan.order import Order

_CHUNK: Final = 1024


class SampleForever(IterableDataset[Any]):
    """See `sample_forever`."""

    def __init__(self, dataset: MapStyle, order: Order) -> None:
        super().__init__()
        self._dataset = dataset
        self._order = order
        self._epoch = 0
        self._drawn = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next `iter()`, and so its draws."""
        self._epoch = natural("epoch", epoch)
        self._drawn = 0

    def __iter__(self) -> Iterator[Any]:
        """Draw samples, from the beginning or from the loaded position."""
        epoch = self._order.epoch(self._epoch)
        while True:
            start = self._drawn
            for index in epoch.indices(start, start + _CHUNK).tolist():
                self._drawn += 1
                yield self._dataset[index]

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of draws so far, since draws can start at any position."""
        return {"epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position."""
        self._epoch, self._drawn = int(state_dict["epoch"]), int(state_dict["drawn"])


def sample_forever(
    dataset: MapStyle, *, weights: npt.ArrayLike | None = None, seed: int = 0
) -> SampleForever:
    """Draw samples of a dataset endlessly, each independently of the others.

    A source for `BudgetedIterableDataset(…, batches_per_epoch=…)`.

    Args:
        dataset: N samples.
        weights: relative frequencies, shape `(N,)`. Default: all equal.
        seed: the draws are a function of (seed, epoch, position).

    Raises:
        OptionError: the dataset is empty, or the weights are invalid.

    >>> from itertools import islice
    >>> set(islice(sample_forever("ab", weights=[0, 1]), 5))
    {'b'}
    """
    if not len(dataset):
        raise OptionError("an empty dataset has no samples to draw")
    try:
        frequencies = None if weights is None else np.asarray(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(f"weights must be numbers: {error}") from error
    order = Order(
        dataset_length=len(dataset),
        skipped=np.empty(0, np.int64),
        num_samples=2**62,
        replacement=True,
        weights=frequencies,
        seed=natural("seed", seed),
    )
    return SampleForever(dataset, order)
