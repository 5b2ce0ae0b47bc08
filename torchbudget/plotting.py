"""Figures of matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchbudget.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(
    columns: int = 1, *, width: float = 8, height: float = 4
) -> tuple[Figure, list[Any]]:
    """An empty figure without a window, and its axes side by side.

    Args:
        columns: of axes.
        width: in inches.
        height: likewise.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", "plot") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])
