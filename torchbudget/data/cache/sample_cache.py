"""`SampleCache`: samples that were read once, in memory that all workers share."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from torchbudget.data.cache.frozen import freeze, thaw
from torchbudget.data.cache.shared_file import SharedFile
from torchbudget.data.map_style import MapStyle
from torchbudget.errors import BudgetError, OptionError
from torchbudget.units import format_bytes, parse_bytes

_ROWS: Final = 512  # processes that count for themselves
_HITS, _MISSES = 0, 1


class _Row:
    """Where a process counts: a fork goes on to another one.

    Args:
        process: its number.
        number: of the row.
    """

    def __init__(self, process: int = -1, number: int = 0) -> None:
        self.process = process
        self.number = number
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type[_Row], tuple[()]]:
        return _Row, ()


class SampleCache(Dataset[Any]):
    """A data set whose samples are kept as long as they fit, for all workers and epochs.

    What was read by one worker is there for all, those of later epochs too, once: it lies in
    memory that processes share, however they are started. A sample that is kept comes as a copy
    that may be changed. Where no more fits the cache stays as it is: in an epoch each sample is
    asked for once, so that no other choice is hit more often.

    A worker that is killed loses what it was reading, and nothing else.

    Args:
        dataset: N samples, of which each must depend on its index alone (random transforms belong
            behind the cache), and can be pickled.
        budget: bytes, all included: 8 for each sample of the data set, and 8 KiB, beside what is
            kept.

    Raises:
        OptionError: the data set has no length.
        BudgetError: the budget does not hold more than the table of contents.

    >>> cache = SampleCache([[1, 2], [3]], "1MiB")
    >>> cache[0], cache[0], cache.hits, cache.misses
    ([1, 2], [1, 2], 1, 1)
    """

    def __init__(self, dataset: MapStyle, budget: int | str) -> None:
        if not isinstance(dataset, MapStyle):
            raise OptionError(f"a cache needs a map-style data set, got {type(dataset).__name__}")
        self.dataset = dataset
        self.budget = parse_bytes(budget)
        self._samples = len(dataset)
        self._table = 8 * (2 + 2 * _ROWS + self._samples)
        if self.budget <= self._table:
            raise BudgetError(
                f"{format_bytes(self.budget)} hold no samples: the table of contents of "
                f"{self._samples:,} takes {format_bytes(self._table)}"
            )
        self._file = SharedFile(self.budget)  # all zeros: an empty cache
        self._row = _Row()

    # ------------------------------------------------------------------ the table of contents

    def _words(self, first: int, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        count = int(np.prod(shape))
        words = np.frombuffer(self._file.memory, np.int64, count, offset=8 * first)
        return words.reshape(shape)

    @property
    def _used(self) -> npt.NDArray[np.int64]:
        """Bytes that are taken behind the table, shape `(1,)`."""
        return self._words(0, (1,))

    @property
    def _processes(self) -> npt.NDArray[np.int64]:
        """How many processes have counted, shape `(1,)`."""
        return self._words(1, (1,))

    @property
    def _counts(self) -> npt.NDArray[np.int64]:
        """Hits and misses, shape `(rows, 2)`, a row for each process."""
        return self._words(2, (_ROWS, 2))

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        """Where each sample begins, shape `(N,)`; 0 where it is not kept."""
        return self._words(2 + 2 * _ROWS, (self._samples,))

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """N."""
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """The sample; O(its bytes) where it is kept."""
        number = int(index)
        if number < 0:
            number += self._samples
        if not 0 <= number < self._samples:
            raise IndexError(f"{index} is no sample of {self._samples}")
        place = self._places.item(number)
        if place:
            self._count(_HITS)
            return thaw(memoryview(self._file.memory)[place:])
        self._count(_MISSES)
        sample = self.dataset[number]
        self._keep(number, sample)
        return sample

    def _keep(self, number: int, sample: Any) -> None:
        if self.nbytes >= self.budget:
            return
        parts = freeze(sample)
        size = sum(part.nbytes for part in parts)
        memory = memoryview(self._file.memory)
        with self._file.locked():
            start = self._table + int(self._used[0])
            if self._places[number] or start + size > self.budget:
                return
            at = start
            for part in parts:
                memory[at : at + part.nbytes] = part
                at += part.nbytes
            # Killed before here, nothing has happened. The place, one word, makes it readable.
            self._used[0] = -(-at // 8) * 8 - self._table
            self._places[number] = start

    def _count(self, kind: int) -> None:
        row = self._row
        if row.process != os.getpid():
            with self._file.locked():
                row = self._row = _Row(os.getpid(), int(self._processes[0]) % _ROWS)
                self._processes[0] += 1
        with row.lock:  # a thread's addition is read, and then written
            self._counts[row.number, kind] += 1

    # ------------------------------------------------------------------ figures

    @property
    def hits(self) -> int:
        """How often a sample was kept already, in all processes."""
        return int(self._counts[:, _HITS].sum())

    @property
    def misses(self) -> int:
        """How often a sample was read."""
        return int(self._counts[:, _MISSES].sum())

    @property
    def kept(self) -> int:
        """How many samples are kept."""
        return int(np.count_nonzero(self._places))

    @property
    def nbytes(self) -> int:
        """Bytes that are taken, the table of contents included; never above `budget`."""
        return min(self._table + int(self._used[0]), self.budget)

    def __repr__(self) -> str:
        return (
            f"SampleCache({self.kept:,} of {self._samples:,} samples in "
            f"{format_bytes(self.nbytes)} of {format_bytes(self.budget)}, {self.hits:,} hits, "
            f"{self.misses:,} misses)"
        )
