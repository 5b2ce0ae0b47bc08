"""The laws that every sampler keeps, whatever its data, its budget and its options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.refusals import Refusals, reasons_of
from tests.support.resuming import in_parts
from tests.support.sampler_cases import cases, drawn_once, samplers, without_draws
from tests.support.samplers import TOKENS, counted
from torchbudget import MemoryBudgetBatchSampler
from torchbudget.errors import OptionError, UnevenRanksError

REFUSALS = Refusals()


@pytest.fixture(scope="module", autouse=True)
def most_cases_are_accepted() -> Iterator[None]:
    yield
    REFUSALS.check()


def drawn(those: Any, case: Any) -> list[list[list[int]]]:
    """Every rank's epoch; one that is refused is checked to say so at once."""
    epochs = REFUSALS.accepted(lambda: [list(one) for one in those], reasons_of(*case))
    if epochs is None:
        with pytest.raises((UnevenRanksError, OptionError)):
            next(iter(those[0]))
        return []
    return epochs


def check_bytes(sizes: Any, cost: Any, budget: int, options: Any, batches: Any) -> None:
    """No batch is over the budget, nor over what it may need on the host."""
    limits = [(cost, budget)]
    if "host_batch_bytes" in options:
        limits.append(options["host_batch_bytes"])
    for model, limit in limits:
        assert max(batch_costs(sizes, model, batches, options["size_multiple"])) <= limit


