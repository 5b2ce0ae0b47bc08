"""A step on the CPU that takes the ways of CUDA, as far as its memory depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own usage)
from torch.overrides import TorchFunctionMode

from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState


def check_not_recurrent(state: TrainingState) -> None:
    """Check that no module is run by cuDNN's recurrent kernels, which a trace cannot see.

    Raises:
        CostError: one is; fake tensors have other buffers there than the real ones, or none.
    """
    parts = (part for module in state.modules for part in module.modules())
    recurrent = next((part for part in parts if isinstance(part, nn.RNNBase)), None)
    if recurrent is not None:
        raise CostError(
            f"a {type(recurrent).__name__} is run by cuDNN on CUDA, whose memory cannot be "
            "predicted from a trace; run it on the device: method='run'"
        )


@contextmanager
def as_on_cuda(state: TrainingState) -> Iterator[None]:
    """Choose as torch does by default for tensors on CUDA.

    - Optimizers step all parameters at once (`foreach`), with temporaries of that size.
    - Dropout keeps a mask of one byte for each element, instead of one of the input's type.
    - Attention with dropout takes a fused kernel, which keeps no scores.

    Args:
        state: what the step refers to; the options of optimizers are restored.

    Raises:
        CostError: a module is recurrent, of which cuDNN keeps what no other kernel shows.
    """
    check_not_recurrent(state)
    groups = [group for one in state.optimizers for group in one.param_groups if _is_looped(group)]
    for group in groups:
        group["foreach"] = True
    try:
        with _CudaFunctions():
            yield
    finally:
        for group in groups:
            group["foreach"] = None


def _is_looped(group: dict[str, Any]) -> bool:
    """Whether torch would choose `foreach` by itself for these parameters on CUDA."""
    chosen = [group.get(name) for name in ("fused", "differentiable")]
    return "foreach" in group and group["foreach"] is None and not any(chosen)


# torch leaves the mode without types.
class _CudaFunctions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replaced: Callable[..., Any] = _REPLACED.get(func, func)
        return replaced(*args, **(kwargs or {}))


def _dropout(
    input: torch.Tensor,  # noqa: A002  (the name of the argument in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001  (which fused kernels compute again)
    **options: Any,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
