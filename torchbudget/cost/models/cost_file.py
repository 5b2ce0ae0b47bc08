"""Measured costs as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchbudget.cost.models.padded import PaddedCost
from torchbudget.cost.models.probe import Probe
from torchbudget.cost.models.table import TableCost
from torchbudget.errors import CostError

if TYPE_CHECKING:
    from torchbudget.cost.models.measured import MeasuredCost

_FORMAT: Final = 2


def write_cost(path: str | Path, cost: MeasuredCost) -> None:
    """Write a cost as JSON, with its probes and what it was measured on."""
    kind = "table" if isinstance(cost.forms[0], TableCost) else "formula"
    attributes = {name: value for name, value in asdict(cost).items() if not name.startswith("_")}
    written = {"format": _FORMAT, "kind": kind, **attributes}
    Path(path).write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def read_cost(path: str | Path) -> dict[str, Any]:
    """The attributes of the cost that a file contains.

    Raises:
        CostError: the file is not a saved cost, or its format is another one.
    """
    try:
        read = json.loads(Path(path).read_text("utf-8"))
        saved_format = read["format"]
        if saved_format == _FORMAT:
            make = _table if read["kind"] == "table" else PaddedCost
            time_form = read["time_form"]
            return {
                "forms": tuple(make(**form) for form in read["forms"]),
                "margin": read["margin"],
                "time_form": None if time_form is None else PaddedCost(**time_form),
                "probes": tuple(Probe(**p | {"size": tuple(p["size"])}) for p in read["probes"]),
                "measured_on": read["measured_on"],
                "notes": tuple(read["notes"]),
            }
    except (KeyError, TypeError, ValueError) as error:
        raise CostError(f"{path} is not a saved cost: {type(error).__name__}: {error}") from error
    raise CostError(f"{path}: format {saved_format!r} is not {_FORMAT}; measure again")


def _table(numbers: list[int], sizes: list[list[int]], peak_bytes: list[int]) -> TableCost:
    return TableCost(
        numbers=tuple(numbers), sizes=tuple(map(tuple, sizes)), peak_bytes=tuple(peak_bytes)
    )
