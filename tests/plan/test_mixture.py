"""Mixtures: sources take turns by their shares, and each is passed over in an order of its own."""

from __future__ import annotations

import json
from collections import Counter
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.samplers import counted, sampler_of
from torchbudget import Mixture, PaddedCost
from torchbudget.errors import OptionError, StateMismatchError
from torchbudget.plan.mixture import Turns
from torchbudget.plan.permutation import Permutation

RNG = np.random.default_rng(5)
NAMES = ["web", "code", "papers"]
SHARES = {"web": 0.7, "code": 0.2, "papers": 0.1}
SOURCES = RNG.permutation(np.repeat(NAMES, [7000, 2000, 1000]))
OF = {name: np.flatnonzero(name == SOURCES) for name in NAMES}
# Each source has lengths of its own.
MEANS = np.select([SOURCES == "web", SOURCES == "code"], [4.0, 5.5], 3.0)
SIZES = np.clip(RNG.lognormal(MEANS, 0.9), 1, 4000).astype(np.int64)


def mixed(shares: Any = None, by: Any = "size", **options: Any) -> Any:
    """Steps of 500 samples of the three sources."""
    mixture = Mixture(SOURCES, SHARES if shares is None else shares, by)
    given = {"samples_per_step": 500, "steps_per_epoch": 64, "weights": mixture}
    return sampler_of(SIZES, 8000, **given | options)


def steps_of(sampler: Any) -> list[list[int]]:
    """The samples of each optimizer step of the coming epoch, of one rank."""
    batches = list(sampler)
    lasts = [*accumulate(sampler.steps, initial=0)]
    return [[*chain.from_iterable(batches[start:stop])] for start, stop in pairwise(lasts)]


def counts_of(samples: list[int]) -> list[int]:
    """Samples of each source."""
    counts = Counter(SOURCES[samples].tolist())
    return [counts[name] for name in NAMES]


# ---------------------------------------------------------------------- turns


WEIGHTS = st.one_of(
    st.lists(st.integers(1, 2**40), min_size=1, max_size=24),
    st.lists(st.integers(0, 40).map(lambda power: 2**power), min_size=1, max_size=24),
    st.integers(2, 60).map(lambda number: [1] * number),
)


@given(WEIGHTS, st.integers(0, 2**38), st.integers(0, 400), st.lists(st.booleans(), max_size=24))
def test_at_each_position_one_source_has_its_turn(
    weights: list[int], position: int, length: int, out: list[bool]
) -> None:
    """Draws step by 0 or 1, add up, stay within two draws of the share; `within` has them all."""
    left_out = [
        weight and not any(out[number : number + 1]) for number, weight in enumerate(weights)
    ]
    weights = [weight * stays for weight, stays in zip(weights, left_out, strict=True)]
    if not any(weights):
        weights[0] = 1
    drawn = tuple(range(len(weights)))
    turns = Turns(drawn, tuple(weights))
    start = sum(drawn) + position
    before = [turns.before(start + more) for more in range(length + 1)]
    turn_of = {}
    for source, draw, places in turns.within(start, start + length):
        assert draw == before[0][source]
        for number, place in enumerate(places.tolist()):
            assert turn_of.setdefault(place, (source, draw + number)) == (source, draw + number)
    assert sorted(turn_of) == list(range(length))
    for place, (now, then) in enumerate(pairwise(before)):
        steps = np.subtract(then, now)
        assert sorted(steps.tolist()) == [*[0] * (len(weights) - 1), 1]
        source = int(steps.argmax())
        assert turn_of[place] == (source, now[source])
    for first, has, weight in zip(drawn, before[-1], weights, strict=True):
        share = weight / sum(weights)
        # Parts are rounded to 2⁻³⁶ at each node.
        assert abs(has - first - (position + length) * share) < 2 + (position + length) * 2.0**-32


