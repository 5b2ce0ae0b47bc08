"""The bytes of real tensors, counted for as long as they live: the truth of traces."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# torch leaves the dispatch mode's class and constructor without types.
class LiveBytes(TorchDispatchMode):
    """Bytes of living storages, each counted once, after each operation inside the context.

    Args:
        device: type of the device that tensors are counted on.
        block_bytes: a storage takes a multiple of it.

    Attributes:
        num_bytes: bytes that live now.
        history: bytes that live after each operation.
    """

    def __init__(self, device: str, *, block_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it not
        self.num_bytes = 0
        self.history: list[int] = []
        self._device, self._block_bytes = device, block_bytes
        self._ids: set[int] = set()

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self._device or id(storage) in self._ids:
            return
        num_bytes = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        self._ids.add(id(storage))
        self.num_bytes += num_bytes
        weakref.finalize(storage, self._forget, id(storage), num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._ids.remove(key)
        self.num_bytes -= num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        self.history.append(self.num_bytes)
        return result


def allocated(work: Callable[[], object]) -> int:
    """The most bytes that are allocated meanwhile on the CPU, in blocks of 64, inside kernels too.

    As torch's profiler tells it.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    changes = np.array([0, *(one["args"]["Bytes"] for one in memory)])
    blocks = np.sign(changes) * (-(-np.abs(changes) // 64) * 64)
    return max(0, int(np.cumsum(blocks).max()))
