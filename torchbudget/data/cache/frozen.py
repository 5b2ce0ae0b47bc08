"""A sample as bytes: a pickle, and the memory of its tensors and arrays apart from it."""

from __future__ import annotations

import io
import pickle
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_WORD: Final = 8


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
