"""Functions that raise on symbols, or that silently turn a symbol into a number.

Names are replaced while a step is traced with symbols, never while it is traced with numbers. No
mode for functions is used: it would turn off the fast path of `nn.TransformerEncoderLayer`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch._decomp.decompositions import matmul as _python_matmul
from torch.nn import functional as F  # noqa: N812  (torch's own usage)

_ATEN: Final = torch.ops.aten
_MODES: Final = {  # of F.interpolate
    "linear": "linear1d",
    "bilinear": "bilinear2d",
    "bicubic": "bicubic2d",
    "trilinear": "trilinear3d",
}


@contextmanager
def mended(env: Any) -> Iterator[None]:
    """Replace the names of functions that take only concrete numbers.

    Args:
        env: the shape environment; its `quotients` are symbols, by the expression of each.
    """
    from torch._subclasses import FakeTensor
    from torch.fx.experimental.sym_node import SymNode

    of_symbols = {name: _named(env, getattr(SymNode, name)) for name in ("int_floordiv", "mod")}
    of_tensors: dict[str, Any] = {"matmul": _matmul, "__matmul__": _matmul, "__getitem__": _getitem}
    with (
        patch.multiple(builtins, len=_len, range=_range),
        patch.multiple(F, interpolate=_interpolate, one_hot=_one_hot),
        patch.multiple(torch, from_numpy=_from_numpy, matmul=_matmul),
        patch.object(torch._VF, "stft", _stft),
        # Not of `torch.Tensor`: CPython keeps a class that ever had a `__getitem__` in Python among
        # the sequences, and then `torch.tensor([loss])` asks for the `len` of a loss.
        patch.multiple(FakeTensor, **of_tensors),
        patch.multiple(SymNode, **of_symbols),
    ):
        yield


_python_len, _python_range = builtins.len, builtins.range
_torch_interpolate, _torch_one_hot = F.interpolate, F.one_hot
_torch_from_numpy, _torch_matmul = torch.from_numpy, torch.matmul
_torch_getitem: Any = torch.Tensor.__getitem__
_BASIC: Final = (int, torch.SymInt, slice, type(None), type(Ellipsis))


def _named(env: Any, operation: Callable[[Any, Any], Any]) -> Any:
    """A division that rounds, or a remainder, whose results are new symbols.

    In an attention within windows of two padded axes, sympy simplified quotients of quotients for
    over 100 seconds; a trace with these symbols takes 8.
    """
    from torch._dynamo import source as sources
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    def named(one: Any, other: Any) -> Any:
        found = operation(one, other)
        meaning = found.expr
        if not meaning.atoms(FloorDiv, Mod, PythonMod):
            return found
        if meaning not in env.quotients:
            source: Any = sources.ConstantSource(f"q{len(env.quotients)}")
            new = env.create_unspecified_symint_and_symbol(found.hint, source, DimDynamic.DYNAMIC)
            bounds = env.bound_sympy(meaning)
            if found.hint in bounds:  # torch 2.6 takes -L % 4 for 0
                env.var_to_range[new.node.expr] = bounds
            env.quotients[meaning] = new.node
        return env.quotients[meaning]

    return named


def _len(one: Any) -> Any:
    """`len`, which must return an int, of a tensor: its first dimension, which may be a symbol."""
    first: Any = one.shape[0] if isinstance(one, torch.Tensor) and one.dim() else None
    if isinstance(first, torch.SymInt):
        return first
    return _python_len(one)


def _range(*ends: Any) -> Any:
    """`range`: a symbol as its end stays one, and only the number of turns becomes a number."""
    if _python_len(ends) == 3 and isinstance(ends[1], torch.SymInt):
        start, stop, step = ends
        if isinstance(start, int) and isinstance(step, int) and step > 1:
            stop = start + step * int((stop - start + step - 1) // step)
            return _python_range(start, stop, step)
    return _python_range(*ends)


def _getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Indexing without `:`, which torch leaves out for numbers alone: its backward makes a copy."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(type(one) in _BASIC for one in items):
        return _torch_getitem(tensor, index)  # type: ignore[no-any-return]
    at = 0
    for k, one in enumerate(items):
        if one is Ellipsis:
            at = tensor.dim() - sum(later is not None for later in items[k + 1 :])
        elif isinstance(one, (int, torch.SymInt)):
            tensor = tensor.select(at, one)
        else:
            if one is None:
                tensor = tensor.unsqueeze(at)
            elif one != slice(None):
                tensor = _ATEN.slice(tensor, at, one.start, one.stop, one.step or 1)
            at += 1
    return tensor


def _matmul(input: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:  # noqa: A002
    """`torch.matmul` of batches of matrices; before torch 2.13, its C++ takes only numbers."""
    if input.dim() > 2 and other.dim() > 2 and not options:
        return _python_matmul(input, other)  # type: ignore[no-any-return]
    return _torch_matmul(input, other, **options)


def _from_numpy(array: Any) -> torch.Tensor:
    """`torch.from_numpy`; an array of a symbolic batch is a tensor already."""
    return array if isinstance(array, torch.Tensor) else _torch_from_numpy(array)


def _interpolate(
    input: torch.Tensor,  # noqa: A002  (the name of the argument in torch)
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    **others: Any,
) -> torch.Tensor:
    """`F.interpolate` to a symbolic size: torch's own overloads take only numbers."""
    if size is None or any(others.values()) or mode not in (*_MODES, "nearest"):
        return _torch_interpolate(input, size, scale_factor, mode, align_corners, **others)
    axes = input.dim() - 2
    sizes = list(size) if isinstance(size, (tuple, list)) else [size] * axes
    if mode == "nearest":
        return getattr(_ATEN, f"upsample_nearest{axes}d")(input, sizes)  # type: ignore[no-any-return]
    return getattr(_ATEN, f"upsample_{_MODES[mode]}")(input, sizes, bool(align_corners))  # type: ignore[no-any-return]