# ---------------------------------------------------------------------- samples and shares


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("by", ["size", "samples"])
def test_windows_have_as_many_samples_as_the_turns_say(by: str, shuffle: bool) -> None:
    """In every step of three epochs; each source's samples once in each of its passes."""
    sampler = mixed(by=by, shuffle=shuffle)
    turns, done = sampler.plan.order.sources.turns, 0
    names = sampler.plan.order.sources.names
    of_source: dict[str, list[int]] = {name: [] for name in NAMES}
    for _ in range(3):
        for samples in steps_of(sampler):
            now, then = turns.before(done), turns.before(done + 500)
            expected = dict(zip(names, np.subtract(then, now).tolist(), strict=True))
            assert counts_of(samples) == [expected[name] for name in NAMES]
            done += 500
            for name in NAMES:
                of_source[name] += [one for one in samples if SOURCES[one] == name]
    for name, samples in of_source.items():
        own = OF[name]
        counts = np.bincount(samples, minlength=len(SIZES))[own]
        assert counts.max() - counts.min() <= 1
    weight = np.array([SHARES[name] for name in NAMES])
    if by == "size":
        weight = weight / [SIZES[OF[name]].mean() for name in NAMES]
    shares = np.array([len(of_source[name]) for name in NAMES]) / done
    assert np.abs(shares - weight / weight.sum()).max() < 2 / done


def test_each_pass_of_a_source_has_an_order_of_its_own() -> None:
    """In the data set's order it has none."""
    mixture = Mixture(["a"] * 20, {"a": 1})
    given = {"weights": mixture, "batches_per_epoch": 1}
    for shuffle, orders in ((True, 6), (False, 1)):
        order = sampler_of(range(1, 21), **given, shuffle=shuffle).plan.order
        passes = [
            tuple(order.indices((epoch, 0), start, start + 20).tolist())
            for epoch in range(2)
            for start in (0, 20, 40)
        ]
        assert {tuple(sorted(one)) for one in passes} == {tuple(range(20))}
        assert len({*passes}) == orders


def test_shares_of_sizes_scatter_as_the_lengths_do() -> None:
    """Of any 64 steps one after another: within five standard deviations of each source's own."""
    steps = steps_of(mixed(steps_per_epoch=400))
    tokens = np.array(
        [[SIZES[[i for i in own if SOURCES[i] == name]].sum() for name in NAMES] for own in steps]
    )
    numbers = np.array([counts_of(own) for own in steps])
    spread = np.array([SIZES[OF[name]].std() for name in NAMES])
    for first in range(len(steps) - 63):
        own = tokens[first : first + 64].sum(axis=0)
        variances = numbers[first : first + 64].sum(axis=0) * spread**2
        for number, name in enumerate(NAMES):
            share = SHARES[name]
            others = variances.sum() - variances[number]
            deviation = np.sqrt((1 - share) ** 2 * variances[number] + share**2 * others)
            assert abs(own[number] / own.sum() - share) < 5 * deviation / own.sum()


def test_shares_of_sizes_are_exact_over_whole_passes() -> None:
    """One pass over web, two over code, three over papers: within 0.05 points of the shares."""
    passes = dict(zip(NAMES, [1, 2, 3], strict=True))
    totals = {name: int(SIZES[OF[name]].sum()) * passes[name] for name in NAMES}
    sampler = mixed(totals, samples_per_step=1000, steps_per_epoch=14)
    report = sampler.report()
    counts = counted(sampler)
    assert [{counts[i] for i in OF[name].tolist()} for name in NAMES] == [
        {1},
        {2},
        {3},
    ]
    assert report.passes == passes
    tokens = {name: sum(SIZES[one] * counts[int(one)] for one in OF[name]) for name in NAMES}
    for name, total in totals.items():
        share = tokens[name] / sum(tokens.values())
        assert abs(share - total / sum(totals.values())) < 0.0005


def test_the_report_has_what_comes() -> None:
    """The rest of an epoch that was begun; passes from the first epoch on."""
    sampler = mixed(steps_per_epoch=9)
    first = [*chain.from_iterable(sampler)]
    batches = iter(sampler)
    first += next(batches)
    first += chain.from_iterable(islice(batches, sampler.steps[0] - 1))
    sampler.load_state_dict(sampler.state_dict())
    report, left = sampler.report(), sampler.batches_left
    samples = [*chain.from_iterable(sampler)]
    assert (report.batches, report.steps, report.samples) == (left, 8, len(samples))
    assert report.dropped == 0
    counts = counts_of(first + samples)
    assert [report.passes[name] * len(OF[name]) for name in NAMES] == pytest.approx(counts)
    assert "passes over web" in str(report)


