"""The cost that a plan needs: two vectorised, monotone functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from torchbudget.errors import CostError

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
ArrayLike: TypeAlias = npt.ArrayLike
Sizes: TypeAlias = npt.NDArray[np.integer[Any]]


def axes_last(sizes: ArrayLike, axes: int) -> Sizes:
    """The sizes as an array `(…, d)`, from `(…)` for one axis.

    Raises:
        CostError: the sizes have another number of axes.
    """
    array = np.asarray(sizes)
    if axes == 1:
        return array[..., None]
    if array.ndim == 0 or array.shape[-1] != axes:
        raise CostError(
            f"this cost has {axes} axes: expected sizes of shape (…, {axes}), got {array.shape}"
        )
    return array


@runtime_checkable
class CostModel(Protocol):
    """Bytes of a micro-batch as a function of its number of samples and its padded size.

    Both methods are pure, vectorised and monotone: more samples, or a longer padded size, never
    cost less. A model of one ragged axis takes padded sizes of any shape `(…)`; a model of d > 1
    axes takes them with the axes last, `(…, d)`.
    """

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """Peak bytes of a micro-batch.

        Args:
            n: numbers of samples, shape `(…)`, at least 0.
            padded_size: padded sizes, shape `(…)` or `(…, d)`, broadcast against `n`.

        Returns:
            Bytes, shape `(…)`.
        """

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """The largest number of samples that fits.

        Args:
            padded_size: padded sizes, shape `(…)` or `(…, d)`.
            budget_bytes: bytes, shape `(…)`, broadcast.

        Returns:
            The largest n with `batch_bytes(n, padded_size) <= budget_bytes`; 0 if not even one
            sample fits; 2⁶³ − 1 if any number does.
        """


class AdditiveCost(ABC):
    """A `CostModel` of packed batches: the bytes of a base, and of each sample.

    Derive your cost model from it if batches are packed. Then `base_bytes +
    item_bytes(sizes).sum()` must fit the budget, with `padding_bytes` on top if the total is
    padded. Any other cost model is one of padded batches.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def base_bytes(self) -> int:
        """Bytes of a batch without its samples."""

    @abstractmethod
    def item_bytes(self, sizes: ArrayLike) -> IntArray:
        """The bytes of each sample: shape `(…)` for sizes of shape `(…)` or `(…, d)`."""

    def padded_totals(self, totals: IntArray) -> IntArray:
        """The lengths of rows after padding, from the sums of their samples' sizes: any shape."""
        return totals

    def padding_bytes(self, totals: IntArray) -> Any:
        """Bytes of the padding of rows, from the sums of their samples' sizes: any shape."""
        return 0

    def room_bytes(self, budget_bytes: int) -> int:
        """Bytes that the shares of a row's samples may have, so that the row fits when padded."""
        return budget_bytes - self.base_bytes
