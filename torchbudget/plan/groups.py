"""Labels of samples: groups, of which no micro-batch mixes two, and units, which stay together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Stream, shuffled_keys


class Labels(NamedTuple):
    """Labels of the samples of a single window, each of shape `(S,)`.

    Attributes:
        groups: number of each sample's group: no micro-batch has two, while ranks of a round may
            have different ones. `None`: all are alike.
        units: number of each sample's unit, whose samples stay on one rank. `None`: each sample is
            one.
        whole: units stay in one micro-batch.
    """

    groups: IntArray | None = None
    units: IntArray | None = None
    whole: bool = False

    def take(self, places: IntArray) -> Labels:
        """Labels of some of the samples, with units numbered anew from 0 on."""
        groups = None if self.groups is None else self.groups[places]
        units = None
        if self.units is not None:
            units = np.unique(self.units[places], return_inverse=True)[1].astype(np.int64)
        return Labels(groups, units, self.whole)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The units of a data set's samples, in the order of their first appearance.

    Attributes:
        codes: number of each sample's unit, shape `(N,)`.
        members: indices of the samples that are drawn, unit after unit, shape `(kept,)`.
        firsts: place in `members` of each unit's first one, and their end, shape `(units + 1,)`.
        whole: a unit stays in one micro-batch; otherwise on one rank, within one step.
    """

    codes: npt.NDArray[np.int32]
    members: npt.NDArray[np.signedinteger[Any]]
    firsts: IntArray
    whole: bool

    @classmethod
    def of(cls, given: Any, length: int) -> Units:
        """Units as users give them: labels, or a pair of them and "micro_batch"; see `Groups.of`.

        Raises:
            OptionError: another form; labels of another type or shape.
        """
        labels, form = given, None
        if isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) == 1:
            labels, form = given
        if form not in (None, "micro_batch"):
            raise OptionError(f"units must be labels, or (labels, 'micro_batch'), got {form!r}")
        _, codes = _numbered("units", labels, length)
        return cls._of_codes(codes, np.empty(0, np.int64), form is not None)

    @classmethod
    def _of_codes(cls, codes: npt.NDArray[np.int32], skipped: IntArray, whole: bool) -> Units:
        members = _grouped(codes, skipped)
        firsts = np.flatnonzero(np.diff(codes[members], prepend=-1))
        return cls(codes, members, np.append(firsts, len(members)), whole)

    def without(self, skipped: IntArray) -> Units:
        """The units of the samples that are drawn; `skipped` are sorted indices."""
        return self if not len(skipped) else self._of_codes(self.codes, skipped, self.whole)

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def samples(self, units: IntArray) -> IntArray:
        """The indices of units' samples, unit after unit; O(samples)."""
        firsts, stops = self.firsts[units], self.firsts[units + 1]
        ends = np.cumsum(stops - firsts)
        places = np.repeat(stops - ends, stops - firsts) + np.arange(ends[-1] if len(ends) else 0)
        return self.members[places].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups of a data set's samples, in the order of their first appearance.

    Attributes:
        names: label of each group, for messages.
        codes: number of each sample's group, shape `(N,)`.
        members: indices of the samples (numbers of the units) that are drawn, group after group,
            shape `(kept,)`; `None` where windows mix groups.
        counts: members of each group, shape `(groups,)`.
        firsts: place in `members` of each group's first one, shape `(groups,)`.
    """

    names: list[Any]
    codes: npt.NDArray[np.int32]
    members: npt.NDArray[np.signedinteger[Any]] | None
    counts: IntArray
    firsts: IntArray

    @classmethod
    def of(
        cls,
        labels: npt.ArrayLike,
        skipped: IntArray,
        length: int,
        *,
        apart: bool,
        units: Units | None = None,
    ) -> Groups:
        """Groups of labels as users give them; O(N log N), and 4 bytes a sample (8 from 2³¹ on).

        Args:
            labels: ints or text, shape `(N,)`.
            skipped: sorted indices that are not drawn.
            length: N.
            apart: windows are of one group each, so that `members` are needed, and `codes` are not.
            units: of the samples that are drawn.

        Raises:
            OptionError: labels of another type or shape; or a unit of two groups.
        """
        names, codes = _numbered("groups", labels, length)
        if units is not None:
            each, firsts = codes[units.members], units.firsts[:-1]
            mixed = np.flatnonzero(each != np.repeat(each[firsts], np.diff(units.firsts)))
            if mixed.size:
                raise OptionError(
                    f"a unit must be of one group: sample {units.members[mixed[0]]} is of another "
                    "group than the first of its unit"
                )
        if not apart:
            none = np.empty(0, np.int64)
            return cls(names.tolist(), codes, None, none, none)
        members, of = _grouped(codes, skipped), codes
        if units is not None:
            of = each[firsts]
            members = np.argsort(of, kind="stable")
        counts = np.bincount(of[members], minlength=len(names))
        return cls(names.tolist(), codes[:0], members, counts, np.cumsum(counts) - counts)

    def at(self, position: int) -> int:
        """The group whose part of `members` has a position."""
        return int(np.searchsorted(self.firsts + self.counts, position, side="right"))

    def turn(
        self, done: Sequence[int], ends: Sequence[int], key: tuple[int, ...] | None
    ) -> int | None:
        """The group of the next window, drawn in proportion to the samples that are left of it.

        Every order of the windows is equally likely, and the choice depends on `done` alone.

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


def _numbered(
    name: str, labels: npt.ArrayLike, length: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The labels in the order of their first appearance, and each sample's number among them."""
    given = np.asarray(labels)
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


def _grouped(codes: npt.NDArray[np.int32], skipped: IntArray) -> npt.NDArray[np.signedinteger[Any]]:
    """The indices that are not skipped, in the order of their codes."""
    kept = np.delete(np.arange(len(codes), dtype=np.min_scalar_type(-len(codes))), skipped)
    return kept[np.argsort(codes[kept], kind="stable")]
