"""`ReaderDataset`: samples that are read by identity, several per read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from torchbudget.checks import at_least_one
from torchbudget.errors import OptionError, SampleError

Read = Callable[[Any], Any]


class ReaderDataset(Dataset[Any]):
    """A data set of samples that are read by identity: a file's name, a patient's number, a key.

    A read may return several variants (crops, slices, channels), each of which is a sample. With
    `read_target`, each sample is a pair of input and target.

    Sample i is variant `i % variants_per_read` of identity `i // variants_per_read`. In order,
    each identity is read once. For a shuffled order leave `variants_per_read` at 1, so that a
    sample is all that a read returns, and expand it in a stream: by `transforms.expand(list)`, or
    with `read_target` by `transforms.expand(transforms.unpack_args(zip))`.

    Args:
        identities: the identities to read.
        read: returns the input of an identity; if `variants_per_read` is above 1, a sequence of
            that many inputs.
        read_target: returns the target, or the targets, of an identity in the same way.
        variants_per_read: number of samples for each identity.

    Raises:
        OptionError: there are no identities, a function is not callable, or `variants_per_read`
            is not an int of at least 1.
        SampleError: a read returned another number of variants; raised when a sample is read.

    >>> reader = ReaderDataset(["ab", "cd"], list, variants_per_read=2)
    >>> len(reader), reader[3]
    (4, 'd')
    """

    def __init__(
        self,
        identities: Sequence[Any],
        read: Read,
        *,
        read_target: Read | None = None,
        variants_per_read: int = 1,
    ) -> None:
        if not len(identities):
            raise OptionError("a reader needs at least one identity, got none")
        for name, function in (("read", read), ("read_target", read_target)):
            if function is not None and not callable(function):
                raise OptionError(f"{name} must be a function of an identity, got {function!r}")
        self.identities = identities
        self.variants_per_read = at_least_one("variants_per_read", variants_per_read)
        self._read = read
        self._read_target = read_target
        self._last: tuple[int, list[Any]] = -1, []  # place and samples of the last read

    def __len__(self) -> int:
        """The number of samples: identities times variants."""
        return len(self.identities) * self.variants_per_read

    def __getitem__(self, index: int) -> Any:
        """Sample `index`."""
        number = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        place, variant = divmod(number, self.variants_per_read)
        if self.variants_per_read == 1:
            return self._samples(place)[0]
        last = self._last  # read once: another thread may read another place
        if last[0] != place:
            last = self._last = place, self._samples(place)
        # Variants may share memory, such as crops that overlap, or a target of all of them.
        return tree_map(_own, last[1][variant])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": (-1, [])}

    def _samples(self, place: int) -> list[Any]:
        identity = self.identities[place]
        inputs = self._variants(self._read, identity)
        if self._read_target is None:
            return inputs
        return list(zip(inputs, self._variants(self._read_target, identity), strict=True))

    def _variants(self, read: Read, identity: Any) -> list[Any]:
        found = read(identity)
        if self.variants_per_read == 1:
            return [found]
        if len(found) != self.variants_per_read:
            raise SampleError(
                f"expected {self.variants_per_read} variants of {identity!r}, "
                f"its read returned {len(found)}"
            )
        return list(found)


def _own(value: Any) -> Any:
    """A copy of a leaf of a sample; of a part of a tensor, that part alone."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value)
