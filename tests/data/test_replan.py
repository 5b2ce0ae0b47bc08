"""A cost that is corrected while an epoch is drawn: what was begun stays, the rest is replanned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import measured
from tests.support.ranks import run_ranks
from tests.support.refusals import Refusals, reasons_of
from tests.support.strategies import problems
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, PaddedCost
from torchbudget.errors import MeasureWarning, OptionError

REFUSALS = Refusals()


@pytest.fixture(scope="module", autouse=True)
def most_cases_are_accepted() -> Iterator[None]:
    yield
    REFUSALS.check()


@st.composite
def cases(draw: st.DrawFn) -> Any:
    """Sizes, a measured cost, a budget, a number of ranks and options."""
    sizes, form, budget = draw(problems(packed=False))
    ranks = draw(st.integers(1, min(4, len(sizes))))
    window = draw(st.integers(ranks, max(len(sizes), ranks)))
    options = {draw(st.sampled_from(["window", "samples_per_step"])): window}
    options["shuffle"] = draw(st.booleans())
    cost = form if isinstance(form, MeasuredCost) else measured(form)
    cost = replace(cost, margin=0.01)
    return sizes, cost, max(budget, int(cost.batch_bytes(1, largest(sizes)))), ranks, options


def samplers(case: Any) -> list[MemoryBudgetBatchSampler]:
    sizes, cost, budget, ranks, options = case
    return [
        MemoryBudgetBatchSampler(sizes, cost, budget, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]


def observe_more(cost: MeasuredCost, size: Any, factor: float) -> None:
    """Report a step that needed more than was predicted."""
    with pytest.warns(MeasureWarning):
        cost.observe(1, size, int(factor * int(cost.batch_bytes(1, size))) + 1)


def largest(sizes: Any) -> Any:
    return tuple(map(int, sizes.max(0))) if sizes.ndim == 2 else int(sizes.max())


@given(cases(), st.floats(1.01, 1.8), st.data())
def test_the_rest_of_an_epoch_is_planned_anew(
    case: Any, factor: float, data: st.DataObject
) -> None:
    """Windows begun stay; later ones fit the corrected cost or hold one sample; all come once.

    Every position of the epoch can be resumed from: with the corrected cost what would have come
    comes, with the old one every remaining sample.
    """
    sizes, cost, budget, _, options = case
    case = (sizes, cost, budget, 1, options)
    [sampler] = samplers(case)
    before = list(sampler)
    observed = deepcopy(cost)
    [sampler] = samplers((sizes, observed, budget, 1, options))
    batches = iter(sampler)
    steps = iter(sampler.steps)
    read = list(islice(steps, data.draw(st.integers(0, 3))))
    drawn = [next(batches) for _ in range(data.draw(st.integers(0, len(before))))]
    ahead = sum(read) - len(drawn)
    order = sampler.plan.order.epoch(0).indices(0, len(sizes))
    stop = sampler.state_dict()["stop"] if drawn else len(order)  # the first window stays anyway
    later = set(order[stop:].tolist()) if stop else set()  # stop 0: the epoch is over
    observe_more(observed, largest(sizes), factor)
    margin = sampler.replan()
    assert margin == observed.with_observed_margin().margin == sampler.replan()
    first = len(drawn)
    drawn += batches
    assert drawn[:first] == before[:first]
    counts = Counter(index for batch in drawn for index in batch)
    assert counts == Counter(range(len(sizes)))
    corrected = observed.with_observed_margin()
    for batch in drawn[first:]:
        if later.issuperset(batch) and len(batch) > 1:
            assert corrected.batch_bytes(len(batch), sizes[batch].max(0)) <= budget
    assert sum(sampler.steps) == len(drawn)
    if ahead <= 0:  # steps that were read before they were drawn may be others now
        assert sum(read) + sum(steps) == len(drawn)
    done = data.draw(st.integers(0, len(drawn)))
    state = json.loads(json.dumps(sampler.state_dict(batches_done=done)))
    for known in (corrected, cost):
        again = MemoryBudgetBatchSampler(sizes, known, budget, oversize="alone", **options)
        again.load_state_dict(state)
        if done == len(drawn):
            assert again.epoch == 1
            continue
        rest = Counter(index for batch in again for index in batch)
        assert rest == Counter(index for batch in drawn[done:] for index in batch)


@pytest.mark.slow
@given(cases(), st.floats(1.01, 1.8), st.data())
def test_ranks_that_drew_unequally_far_stay_together(
    case: Any, factor: float, data: st.DataObject
) -> None:
    """From the same window on all ranks go on with the new plan: each sample once."""
    sizes, cost, budget, ranks, _ = case
    those = samplers(case)
    epochs: list[list[list[int]]] = [[] for _ in those]
    iterators = [iter(sampler) for sampler in those]

    def draw() -> bool:
        for epoch, iterator in zip(epochs, iterators, strict=True):
            epoch += islice(iterator, data.draw(st.integers(0, 6)))
        for more in range(1, 3):
            corrected = replace(cost, margin=more * (factor - 1))
            after = max(iterator.windows_begun for iterator in iterators)
            for sampler, epoch, iterator in zip(those, epochs, iterators, strict=True):
                iterator.replan(sampler.plan.with_cost(corrected), after=after)
                epoch += islice(iterator, data.draw(st.integers(0, 3)))
        for epoch, iterator in zip(epochs, iterators, strict=True):
            epoch += iterator
        return True

    # Samples of which no two fit together, under the corrected cost, may be dealt unevenly.
    corrected = replace(cost, margin=2 * (factor - 1))
    if not REFUSALS.accepted(draw, reasons_of(sizes, corrected, budget, ranks, {})):
        return
    counts = Counter(index for epoch in epochs for batch in epoch for index in batch)
    assert counts == Counter(range(len(sizes)))
    assert len({len(epoch) for epoch in epochs}) == 1


def test_windows_that_were_not_begun_are_cut_anew() -> None:
    """From the second window on: of two samples under the corrected cost, of four before."""
    cost = measured(margin=0.01)
    sampler = MemoryBudgetBatchSampler(np.full(100, 100), cost, 500_000, window=20)
    batches = iter(sampler)
    numbers = [len(next(batches)) for _ in range(2)]
    observe_more(cost, 100, 2)
    sampler.replan()
    numbers += map(len, batches)
    assert numbers == [4] * 5 + [2] * 40


def test_a_resumed_window_is_replanned() -> None:
    """A position inside a window, loaded and then corrected, still brings what is left."""
    sizes = np.arange(1, 200)
    sampler = MemoryBudgetBatchSampler(sizes, measured(margin=0.01), 500_000, window=100)
    batches = iter(sampler)
    seen = [index for _ in range(3) for index in next(batches)]
    cost = measured(margin=0.01)
    again = MemoryBudgetBatchSampler(sizes, cost, 500_000, window=100)
    again.load_state_dict(sampler.state_dict())
    observe_more(cost, 100, 1.5)
    again.replan()
    left = again.batches_left
    assert len(again) == 3 + left
    rest = list(again)
    assert len(rest) == left
    assert sorted([*seen, *(index for batch in rest for index in batch)]) == list(range(199))


def test_a_resumed_sampler_keeps_the_margin() -> None:
    """Under the same cost, loaded anew without its observations; under another one it does not."""
    sizes = np.arange(1, 200)
    cost = measured(margin=0.01)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 500_000, window=50)
    batches = iter(sampler)
    next(batches)
    observe_more(cost, 100, 1.5)
    sampler.replan()
    next(batches)
    state = sampler.state_dict()
    again = MemoryBudgetBatchSampler(sizes, measured(margin=0.01), 500_000, window=50)
    again.load_state_dict(state)
    assert again.plan.rules.cost.margin == sampler.plan.rules.cost.margin > 0.5
    assert again.cost.with_observed_margin().margin == sampler.plan.rules.cost.margin
    left = sorted(index for batch in again for index in batch)
    assert left == sorted(index for batch in batches for index in batch)
    other = MemoryBudgetBatchSampler(sizes, measured(PaddedCost(unit_bytes=900)), 500_000)
    other.load_state_dict(state)
    assert other.plan.rules.cost.margin == 0
    assert other.cost.with_observed_margin().margin == 0


def test_a_resumed_sampler_keeps_the_margin_of_a_cost_that_had_none() -> None:
    """A margin of 0 may be an int, in a cost or in a state that another format has kept."""
    sizes = np.arange(1, 200)
    cost = measured(margin=0)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 500_000, window=50)
    next(iter(sampler))
    observe_more(cost, 100, 1.5)
    sampler.replan()
    for state in (sampler.state_dict(), sampler.state_dict() | {"margins": [0, 1]}):
        again = MemoryBudgetBatchSampler(sizes, measured(margin=0.0), 500_000, window=50)
        again.load_state_dict(state)
        assert again.plan.rules.cost.margin == pytest.approx(state["margins"][1])
        assert again.plan.rules.cost.margin > 0.4


def test_the_next_epoch_has_the_corrected_cost() -> None:
    cost = measured(margin=0.01)
    sampler = MemoryBudgetBatchSampler(np.full(100, 100), cost, 500_000)
    assert {len(batch) for batch in sampler} == {4}
    observe_more(cost, 100, 1.5)
    sampler.replan()
    assert len(sampler) == len(list(sampler)) > 25
    assert sampler.replan() > 0.5


def test_nothing_observed_changes_nothing() -> None:
    cost = measured(margin=0.01)
    sampler = MemoryBudgetBatchSampler(np.full(100, 100), cost, 500_000)
    plan = sampler.plan
    assert sampler.replan() == 0.01
    assert sampler.plan is plan


def test_what_cannot_be_corrected() -> None:
    with pytest.raises(OptionError, match="only a measured cost"):
        MemoryBudgetBatchSampler([3], PaddedCost(unit_bytes=1), 10).replan()
    apart = MemoryBudgetBatchSampler([3, 4], measured(margin=0.01), 10**6, num_replicas=2, rank=0)
    with pytest.raises(OptionError, match="must agree on a margin"):
        apart.replan()


RANKS = """
import json
import sys
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tests.support.costs import measured
from torchbudget import MemoryBudgetBatchSampler

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
cost = measured(margin=0.01)
sizes = np.random.default_rng(0).integers(1, 300, 2000)
sampler = MemoryBudgetBatchSampler(sizes, cost, 1_000_000, window=200)
iterator, epoch, margins = iter(sampler), [], []
ahead = [next(iterator) for _ in range(3 * rank)]  # each rank's workers run ahead unequally far
for number in range(10_000):
    ahead += islice(iterator, 1)
    if not ahead:
        break
    epoch.append(ahead.pop(0))
    if number == 7 and rank == 1:
        cost.observe(10, 100, 1_300_000)
    if number % 5 == 4 and number < 40:
        margins.append(sampler.replan())
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([epoch, margins]))
"""


@pytest.mark.distributed
def test_ranks_replan_together(tmp_path: Path) -> None:
    """One rank sees a step that needs more: all replan from the same window on."""
    found = run_ranks(RANKS, tmp_path, 3)
    epochs = [epoch for epoch, _ in found]
    assert len({len(epoch) for epoch in epochs}) == 1
    assert sorted(index for epoch in epochs for b in epoch for index in b) == list(range(2000))
    assert all(margins == found[0][1] for _, margins in found)
    assert found[0][1][0] == 0.01 < found[0][1][1]
