"""Copies of tensors in a file, since memory may have no room for them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def copied(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Copy the values of tensors to a temporary file.

    The file is in the folder of `tempfile.gettempdir()`, which `TMPDIR` chooses. Writing and
    reading take the memory of one tensor at a time.

    Args:
        tensors: without elements that share a place in memory.

    Yields:
        A function that copies the values back into the tensors.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]  # empty ones have no bytes to view
    with tempfile.TemporaryFile() as file:
        for tensor in tensors:
            values = tensor.detach().cpu().contiguous().reshape(-1)
            values.view(torch.uint8).numpy().tofile(file)

        @torch.no_grad()
        def put_back() -> None:
            file.seek(0)
            for tensor in tensors:
                read = torch.from_numpy(np.fromfile(file, np.uint8, tensor.nbytes))
                tensor.copy_(read.view(tensor.dtype).view(tensor.shape))

        yield put_back
