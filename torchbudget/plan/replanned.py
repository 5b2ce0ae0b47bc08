"""The margin that a plan goes on with after steps were observed, in the state of its sampler."""

from __future__ import annotations

from typing import Any

from torchbudget.checks import is_number
from torchbudget.cost.models.measured import MOST_MARGIN, MeasuredCost
from torchbudget.plan.fingerprint import cost_fingerprint
from torchbudget.plan.plan import Plan


def margins_of(begun: Plan, later: Plan) -> list[float] | None:
    """The margins of the window that was begun and of later ones; `None` of another cost."""
    costs = [plan.rules.cost for plan in (begun, later)]
    margins = [cost.margin for cost in costs if isinstance(cost, MeasuredCost)]
    return list(map(float, margins)) or None


def with_margin_of(plan: Plan, state: Any) -> Plan:
    """The plan with the margin that a saved one had gone on with, if it is of the same cost.

    A malformed state changes nothing here: decoding its cursor refuses it.
    """
    cost = plan.rules.cost
    match state:
        case {"margins": [begun, later], "dealing": {"cost": saved}}:
            pass
        case _:
            return plan
    if not isinstance(cost, MeasuredCost) or not (is_number(begun) and is_number(later)):
        return plan
    if not cost.margin < later <= MOST_MARGIN:
        return plan
    if not 0 <= begun <= later:
        return plan
    same = cost_fingerprint(cost.with_margin(begun), plan.sizes.largest) == saved
    return plan.with_cost(cost.planned_with(later)) if same else plan
