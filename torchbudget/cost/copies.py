"""What tensors hold, set aside in a file: on the device and in memory there may be no room for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

import numpy as np
import torch


class Copies:
    """The contents of tensors, in a temporary file of theirs; a context that removes it.

    The file lies in the folder of `tempfile.gettempdir()`, which `TMPDIR` chooses. Writing and
    reading hold one tensor at a time.

    Args:
        tensors: each with its elements at places of their own.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._file = tempfile.TemporaryFile()

    def __enter__(self) -> Copies:
        for tensor in self._tensors:
            held = tensor.detach().cpu().contiguous().reshape(-1)
            held.view(torch.uint8).numpy().tofile(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @torch.no_grad()
    def put_back(self) -> None:
        """Let every tensor hold what it held."""
        self._file.seek(0)
        for tensor in self._tensors:
            read = torch.from_numpy(np.fromfile(self._file, np.uint8, tensor.nbytes))
            tensor.copy_(read.view(tensor.dtype).view(tensor.shape))
