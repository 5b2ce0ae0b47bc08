"""Measured costs that are stated in the numbers of a padded one."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchbudget import MeasuredCost, PaddedCost
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term


def forms_of(cost: PaddedCost) -> tuple[Form, ...]:
    """The cost's polynomial and its floor."""
    d = cost.axes
    units = np.eye(d, dtype=int)
    terms = [(cost.fixed_bytes, 0, 0 * units[0]), (cost.sample_bytes, 1, 0 * units[0])]
    terms += [(b, 1, unit) for b, unit in zip(np.reshape(cost.unit_bytes, d), units, strict=True)]
    pairs = np.reshape(np.asarray(cost.pair_bytes, float), (d, d))
    terms += [(pairs[i, j], 1, units[i] + units[j]) for i in range(d) for j in range(d)]
    grows = Form(terms=tuple(Term(float(b), n, tuple(map(int, size))) for b, n, size in terms))
    floor = Form(terms=(Term(cost.floor_bytes, 0, (0,) * d),))
    return (grows, floor) if cost.floor_bytes else (grows,)


def measured(cost: PaddedCost | None = None, *, margin: float = 0, **options: Any) -> MeasuredCost:
    """By default a thousand bytes a unit."""
    forms = forms_of(cost or PaddedCost(unit_bytes=1000))
    return MeasuredCost(forms=forms, margin=margin, **options)
