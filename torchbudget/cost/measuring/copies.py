"""Copies of tensors' values, in a file."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from torchbudget.dtensors import local_part
from torchbudget.errors import CostError
from torchbudget.units import format_bytes

_log: Final = logging.getLogger("torchbudget")

# From here on it is said, before anything is written, how much and where.
_LARGE: Final = 2**30


@contextmanager
def copied(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Copy the values of tensors to a temporary file.

    The file is in the folder of `tempfile.gettempdir()`, which `TMPDIR` chooses. Writing and
    reading take the memory of one tensor at a time. Of sharded tensors, the local part is copied.

    Args:
        tensors: may be expanded.

    Yields:
        A function that copies the values back into the tensors.

    Raises:
        CostError: the folder has less room than they take; nothing was written.
    """
    tensors = [local_part(tensor.detach()) for tensor in tensors]
    tensors = [tensor for tensor in tensors if tensor.numel()]  # empty ones have no bytes
    odd = [(one, one.clone()) for one in tensors if not _is_plain(one)]
    tensors = [_unexpanded(tensor) for tensor in tensors if _is_plain(tensor)]
    _check_room(sum(tensor.nbytes for tensor in tensors))
    with tempfile.TemporaryFile() as file:
        for tensor in tensors:
            values = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            values.view(torch.uint8).numpy().tofile(file)

        @torch.no_grad()
        def put_back() -> None:
            file.seek(0)
            for tensor in tensors:
                read = torch.from_numpy(np.fromfile(file, np.uint8, tensor.nbytes))
                tensor.copy_(read.view(tensor.dtype).view(tensor.shape))
            for tensor, values in odd:
                tensor.copy_(values)

        yield put_back


def _check_room(num_bytes: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CostError(
            "while the step is run, the values of model and optimizer are kept in a file: "
            f"{format_bytes(num_bytes)}, but {folder} has only {format_bytes(free)} free; set "
            "TMPDIR to a folder with more, or pass method='trace'"
        )
    if num_bytes >= _LARGE:
        _log.warning(
            "writing the values of model and optimizer, %s, to a file in %s, from which they are "
            "restored after the step was run; TMPDIR chooses another folder",
            format_bytes(num_bytes),
            folder,
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """A view of each element once, which can be written to."""
    for axis in reversed(range(tensor.dim())):
        if not tensor.stride(axis) and tensor.shape[axis] > 1:
            tensor = tensor.select(axis, 0)
    return tensor