def batch_costs(sizes: Any, cost: Any, batches: list[list[int]], multiple: int) -> list[int]:
    """Bytes of each batch from the definition of the cost."""
    own = [-(-sizes[batch].astype(np.int64) // multiple) * multiple for batch in batches]
    if hasattr(cost, "base_bytes"):
        return [int(cost.base_bytes + cost.item_bytes(each).sum()) for each in own]
    longest = np.stack([each.max(axis=0) for each in own])
    return list(map(int, cost.batch_bytes(list(map(len, own)), longest)))


@given(cases())
def test_no_micro_batch_is_over_the_budget(case: Any) -> None:
    """Law 1: the predicted cost of every micro-batch is within the budget; none is empty.

    So is what it needs on the host, where that is limited too.
    """
    sizes, cost, budget, ranks, options = case
    for batches in drawn(samplers(sizes, cost, budget, ranks, **options), case):
        assert all(batches)
        if batches:
            check_bytes(sizes, cost, budget, options, batches)
        assert all(len(batch) <= options.get("max_batch_size", len(batch)) for batch in batches)


@given(cases())
def test_every_index_comes_once_over_all_ranks(case: Any) -> None:
    """Law 2: each index comes once in an epoch; with drop_last the report counts the missing ones.

    With num_samples each index comes in every whole pass, and at most once more.
    """
    check_indices(case)


@given(cases(draws=True))
def test_every_drawn_index_comes_once_over_all_ranks(case: Any) -> None:
    """Law 2, of draws: by weights each drawn index comes once; with replacement, as many as asked.

    Each of them is one of the data set.
    """
    check_indices(case)


def check_indices(case: Any) -> None:
    sizes, cost, budget, ranks, options = case
    those = samplers(sizes, cost, budget, ranks, **options)
    epochs = drawn(those, case)
    if not epochs:
        return
    those[0].set_epoch(0)
    counts = counted(batch for batches in epochs for batch in batches)
    total = options.get("num_samples", len(sizes))
    dropped = those[0].report().dropped
    assert counts.total() == total - dropped
    if not options["drop_last"]:
        assert dropped == 0
    assert set(counts) <= set(range(len(sizes)))
    if options.get("replacement"):
        return
    if not drawn_once(options):
        assert set(counts.values()) == {1}
    elif not options["drop_last"]:
        passes = total // len(sizes)
        assert all(passes <= counts[index] <= passes + 1 for index in range(len(sizes)))
        assert sum(counts[index] == passes for index in range(len(sizes))) == (
            len(sizes) - total % len(sizes)
        )
    else:
        assert all(count <= -(-total // len(sizes)) for count in counts.values())


@given(cases())
def test_every_rank_has_as_many_micro_batches_and_steps(case: Any) -> None:
    """Law 3: numbers of micro-batches and of steps are the same on every rank."""
    sizes, cost, budget, ranks, options = case
    those = samplers(sizes, cost, budget, ranks, **options)
    epochs = drawn(those, case)
    if not epochs:
        return
    steps = [list(sampler.steps) for sampler in those]
    assert len({len(batches) for batches in epochs}) == 1
    assert len({tuple(counts) for counts in steps}) == 1
    assert sum(steps[0]) == len(epochs[0])
    if "samples_per_step" not in options:
        assert set(steps[0]) <= {1}


@given(cases(), st.data())
def test_a_step_holds_samples_per_step(case: Any, data: st.DataObject) -> None:
    """With samples_per_step every step but the last holds exactly that many over all ranks."""
    sizes, cost, budget, ranks, options = case
    options.pop("window", None)
    options.setdefault("samples_per_step", data.draw(st.integers(ranks, max(len(sizes), ranks))))
    if options["drop_last"]:
        options["samples_per_step"] = min(
            options["samples_per_step"], options.get("num_samples", len(sizes))
        )
    those = samplers(sizes, cost, budget, ranks, **options)
    epochs = drawn(those, case)
    if not epochs:
        return
    at = 0
    numbers = []
    for count in those[0].steps:
        numbers.append(sum(len(b) for batches in epochs for b in batches[at : at + count]))
        at += count
    each = options["samples_per_step"]
    assert set(numbers[:-1]) <= {each}
    if options["drop_last"]:
        assert numbers[-1] == each
    else:
        assert 0 < numbers[-1] < 2 * each + ranks


@given(cases())
def test_given_numbers_are_those_of_every_epoch_and_full_step(case: Any) -> None:
    """`len` is one number with the one; all full steps have as many with the other."""
    sizes, cost, budget, ranks, options = case
    sampler = samplers(sizes, cost, budget, ranks, **options)[0]
    lengths = set()
    for _ in range(3):
        epoch = REFUSALS.accepted(lambda: (len(sampler), list(sampler.steps)), reasons_of(*case))
        if epoch is None:
            return
        lengths.add(epoch[0])
        *full, last = epoch[1]
        per_step = options.get("micro_batches_per_step")
        if per_step is not None:
            assert set(full) <= {per_step}
            assert last <= per_step
        if REFUSALS.accepted(lambda: list(sampler), reasons_of(*case)) is None:
            return
    per_epoch = options.get("batches_per_epoch")
    if per_epoch is not None:
        assert lengths <= {per_epoch} or per_epoch == "auto"
        assert len(lengths) == 1


@given(cases())
def test_len_is_what_comes(case: Any) -> None:
    """Law 5: len is the number of batches of this epoch, and of the next."""
    sizes, cost, budget, ranks, options = case
    for sampler in samplers(sizes, cost, budget, ranks, **options)[:1]:
        for _ in range(2):
            expected = REFUSALS.accepted(sampler.__len__, reasons_of(*case))
            if expected is None:
                return
            assert sampler.batches_left == expected
            assert len(list(sampler)) == expected


@given(cases(), st.data())
def test_resuming_goes_on_exactly(case: Any, data: st.DataObject) -> None:
    """Law 4 on the same ranks: after any batch, what comes is what would have come.

    Law 5: `len` stays the whole epoch's, and `batches_left` is what comes.
    """
    sizes, cost, budget, ranks, options = case
    rank = data.draw(st.integers(0, ranks - 1))

    def make() -> MemoryBudgetBatchSampler:
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


@pytest.mark.filterwarnings("ignore::torchbudget.errors.OtherNumbersWarning")
@given(cases(), st.data())
def test_resuming_on_other_ranks_brings_every_remaining_sample_once(
    case: Any, data: st.DataObject
) -> None:
    """Law 4 on other ranks and under another budget, several times: the rest comes exactly once.

    What comes stays within the budget in force and is the same number on every rank. Law 5: `len`
    is what was done, as the ranks were then, and what comes.
    """
    sizes, cost, budget, ranks, options = case
    options = without_draws(options) | {"drop_last": False}
    those = samplers(sizes, cost, budget, ranks, **options)
    remaining = Counter(range(len(sizes)))
    before = 0
    for _ in range(3):
        begun = REFUSALS.accepted(
            partial(lambda sampler: next(iter(sampler)), copy(those[0])),
            reasons_of(sizes, cost, budget, ranks, options),
        )
        if begun is None:
            return
        left = those[0].batches_left
        assert len(those[0]) == before + left
        done = data.draw(st.integers(0, max(left - 1, 0)))
        before += done
        for sampler in those:
            batches = iter(sampler)
            for _ in range(done):
                batch = next(batches)
                assert batch_costs(sizes, cost, [batch], options["size_multiple"])[0] <= budget
                remaining.subtract(batch)
        state = those[0].state_dict()
        for sampler in those[1:]:
            assert sampler.state_dict() == state
        ranks = data.draw(st.integers(1, 16))
        budget = budget * data.draw(st.sampled_from([1, 1, 2, 3]))
        left = sum(remaining.values())
        each = options.get("samples_per_step", left) // options.get("micro_batches_per_step", 1)
        if ranks > min(left, options.get("window", left), each):
            ranks = 1
        those = samplers(sizes, cost, budget, ranks, **options)
        for sampler in those:
            sampler.load_state_dict(state)
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
    last = list(samplers(sizes, TOKENS, budget, ranks, **options)[0].steps)[-1]
    done = len(whole[0]) - data.draw(st.integers(1, last))
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


@given(cases(), st.data())
def test_the_state_is_small_plain_and_counts_for_the_loop(case: Any, data: st.DataObject) -> None:
    """Law 7, and the loop's own count: a state with batches_done is that of then.

    A DataLoader's workers draw ahead; the state after k batches must not depend on how far.
    """
    sizes, cost, budget, ranks, options = case
    sampler = samplers(sizes, cost, budget, ranks, **options)[0]
    batches = iter(sampler)
    states = [sampler.state_dict()]
    more = REFUSALS.accepted(
        lambda: [sampler.state_dict() for _ in islice(batches, 6)], reasons_of(*case)
    )
    if more is None:
        return
    states += more
    for done, state in enumerate(states):
        assert sampler.state_dict(batches_done=done) == state
        assert json.loads(json.dumps(state)) == state
        bits = state["stop"] - state["start"]
        assert len(json.dumps(state)) <= 1000 + 2 * bits // 6 + 8


@given(cases(fits=False), st.sampled_from(["skip", "alone"]))
def test_oversize_samples_are_skipped_or_stand_alone(case: Any, oversize: str) -> None:
    """Law 2 with oversize: the skipped ones are counted and never come; or each comes alone."""
    sizes, cost, budget, ranks, options = case
    options = without_draws(options) | {"drop_last": False}
    multiple = options["size_multiple"]
    over = {
        index
        for index, bytes_ in enumerate(
            batch_costs(sizes, cost, [[one] for one in range(len(sizes))], multiple)
        )
        if bytes_ > budget
    }
    if oversize == "skip" and len(sizes) - len(over) < ranks:
        return
    those = samplers(sizes, cost, budget, ranks, oversize=oversize, **options)
    epochs = drawn(those, case)
    if not epochs:
        return
    indices = counted(batch for batches in epochs for batch in batches)
    those[0].set_epoch(0)
    report = those[0].report()
    assert report.skipped == (len(over) if oversize == "skip" else 0)
    expected = set(range(len(sizes))) - (over if oversize == "skip" else set())
    assert indices == Counter(expected)
    for batches in epochs:
        for batch in batches:
            if over & set(batch):
                assert len(batch) == 1
            else:
                assert batch_costs(sizes, cost, [batch], multiple)[0] <= budget
    assert report.over_budget == (len(over) if oversize == "alone" else 0)
