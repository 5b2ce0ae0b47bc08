"""Scripts that ranks run: see `tests.support.ranks.run_ranks`."""

from pathlib import Path


def script(name: str) -> str:
    """The text of a script of this folder."""
    return (Path(__file__).parent / f"{name}.py").read_text("utf-8")
