"""What tensors hold, set aside in a file: in memory there may be no room for it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def copied(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """The contents of tensors, in a temporary file of theirs.

    The file lies in the folder of `tempfile.gettempdir()`, which `TMPDIR` chooses. Writing and
    reading hold one tensor at a time.

    Args:
        tensors: each with its elements at places of their own.

    Yields:
        A function that lets every tensor hold what it held.
    """
    with tempfile.TemporaryFile() as file:
        for tensor in tensors:
            held = tensor.detach().cpu().contiguous().reshape(-1)
            held.view(torch.uint8).numpy().tofile(file)

        @torch.no_grad()
        def put_back() -> None:
            file.seek(0)
            for tensor in tensors:
                read = torch.from_numpy(np.fromfile(file, np.uint8, tensor.nbytes))
                tensor.copy_(read.view(tensor.dtype).view(tensor.shape))

        yield put_back
