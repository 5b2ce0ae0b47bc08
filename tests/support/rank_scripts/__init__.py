"""Functions that ranks run, each in a process of its own: see `tests.support.ranks.run_ranks`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist


def script(name: str) -> str:
    """The text of a script that runs one of the functions, as in `script("steps.cases")`."""
    return f"from tests.support.rank_scripts import run\n\nrun({name!r})\n"


def run(name: str) -> None:
    """Call a function with the arguments of this script, and write what it returns."""
    module, function = name.split(".")
    tell(getattr(import_module(f"{__name__}.{module}"), function)(*sys.argv[2:]))


def tell(result: Any) -> None:
    """Write the result of this rank, which `run_ranks` returns."""
    Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(result))


def join(**options: Any) -> tuple[int, int]:
    """Join the group of all ranks; this rank, and their number."""
    dist.init_process_group("gloo", **options)
    return dist.get_rank(), dist.get_world_size()


def error_of(act: Callable[[], object]) -> str:
    """The error that is raised, as text."""
    try:
        act()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""
