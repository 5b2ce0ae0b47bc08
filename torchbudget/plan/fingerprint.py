"""Fingerprints of costs, orders and values, by which two plans are compared."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import CostModel
from torchbudget.plan.groups import Groups, Units
from torchbudget.plan.order import Order

Plain: TypeAlias = dict[str, int | bool | str | None]

# Names of a plan's parts in messages.
MEANING: Final = {
    "samples": "the number of samples",
    "sizes": "the samples' sizes",
    "skipped": "the samples that are skipped as oversize",
    "weights": "the weights",
    "groups": "the samples' groups",
    "units": "the samples' units",
}
# A cost is called with these numbers of samples, and this many sizes on a logarithmic scale.
_NUMBERS: Final = np.array([1, 2, 3, 7, 64])
_LENGTHS: Final = 32


def fingerprint(*parts: bytes | str | npt.NDArray[Any]) -> str:
    """32 hexadecimal digits of bytes, text and arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else _encoded(part)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _encoded(part: str | npt.NDArray[Any]) -> bytes:
    if isinstance(part, str):
        return part.encode()
    return part.dtype.newbyteorder("<").str.encode() + np.ascontiguousarray(part).tobytes()


def cost_fingerprint(cost: CostModel, largest: npt.ArrayLike) -> str:
    """The fingerprint of the values that a cost model computes; its class and `repr` do not count.

    The model is called for batches of 1 to 64 samples at 32 sizes up to the largest, so it needs no
    fingerprint of its own. An error that it raises counts as a value.

    Args:
        cost: cost model.
        largest: largest size on every axis, shape `()` or `(d,)`.
    """
    fractions = np.linspace(0, 1, _LENGTHS).reshape(-1, *(1 for _ in np.shape(largest)))
    sizes = np.ceil((np.asarray(largest) + 1.0) ** fractions).astype(np.int64) - 1
    parts: list[str | npt.NDArray[Any]] = []
    for size in sizes:
        try:
            parts.append(np.asarray(cost.batch_bytes(_NUMBERS, size), np.int64))
        except Exception as error:  # noqa: BLE001, PERF203  (a user's model raises what it likes)
            parts.append(type(error).__name__)
    return fingerprint(*parts)


def _of_labels(labels: Groups | Units | None) -> str | None:
    if labels is None:
        return None
    members = labels.codes if labels.members is None else labels.members
    form = f"{labels.members is None} {getattr(labels, 'whole', None)}"
    return fingerprint(form, members.astype(np.int64), labels.firsts)


def order_identity(order: Order, sizes: str) -> Plain:
    """The values that must be the same for a position to mean the same samples.

    Args:
        order: order of an epoch.
        sizes: fingerprint of the data set's sizes.
    """
    return {
        "samples": order.dataset_length,
        "sizes": sizes,
        "skipped": fingerprint(order.skipped) if len(order.skipped) else None,
        "shuffle": order.shuffle,
        "weights": None if order.weights is None else fingerprint(order.weights),
        "groups": _of_labels(order.groups),
        "units": _of_labels(order.units),
        "seed": order.seed,
    }
