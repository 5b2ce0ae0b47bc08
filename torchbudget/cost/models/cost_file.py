"""Reads a cost that `MeasuredCost.save` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import FORMAT, MeasuredCost
from torchbudget.cost.models.padded import PaddedCost
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.probe import Probe
from torchbudget.cost.models.table import TableCost
from torchbudget.cost.models.vouched import VouchedRange
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.warn import warn


def load_cost(path: str | Path, measured_on: Mapping[str, str] | None = None) -> MeasuredCost:
    """Read a cost that `MeasuredCost.save` wrote.

    Args:
        path: of the file.
        measured_on: what it is to be used on, as `describe_step(step)` returns it.

    Raises:
        CostError: the file is not a saved cost, or its format is another one.

    Warns:
        MeasureWarning: it was measured on something else; names what differs.
    """
    try:
        read = json.loads(Path(path).read_text("utf-8"))
        cost = _from_file(read) if read["format"] == FORMAT else None
    except (KeyError, TypeError, ValueError) as error:
        raise CostError(f"{path} is not a saved cost: {type(error).__name__}: {error}") from error
    if cost is None:
        raise CostError(f"{path}: format {read['format']!r} is not {FORMAT}; measure again")
    differing = [
        f"{name}: {cost.measured_on.get(name)!r} then, {now!r} now"
        for name, now in (measured_on or {}).items()
        if cost.measured_on.get(name) != now
    ]
    if differing:
        warn(
            f"{path} was measured on something else: {'; '.join(differing)}",
            MeasureWarning,
        )
    return cost


def _from_file(read: dict[str, Any]) -> MeasuredCost:
    """The cost of what a file contains."""
    table, vouched, time_form = (read[name] for name in ("table", "vouched", "time_form"))
    largest = read["largest"]
    return MeasuredCost(
        forms=tuple(
            Form(
                terms=tuple(
                    Term(**term | {name: tuple(term.get(name, ())) for name in ("sizes", "start")})
                    for term in form["terms"]
                )
            )
            for form in read["forms"]
        ),
        margin=read["margin"],
        largest=None if largest is None else tuple(largest),
        vouched=None if vouched is None else VouchedRange(**_tuples(vouched)),
        table=None if table is None else TableCost(**_tuples(table)),
        time_form=None if time_form is None else PaddedCost(**time_form),
        probes=tuple(Probe(**p | {"size": tuple(p["size"])}) for p in read["probes"]),
        measured_on=read["measured_on"],
        notes=tuple(read["notes"]),
        predicted_for=read.get("predicted_for"),
    )


def _tuples(columns: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(tuple(one) if isinstance(one, list) else one for one in column)
        if isinstance(column, list)
        else column
        for name, column in columns.items()
    }