def test_a_source_smaller_than_a_window_is_passed_over_within_it() -> None:
    """A source of one sample, and one of three, in steps of 100."""
    sources = np.array([0] * 200 + [1] * 3 + [2])
    mixture = Mixture(sources, {0: 1, 1: 2, 2: 1}, by="samples")
    sampler = sampler_of(np.full(204, 10), weights=mixture, samples_per_step=100, steps_per_epoch=5)
    counts = counted(sampler)
    assert sorted(counts[one] for one in (200, 201, 202)) == [83, 83, 84]
    assert counts[203] == 125


def test_shares_of_one_axis() -> None:
    sizes = np.stack([SIZES, SIZES[::-1]], axis=1)
    cost = PaddedCost(unit_bytes=(1, 1))
    options = {"samples_per_step": 1000, "steps_per_epoch": 100}
    for axis in (0, 1):
        sampler = sampler_of(
            sizes, 16_000, cost=cost, weights=Mixture(SOURCES, SHARES, by=axis), **options
        )
        samples = [*chain.from_iterable(sampler)]
        own = sizes[samples, axis]
        for name, share in SHARES.items():
            assert own[SOURCES[samples] == name].sum() / own.sum() == pytest.approx(share, rel=0.02)


def test_a_begun_window_goes_on_where_each_sample_needs_a_batch_of_its_own() -> None:
    """On two ranks five samples cannot be split, nor with whole windows of eight more of them."""
    mixture = Mixture([0, 0, 0, 1], {0: 1, 1: 1})
    given = {"weights": mixture, "window": 8, "batches_per_epoch": 12}
    first = sampler_of([10] * 4, 10, **given)
    came = list(islice(first, 3))
    ranks = [sampler_of([10] * 4, 10, **given, num_replicas=2, rank=rank) for rank in range(2)]
    for one in ranks:
        one.load_state_dict(first.state_dict())
    rest = [batch for one in ranks for batch in one]
    assert len(rest) == 2 * (12 - 3)
    counts = counted([*came, *rest])
    assert abs(counts[3] - (counts[0] + counts[1] + counts[2])) <= 5  # the last window is begun


def test_groups_of_a_mixture_on_other_ranks() -> None:
    """From two ranks to three within a step: groups stay apart, and passes go on."""
    groups = np.arange(len(SIZES)) % 3
    given = {"groups": groups, "steps_per_epoch": 20}
    ranks = [mixed(**given, num_replicas=2, rank=rank) for rank in range(2)]
    begun = [list(islice(one, 7)) for one in ranks]
    others = [mixed(**given, num_replicas=3, rank=rank) for rank in range(3)]
    for one in others:
        one.load_state_dict(json.loads(json.dumps(ranks[0].state_dict())))
    rest = [list(one) for one in others]
    batches = [*chain.from_iterable(begun + rest)]
    assert len({len(mine) for mine in rest}) == 1
    assert all(len({*groups[batch].tolist()}) == 1 for batch in batches)
    counts = counted(batches)
    assert counts.total() == 20 * 500
    for own in OF.values():
        numbers = [counts[one] for one in own.tolist()]
        assert max(numbers) - min(numbers) <= 1


