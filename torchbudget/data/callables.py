"""What a user's function computes, as far as that can be told: its fingerprint.

A function counts by its code without file and line numbers, its defaults and its closed-over
values; an object by its class (methods, properties, numbers and texts, its own and those that it
inherits within its package) and by what pickling it would keep; arrays and tensors by their bytes.
Functions that it finds by a global name do not count, nor what a class inherits from another
package. Neither does the content of a memory map, which may be as large as the data, nor where a
random generator stands: that differs from run to run.
"""

from __future__ import annotations

import copyreg
import random
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from torchbudget.plan.fingerprint import fingerprint

# Of these, and of containers of nothing else, `repr` says everything, and is the same everywhere.
_PLAIN: Final = frozenset({type(None), type(...), bool, int, float, complex, str, range})
_GENERATORS: Final = (
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    torch.Generator,
)
_PROTOCOL: Final = 4  # of pickle


def callable_fingerprint(function: Any) -> str:
    """32 hexadecimal digits, the same in every process; what has no value counts by its name."""
    return values_fingerprint(function)[0]


def values_fingerprint(value: Any) -> tuple[str, list[str]]:
    """The fingerprint of a value, and the names of the parts of it that count by name alone.

    Linear in what it refers to. Bytes are hashed at about 1 GB/s.
    """
    digests = _Digests()
    try:
        found = digests.of(value)
    except RecursionError:  # a chain of objects that is hundreds long
        found = digests.by_name(value)
    return found, digests.by_name_alone


class _Digests:
    """Digests of values, each a function of the digests of its parts.

    Attributes:
        by_name_alone: names of values of which nothing else is known.
    """

    def __init__(self) -> None:
        self.by_name_alone: list[str] = []
        self._found: dict[int, tuple[Any, str]] = {}  # by id; with the value, so that it stays
        self._open: list[int] = []  # ids of the values that are being digested

    def of(self, value: Any) -> str:
        """The digest of any value."""
        if type(value) in _PLAIN:
            return fingerprint(type(value).__name__, repr(value))
        number = id(value)
        if number in self._found:
            return self._found[number][1]
        if number in self._open:  # it refers to itself
            return fingerprint("cycle", str(len(self._open) - self._open.index(number)))
        self._open.append(number)
        found = self._of_parts(value)
        self._open.pop()
        self._found[number] = value, found
        return found

    def by_name(self, value: Any) -> str:
        """The digest of what cannot be taken apart."""
        named = value if hasattr(value, "__qualname__") else type(value)
        self.by_name_alone.append(f"{named.__module__}.{named.__qualname__}")
        return fingerprint("name", self.by_name_alone[-1])

    def _of_parts(self, value: Any) -> str:
        kind = type(value)
        if kind in (bytes, bytearray):
            return fingerprint(kind.__name__, bytes(value))
        if isinstance(value, _GENERATORS):
            return self._all("generator", kind)
        if isinstance(value, torch.device):  # of each rank its own
            return self._all("device", value.type)
        if isinstance(value, np.memmap):
            return self._all("memory map", value.dtype.str, value.shape)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return fingerprint("array", repr(value.shape), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in (list, tuple):
            return self._items(kind.__name__, value)
        if kind in (set, frozenset):  # in an order that depends on the process
            return fingerprint(kind.__name__, *sorted(map(self.of, value)))
        if kind is dict:
            return fingerprint("dict", self._items("", value), self._items("", value.values()))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, MethodType):
            return self._all("method", value.__func__, value.__self__)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return fingerprint("module", value.__name__)
        return self._reduced(value)

    def _all(self, *parts: Any) -> str:
        return fingerprint(*map(self.of, parts))

    def _items(self, name: str, values: Any) -> str:
        values = list(values)
        if _PLAIN.issuperset(map(type, values)):  # not one by one
            return fingerprint(name, repr(values))
        return fingerprint(name, *map(self.of, values))

    def _function(self, function: FunctionType) -> str:
        closure = list(map(_content, function.__closure__ or ()))
        defaults = function.__defaults__, function.__kwdefaults__
        return self._all("function", function.__code__, defaults, closure)

    def _code(self, code: CodeType) -> str:
        names = code.co_names, code.co_varnames, code.co_freevars
        arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        return self._all("code", code.co_code, code.co_consts, names, arguments, code.co_flags)

    def _class(self, kind: type) -> str:
        package = _package(kind)
        own = [base for base in kind.__mro__ if _package(base) == package]
        return self._all("class", kind.__qualname__, list(map(_members, own)))

    def _tensor(self, tensor: torch.Tensor) -> str:
        try:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantized, meta, …
            return self.by_name(tensor)
        return fingerprint("tensor", repr((tensor.dtype, tuple(tensor.shape))), flat)

    def _reduced(self, value: Any) -> str:
        """By what pickle would keep of it."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            parts = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
        except Exception:  # noqa: BLE001  (any class may refuse in its own way)
            return self.by_name(value)
        if isinstance(parts, str):  # a global name
            wrapped = getattr(value, "__wrapped__", None)  # as by `functools.lru_cache`
            return self._all("global", getattr(value, "__module__", None), parts, wrapped)
        function, arguments, state, items, pairs = (*parts, None, None, None)[:5]
        return self._all("object", function, arguments, state, list(items or ()), list(pairs or ()))


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _members(kind: type) -> dict[str, Any]:
    """Methods, properties, numbers and texts of a class."""
    members = {}
    for name, member in vars(kind).items():
        if isinstance(member, (FunctionType, classmethod, staticmethod)):
            members[name] = getattr(member, "__func__", member)
        elif isinstance(member, property):
            members[name] = member.fget, member.fset
        elif type(member) in _PLAIN and not name.startswith("__"):
            members[name] = member
    return members


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None
