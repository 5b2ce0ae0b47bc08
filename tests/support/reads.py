"""What reads a tensor's value, which on a device waits for all of its work.

Reads are counted on the CPU, where nothing waits: by modes that see each operation that reads. They
would see copies from a device to the host as well, but none can be made without a device.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_assert_async"}


class ListReads(TorchFunctionMode):
    """The names of the methods that make numbers of a whole tensor, on the CPU by no operation."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """The names of the operations inside that read a tensor's value, or copy it to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._lists = ListReads(self.names)

    def __enter__(self) -> Reads:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        result = func(*args, **(kwargs or {}))
        copied = name in ("_to_copy", "copy_") and args[0].device != result.device
        if name in READS or (copied and result.device.type == "cpu"):
            self.names.append(name)
        return result
