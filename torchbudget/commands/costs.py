"""A cost on the command line: a saved one, or the coefficients of a formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torchbudget.commands.answer import UsageError
from torchbudget.cost.models.cost_file import load_cost
from torchbudget.cost.models.padded import PackedCost, PaddedCost
from torchbudget.cost.models.protocol import CostModel
from torchbudget.errors import BudgetError, CostError
from torchbudget.units import parse_bytes

HELP: Final = (
    "a file that `measure` or MeasuredCost.save wrote; or bytes of a formula, such as "
    '"fixed=50MB,unit=400,pair=0.5": fixed, floor, sample, unit and pair, as of PaddedCost, for '
    'several axes "unit=4:8,pair=0:1:0:0"; "tokens" counts elements, for a budget in tokens'
)
_NAMES: Final = ("fixed", "floor", "sample", "unit", "pair")


def read_cost(text: str, *, packed: bool) -> CostModel:
    """The cost that an argument names.

    Args:
        text: a path or coefficients.
        packed: of batches without padding.

    Raises:
        UsageError: it is neither.
    """
    if text == "tokens":
        text = "unit=1"
    if "=" not in text or Path(text).is_file():  # folders are called lr=0.1, too
        return _loaded(text, packed=packed)
    coefficients = list(map(_coefficient, text.split(",")))
    options = dict(coefficients)
    if len(options) < len(coefficients):
        raise UsageError(f"--cost {text}: each coefficient may stand there once")
    try:
        return PackedCost(**options) if packed else PaddedCost(**options)
    except (CostError, TypeError) as error:
        raise UsageError(f"--cost {text}: {error}") from error


def _loaded(path: str, *, packed: bool) -> CostModel:
    if not Path(path).exists():
        raise UsageError(f"--cost {path}: no such file, and no coefficients such as unit=400")
    try:
        cost = load_cost(path)
        return cost.packed() if packed else cost
    except (CostError, OSError) as error:
        raise UsageError(f"--cost {path}: {error}") from error


def _coefficient(entry: str) -> tuple[str, Any]:
    name, _, value = entry.strip().partition("=")
    if name not in _NAMES:
        raise UsageError(f"--cost: expected one of {', '.join(_NAMES)} and =, got {entry!r}")
    numbers = [_number(name, one) for one in value.split(":")]
    axes = len(numbers) if name == "unit" else round(len(numbers) ** 0.5)
    if len(numbers) == 1:
        return f"{name}_bytes", numbers[0]
    if name == "pair":
        return "pair_bytes", [numbers[i : i + axes] for i in range(0, len(numbers), axes)]
    return f"{name}_bytes", numbers


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        try:
            return parse_bytes(text)
        except BudgetError as error:
            raise UsageError(f"--cost: {name}={text}: {error}") from error
