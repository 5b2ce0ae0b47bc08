"""`inspect`: what this machine allows, and what limits it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from torchbudget.budget import MemoryBudget
from torchbudget.commands.answer import Answer, UsageError, as_json
from torchbudget.errors import BudgetError
from torchbudget.machine.device import cuda_memory
from torchbudget.machine.host import host_memory, shared_memory
from torchbudget.machine.limits import free_descriptors, usable_processors
from torchbudget.machine.pools import MemoryPool
from torchbudget.machine.process_limits import process_limits
from torchbudget.tables import aligned
from torchbudget.units import format_bytes, parse_bytes

HELP: Final = "what this machine allows, and what limits it"
DESCRIPTION: Final = """\
What this machine allows a job now, and which limit binds: the machine, each control group, the
process's own limits, /dev/shm, the GPUs; and the budget that MemoryBudget.detect would find.

  python -m torchbudget inspect
  python -m torchbudget inspect --need host=16GiB --need shared=1GiB  # or exit code 1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to its parser."""
    parser.add_argument(
        "--device", help='"cuda:0" or "cpu"; default: the first GPU if there is one, else the CPU'
    )
    parser.add_argument(
        "--fraction", type=float, default=0.9, metavar="SHARE", help="to budget; default 0.9"
    )
    parser.add_argument(
        "--ranks-per-machine",
        type=int,
        metavar="N",
        help="that share its memory (default: torchrun's LOCAL_WORLD_SIZE, else 1)",
    )
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        metavar="WHAT=BYTES",
        help="fail where the budget has less of device, host or shared",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(options: argparse.Namespace) -> Answer:
    """Read the machine."""
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    wanted = [_wanted(text) for text in options.need]
    pools = _pools(device)
    budget = MemoryBudget.detect(
        device, fraction=options.fraction, ranks_per_machine=options.ranks_per_machine
    )
    host = [pool for what, pool in pools if what == "host"]
    facts = {
        "host_limited_by": min(host, key=lambda pool: pool.usable_bytes).name,
        "processors": usable_processors(),
        "free_descriptors": free_descriptors(),
    }
    failed = tuple(_missing(budget, wanted))
    if options.json:
        return Answer(text=as_json(_plain(pools, budget, facts)), failed=failed)
    return Answer(text="\n".join(_lines(pools, budget, facts)), failed=failed)


def _pools(device: str) -> list[tuple[str, MemoryPool]]:
    """Every memory that may run out, and what it bounds."""
    pools = [("host", pool) for pool in host_memory()]
    pools += [("process", pool) for pool in process_limits()]
    shared = shared_memory()
    pools += [] if shared is None else [("shared", shared)]
    return pools if device.startswith("cpu") else [*pools, ("device", cuda_memory(device))]


def _wanted(text: str) -> tuple[str, int]:
    what, _, amount = text.partition("=")
    if what not in ("device", "host", "shared"):
        raise UsageError(f"--need: expected device=, host= or shared= and bytes, got {text!r}")
    try:
        return what, parse_bytes(amount)
    except BudgetError as error:
        raise UsageError(f"--need {text}: {error}") from error


def _missing(budget: MemoryBudget, wanted: Sequence[tuple[str, int]]) -> Iterator[str]:
    for what, needed in wanted:
        has = getattr(budget, what)
        if has is not None and has < needed:
            yield f"{what}: {format_bytes(has)} of the {format_bytes(needed)} that are needed"


def _lines(
    pools: Sequence[tuple[str, MemoryPool]], budget: MemoryBudget, facts: dict[str, Any]
) -> Iterator[str]:
    rows = [("bounds", "limit", "in use", "usable", "")]
    rows += [
        (
            what,
            format_bytes(pool.limit_bytes),
            format_bytes(pool.used_bytes),
            format_bytes(pool.usable_bytes),
            pool.name,
        )
        for what, pool in pools
    ]
    yield from aligned(rows)
    yield f"the host is limited by: {facts['host_limited_by']}"
    yield f"processors: {facts['processors']}; files to open: {facts['free_descriptors']:,}"
    yield f"budget: {budget}"


def _plain(
    pools: Sequence[tuple[str, MemoryPool]], budget: MemoryBudget, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "pools": [
            {
                "bounds": what,
                "name": pool.name,
                "limit_bytes": pool.limit_bytes,
                "used_bytes": pool.used_bytes,
                "usable_bytes": pool.usable_bytes,
            }
            for what, pool in pools
        ],
        "budget": asdict(budget),
        **facts,
    }