def _one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> torch.Tensor:
    """`F.one_hot` as torch computes it of fake tensors, for a symbolic number of classes."""
    if not isinstance(num_classes, torch.SymInt):
        return _torch_one_hot(tensor, num_classes)
    number: Any = num_classes
    classes = torch.arange(number, device=tensor.device)
    return tensor.unsqueeze(-1).eq(classes).to(torch.int64)


def _stft(
    input: torch.Tensor,  # noqa: A002
    n_fft: int,
    hop: int | None,
    length: int | None,
    window: torch.Tensor | None,
    normalized: bool,
    onesided: bool | None,
    return_complex: bool,
    *_: Any,
) -> torch.Tensor:
    """`torch.stft` of real signals after its padding, by the operations that torch's own calls."""
    frames = input.unfold(-1, n_fft, n_fft // 4 if hop is None else hop)
    if length is not None and length < n_fft:
        left = (n_fft - length) // 2
        window = input.new_ones(length) if window is None else window
        window = F.pad(window, (left, n_fft - length - left))
    if window is not None:
        frames = frames * window
    found = _ATEN._fft_r2c(frames, [frames.dim() - 1], int(normalized), onesided is not False)
    found = found.transpose(-1, -2)
    return found if return_complex else torch.view_as_real(found)


def _enlarged(input: torch.Tensor, size: Any, *_: Any) -> torch.Tensor:  # noqa: A002
    return input.new_empty((*input.shape[:2], *size))


def _shrunk(gradient: torch.Tensor, _: Any, size: Any, *__: Any) -> torch.Tensor:
    return gradient.new_empty(size)


# Operations whose kernels for shapes take only numbers: they raise, or specialise silently.
OPERATIONS: Final[dict[Any, Callable[..., Any]]] = {}
for _name in ("nearest1d", "nearest2d", "nearest3d", *_MODES.values()):
    OPERATIONS[getattr(_ATEN, f"upsample_{_name}").default] = _enlarged
    OPERATIONS[getattr(_ATEN, f"upsample_{_name}_backward").default] = _shrunk
