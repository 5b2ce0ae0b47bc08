"""Checks that ranks which share samples plan by the same facts and read the same samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from torchbudget.distributed import AskedRanks, gathered_of_all
from torchbudget.errors import RankError
from torchbudget.plan.fingerprint import MEANING


def check_same_on_ranks(
    ranks: AskedRanks, facts: Callable[[], Mapping[str, Any]], *, each_time: bool = False
) -> None:
    """Raise if ranks plan by different facts: a collective, at the first loop.

    Nothing happens if ranks were given by hand, in a `DataLoader`'s worker, or in another thread
    than the main one, whose collectives could come between those of a training step.

    Args:
        ranks: the ranks that share samples.
        facts: what they plan by, of plain types.
        each_time: compare them at each call, and not only at the first one.

    Raises:
        RankError: something differs, or a rank does not begin its loop within the timeout of its
            process group; on all ranks that have begun theirs.
    """
    if _may_compare() and (ranks.joined if each_time else not ranks.have_compared("facts")):
        _raise_difference(gathered_of_all(dict(facts())))
        ranks.note_comparison("facts")


def check_same_samples(ranks: AskedRanks, worker: int, sizes: int | None) -> None:
    """Raise if ranks have read different samples from one source: a collective, at the first batch.

    Args:
        ranks: the ranks that share each window.
        worker: number of the worker that read the batch.
        sizes: a digest of the sizes in its first window.

    Raises:
        RankError: another rank's differ, or it does not come here, as in `check_same_on_ranks`.
    """
    if not _may_compare() or ranks.have_compared("samples"):
        return
    found = gathered_of_all((worker, sizes))
    # Out of order, the first batch of another rank may be that of another worker.
    other = [rank for rank, one in enumerate(found) if one[0] == found[0][0] and one != found[0]]
    if other:
        raise RankError(
            f"rank 0 and rank {other[0]} read different samples from the source that they share: "
            "sizes in the first window differ, so samples would be lost or repeated. If the source "
            "splits itself by rank, pass split='ranks'. If it or a transform draws at random, use "
            "transforms.rng(), or a generator with a fixed seed"
        )
    ranks.note_comparison("samples")


def _may_compare() -> bool:
    """Return true if a collective here cannot come between those of a training step."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and get_worker_info() is None


def _raise_difference(facts: list[dict[str, Any]]) -> None:
    first = facts[0]
    for rank, other in enumerate(facts):
        found = "; ".join(
            f"{MEANING.get(name, name)}: {first.get(name)!r} on rank 0, {other.get(name)!r} on "
            f"rank {rank}"
            for name in first | other
            if first.get(name) != other.get(name)
        )
        if found:
            raise RankError(
                "all ranks must plan the same samples, or some would be lost or repeated, but they "
                f"differ: {found}. Make them equal: cost, budget = agree(cost, budget) takes rank "
                "0's cost and the smallest budget; loader_options gives all ranks equal numbers of "
                "workers. If each rank has samples of its own, pass num_replicas and rank, such "
                "as num_replicas=1, rank=0"
            )
