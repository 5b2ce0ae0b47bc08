"""A step on the CPU that takes the ways of CUDA, as far as its memory depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own usage)

from torchbudget.errors import CostError
from torchbudget.machine.allocators import has_expandable_segments
from torchbudget.restoring import TrainingState
from torchbudget.units import format_bytes

# torch's allocator on CUDA rounds each storage up to this.
CUDA_BLOCK_BYTES: Final = 512
# Bytes of a process on a device outside torch's allocator: the context (610 MiB on an H200 with
# CUDA 13), and libraries with their kernels (742 to 766 MiB after steps of 14 models). It differs
# between devices and drivers; a run on the device measures it.
CONTEXT_BYTES: Final = 768 * 2**20
# ATen/cuda/CUDABlas.cpp: workspaces that cuBLAS gets from torch's allocator, 8 of 4 MiB from Hopper
# on, and 1 MiB for cuBLASLt. Each thread has a handle of its own: the forward's and the backward's.
WORKSPACE_BYTES: Final = 2 * (8 * 2**22 + 2**20)
# Of expandable segments: pools of small blocks, one page of 20 MiB, and gaps between blocks. On an
# H200, 28 steps of 14 models reserved 1.01 to 1.26 times what they allocated.
_SEGMENT_BYTES: Final = (18 + 20) * 2**20
EXPANDABLE_SCALE: Final = 1.26
# All that is on the device beside the step's tensors.
BESIDE_BYTES: Final = CONTEXT_BYTES + WORKSPACE_BYTES + _SEGMENT_BYTES
# Functions that autocast runs in float32 on CUDA, but not on the CPU.
_IN_FLOAT32: Final = (
    *("layer_norm", "group_norm", "softmax", "log_softmax", "nll_loss"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "cosine_similarity"),
)


def like(at: int, *arguments: Any, **options: Any) -> torch.Tensor:
    """A tensor as large as one of an operation's arguments."""
    return torch.empty_like(arguments[at], **options)


_ATEN: Final = torch.ops.aten
# Tensors that CUDA kernels allocate while they run, and fake kernels do not. SoftMax.cu multiplies
# the gradient by the output before it sums. The backward of fused attention sums the gradient of
# the query in float32: on an H200 it took 4.03 and, in bfloat16, 5.03 times the query's bytes,
# three of which are the gradients.
TEMPORARIES: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    _ATEN._softmax_backward_data.default: partial(like, 1),
    # LossCTC has the probabilities of the forward once more, from the end.
    _ATEN._ctc_loss_backward.Tensor: partial(like, 6),
    **{
        getattr(_ATEN, f"_scaled_dot_product_{kind}_backward").default: partial(
            like, 1, dtype=torch.float32
        )
        for kind in (
            *("flash_attention", "efficient_attention", "cudnn_attention"),
            "flash_attention_for_cpu",
        )
    },
}


# The note of a cost that was traced for CUDA without a step on a device.
ASSUMED: Final = (
    "predicted for CUDA, and checked on one card: storages in blocks of "
    f"{CUDA_BLOCK_BYTES} bytes, {format_bytes(CONTEXT_BYTES)} for the context, "
    f"{format_bytes(WORKSPACE_BYTES)} for workspaces of cuBLAS, {format_bytes(_SEGMENT_BYTES)} and "
    f"{EXPANDABLE_SCALE - 1:.0%} for gaps in expandable segments; workspaces of convolutions are "
    "not counted, and tensors that the step moves to the CPU, as by save_on_cpu, count as if they "
    "stayed on the card"
)


def caution_of_segments() -> str:
    """The warning of segments of fixed sizes; empty for expandable ones."""
    if has_expandable_segments():
        return ""
    return (
        "the cost was traced for torch's default segments of fixed sizes, which may reserve up to "
        "twice the bytes in use: call configure_allocators() for expandable segments, or "
        "limit_device_memory() for a hard limit"
    )


def check_not_recurrent(state: TrainingState) -> None:
    """Check that no module is run by cuDNN's recurrent kernels, which a trace cannot see.

    Raises:
        CostError: one is; fake tensors have other buffers there than the real ones, or none.
    """
    recurrent = next((part for part in state.parts() if isinstance(part, nn.RNNBase)), None)
    if recurrent is not None:
        raise CostError(
            f"on CUDA, cuDNN runs a {type(recurrent).__name__}, and a trace cannot predict its "
            "memory; measure it on the device, with method='run'"
        )


@contextmanager
def as_on_cuda(state: TrainingState) -> Iterator[None]:
    """Choose as torch does by default for tensors on CUDA.

    - Optimizers step all parameters at once (`foreach`), with temporaries of that size.
    - Dropout keeps a mask of one byte for each element, instead of one of the input's type.
    - Attention with dropout takes a fused kernel, which keeps no scores.
    - Inside an autocast, norms, softmax and losses that are called by `torch.nn` run in float32.

    Args:
        state: what the step refers to; the options of optimizers are restored.
    """
    groups = [group for one in state.optimizers for group in one.param_groups if _is_looped(group)]
    for group in groups:
        group["foreach"] = True
    rules: dict[str, Any] = {"dropout": _dropout, "scaled_dot_product_attention": _attention}
    rules |= dict.fromkeys(_IN_FLOAT32, _in_float32) | {"cross_entropy": _cross_entropy}
    rules = {name: partial(rule, getattr(F, name)) for name, rule in rules.items()}
    try:
        with patch.multiple(F, **rules):
            yield
    finally:
        for group in groups:
            group["foreach"] = None


def _is_looped(group: dict[str, Any]) -> bool:
    """Whether torch would choose `foreach` by itself for these parameters on CUDA."""
    chosen = [group.get(name) for name in ("fused", "differentiable")]
    return "foreach" in group and group["foreach"] is None and not any(chosen)


def _in_float32(
    torch_function: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002  (the name of the argument in torch)
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        input = input.float()  # noqa: A001
    return torch_function(input, *args, **options)


def _cross_entropy(
    torch_cross_entropy: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002  (the name of the argument in torch)
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    simple = not args and options.keys() <= {"ignore_index", "reduction"}
    if not simple or target.is_floating_point() or not torch.is_autocast_enabled("cpu"):
        return torch_cross_entropy(input, target, weight, *args, **options)
    # The CPU's autocast casts the logits; CUDA's casts their logarithmic softmax.
    logarithms = torch.log_softmax(input, min(input.dim() - 1, 1))
    return F.nll_loss(logarithms, target, weight, **options)


def _dropout(
    torch_dropout: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002  (the name of the argument in torch)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if inplace or not training or not 0 < p < 1:
        return torch_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    torch_attention: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # which fused kernels compute again
    **options: Any,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.requires_grad:  # which no fused kernel takes
        scale = options.get("scale") or query.shape[-1] ** -0.5
        scores = (query * scale**0.5) @ (key * scale**0.5).transpose(-2, -1)
        scores = torch.ops.aten._safe_softmax(scores.add_(attn_mask), -1)
        return F.dropout(scores, dropout_p) @ value
    return torch_attention(query, key, value, attn_mask, **options)
