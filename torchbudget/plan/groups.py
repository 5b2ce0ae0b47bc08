"""Labels of samples: groups, of which no micro-batch mixes two, and units, which stay together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Purpose, shuffled_keys


class Labels(NamedTuple):
    """Labels of the samples of a single window, or of a data set; each of shape `(S,)`.

    Attributes:
        groups: number of each sample's group: no micro-batch has two, while ranks of a round may
            have different ones. `None`: all are alike.
        units: number of each sample's unit, whose samples stay on one rank. `None`: each sample is
            one.
        whole: units stay in one micro-batch.
    """

    groups: npt.NDArray[np.signedinteger[Any]] | None = None
    units: npt.NDArray[np.signedinteger[Any]] | None = None
    whole: bool = False

    def take(self, places: IntArray) -> Labels:
        """Labels of some of the samples, with units numbered anew from 0 on."""
        groups = None if self.groups is None else self.groups[places]
        units = None
        if self.units is not None:
            units = np.unique(self.units[places], return_inverse=True)[1].astype(np.int64)
        return Labels(groups, units, self.whole)


NONE: Final = np.empty(0, np.int64)
NO_LABELS: Final = Labels()


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The members of each label: the samples of units, or the samples (or units) of groups.

    Attributes:
        members: indices of the samples that are drawn (numbers of units), label after label, in the
            order of the labels' first appearance; shape `(kept,)`.
        firsts: place in `members` of each label's first one, and their end, shape `(labels + 1,)`.
    """

    members: npt.NDArray[np.signedinteger[Any]]
    firsts: IntArray

    @classmethod
    def of(cls, codes: npt.NDArray[np.int32], skipped: IntArray = NONE) -> Members:
        """The members by codes, shape `(N,)`, without skipped indices and labels that have none."""
        kept = np.delete(np.arange(len(codes), dtype=np.min_scalar_type(-len(codes))), skipped)
        members = kept[np.argsort(codes[kept], kind="stable")]
        firsts = np.flatnonzero(np.diff(codes[members], prepend=-1))
        return cls(members, np.append(firsts, len(members)))

    def __len__(self) -> int:
        """Number of labels."""
        return len(self.firsts) - 1

    @property
    def leaders(self) -> npt.NDArray[np.signedinteger[Any]]:
        """The first member of each label, shape `(labels,)`."""
        return self.members[self.firsts[:-1]]

    @property
    def counts(self) -> IntArray:
        """Members of each label, shape `(labels,)`."""
        return np.diff(self.firsts)

    def at(self, place: int) -> int:
        """The label whose part of `members` has a place."""
        return int(np.searchsorted(self.firsts, place, side="right")) - 1

    def samples(self, labels: IntArray) -> IntArray:
        """The members of some labels, one label after the other; O(samples)."""
        firsts, stops = self.firsts[labels], self.firsts[labels + 1]
        ends = np.cumsum(stops - firsts)
        places = np.repeat(stops - ends, stops - firsts) + np.arange(ends[-1] if len(ends) else 0)
        return self.members[places].astype(np.int64)

    def turn(
        self, done: Sequence[int], ends: Sequence[int], key: tuple[int, ...] | None
    ) -> int | None:
        """The label of the next window, drawn in proportion to the members that are left of it.

        Every order of the windows is equally likely, and the choice depends on `done` alone.

        Args:
            done: members of each label that earlier windows have.
            ends: number of members of each label that the pass uses.
            key: seed and path of the choice; `None`: the labels in turn.

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
        word = shuffled_keys(seed, *path, Purpose.GROUPS, numbers=np.array([sum(done)]))[0]
        return int(np.searchsorted(np.cumsum(left), int(word) * total >> 64, side="right"))


def unit_labels(given: Any) -> tuple[Any, bool]:
    """The labels of units, and whether units stay in one micro-batch.

    Args:
        given: labels, or a pair of them and "micro_batch".

    Raises:
        OptionError: a pair with another text.
    """
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and np.ndim(given[0]) == 1):
        return given, False
    if given[1] != "micro_batch":
        raise OptionError(f"units must be labels, or (labels, 'micro_batch'), got {given[1]!r}")
    return given[0], True


def numbered(
    name: str, labels: npt.ArrayLike, length: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The labels in the order of their first appearance, and each sample's number among them.

    O(N log N).

    Args:
        name: of the argument, for messages.
        labels: ints or text, shape `(N,)`.
        length: N.

    Raises:
        OptionError: labels of another type or shape.
    """
    given = np.asarray(labels)
    if given.dtype.kind == "O" and all(isinstance(one, str) for one in given.flat):
        given = given.astype(str)  # a text column of pandas or Arrow
    if given.shape != (length,) or given.dtype.kind not in "biuSU" or np.ma.is_masked(labels):
        raise OptionError(
            f"{name} must be one label a sample, ints or text of the shape ({length},), got "
            f"{given.dtype} of the shape {given.shape}"
        )
    names, first, inverse = np.unique(given, return_index=True, return_inverse=True)
    appear = np.argsort(first, kind="stable")
    number = np.empty(len(names), np.int32)
    number[appear] = np.arange(len(names))
    return names[appear], number[inverse.reshape(-1)]
