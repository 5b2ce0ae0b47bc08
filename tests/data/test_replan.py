"""A cost that is corrected while an epoch is drawn: what was begun stays, the rest is replanned."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.costs import measured
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.refusals import REFUSALS, reasons_of
from tests.support.resuming import as_json
from tests.support.sampler_cases import samplers
from tests.support.samplers import counted, loader_of, sampler_of
from tests.support.strategies import problems
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, PaddedCost, TableCost
from torchbudget.errors import MeasureWarning, OptionError


def observe_more(cost: MeasuredCost, size: Any, factor: float) -> None:
    """Report a step that needed more than was predicted."""
    with pytest.warns(MeasureWarning):
        cost.observe(1, size, int(factor * int(cost.batch_bytes(1, size))) + 1)


class Asked(Exception):  # noqa: N818  (no failure)
    """A rank came to the collective."""


def replan_together(those: list[Any]) -> None:
    """Call `replan` on each rank, as ranks of a process group do."""
    asked: list[Any] = []

    def ask(ranks: int, *values: Any) -> None:
        asked.append(values)
        raise Asked

    meeting = "torchbudget.data.sampler.largest_of_all_ranks"
    with patch(meeting, ask):
        for sampler in those:
            with suppress(Asked):
                sampler.replan()
    with patch(meeting, lambda *_: [max(column) for column in zip(*asked, strict=True)]):
        for sampler in those:
            sampler.replan()


@settings(max_examples=16)
@given(problems(packed=False), st.floats(1.01, 1.8), st.data())
def test_the_rest_of_an_epoch_is_planned_anew(
    problem: Any, factor: float, data: st.DataObject
) -> None:
    """Windows that a rank has begun stay; later ones fit the corrected cost, or hold one sample.

    Each sample comes once, on as many batches on each rank, though ranks have drawn unequally far.
    From any later position, the rest comes under the corrected cost as under the old one.
    """
    sizes, form, budget = problem
    assume(not isinstance(form, TableCost) and sizes.max() < 2**13)  # as far as is measured
    ranks = data.draw(st.integers(1, min(4, len(sizes))))
    options = {
        data.draw(st.sampled_from(["window", "samples_per_step"])): data.draw(
            st.integers(ranks, max(len(sizes), ranks))
        ),
        "shuffle": data.draw(st.booleans()),
    }
    if not isinstance(form, MeasuredCost):
        form = measured(form, multiple=1 if form.axes == 1 else 1024)
    cost = replace(form, margin=0.01)
    largest = tuple(map(int, sizes.max(0))) if sizes.ndim == 2 else int(sizes.max())
    budget = max(budget, int(cost.batch_bytes(1, largest)))
    those = [
        sampler_of(sizes, budget, cost=deepcopy(cost), num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]
    epochs: list[list[list[int]]] = [[] for _ in those]
    observed = data.draw(st.sampled_from(those)).cost

    def draw() -> tuple[int, int, Any]:
        loops = [iter(sampler) for sampler in those]
        for epoch, loop in zip(epochs, loops, strict=True):
            epoch += islice(loop, data.draw(st.integers(0, 6)))
        begun = max(len(sizes) if one.epoch else one.state_dict()["stop"] for one in those)
        observe_more(observed, largest, factor)
        replan_together(those)
        even = max(map(len, epochs)) + data.draw(st.integers(0, 4))
        for epoch, loop in zip(epochs, loops, strict=True):
            epoch += islice(loop, even - len(epoch))
        states = [sampler.state_dict() for sampler in those]
        assert all(state == states[0] for state in states)
        for epoch, loop in zip(epochs, loops, strict=True):
            epoch += loop
        return begun, even, states[0]

    larger = replace(cost, margin=2 * (factor - 1))
    found = REFUSALS.accepted(draw, reasons_of(sizes, larger, budget, ranks, {}))
    if found is None:
        return
    begun, even, state = found
    corrected = those[0].plan.rules.cost
    assert corrected.margin > 0.01
    assert len({len(epoch) for epoch in epochs}) == 1
    assert counted(batch for epoch in epochs for batch in epoch) == Counter(range(len(sizes)))
    assert all(sum(sampler.steps) == len(epochs[0]) for sampler in those)
    assert {sampler.epoch for sampler in those} == {1}
    order = those[0].plan.order.indices((0, 0), begun, len(sizes))
    for batch in (batch for epoch in epochs for batch in epoch):
        if len(batch) > 1 and set(order.tolist()).issuperset(batch):
            assert corrected.batch_bytes(len(batch), sizes[batch].max(0)) <= budget
    for known in (corrected, cost):
        rest = samplers(sizes, known, budget, 1, oversize="alone", **options)[0]
        rest.load_state_dict(as_json(state))
        expected = counted(batch for epoch in epochs for batch in epoch[even:])
        assert (rest.epoch, expected.total()) == (1, 0) or counted(rest) == expected


def test_windows_that_were_not_begun_are_cut_anew() -> None:
    """From the second window on: of two samples under the corrected cost, of four before.

    A position that is asked for later is still that of the plan which dealt its window.
    """
    cost = measured(margin=0.01)
    sampler = sampler_of(np.full(300, 100), 500_000, cost=cost, window=20)
    run = sampler.tracked(loader_of(sampler))
    numbers = [len(next(run)) for _ in range(2)]
    before = run.position()
    observe_more(cost, 100, 2)
    assert sampler.replan() == cost.with_observed_margin().margin == sampler.replan()
    dealt = {name: before[name] for name in before if name != "replanned"}
    assert dealt.items() <= run.position().items()
    numbers += [len(batch) for batch in islice(run, 4)]
    assert run.position(back=2)["dealing"] == before["dealing"]
    again = sampler_of(np.full(300, 100), 500_000, cost=measured(margin=0.01), window=20)
    again.load_state_dict(before)
    assert counted(again).total() == 300 - 8
    numbers += map(len, run)
    assert numbers == [4] * 5 + [2] * 140
    assert len(sampler) == len(list(sampler)) == 150  # of the next epoch


def test_a_resumed_sampler_keeps_the_margin() -> None:
    """Under the same cost, loaded anew without its observations; under another one it does not."""
    sizes, options = np.arange(1, 200), {"budget": 500_000, "window": 50}
    cost = measured(margin=0)
    sampler = sampler_of(sizes, cost=cost, **options)
    batches = iter(sampler)
    next(batches)
    observe_more(cost, 100, 1.5)
    sampler.replan()
    next(batches)
    again = sampler_of(sizes, cost=measured(margin=0.0), **options)
    again.load_state_dict(as_json(sampler.state_dict()))
    assert again.plan.rules.cost.margin == sampler.plan.rules.cost.margin > 0.4
    assert again.cost.with_observed_margin().margin == sampler.plan.rules.cost.margin
    other = sampler_of(sizes, cost=measured(PaddedCost(unit_bytes=900)), **options)
    other.load_state_dict(sampler.state_dict())
    assert other.plan.rules.cost.margin == other.cost.with_observed_margin().margin == 0
    assert counted(again) == counted(other) == counted(batches)


def test_a_resumed_window_is_replanned() -> None:
    """A position inside a window, loaded and then corrected, still brings what is left."""
    sizes, options = np.arange(1, 200), {"budget": 500_000, "window": 100}
    sampler = sampler_of(sizes, cost=measured(margin=0.01), **options)
    seen = list(islice(sampler, 3))
    cost = measured(margin=0.01)
    again = sampler_of(sizes, cost=cost, **options)
    again.load_state_dict(sampler.state_dict())
    observe_more(cost, 100, 1.5)
    again.replan()
    left = again.batches_left
    assert len(again) == 3 + left
    rest = list(again)
    assert len(rest) == left
    assert counted(seen + rest) == Counter(range(199))


def test_what_cannot_be_corrected() -> None:
    """Nothing observed changes nothing; a cost by formula, and ranks apart, are refused."""
    sampler = sampler_of(cost=measured(margin=0.01), budget=500_000)
    plan = sampler.plan
    assert sampler.replan() == 0.01
    assert sampler.plan is plan
    with pytest.raises(OptionError, match="replan needs a cost"):
        sampler_of().replan()
    apart = MemoryBudgetBatchSampler([3, 4], measured(margin=0.01), 10**6, num_replicas=2, rank=0)
    with pytest.raises(OptionError, match="must agree on a margin"):
        apart.replan()


@pytest.mark.distributed
def test_ranks_replan_together(tmp_path: Path) -> None:
    """One rank sees a step that needs more: all replan from the same window on."""
    found = run_ranks(script("planning.replan"), tmp_path, 3)
    epochs = [epoch for epoch, _ in found]
    assert len({len(epoch) for epoch in epochs}) == 1
    assert counted(batch for epoch in epochs for batch in epoch) == Counter(range(2000))
    assert all(margins == found[0][1] for _, margins in found)
    assert found[0][1][0] == 0.01 < found[0][1][1]
