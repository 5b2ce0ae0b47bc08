"""Refusals in laws: for named reasons that hold in the case, and not in most cases.

A law says nothing of what is refused. So a sampler that refused everything would keep every law,
unless a refusal must be one of those that the case allows, and most cases must be accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np

from tests.support.oracles import bytes_of
from torchbudget.errors import OptionError, SampleError, UnevenRanksError

T = TypeVar("T")


class Refused(Exception):  # noqa: N818  (no failure)
    """What was asked for is refused, for a reason that the case allows."""


def accepted(action: Callable[[], T], reasons: Mapping[str, bool]) -> T:
    """What an action returns.

    Args:
        action: may raise an `UnevenRanksError`, `OptionError` or `SampleError`.
        reasons: a part of the message of each refusal, and whether the case allows it.

    Raises:
        Refused: for one of the reasons that hold, which is its text.
        AssertionError: for no reason, or for one that does not hold.
    """
    try:
        return action()
    except (UnevenRanksError, OptionError, SampleError) as error:
        refusal = str(error)
    allowed = [reason for reason, holds in reasons.items() if holds]
    found = [reason for reason in allowed if reason in refusal]
    assert found, f"{refusal}; allowed: {allowed}"
    raise Refused(found[0])


class Refusals:
    """Counts what the running test tries, and what is refused; `conftest` checks it after each."""

    tried = refused = 0

    def accepted(self, action: Callable[[], T], reasons: Mapping[str, bool]) -> T | None:
        """What an action returns; `None` where it is refused, for one of the reasons that hold."""
        self.tried += 1
        try:
            return accepted(action, reasons)
        except Refused:
            self.refused += 1
            return None

    def check(self) -> None:
        """Most cases were accepted; count anew."""
        tried, refused = self.tried, self.refused
        self.tried = self.refused = 0
        assert refused <= tried / 2, f"{refused} of {tried} cases are refused"


REFUSALS: Final = Refusals()


def two_fit(sizes: Any, cost: Any, budget: int, options: Mapping[str, Any]) -> bool:
    """Whether every micro-batch has room for two samples, be they the largest."""
    pair, multiple = np.stack([np.max(sizes, axis=0)] * 2), options.get("size_multiple", 1)
    limits = [(cost, budget), *options.get("limits", ())]
    fits = all(bytes_of(pair, model, multiple=multiple) <= limit for model, limit in limits)
    return fits and options.get("max_batch_size") != 1


def reasons_of(
    sizes: Any, cost: Any, budget: int, ranks: int, options: Mapping[str, Any]
) -> dict[str, bool]:
    """Why a sampler may refuse an epoch.

    Samples that no other fits beside are micro-batches of their own, of which there must be a
    multiple of the ranks' number. `drop_last` may drop all there is.
    """
    groups = options.get("groups")
    mixed = groups is not None and "samples_per_step" in options
    few = False
    if groups is not None:
        units = options.get("units", np.arange(len(groups)))
        labels = units[0] if isinstance(units, tuple) else units
        pairs = set(zip(groups.tolist(), labels.tolist(), strict=True))
        few = min(Counter(group for group, _ in pairs).values()) < ranks
    few_places = "units" in options or "max_shapes" in options
    uneven = mixed or few_places or not two_fit(sizes, cost, budget, options)
    return {
        "cannot be split evenly": ranks > 1 and uneven,
        f"too few for {ranks} ranks": few,
        "drop_last=True drops all": bool(options.get("drop_last")),
    }
