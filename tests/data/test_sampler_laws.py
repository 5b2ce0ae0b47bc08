"""The laws that every sampler keeps, whatever its data, its budget and its options."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import copy
from functools import partial
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import bytes_of
from tests.support.refusals import Refusals, reasons_of
from tests.support.resuming import as_json, in_parts
from tests.support.sampler_cases import (
    cases,
    check_batch,
    check_shapes,
    check_state_size,
    check_units,
    samplers,
    sharing_ranks,
    whole_bytes,
)
from tests.support.samplers import TOKENS, counted
from tests.support.strategies import formulas
from torchbudget.errors import DiscardedStateWarning, OptionError, UnevenRanksError
from torchbudget.plan.cursor import Cursor

REFUSALS = Refusals()


@pytest.fixture(scope="module", autouse=True)
def most_cases_are_accepted() -> Iterator[None]:
    with patch("torchbudget.plan.cursor.PART", 16):  # small windows are dealt anew in parts, too
        yield
    REFUSALS.check()


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
        if "batches_per_epoch" not in case[-1]:
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
        length = REFUSALS.accepted(lambda: len(those[0]), reasons_of(*case))
        is_pass = length is not None and "batches_per_epoch" not in options
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
            if "units" in options:
                continue
            assert set(full) <= {each}
            assert last == each if options["drop_last"] else 0 < last < 2 * each + ranks
        if "batches_per_epoch" not in options:
            counts = counted(batch for batches in epochs for batch in batches)
            assert set(counts.values()) == {1}
            assert counts.keys() <= set(range(len(sizes)))
            assert len(sizes) - len(counts) == dropped
            assert options["drop_last"] or not dropped


@given(cases(), st.integers(0, 3), st.data())
def test_records_say_where_the_epoch_stands(case: Any, epoch: int, data: st.DataObject) -> None:
    """Laws 4 and 7 of each record: sizes, ends of steps, and a small state of exactly the rest."""
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
    if place < len(records) - 1:
        found = Cursor.decode(json.loads(text), order, plan)
        assert found.done == place + 1
        assert plan.batches_left(found) == len(records) - place - 1
        rest = plan.micro_batches(found, rank=sampler.rank)
        assert [record.indices.tolist() for record in rest] == batches[place + 1 :]


@given(cases(epochs="given"), st.data())
def test_epochs_of_a_given_length_go_on_in_the_order(case: Any, data: st.DataObject) -> None:
    """Epochs of K batches read pass after pass, on any ranks; the next `set_epoch` changes nothing.

    Of a loaded state K − done batches are left. Another epoch begins with a fresh pass.
    """
    sizes, cost, budget, ranks, options = case
    number, state = options["batches_per_epoch"], None
    came: Counter[int] = Counter()
    for _ in range(data.draw(st.integers(1, 4))):
        those = samplers(sizes, cost, budget, ranks, **options)
        for one in those:
            if state is not None:
                one.load_state_dict(state)
            one.set_epoch(one.epoch)
        done = 0 if state is None else state["done"]
        left = those[0].batches_left
        assert left == number - done
        assert len(those[0]) == number
        some = data.draw(st.integers(0, left))
        epochs = REFUSALS.accepted(
            lambda: [list(islice(one, some)) for one in those],  # noqa: B023
            reasons_of(sizes, cost, budget, ranks, options) | {"left of epoch": state is not None},
        )
        if epochs is None:
            return
        assert {len(batches) for batches in epochs} == {some}
        came += counted(batch for batches in epochs for batch in batches)
        state = those[0].state_dict()
        assert all(as_json(one.state_dict()) == state for one in those)
        assert state["done"] == (done + some) % number
        ranks = data.draw(st.integers(1, min(8, sharing_ranks(options, len(sizes)))))
        budget *= data.draw(st.sampled_from([1, 1, 2]))
    if not (options["drop_last"] or "weights" in options):
        passes = [came[index] for index in range(len(sizes))]
        assert max(passes) - min(passes) <= 1
    begun, fresh = those[0], samplers(sizes, cost, budget, ranks, **options)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiscardedStateWarning)
        begun.set_epoch(state["epoch"] + 2)
    fresh.set_epoch(begun.epoch)
    assert fresh.state_dict() == begun.state_dict()
    assert (begun.batches_left, fresh.batches_left) == (number, number)


@given(cases(), st.data())
def test_resuming_goes_on_exactly(case: Any, data: st.DataObject) -> None:
    """Law 4 on the same ranks: after any batch, what comes is what would have come.

    Law 5: `len` stays the whole epoch's, and `batches_left` is what comes.
    """
    sizes, cost, budget, ranks, options = case
    rank = data.draw(st.integers(0, ranks - 1))

    def make() -> Any:
        return samplers(sizes, cost, budget, ranks, **options)[rank]

    sampler = make()
    epochs = REFUSALS.accepted(lambda: (list(sampler), list(sampler)), reasons_of(*case))
    if epochs is None:
        return
    whole, following = epochs
    done = data.draw(st.integers(0, len(whole)))
    more = data.draw(st.integers(0, len(whole) - done))
    found = in_parts(make, [done, more])
    assert found == (whole if done + more < len(whole) else whole + following)
    begun, resumed = make(), make()
    list(islice(begun, done))
    for _ in range(2):  # loading again begins there again
        resumed.load_state_dict(begun.state_dict())
        next(iter(resumed))
    resumed.load_state_dict(begun.state_dict())
    if done < len(whole):
        assert len(resumed) == len(whole)
        assert resumed.batches_left == len(whole) - done
        assert list(resumed) == whole[done:]
    assert list(resumed) == following


@given(cases(epochs="passes"), st.data())
def test_resuming_elsewhere_brings_every_remaining_sample_once(
    case: Any, data: st.DataObject
) -> None:
    """Law 4 on other ranks, and under other budgets and costs, several times.

    What comes keeps the limits in force and is the same number on every rank. Law 5: `len` is what
    was done, as the ranks were then, and what comes.
    """
    sizes, cost, budget, ranks, options = case
    options["drop_last"] = False
    remaining, before = Counter(range(len(sizes))), 0
    those = samplers(sizes, cost, budget, ranks, **options)
    for _ in range(3):
        reasons = reasons_of(sizes, cost, budget, ranks, options)
        begun = REFUSALS.accepted(partial(lambda one: next(iter(one)), copy(those[0])), reasons)
        if begun is None:
            return
        number = those[0].batches_left
        assert len(those[0]) == before + number
        done = data.draw(st.integers(0, max(number - 1, 0)))
        before += done
        for sampler in those:
            found = list(islice(sampler, done))
            for batch in found:
                check_batch(sizes[batch], cost, budget, options)
            remaining.subtract(counted(found))
        state = those[0].state_dict()
        check_state_size(json.dumps(state), state["stop"] - state["start"])
        for sampler in those[1:]:
            assert sampler.state_dict() == state
        ranks = data.draw(st.integers(1, 8))
        budget *= data.draw(st.sampled_from([1, 1, 2, 3]))
        if data.draw(st.integers(0, 3)) == 0:
            axes, largest = sizes[0].size, sizes.max(axis=0) + options["size_multiple"]
            cost = data.draw(formulas(axes, packed=False))
            least = max(int(cost.batch_bytes(1, largest)), whole_bytes(sizes, cost, options))
            budget = least * data.draw(st.integers(1, 4))
        left = sum(remaining.values())
        if "groups" in options:  # each of them is shared by the ranks
            of_groups = np.bincount(options["groups"], [remaining[i] for i in range(len(sizes))])
            left = int(min(of_groups[of_groups > 0], default=1))
        ranks = ranks if ranks <= sharing_ranks(options, left) else 1
        those = samplers(sizes, cost, budget, ranks, **options)
        for sampler in those:
            sampler.load_state_dict(as_json(state))
    rest = drawn(those, (sizes, cost, budget, ranks, options))
    if rest:
        remaining.subtract(index for batches in rest for batch in batches for index in batch)
        assert not any(remaining.values())
        assert len({len(batches) for batches in rest}) == 1


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


@given(cases(fits=False, epochs="passes"), st.sampled_from(["skip", "alone"]))
def test_oversize_samples_are_skipped_or_stand_alone(case: Any, oversize: str) -> None:
    """Law 2 with oversize: the skipped ones are counted and never come; or each comes alone."""
    sizes, cost, budget, ranks, options = case
    options["drop_last"] = False
    if oversize == "alone":
        options.pop("max_shapes", None)
    multiple = options["size_multiple"]
    every = range(len(sizes))
    over = {index for index in every if bytes_of(sizes, cost, [index], multiple) > budget}
    skipped = over if oversize == "skip" else set()
    if len(sizes) - len(skipped) < ranks:
        return
    those = samplers(sizes, cost, budget, ranks, oversize=oversize, **options)
    if "groups" in options:  # those of the samples that are drawn may be too small
        kept = [index for index in every if index not in skipped]
        those_kept = {name: options[name][kept] for name in ("groups", "units") if name in options}
        case = (sizes, cost, budget, ranks, options | those_kept)
    report = REFUSALS.accepted(those[0].report, reasons_of(*case))
    epochs = drawn(those, case)
    if not epochs or report is None:
        return
    assert (report.skipped, report.over_budget) == (len(skipped), len(over) - len(skipped))
    batches = [batch for batches in epochs for batch in batches]
    assert counted(batches) == Counter(set(every) - skipped)
    for batch in batches:
        check_batch(sizes[batch], cost, budget, options | {"oversize": oversize})
