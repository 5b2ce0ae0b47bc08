"""Groups: labels of samples, of which no micro-batch mixes two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Stream, shuffled_keys


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups of a data set's samples, in the order of their first appearance.

    Attributes:
        names: label of each group, for messages.
        codes: number of each sample's group, shape `(N,)`.
        members: indices of the samples that are drawn, group after group, shape `(kept,)`; `None`
            where windows mix groups.
        counts: samples of each group among `members`, shape `(groups,)`.
        firsts: place in `members` of each group's first one, shape `(groups,)`.
    """

    names: list[Any]
    codes: npt.NDArray[np.int32]
    members: npt.NDArray[np.signedinteger[Any]] | None
    counts: IntArray
    firsts: IntArray

    @classmethod
    def of(cls, labels: npt.ArrayLike, skipped: IntArray, length: int, *, apart: bool) -> Groups:
        """Groups of labels as users give them; O(N log N), and 4 bytes a sample (8 from 2³¹ on).

        Args:
            labels: ints or text, shape `(N,)`.
            skipped: sorted indices that are not drawn.
            length: N.
            apart: windows are of one group each, so that `members` are needed, and `codes` are not.

        Raises:
            OptionError: labels of another type or shape.
        """
        given = np.asarray(labels)
        if given.shape != (length,) or given.dtype.kind not in "biuSU" or np.ma.is_masked(labels):
            raise OptionError(
                f"groups must be one label a sample, ints or text of the shape ({length},), got "
                f"{given.dtype} of the shape {given.shape}"
            )
        names, first, inverse = np.unique(given, return_index=True, return_inverse=True)
        appear = np.argsort(first, kind="stable")
        number = np.empty(len(names), np.int32)
        number[appear] = np.arange(len(names))
        codes = number[inverse.reshape(-1)]
        named = names[appear].tolist()
        if not apart:
            none = np.empty(0, np.int64)
            return cls(named, codes, None, none, none)
        kept = np.delete(np.arange(length, dtype=np.min_scalar_type(-length)), skipped)
        members = kept[np.argsort(codes[kept], kind="stable")]
        counts = np.bincount(codes[kept], minlength=len(named))
        return cls(named, codes[:0], members, counts, np.cumsum(counts) - counts)

    def at(self, position: int) -> int:
        """The group whose part of `members` has a position."""
        return int(np.searchsorted(self.firsts + self.counts, position, side="right"))

    def turn(
        self, done: Sequence[int], ends: Sequence[int], key: tuple[int, ...] | None
    ) -> int | None:
        """The group of the next window, drawn in proportion to the samples that are left of it.

        So all orders of all windows are alike, and the choice depends on `done` alone.

        Args:
            done: samples of each group that earlier windows have.
            ends: samples of each group after which none comes any more.
            key: seed and path of the choice; `None`: the groups in turn.

        Returns:
            Its number; `None` at the end of the pass.
        """
        left = np.where(np.less(done, ends), self.counts - done, 0)
        total = int(left.sum())
        if not total:
            return None
        if key is None:
            return int(np.flatnonzero(left)[0])
        seed, *path = key
        word = shuffled_keys(seed, *path, Stream.GROUPS, numbers=np.array([sum(done)]))[0]
        return int(np.searchsorted(np.cumsum(left), int(word) * total >> 64, side="right"))
