"""Ranks that share a step; over several of them see `test_accumulator_ranks.py`."""

from __future__ import annotations

import torch

from torchbudget.train.gradient_sums import GradientSums
from torchbudget.train.process_group import Ranks


def test_a_single_rank_needs_no_process_group() -> None:
    """Sums are what they are of, and nothing is copied."""
    ranks = Ranks()
    assert (len(ranks), ranks.rank) == (1, 0)
    numbers = torch.arange(3)
    assert ranks.sum(numbers) is numbers
    assert ranks.gather_objects("mine") == ["mine"]
    rows = torch.ones(2, 3)
    whole, starts = ranks.gather_rows([rows])
    assert whole[0] is rows
    assert starts == [0]
    parameter = torch.zeros(2, requires_grad=True)
    sums = GradientSums(ranks, [parameter], torch.ones(()))
    sums.allocate()
    assert sums.sum([]) == 1
    assert parameter.grad is None
    assert ranks.sum_on_host([1, 2.5]) == [1, 2.5]
    assert ranks.device(torch.device("meta")) == torch.device("cpu")
