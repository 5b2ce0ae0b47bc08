"""`inspect`: the limits of this machine, and the one that binds."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Final

import torch

from torchbudget.budget import MemoryBudget
from torchbudget.commands import Answer, Command, as_json
from torchbudget.display import aligned
from torchbudget.machine.device import device_memory
from torchbudget.machine.host import (
    MemoryPool,
    free_descriptors,
    host_memory,
    process_limits,
    shared_memory,
    usable_processors,
)
from torchbudget.units import format_bytes

_DESCRIPTION: Final = """\
The memory that this machine allows a job now, and the limit that binds: the machine, each control
group, the process's own limits, /dev/shm, the GPUs; and the budget of MemoryBudget.detect.

  python -m torchbudget inspect
  python -m torchbudget inspect --json"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    device_help = '"cuda:0" or "cpu"; default: the first GPU if there is one, else the CPU'
    ranks_help = "that share its memory (default: torchrun's LOCAL_WORLD_SIZE, else 1)"
    add = parser.add_argument
    add("--device", help=device_help)
    add("--fraction", type=float, default=0.9, metavar="SHARE", help="to budget; default 0.9")
    add("--ranks-per-machine", type=int, metavar="N", help=ranks_help)
    add("--json", action="store_true", help="JSON instead of a table")


def _run(options: argparse.Namespace) -> Answer:
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    pools = _pools(device)
    budget = MemoryBudget.detect(
        device, fraction=options.fraction, ranks_per_machine=options.ranks_per_machine
    )
    host = min((pool for what, pool in pools if what == "host"), key=lambda one: one.usable_bytes)
    processors, descriptors = usable_processors(), free_descriptors()
    if options.json:
        found = {
            "pools": [
                {"bounds": what, **asdict(pool), "usable_bytes": pool.usable_bytes}
                for what, pool in pools
            ],
            "budget": asdict(budget),
            "processors": processors,
            "free_descriptors": descriptors,
        }
        return Answer(text=as_json(found))
    rows = [["bounds", "limit", "in use", "usable", ""]]
    for what, pool in pools:
        amounts = map(format_bytes, (pool.limit_bytes, pool.used_bytes, pool.usable_bytes))
        rows.append([what, *amounts, pool.name])
    lines = [
        *aligned(rows),
        f"the host is limited by: {host.name}",
        f"processors: {processors}; files to open: {descriptors:,}",
        f"budget: {_shown(budget, device)}",
    ]
    return Answer(text="\n".join(lines))


def _shown(budget: MemoryBudget, device: str) -> str:
    """The budget as text; on the CPU, device and host are one memory."""
    if not device.startswith("cpu"):
        return str(budget)
    return f"{MemoryBudget(host=budget.host, shared=budget.shared)}, for steps and loading together"


def _pools(device: str) -> list[tuple[str, MemoryPool]]:
    """Every memory that may run out, and its kind."""
    pools = [("host", pool) for pool in host_memory()]
    pools += [("process", pool) for pool in process_limits()]
    shared = shared_memory()
    pools += [] if shared is None else [("shared", shared)]
    return pools if device.startswith("cpu") else [*pools, ("device", device_memory(device).pool())]


_HELP: Final = "the limits of this machine, and the one that binds"
INSPECT: Final = Command(_HELP, _DESCRIPTION, _add_arguments, _run)
