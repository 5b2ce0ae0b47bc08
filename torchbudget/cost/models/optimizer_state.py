"""What an optimizer keeps for the parameters that it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchbudget.checks import is_int
from torchbudget.errors import CostError

OptimizerFactory: TypeAlias = Callable[[list[Any]], torch.optim.Optimizer]


def states_per_parameter(optimizer: torch.optim.Optimizer | OptimizerFactory | int | None) -> int:
    """How many elements an optimizer keeps for each element that it trains.

    SGD 0, with momentum 1, Adam 2; the largest of all groups, without what is less than one (step
    counts, factored moments). It is found by one step on a small matrix. An optimizer that is
    given is not stepped: another one is made of its class and the options of its groups.

    Raises:
        CostError: `optimizer` is not an optimizer, or it does not step on the matrix.

    >>> states_per_parameter(torch.optim.AdamW)
    2
    """
    if optimizer is None:
        return 0
    if is_int(optimizer) and optimizer >= 0:
        return optimizer
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise CostError(
            "optimizer must be an optimizer, a class of one, or a number of states per parameter, "
            f"got {optimizer!r}"
        )
    make: Any = optimizer
    trained: list[Any] = [_matrix()]
    if isinstance(optimizer, torch.optim.Optimizer):
        anywhere = {"fused": False, "capturable": False}  # these options may ask for a GPU
        make = type(optimizer)
        trained = [{**group, **anywhere, "params": [_matrix()]} for group in optimizer.param_groups]
    try:
        trial: torch.optim.Optimizer = make(trained)
        trial.step()
        matrices: list[nn.Parameter] = [m for g in trial.param_groups for m in g["params"]]
        return max(_elements(trial.state[matrix]) // matrix.numel() for matrix in matrices)
    except Exception as error:
        raise CostError(
            "cannot find out the optimizer's state; give the number of states that it keeps per "
            f"parameter, as in optimizer=2: {type(error).__name__}: {error}"
        ) from error


def _matrix() -> nn.Parameter:
    matrix = nn.Parameter(torch.zeros(8, 8))
    matrix.grad = torch.ones_like(matrix)
    return matrix


def _elements(state: Any) -> int:
    return sum(t.numel() for t in tree_leaves(dict(state)) if isinstance(t, torch.Tensor))
