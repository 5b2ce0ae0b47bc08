"""The laws that every sampler keeps, whatever its data, its budget and its options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.support.oracles import bytes_of
from tests.support.refusals import REFUSALS, Refused, reasons_of
from tests.support.sampler_cases import (
    cases,
    check_batch,
    check_shapes,
    check_state_size,
    check_units,
    given_length,
    samplers,
)
from tests.support.sampler_chain import Chain
from tests.support.samplers import TOKENS, counted
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cursor import Cursor


@pytest.fixture(scope="module", autouse=True)
def small_windows_are_dealt_anew_in_parts_too() -> Iterator[None]:
    with patch("torchbudget.plan.cursor.PART", 16):
        yield


def padded_size(sizes: Any, batch: Any, cost: Any, multiple: int) -> Any:
    """The padded size of a batch, shape `(d,)`; of packed samples the sum."""
    own = sizes[batch].reshape(len(batch), -1).astype(np.int64)
    if hasattr(cost, "base_bytes"):
        return own.sum(axis=0)
    return -(-own.max(axis=0) // multiple) * multiple


def drawn(those: Any, case: Any) -> list[list[list[int]]]:
    """Every rank's epoch; one that is refused is checked to say so at once."""
    epochs = REFUSALS.accepted(lambda: [list(one) for one in those], reasons_of(*case))
    if epochs is None:
        if not given_length(case[-1]):
            with pytest.raises((UnevenRanksError, OptionError)):
                next(iter(those[0]))
        return []
    return epochs


@given(cases())
def test_epochs_keep_their_laws(case: Any) -> None:
    """Laws 1, 2, 3 and 5 of two epochs: bytes, indices, ranks and steps, and `len`."""
    sizes, cost, budget, ranks, options = case
    those = samplers(sizes, cost, budget, ranks, **options)
    each = options.get("samples_per_step")
    for epoch in range(2):
        left = those[0].steps_left if "steps_per_epoch" in options else None
        length = REFUSALS.accepted(lambda: len(those[0]), reasons_of(*case))
        is_pass = length is not None and not given_length(options)
        report = those[0].report() if is_pass else None
        dropped = 0 if report is None else report.dropped
        epochs = drawn(those, case)
        if not epochs or length is None:
            return
        assert {len(batches) for batches in epochs} == {length}
        assert {one.epoch for one in those} == {epoch + 1}
        for batches in epochs:
            for batch in batches:
                check_batch(sizes[batch], cost, budget, options)
                if "max_shapes" not in options:
                    expected = bytes_of(sizes, cost, batch, options["size_multiple"])
                    assert those[0].batch_bytes(batch) == expected
        if "max_shapes" in options:
            check_shapes(those[0], epochs, sizes)
            rows = [those[0].shape_of(len(b), sizes[b].max())[0] for mine in epochs for b in mine]
            lacks = [n - len(b) for n, b in zip(rows, chain(*epochs), strict=True)]
            if report is not None:
                assert report.masked_rows == sum(lacks)
                assert ranks > 1 or np.count_nonzero(lacks) <= report.windows
        if "groups" in options:
            of_ranks = [[set(options["groups"][batch]) for batch in mine] for mine in epochs]
            assert all(len(found) == 1 for mine in of_ranks for found in mine)
            assert each or all(mine == of_ranks[0] for mine in of_ranks)
        steps = those[0].steps
        assert all(one.steps == steps for one in those)
        if "units" in options:
            check_units(epochs, steps, options)
        assert sum(steps) == length
        if each is None:
            assert set(steps) <= {1}
        else:
            ends = np.cumsum(steps)
            rounds = [sum(map(len, batches)) for batches in zip(*epochs, strict=True)]
            *full, last = np.add.reduceat(rounds, ends - np.array(steps)).tolist()
            if "steps_per_epoch" in options:
                assert len(steps) == options["steps_per_epoch"] == left
                if "weights" in options:
                    assert {*full, last} == {each}
                continue
            if "units" in options:
                continue
            assert set(full) <= {each}
            assert last == each if options["drop_last"] else 0 < last < 2 * each + ranks
        if is_pass:
            counts = counted(batch for batches in epochs for batch in batches)
            assert set(counts.values()) == {1}
            assert counts.keys() <= set(range(len(sizes)))
            assert len(sizes) - len(counts) == dropped
            assert options["drop_last"] or not dropped


