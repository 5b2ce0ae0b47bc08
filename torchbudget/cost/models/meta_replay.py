"""A module's forward and backward on PyTorch's meta device, where tensors have no memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchbudget.cost.models.live_bytes import LiveBytes
from torchbudget.errors import CostError

_BY_HAND: Final = (
    "state the bytes by hand, as in DenseCost(fixed_bytes=…, sample_bytes=…), "
    "or measure the real step"
)


def replay(
    module: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> tuple[nn.Module, int, int]:
    """Run a copy of `module` forward and backward on the meta device, for 2, 4 and 8 samples.

    In training mode, and with gradients allocated, as when micro-batches accumulate. The module
    itself, its mode and the random state do not change.

    Args:
        module: a module, or what builds one (without memory, on the meta device).
        inputs: its positional arguments: one sample's meta tensors, without the batch axis.
        targets: what else lives until the step ends, likewise.

    Returns:
        The copy; bytes per sample; and constant bytes beside those of the copy and its gradients.

    Raises:
        CostError: the module does not run on the meta device, is recurrent, or needs bytes that are
            not in proportion to the batch.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            replica = _meta_copy(module)
            histories = [_history(replica, inputs, targets, n) for n in (2, 4, 8)]
    except CostError:
        raise
    except Exception as error:
        raise CostError(
            f"the module does not run on the meta device; {_BY_HAND}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return replica, *_line(histories)


def _meta_copy(module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy of the module on the meta device, in training mode, with gradients."""
    if not isinstance(module, nn.Module):
        with torch.device("meta"):
            module = module()
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        # Fused kernels (oneDNN, cuDNN) have workspaces that the meta device's plain cells do not:
        # an LSTM on a CPU was seen to take 2.4 times the bytes that are counted here.
        raise CostError(f"a recurrent module needs what its device's kernel needs; {_BY_HAND}")
    # A copy rather than a functional call on the module itself: what a forward stores in its module
    # (a cached table, a recomputed weight) would stay there, as meta tensors. With the memo,
    # deepcopy takes these empty tensors instead of copying the real ones.
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    replica = copy.deepcopy(module, memo)
    if not replica.training:  # else parts that are frozen in evaluation mode stay so
        replica.train()
    for parameter in replica.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return replica


def _history(
    module: nn.Module, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], n: int
) -> list[int]:
    """The bytes that live after each operation on n samples, beside the module and gradients."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    live = LiveBytes("meta")
    for tensor in [*parameters, *gradients, *module.buffers()]:
        live.add(tensor, 0)
    with live:
        batch, target = (
            [one.new_empty((n, *one.shape)) for one in sample] for sample in (inputs, targets)
        )
        output = module(*batch)
        roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if gradients and not roots:
            raise CostError(
                "the module's output contains no tensor that depends on its parameters; it must be "
                f"a tensor, or a tuple, list or dict of tensors, got {type(output).__name__}"
            )
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        del target  # it lives until the step ends
    return live.history


def _line(histories: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Bytes per sample and constant bytes, of the line that is at or above every operation's.

    Each operation's bytes are a line over n, and the peak is the largest of them. The steepest
    slope through that peak at n = 1 is the lowest line that is nowhere below it.
    """
    if len(set(map(len, histories))) == 1:
        at_2, at_4, at_8 = np.asarray(histories, dtype=np.int64)
        if np.array_equal(at_8 - at_4, 2 * (at_4 - at_2)):
            sample_bytes = -(-int((at_4 - at_2).max()) // 2)
            at_1 = -(-int((3 * at_2 - at_4).max()) // 2)
            return sample_bytes, max(0, at_1 - sample_bytes)
    raise CostError(f"the module's bytes are not in proportion to the batch; {_BY_HAND}")
