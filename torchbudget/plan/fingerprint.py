"""What makes two plans the same: fingerprints of costs, orders and rules."""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np

from torchbudget.cost.models.protocol import CostModel
from torchbudget.plan.order import Order

Plain: TypeAlias = dict[str, int | bool | str | None]

_NUMBERS = np.array([1, 2, 3, 7, 64])
_LENGTHS = 32


def cost_fingerprint(cost: CostModel, largest: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """32 hexadecimal digits of what a cost model says, whatever its class.

    It is asked for batches of 1 to 64 samples at 32 lengths up to the largest, spaced evenly on a
    logarithmic scale, so that a model needs no fingerprint of its own.
    """
    fractions = np.linspace(0, 1, _LENGTHS)[:, None]
    lengths = np.ceil((largest + 1.0) ** fractions).astype(np.int64) - 1
    sizes = lengths if len(largest) > 1 else lengths[:, 0]
    budgets = cost.batch_bytes(_NUMBERS[:, None], sizes)
    return hashlib.blake2b(budgets.astype("<i8").tobytes(), digest_size=16).hexdigest()


def order_identity(order: Order, fingerprint: str) -> Plain:
    """What must be the same for a position to mean the same samples."""
    return {
        "samples": order.dataset_length,
        "sizes": fingerprint,
        "skipped": _digest(order.skipped) if len(order.skipped) else None,
        "num_samples": len(order),
        "shuffle": order.shuffle,
        "replacement": order.replacement,
        "weights": None if order.weights is None else _digest(order.weights),
        "seed": order.seed,
    }


def _digest(values: np.ndarray[Any, np.dtype[Any]]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
