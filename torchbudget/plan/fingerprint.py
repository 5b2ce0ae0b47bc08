"""Fingerprints of costs, orders and values, by which two plans are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import AdditiveCost, CostModel
from torchbudget.plan.order import Order
from torchbudget.plan.rules import BatchRules

Plain: TypeAlias = dict[str, int | bool | str | None]

# Names of a plan's parts in messages.
MEANING: Final = {
    "samples": "the number of samples",
    "sizes": "the samples' sizes",
    "skipped": "the samples that are skipped as oversize",
    "weights": "the weights",
    "sources": "the sources of the mixture",
    "turns": "the mixture's shares, or what was drawn",
    "per_epoch": "batches_per_epoch or steps_per_epoch",
    "strips": "how windows of several axes are cut",
    "groups": "the samples' groups",
    "units": "the samples' units",
    "workers": "the number of workers (at least 1)",
}
# A cost is called with these numbers of samples, and this many sizes on a logarithmic scale.
_NUMBERS: Final = np.array([1, 2, 3, 7, 64])
_LENGTHS: Final = 32


def fingerprint(*parts: str | npt.NDArray[Any]) -> str:
    """32 hexadecimal digits of text and arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            data = part.encode()
        else:
            data = part.dtype.newbyteorder("<").str.encode() + np.ascontiguousarray(part).tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def differences(saved: Mapping[str, Any], now: Plain, names: Iterable[str]) -> str:
    """Name the facts that differ between a state and now, with both values."""
    return "; ".join(
        f"{MEANING.get(name, name)}: saved {saved.get(name)!r}, now {now[name]!r}"
        for name in names
        if saved.get(name) != now[name]
    )


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


def rules_identity(rules: BatchRules, *largest: npt.ArrayLike) -> Plain:
    """The values that must be the same for samples to be cut in the same places.

    Args:
        rules: of a micro-batch.
        largest: sizes up to which the costs are called, see `cost_fingerprint`.
    """

    def named(cost: CostModel) -> str:
        # Of samples of one size, a cost of padded batches and a sum may have the same bytes.
        kind = "summed" if isinstance(cost, AdditiveCost) else "padded"
        return fingerprint(kind, *(cost_fingerprint(cost, one) for one in largest))

    return {
        "cost": named(rules.cost),
        "budget_bytes": rules.budget_bytes,
        "size_multiple": rules.size_multiple,
        "batch_size_multiple": rules.batch_size_multiple,
        "time": None if rules.time is None else f"{named(rules.time)} {rules.most_time}",
        "limits": " ".join(f"{named(one.cost)} {one.amount}" for one in rules.limits[1:]),
        "shapes": str(rules.shapes),
    }


def order_identity(order: Order, sizes: str) -> Plain:
    """The values that must be the same for a position to mean the same samples.

    Args:
        order: order of an epoch.
        sizes: fingerprint of the data set's sizes.
    """
    groups, units, of_groups = order.groups, order.units, order.labels.groups
    if groups is not None:
        of_groups = np.concatenate([groups.members, groups.firsts])
    parts: dict[str, npt.NDArray[Any] | None] = {
        "skipped": order.skipped if len(order.skipped) else None,
        "weights": order.weights,
        "sources": None,
        "groups": of_groups,
        "units": None,
    }
    if order.sources is not None:  # their shares may change
        members = order.sources.members
        parts["sources"] = np.concatenate([members.members, members.firsts])
    if units is not None:
        parts["units"] = np.concatenate([units.members, units.firsts, [order.labels.whole]])
    return {
        "samples": order.dataset_length,
        "sizes": sizes,
        "shuffle": order.shuffle,
        **{name: None if part is None else fingerprint(part) for name, part in parts.items()},
        "seed": order.seed,
    }
