"""Ranks that plan otherwise than others: they are refused, or agree on one cost and budget."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.cost.models.protocol import CostModel
from torchbudget.distributed import (
    AskedRanks,
    failing_together,
    gathered,
    host_group,
    is_distributed,
    timeout_of,
)
from torchbudget.errors import RankError
from torchbudget.plan.fingerprint import MEANING

T = TypeVar("T")


def check_same_on_ranks(ranks: AskedRanks, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Raise where ranks plan by other facts: a collective, at a first loop.

    Nothing happens where ranks were given by hand, in a `DataLoader`'s worker, and in other threads
    than the main one, whose collectives could get between those of a training step.

    Args:
        ranks: that share samples.
        facts: what they plan by, of plain types.

    Raises:
        RankError: something differs, or a rank does not begin its loop within the timeout of its
            process group; on all ranks that have begun theirs.
    """
    if get_worker_info() is not None or threading.current_thread() is not threading.main_thread():
        return
    if not ranks.have_met():
        _raise_difference(gathered_of_all(dict(facts())))
        ranks.note_meeting()


def agreed(
    cost: T, budget: MemoryBudget | int | str, balance: CostModel | None
) -> tuple[T, MemoryBudget, Any]:
    """Rank 0's costs, and the smallest budget of any rank; a collective.

    Raises:
        RankError: another rank's budget or cost is none, or it does not come here within the
            timeout of its process group.
    """
    if not is_distributed():
        return cost, MemoryBudget.of(budget), balance
    with failing_together(gathered_of_all):
        mine = pickle.dumps((cost, balance, MemoryBudget.of(budget)))
    sent = [pickle.loads(one) for one in gathered(mine)]  # noqa: S301  (of the same job)
    costs, balances, budgets = zip(*sent, strict=True)
    least = {
        name: min(filter(None, (getattr(one, name) for one in budgets)), default=None)
        for name in ("device", "host", "shared")
    }
    if torch.distributed.get_rank():
        cost, balance = costs[0], balances[0]  # on rank 0 they stay what they are
    return cost, MemoryBudget(**least), balance


def gathered_of_all(value: T) -> list[T]:
    """What each rank of the default group has passed, once all of them have come; a collective.

    Raises:
        RankError: one did not come within the group's timeout; torch's message names it.
    """
    try:
        group = host_group()
        torch.distributed.monitored_barrier(group, timeout_of(group), wait_all_ranks=True)
    except RuntimeError as error:
        raise RankError(
            "not all ranks came to share out samples: each must begin its loop over the same "
            f"sampler or stream. Give num_replicas and rank to read on one alone. {error}"
        ) from error
    return gathered(value)


def _raise_difference(facts: list[dict[str, Any]]) -> None:
    names = dict.fromkeys(name for each in facts for name in each)
    found = []
    for name in names:
        values = [each.get(name) for each in facts]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            meaning = MEANING.get(name, name)
            found.append(f"{meaning}: {values[0]!r} on rank 0, {values[other]!r} on rank {other}")
    if found:
        raise RankError(
            "ranks would share out samples that differ, so that some would come twice and others "
            f"never: {'; '.join(found)}. Make them the same on all ranks; with agree=True they "
            "take the smallest budget and rank 0's cost. If they are to differ, say which part "
            "each reads, by num_replicas and rank"
        )