@given(cases(), st.integers(0, 3), st.data())
def test_records_say_where_the_epoch_stands(case: Any, epoch: int, data: st.DataObject) -> None:
    """Sizes, ends of steps, and law 7: a small and plain state."""
    sizes, cost, budget, ranks, options = case
    sampler = data.draw(st.sampled_from(samplers(sizes, cost, budget, ranks, **options)))
    sampler.set_epoch(epoch)
    plan, batches = sampler.plan, REFUSALS.accepted(lambda: list(sampler), reasons_of(*case))
    if batches is None:
        return
    records = list(plan.micro_batches(Cursor(epoch=epoch), rank=sampler.rank))
    assert [record.indices.tolist() for record in records] == batches
    ends = np.cumsum(sampler.steps) - 1
    assert [k for k, record in enumerate(records) if record.ends_step] == ends.tolist()
    for record in records:
        expected = padded_size(sizes, record.indices, cost, options["size_multiple"])
        if "max_shapes" in options:
            longest = sizes[record.indices].max()
            expected = np.array([sampler.shape_of(len(record.indices), longest)[1]])
        assert record.padded_size.tolist() == expected.tolist()
    last = records[-1].after
    assert (last.epoch, last.done) == (epoch + 1, 0)
    place = data.draw(st.integers(0, len(records) - 1))
    order = sampler.state_dict()["order"]
    state = records[place].after.encode(order)
    text = json.dumps(state)
    assert json.loads(text) == state
    check_state_size(text, state["stop"] - state["start"])


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Samplers of all kinds, with oversize samples too, whose starts are drawn."""
    oversize = draw(st.sampled_from(["raise", "raise", "skip", "alone"]))
    case = draw(cases(fits=oversize == "raise", most=60))
    try:
        return Chain(draw(st.randoms(use_true_random=False)), case, oversize)
    except Refused:  # no sample fits the budget
        reject()


@given(chains())
def test_it_is_stopped_anywhere_and_started_on_any_ranks(chain: Chain) -> None:
    """Laws 1 to 5 and 7 over all starts: see `tests.support.sampler_chain`."""
    REFUSALS.accepted(chain.check, {})


@given(
    ranks=st.integers(2, 6),
    each=st.integers(0, 20),
    steps=st.integers(1, 3),
    budget=st.sampled_from([60, 200]),
    data=st.data(),
)
def test_a_dropped_tail_stays_dropped(
    ranks: int, each: int, steps: int, budget: int, data: st.DataObject
) -> None:
    """Law 4 with drop_last, where the last step's few samples are fewer than the ranks.

    Resumed within the last step that stays, on the same ranks or others, none of them comes back.
    """
    each += ranks
    n = steps * each + data.draw(st.integers(1, min(ranks, each) - 1))
    sizes = np.random.default_rng(n).integers(1, 50, n)
    options = {"samples_per_step": each, "drop_last": True}
    those = samplers(sizes, TOKENS, budget, ranks, **options)
    whole = drawn(those, (sizes, TOKENS, budget, ranks, options))
    if not whole:
        return
    done = len(whole[0]) - data.draw(st.integers(1, those[0].steps[-1]))
    for sampler in those:
        sampler.set_epoch(0)
        list(islice(sampler, done))
    state = those[0].state_dict()
    begun = [batch for batches in whole for batch in batches[:done]]
    number = data.draw(st.sampled_from([1, ranks]))
    others = samplers(sizes, TOKENS, budget, number, **options)
    for sampler in others:
        sampler.load_state_dict(state)
    comes = drawn(others, (sizes, TOKENS, budget, number, options))
    rest = [batch for batches in comes for batch in batches]
    assert counted(begun + rest) == counted(batch for batches in whole for batch in batches)