def test_each_source_keeps_the_permutation_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of one pass make it once, however many sources there are."""
    made: list[tuple[int, ...]] = []

    def noted(n: int, *key: int) -> Permutation:
        made.append(key)
        return Permutation(n, *key)

    monkeypatch.setattr("torchbudget.plan.mixture.Permutation", noted)
    sources = np.arange(2000) % 20
    sampler = sampler_of(
        np.full(2000, 10),
        weights=Mixture(sources, dict.fromkeys(range(20), 1)),
        samples_per_step=100,
        steps_per_epoch=10,
        rank=0,
        num_replicas=1,
    )
    made.clear()
    assert sum(map(len, sampler)) == 1000
    assert len(made) == len({*made}) <= 20


def test_a_window_has_a_limit() -> None:
    with pytest.raises(OptionError, match=r"at most 2\*\*27 samples: 134,217,729"):
        next(Turns((0,), (1,)).within(0, 2**27 + 1))


# ---------------------------------------------------------------------- other shares


def test_other_shares_go_on_at_the_next_window() -> None:
    """The begun step ends as it was planned; then other shares count, and passes go on."""
    first, whole, done, came = mixed(), steps_of(mixed()), 10, []
    for batch in first:
        came.append(batch)
        if len(first.steps) > done:  # the first batch of a step
            break
    state = json.loads(json.dumps(first.state_dict()))
    other = mixed({"web": 0.1, "code": 0.8, "papers": 0.1}, by="samples")
    other.load_state_dict(state)
    rest = steps_of(other)
    begun = [*chain.from_iterable(came)] + rest[0]
    assert Counter(begun) == Counter([*chain.from_iterable(whole[: done + 1])])
    assert len(rest) == 64 - done
    assert counts_of(rest[1]) == [50, 400, 50]
    counts = Counter([*begun, *chain.from_iterable(rest[1:])])
    for name in NAMES:
        own = [counts[int(one)] for one in OF[name]]
        assert max(own) - min(own) <= 1


def test_other_shares_whose_windows_are_cut_otherwise() -> None:
    """With two axes and a time, shares decide how windows are cut: what is left comes once."""
    rng = np.random.default_rng(3)
    sources = rng.integers(0, 2, 800)
    first_axis = np.where(sources == 0, rng.integers(1, 100, 800), rng.integers(1, 10, 800))
    second_axis = np.where(sources == 1, rng.integers(1, 100, 800), rng.integers(1, 6, 800))
    sizes = np.stack([first_axis, second_axis], axis=1)
    given = {
        "cost": PaddedCost(unit_bytes=(1, 1)),
        "time": PaddedCost(
            unit_bytes=(1, 1), fixed_bytes=100, floor_bytes=int(rng.integers(0, 300))
        ),
        "samples_per_step": 100,
        "steps_per_epoch": 5,
        "seed": 3,
    }
    first, other = (
        sampler_of(sizes, 3000, weights=Mixture(sources, shares, "samples"), **given)
        for shares in ({0: 1, 1: 1}, {0: 0.8, 1: 0.2})
    )
    assert first.plan.rules.most_time == other.plan.rules.most_time
    assert first.plan.rules.strips != other.plan.rules.strips
    expected = steps_of(first)[0]
    first.set_epoch(0)
    came = list(next(iter(first)))
    other.load_state_dict(first.state_dict())
    came += steps_of(other)[0]
    assert sorted(came) == sorted(expected)


def test_states_of_other_histories_are_told_apart() -> None:
    """Two states that stand in the same window, of which a sampler loads one after the other."""
    one = sampler_of(
        SIZES, 8000, weights=Mixture(SOURCES, SHARES), window=100, batches_per_epoch=90
    )
    states = []
    for shares in (SHARES, {"web": 0.1, "code": 0.1, "papers": 0.8}):
        other = sampler_of(
            SIZES, 8000, weights=Mixture(SOURCES, shares), window=100, batches_per_epoch=90
        )
        batches = iter(other)
        while other.state_dict()["stop"] != 500 or other.state_dict()["rounds"] != 1:
            next(batches)
        states.append(json.loads(json.dumps(other.state_dict())))
    assert states[0] != states[1]
    for state in states:
        one.load_state_dict(state)
        assert json.loads(json.dumps(one.state_dict())) == state


@pytest.mark.parametrize("batches", [50, 108, 220])
def test_the_report_of_an_epoch_of_batches_ends_with_it(batches: int) -> None:
    """But for the rest of its last window."""
    sampler = sampler_of(
        SIZES, 4000, weights=Mixture(SOURCES, SHARES), window=20, batches_per_epoch=batches
    )
    report = sampler.report()
    samples = sum(map(len, sampler))
    assert samples <= report.samples < samples + 20


def test_an_epoch_of_which_nothing_is_left_is_over() -> None:
    """A state of six steps of nine, in epochs of three: each loop saves the next epoch."""
    first = mixed(steps_per_epoch=9)
    batches = iter(first)
    while len(first.steps) < 7:
        next(batches)
    state = first.state_dict()
    epochs = []
    for _ in range(3):
        sampler = mixed(steps_per_epoch=3)
        sampler.load_state_dict(state)
        number = len(list(sampler))
        state = sampler.state_dict()
        epochs.append((number > 0, state["epoch"]))
    assert epochs == [(False, 1), (True, 2), (True, 3)]


def test_any_epoch_can_be_chosen() -> None:
    for weights in (Mixture(SOURCES, SHARES), np.ones(len(SIZES))):
        sampler = sampler_of(SIZES, 8000, weights=weights, samples_per_step=1, steps_per_epoch=2)
        sampler.set_epoch(2**40)
        assert len(list(sampler)) == 2


def test_shares_are_relative() -> None:
    """However large or small they are."""
    expected = mixed().plan.order.sources.turns
    for scale in (2.0**-1000, 2.0**990):
        found = mixed({name: share * scale for name, share in SHARES.items()})
        assert found.plan.order.sources.turns == expected


def test_another_epoch_starts_over_and_other_sources_are_refused() -> None:
    sampler = mixed(steps_per_epoch=3)
    first, second = steps_of(sampler), steps_of(sampler)
    assert sampler.epoch == 2
    sampler.set_epoch(1)
    again = steps_of(sampler)
    assert again not in (first, second)
    assert list(map(counts_of, again)) == list(map(counts_of, first))
    list(islice(sampler, 4))
    other = sampler_of(
        SIZES,
        8000,
        samples_per_step=500,
        steps_per_epoch=3,
        weights=Mixture(np.roll(SOURCES, 1), SHARES),
    )
    with pytest.raises(StateMismatchError, match="the sources of the mixture: saved"):
        other.load_state_dict(sampler.state_dict())


# ---------------------------------------------------------------------- errors

STEPS = {"samples_per_step": 4, "steps_per_epoch": 3}
SMALL = list("aabbb")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(SMALL, [0.5, 0.5]), "shares must map each label"),  # type: ignore[arg-type]
        (lambda: Mixture(SMALL, {"a": -1, "b": 1}), "number of at least 0"),
        (lambda: Mixture(SMALL, {"a": float("nan"), "b": 1}), "number of at least 0"),
        (lambda: Mixture(SMALL, {"a": 10**400, "b": 1}), "number of at least 0"),
        (lambda: Mixture(SMALL, {"a": float("inf"), "b": 1}), "number of at least 0"),
        (lambda: Mixture(SMALL, {"a": "half", "b": 1}), "number of at least 0"),  # type: ignore[dict-item]
        (lambda: Mixture(SMALL, {"a": 0, "b": 0}), "one of them above 0"),
        (lambda: Mixture(SMALL, {}), "one of them above 0"),
    ],
)
def test_a_mixture_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ("mixture", "options", "message"),
    [
        (Mixture(SMALL, {"a": 1}), STEPS, r"no share of \['b'\]"),
        (Mixture(SMALL, {"a": 1, "b": 1, "c": 1}), STEPS, r"no samples of \['c'\]"),
        (
            Mixture([1, 1, 2, 2, 2], {"1": 1, "2": 1}),
            STEPS,
            r"no share of \[1, 2\], no samples of \['1', '2'\]",
        ),
        (Mixture(SMALL[:4], {"a": 1, "b": 1}), STEPS, r"sources of a mixture must be one label"),
        (Mixture([0.5] * 5, {0.5: 1}), STEPS, "ints or text"),
        (Mixture(SMALL, {"a": 1, "b": 1}, by=1), STEPS, "or an axis below 1: 1"),
        (Mixture(SMALL, {"a": 1, "b": 1}, by="tokens"), STEPS, "by must be"),  # type: ignore[arg-type]
        (Mixture(SMALL, {"a": 1, "b": 1}, by=True), STEPS, "by must be"),
        (Mixture(SMALL, {"a": 1, "b": 1}), {"samples_per_step": 4}, "or steps_per_epoch="),
        (Mixture(SMALL, {"a": 1, "b": 1}), STEPS | {"steps_per_epoch": 0}, "steps_per_epoch .*0"),
        (
            Mixture(SMALL, {"a": 1, "b": 1}),
            STEPS | {"sizes": [50, 50, 1, 2, 3], "oversize": "skip"},
            r"no samples of \['a'\]",
        ),
        (
            Mixture(SMALL, {"a": 1, "b": 1}),
            STEPS | {"sizes": [0, 0, 1, 2, 3]},
            r"no samples of \['a'\]",
        ),
        (
            Mixture(SMALL, {"a": 1, "b": 1}),
            STEPS | {"sizes": np.ones((5, 2), int), "cost": PaddedCost(unit_bytes=(1, 1))},
            "an axis below 2: 'size'",
        ),
    ],
)
def test_a_mixture_that_does_not_go_with_its_data(
    mixture: Mixture, options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"sizes": [3, 9, 4, 8, 1], "budget": 18} | options
    with pytest.raises(OptionError, match=message):
        sampler_of(weights=mixture, **given)
