"""Samples as bytes: the elements of their tensors, without the storage around them."""

from __future__ import annotations

import io
import pickle
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_WORD: Final = 8


class NoRoomError(Exception):
    """A sample has more bytes than there is room for."""


def freeze(sample: Any, room: int) -> list[memoryview]:
    """The parts of a sample's bytes, not joined: a header, the pickle, and the buffers.

    Stops as soon as the sample is known to have more bytes than `room`.

    Raises:
        NoRoomError: it has.
        Exception: as raised by pickling.
    """
    file = _File(room)
    pickler = _Pickler(file)
    pickler.dump(sample)
    parts = [file.getbuffer(), *pickler.buffers]
    header = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
    return [memoryview(header.tobytes()), *parts]


def thaw(frozen: memoryview) -> Any:
    """The sample again, in memory of its own."""
    count = np.frombuffer(frozen, np.int64, 1).item()
    lengths = np.frombuffer(frozen, np.int64, count, _WORD).tolist()
    ends = accumulate(lengths, initial=_WORD * (count + 1))
    pickled, *buffers = [bytearray(frozen[start:end]) for start, end in pairwise(ends)]
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  (what `freeze` has written)


class _File(io.BytesIO):
    """A file in memory, of a pickle that has buffers beside it.

    Args:
        room: bytes that both may have together.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def check(self, nbytes: int) -> None:
        """Raise a `NoRoomError` unless so many bytes more have room."""
        if nbytes > self._room:
            raise NoRoomError

    def count(self, nbytes: int) -> None:
        """Count bytes that have room."""
        self.check(nbytes)
        self._room -= nbytes

    def write(self, part: Any, /) -> int:
        """Write a part of the pickle."""
        self.count(memoryview(part).nbytes)
        return super().write(part)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory is not copied into the pickle."""

    def __init__(self, file: _File) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._add_buffer)
        self._file = file
        self.buffers: list[memoryview] = []

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.buffers.append(buffer.raw())
        self._file.count(self.buffers[-1].nbytes)

    def reducer_override(self, value: Any) -> Any:
        is_plain = isinstance(value, torch.Tensor) and _is_plain(value)
        if is_plain or isinstance(value, np.ndarray):
            self._file.check(value.nbytes)  # before it is copied
        if is_plain:
            return _tensor, _parts(value)
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor is elements in the CPU's memory, and a `__dict__`.

    Other classes (parameters, tensors that are made of tensors) know how they are pickled.
    """
    cls = type(tensor)
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and cls.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The arguments from which `_tensor` makes the tensor again."""
    elements = tensor.as_subclass(torch.Tensor).detach().resolve_conj().resolve_neg()
    words = elements.contiguous().reshape(-1).view(torch.uint8).numpy()
    cls = None if type(tensor) is torch.Tensor else type(tensor)
    shape = tuple(tensor.shape)
    return words, tensor.dtype, shape, tensor.requires_grad, cls, tensor.__dict__ or None


def _tensor(
    words: npt.NDArray[Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    cls: type[torch.Tensor] | None,
    attributes: dict[str, Any] | None,
) -> torch.Tensor:
    tensor = torch.from_numpy(words).view(dtype).reshape(shape)
    if cls is not None:
        tensor = tensor.as_subclass(cls)
    if attributes is not None:
        tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if requires_grad else tensor
