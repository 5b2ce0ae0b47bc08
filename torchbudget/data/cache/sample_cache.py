"""`SampleCache`: samples are read once and kept, as bytes, in memory that all workers share."""

from __future__ import annotations

import io
import os
import pickle
import threading
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from torchbudget.data.cache.shared_file import SharedFile
from torchbudget.data.map_style import MapStyle
from torchbudget.errors import BudgetError, OptionError
from torchbudget.units import format_bytes, parse_bytes

_WORD: Final = 8
_ROWS: Final = 512  # of counts: so many processes count without sharing a row
# The table of contents begins with the bytes in use after the table, the number of processes that
# have counted, and their hits and misses. Then come the positions of the samples.
_HEAD: Final = np.dtype(
    [("used", "q"), ("processes", "q"), ("hits", "q", _ROWS), ("misses", "q", _ROWS)]
)


class _Row:
    """The row of counts of a process; after a fork, the child takes another one.

    Args:
        process: the process's id.
        number: the row's index.
    """

    def __init__(self, process: int = -1, number: int = 0) -> None:
        self.process = process
        self.number = number
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type[_Row], tuple[()]]:
        return _Row, ()


class SampleCache(Dataset[Any]):
    """A dataset that keeps its samples in memory, up to a budget, for all workers and epochs.

    A sample that one worker has read is there, once, for all workers of this and later epochs, in
    memory that processes share with any start method. A kept sample is returned as a copy, which
    may be changed. When the budget is full the cache stays as it is: an epoch reads each sample
    once, so replacing samples would not give more hits.

    A killed worker loses only the sample that it was reading.

    Args:
        dataset: N samples that can be pickled. A sample must depend on its index alone: apply
            random transforms after the cache.
        budget: bytes in all: the kept samples, 8 bytes for each sample of the dataset, and 8 KiB.

    Raises:
        OptionError: the dataset is not map-style.
        BudgetError: the budget has no room for samples after the table of contents.

    >>> cache = SampleCache([[1, 2], [3]], "1MiB")
    >>> cache[0], cache[0], cache.hits, cache.misses
    ([1, 2], [1, 2], 1, 1)
    """

    def __init__(self, dataset: MapStyle, budget: int | str) -> None:
        if not isinstance(dataset, MapStyle):
            raise OptionError(f"a cache needs a map-style dataset, got {type(dataset).__name__}")
        self.dataset = dataset
        self.budget = parse_bytes(budget)
        self._samples = len(dataset)
        self._table = _HEAD.itemsize + 8 * self._samples
        if self.budget <= self._table:
            raise BudgetError(
                f"a cache of {format_bytes(self.budget)} has no room for samples: its table of "
                f"contents of {self._samples:,} samples takes {format_bytes(self._table)}"
            )
        self._file = SharedFile(self.budget)  # all zeros: an empty cache
        self._row = _Row()

    # ------------------------------------------------------------------ the table of contents

    @property
    def _head(self) -> Any:
        """The record `_HEAD` in the shared memory."""
        return np.frombuffer(self._file.memory, _HEAD, 1)[0]

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        """The position of each sample, shape `(N,)`; 0 if it is not kept."""
        return np.frombuffer(self._file.memory, np.int64, self._samples, _HEAD.itemsize)

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        """N."""
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """The sample; O(its bytes) if it is kept."""
        number = int(index) + (self._samples if index < 0 else 0)
        if not 0 <= number < self._samples:
            raise IndexError(f"index {index} is out of range for {self._samples} samples")
        place = self._places.item(number)
        if place:
            self._count("hits")
            return thaw(memoryview(self._file.memory)[place:])
        self._count("misses")
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
            start = self._table + int(self._head["used"])
            if self._places[number] or start + size > self.budget:
                return
            at = start
            for part in parts:
                memory[at : at + part.nbytes] = part
                at += part.nbytes
            # The place is written last, as one word: killed before that, the sample is not kept.
            self._head["used"] = -(-at // 8) * 8 - self._table
            self._places[number] = start

    def _count(self, kind: str) -> None:
        row = self._row
        if row.process != os.getpid():
            with self._file.locked():
                row = self._row = _Row(os.getpid(), int(self._head["processes"]) % _ROWS)
                self._head["processes"] += 1
        with row.lock:  # += on an array is not atomic between threads
            self._head[kind][row.number] += 1

    # ------------------------------------------------------------------ figures

    @property
    def hits(self) -> int:
        """How often a kept sample was returned, in all processes."""
        return int(self._head["hits"].sum())

    @property
    def misses(self) -> int:
        """How often a sample was read from the dataset, in all processes."""
        return int(self._head["misses"].sum())

    @property
    def kept(self) -> int:
        """The number of samples that are kept."""
        return int(np.count_nonzero(self._places))

    @property
    def nbytes(self) -> int:
        """Bytes in use, the table of contents included; never above `budget`."""
        return min(self._table + int(self._head["used"]), self.budget)

    def __repr__(self) -> str:
        return (
            f"SampleCache({self.kept:,} of {self._samples:,} samples in "
            f"{format_bytes(self.nbytes)} of {format_bytes(self.budget)}, {self.hits:,} hits, "
            f"{self.misses:,} misses)"
        )


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory is not copied into the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            words = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (words, value.dtype, tuple(value.shape))
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but elements in the CPU's memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_complex() or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(words: npt.NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(words).view(dtype).reshape(shape)


def freeze(sample: Any) -> list[memoryview]:
    """The parts of a sample's bytes, not joined: a header, the pickle, and the buffers.

    Raises:
        Exception: as raised by pickling.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(sample)
    parts = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    header = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
    return [memoryview(header.tobytes()), *parts]


def thaw(frozen: memoryview) -> Any:
    """The sample again, in memory of its own."""
    count = np.frombuffer(frozen, np.int64, 1).item()
    lengths = np.frombuffer(frozen, np.int64, count, _WORD).tolist()
    ends = accumulate(lengths, initial=_WORD * (count + 1))
    pickled, *buffers = [bytearray(frozen[start:end]) for start, end in pairwise(ends)]
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  (what `freeze` has written)
