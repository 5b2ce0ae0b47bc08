"""The sizes of a data set: checked, summarised and fingerprinted in one pass."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray, Sizes
from torchbudget.errors import SizesError
from torchbudget.plan.permutation import random_words

_CHUNK: Final = 2**16
# Sizes of up to this many bytes are copied into their smallest type: gathering them in random order
# is bound by the cache, and the given array is often int64.
_COPY_BYTES: Final = 2**25
_LARGEST: Final = 2**48
_OF_SAMPLES: Final = "sizes_of(dataset, …) reads them from samples; of seconds, count frames"


@dataclass(frozen=True, slots=True, eq=False)
class SizeTable:
    """Sizes of all samples.

    Attributes:
        values: non-negative integers, shape `(N,)` or `(N, d)`.
        largest: the maximum on every axis, shape `(d,)`, or `()` for one axis.
        fingerprint: 32 hexadecimal digits of the values; their integer type does not matter.
    """

    values: Sizes
    largest: IntArray
    fingerprint: str

    @classmethod
    def of(cls, sizes: npt.ArrayLike) -> SizeTable:
        """Check and summarise sizes; O(N), with memory for one chunk beside them.

        Args:
            sizes: integers at least 0 and below 2⁴⁸, shape `(N,)` or `(N, d)` with d ≥ 2, N ≥ 1.
                Beyond 32 MiB in the smallest integer type an array (a memory map too) is used as it
                is, and must not be changed.

        Raises:
            SizesError: a wrong shape or type, no samples, or a size that is out of range or masked
                (with its index).
        """
        if isinstance(sizes, np.ma.MaskedArray) and (masked := np.argwhere(sizes.mask)).size:
            # `asarray` would read the values under the mask.
            raise SizesError(f"sizes[{masked[0, 0]}] is masked: fill it first")
        try:
            values = np.asarray(sizes)
        except (ValueError, TypeError, RuntimeError) as error:
            # Lists of different lengths, or a tensor on a device or with a graph.
            raise SizesError(
                f"expected sizes of shape (N,) or (N, d): {error}; {_OF_SAMPLES}"
            ) from error
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim not in (1, 2):
            raise SizesError(f"expected sizes of shape (N,) or (N, d), got {values.shape}")
        if not values.size:
            raise SizesError(f"there are no samples: sizes have the shape {values.shape}")
        if values.dtype.kind not in "iu":  # durations are integers by np.issubdtype
            raise SizesError(f"expected integer sizes, got dtype {values.dtype}; {_OF_SAMPLES}")
        fingerprint, largest = _summary(values)
        narrow = np.min_scalar_type(int(largest.max()))
        if values.size * narrow.itemsize <= _COPY_BYTES:
            values = values.astype(narrow, order="C")
        return cls(values, largest if largest.size > 1 else largest[0], fingerprint)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.values)

    @property
    def axes(self) -> int:
        """Number of ragged axes, d."""
        return self.largest.size


def _summary(values: Sizes) -> tuple[str, IntArray]:
    """The fingerprint of sizes, and the largest on every axis, shape `(d,)`."""
    axes = values.shape[1] if values.ndim == 2 else 1
    weights = random_words(0, count=min(_CHUNK, len(values)) * axes)
    sums, largest = [], np.zeros(axes, np.int64)
    for first in range(0, len(values), _CHUNK):
        # Seen as unsigned, a negative size is a huge one: one comparison finds both.
        signed = np.ascontiguousarray(values[first : first + _CHUNK], np.int64)
        chunk = signed.reshape(-1, axes).view(np.uint64)
        high = np.array([chunk[:, axis].max() for axis in range(axes)])  # NumPy is slow at rows
        if high.max() >= _LARGEST:
            row, axis = np.argwhere(chunk >= _LARGEST)[0]
            where = f"sizes[{first + row}]" + (f"[{axis}]" if axes > 1 else "")
            raise SizesError(
                f"sizes must be at least 0 and below 2**48; {where} is "
                f"{values.reshape(-1, axes)[first + row, axis]}"
            )
        np.maximum(largest, high.astype(np.int64), out=largest)
        # A multilinear hash modulo 2**64 (Lemire and Kaser, "Strongly universal string hashing
        # is fast", 2014) is an order of magnitude faster than a cryptographic one.
        words = chunk.reshape(-1)
        sums.append(np.dot(words, weights[: len(words)]))
    digest = hashlib.blake2b(repr(values.shape).encode(), digest_size=16)
    digest.update(np.array(sums, "<u8").tobytes())
    return digest.hexdigest(), largest
