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
    if _may_compare() and not ranks.have_met("facts"):
        _raise_difference(gathered_of_all(dict(facts())))
        ranks.note_meeting("facts")


def check_same_samples(ranks: AskedRanks, worker: int, sizes: int | None) -> None:
    """Raise where ranks have read other samples from one source: a collective, at a first batch.

    Args:
        ranks: that share each window.
        worker: that read the batch.
        sizes: a digest of those in its first window.

    Raises:
        RankError: another rank's differ, or it does not come here, as in `check_same_on_ranks`.
    """
    if not _may_compare() or ranks.have_met("samples"):
        return
    found = gathered_of_all((worker, sizes))
    # Out of order, the first batch of another rank may be that of another worker.
    other = [rank for rank, one in enumerate(found) if one[0] == found[0][0] and one != found[0]]
    if other:
        raise RankError(
            f"rank 0 and rank {other[0]} read other samples from a source that they share: sizes "
            "in the first window differ, so that samples would come twice, or never. A source that "
            "splits itself by rank needs split='ranks'; a generator that a source or a transform "
            "makes itself needs a fixed seed, or is replaced by transforms.rng()"
        )
    ranks.note_meeting("samples")


def _may_compare() -> bool:
    """Whether this is where a collective does not get between those of a training step."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and get_worker_info() is None


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
