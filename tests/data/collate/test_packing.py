"""Packed batches: offsets, and padding up to multiples and totals."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MemoryBudgetBatchSampler, PackCollate, PackedCost
from torchbudget.errors import CollateError, CostError, OptionError
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import solve


def packed(lengths: list[int]) -> Any:
    return PackCollate()([torch.zeros(length) for length in lengths])


def test_what_cannot_be_packed() -> None:
    with pytest.raises(CollateError, match=r"sample 1 .*: expected equal axes \(3,\).*\(4,\)"):
        PackCollate()([torch.ones(2, 3), torch.ones(2, 4)])
    # Zero-width rows: 2³¹ positions without a byte.
    with pytest.raises(CollateError, match=r"more than the offsets, of torch\.int32, can count"):
        PackCollate()([torch.empty(2**30, 0)] * 2)


class TestMultiples:
    def test_padding_is_in_segments_of_its_own(self) -> None:
        samples = [{"x": [5, 6, 7], "labels": [1, 2, 3]}, {"x": [8], "labels": [4]}]
        batch = PackCollate(size_multiple=2, total_multiple=5)(samples)
        assert batch["x"].tolist() == [5, 6, 7, 0, 8, 0, 0, 0, 0, 0]
        assert batch["labels"].tolist() == [1, 2, 3, -100, 4, -100, -100, -100, -100, -100]
        assert batch.cu_seqlens.tolist() == [0, 3, 4, 5, 8, 10]
        assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 0, 1, 2, 0, 1]
        assert (batch.lengths.tolist(), batch.num_tokens, batch.max_seqlen) == ([3, 1], 4, 3)
        assert [part["labels"].tolist() for part in batch.split(2)] == [
            [1, 2, 3, -100, -100],
            [4, -100, -100, -100, -100],
        ]
        assert [one["x"].tolist() for one in batch.samples()] == [[5, 6, 7], [8]]

    @pytest.mark.parametrize("layout", [None, "transformers"])
    @given(
        st.lists(st.integers(0, 40), min_size=1, max_size=60),
        st.integers(100, 400),
        st.sampled_from([1, 2, 7, 16, 64]),
        st.sampled_from([1, 4]),
        st.sampled_from([(1, 0), (3, 0), (2.5, 0), (1, 5), (2, 0.5), (0, 3)]),
        st.integers(0, 9),
    )
    def test_what_is_planned_is_what_the_row_costs(
        self,
        layout: str | None,
        sizes: list[int],
        room: int,
        total_multiple: int,
        size_multiple: int,
        each: tuple[float, float],
        fixed: int,
    ) -> None:
        """Within the budget, of the real rows, and no row is longer than its multiple needs."""
        unit, sample = each
        cost = PackedCost(
            unit_bytes=unit, sample_bytes=sample, fixed_bytes=fixed, total_multiple=total_multiple
        )
        budget = fixed + room * max(int(unit), 1)
        rules = BatchRules(cost=cost, budget_bytes=budget, size_multiple=size_multiple)
        collate = PackCollate(
            layout=layout, total_multiple=cost, size_multiple=size_multiple, causal_labels=True
        )
        block = solve(rules, np.array([sizes]))
        planned = block.costs(rules, cost)
        for start, stop, bytes_ in zip(block.starts, block.stops, planned, strict=True):
            own = [sizes[i] for i in block.samples[start:stop].tolist()]
            batch: Any = collate([{"input_ids": np.ones(size, np.int64)} for size in own])
            rounded = -(-np.array(own) // size_multiple) * size_multiple
            total = batch["input_ids"].numel()
            assert total == -(-rounded.sum() // total_multiple) * total_multiple
            padding = (total - rounded.sum()) * np.ceil(unit)
            assert bytes_ == fixed + cost.item_bytes(rounded).sum() + padding
            assert bytes_ <= budget or len(own) == 1
            alone = cost.batch_bytes(1, rounded[0]) > budget
            assert bool(rules.exceeded_alone(np.array(own[0])) == 0) == bool(alone)

    @given(
        st.integers(0, 70), st.integers(0, 9000), st.sampled_from([1, 7, 64]),
        st.sampled_from([(1, 0), (2.5, 0), (1, 5), (0, 3)]),
    )  # fmt: skip
    def test_the_capacity_is_exact_at_the_boundary(
        self, size: int, budget: int, multiple: int, each: tuple[float, float]
    ) -> None:
        cost = PackedCost(
            unit_bytes=each[0], sample_bytes=each[1], fixed_bytes=9, total_multiple=multiple
        )
        n = int(cost.capacity(size, budget))
        if n < 2**40:  # empty samples may cost nothing
            assert n == 0 or cost.batch_bytes(n, size) <= budget
            assert cost.batch_bytes(n + 1, size) > budget

    def test_rows_of_tokens_are_padded_by_less_than_a_multiple(self) -> None:
        """Of log-normal texts, that is 0.4 %, and 7 % where each sample is rounded."""
        rng = np.random.default_rng(0)
        sizes = np.clip(rng.lognormal(5.5, 1, 20_000), 16, 4096).astype(np.int64)
        cost = PackedCost(unit_bytes=1, total_multiple=64)
        rows = MemoryBudgetBatchSampler(sizes, cost, 8192)
        each = MemoryBudgetBatchSampler(sizes, PackedCost(unit_bytes=1), 8192, size_multiple=64)
        assert PackCollate(total_multiple=rows).total_multiple == 64
        assert rows.report().padding < 64 / 8192
        assert each.report().padding > 0.05

    def test_where_it_has_no_meaning(self) -> None:
        for options in ({"pair_bytes": 1}, {"unit_bytes": (1, 1)}):
            with pytest.raises(CostError, match="total_multiple"):
                PackedCost(**{"unit_bytes": 1, "total_multiple": 8, **options})  # type: ignore[arg-type]
        for wrong in (0, True, "8"):
            with pytest.raises(OptionError, match="total_multiple must be an int"):
                PackCollate(total_multiple=wrong)
            with pytest.raises(OptionError, match="total_multiple must be an int"):
                PackedCost(unit_bytes=1, total_multiple=wrong)
        collate = PackCollate(total_multiple=PackedCost(unit_bytes=1, total_multiple=8))
        assert collate == PackCollate(total_multiple=8)
        assert pickle.loads(pickle.dumps(collate)) == collate  # noqa: S301  (our own bytes)
