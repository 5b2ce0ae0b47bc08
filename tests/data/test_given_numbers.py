"""Epochs and steps of a given number of micro-batches, for hosts that need constants."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.costs import measured
from tests.support.resuming import in_parts
from tests.support.samplers import LENGTHS, counted, loader_of, sampler_of
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.errors import (
    MeasureWarning,
    OptionError,
    OtherNumbersWarning,
    StateError,
    UnevenRanksError,
)

EVERY = Counter(range(len(LENGTHS)))
RNG = np.random.default_rng(1)
QUADRATIC = PaddedCost(unit_bytes=1, pair_bytes=0.01)
ADVERSARIES: dict[str, dict[str, Any]] = {
    "lognormal": {},
    "ones": {"sizes": [1] * 300, "budget": 10},
    "equal": {"sizes": [40] * 300, "budget": 100},
    "alone": {"sizes": [50] * 300, "budget": 99},
    "one giant": {"sizes": [1000] + [1] * 299},
    "nothing": {"sizes": [0] * 300},
    "quadratic": {"cost": QUADRATIC, "budget": 4000},
    "packed": {"cost": PackedCost(unit_bytes=1)},
    "two axes": {
        "sizes": RNG.integers(1, 40, (300, 2)),
        "cost": PaddedCost(unit_bytes=(1, 2)),
        "budget": 600,
    },
    "in order": {"shuffle": False, "sizes": np.sort(LENGTHS)},
    "multiples": {"batch_size_multiple": 4, "size_multiple": 8},
    "few at a time": {"max_batch_size": 3},
    "weights": {"weights": np.linspace(1, 5, 300)},
}


def ranks_of(number: int, **options: Any) -> list[Any]:
    return [sampler_of(num_replicas=number, rank=rank, **options) for rank in range(number)]


def needed(ranks: int = 1, epoch: int = 0, **options: Any) -> int:
    """Micro-batches that each rank needs of an epoch."""
    sampler = ranks_of(ranks, **options)[0]
    sampler.set_epoch(epoch)
    return len(sampler)


# ---------------------------------------------------------------------- of every epoch


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_every_epoch_has_the_number(name: str, ranks: int) -> None:
    """On every rank, from as many as are needed to as many as there are samples; each once."""
    options = {"window": 60, **ADVERSARIES[name]}
    least = max(needed(ranks, epoch, **options) for epoch in range(2))
    most = 300 // ranks
    for number in sorted({least, min(least + 1, most), (least + most) // 2, most}):
        those = ranks_of(ranks, batches_per_epoch=number, **options)
        for _ in range(2):
            assert {len(sampler) for sampler in those} == {number}
            epochs = [list(sampler) for sampler in those]
            assert {len(batches) for batches in epochs} == {number}
            assert counted(batch for batches in epochs for batch in batches) == EVERY
        those[0].set_epoch(1)
        report = those[0].report()
        assert report.over_budget == 0
        assert report.batches == number * ranks


def test_the_fewest_and_the_most() -> None:
    """One less than an epoch needs, and one more than its samples, are refused by the number."""
    least = needed(2)
    assert len(list(sampler_of(num_replicas=2, batches_per_epoch=least))) == least
    with pytest.raises(OptionError, match=f"epoch 0 needs {least} .* 2 ranks.*={least - 1}: give"):
        next(iter(sampler_of(num_replicas=2, batches_per_epoch=least - 1)))
    single = list(sampler_of(num_replicas=2, batches_per_epoch=150))
    assert {len(batch) for batch in single} == {1}
    with pytest.raises(OptionError, match=r"split into 150 .*=151: give between"):
        next(iter(sampler_of(num_replicas=2, batches_per_epoch=151)))


def test_a_later_epoch_that_needs_more_raises_at_its_start() -> None:
    """Before its first batch, with its number; epochs before it are whole."""
    needs = [needed(window=40, epoch=epoch) for epoch in range(12)]
    number = needs[0]
    first = next(epoch for epoch, need in enumerate(needs) if need > number)
    sampler = sampler_of(window=40, batches_per_epoch=number)
    for _ in range(first):
        assert len(list(sampler)) == number
    message = f"epoch {first} needs {needs[first]} "
    with pytest.raises(OptionError, match=message):
        next(iter(sampler))
    with pytest.raises(OptionError, match=message):
        list(sampler.steps)


def test_more_are_spread_over_the_windows() -> None:
    """Each window has as many more as any other, within one."""
    plain, more = (
        sampler_of([10] * 300, 100, window=30, batches_per_epoch=number) for number in (None, 37)
    )
    rounds = [
        np.concatenate([span.block.rounds for span in one.plan.spans(one._cursor)])
        for one in (plain, more)
    ]
    beyond = rounds[1] - rounds[0]
    assert beyond.tolist().count(1) == 7
    assert abs(np.cumsum(beyond) - 0.7 * np.arange(1, 11)).max() < 1.5


def test_micro_batches_of_a_window_stay_alike() -> None:
    """One more is not one that is cut in two: all of its window get smaller."""
    sampler = sampler_of([10] * 1000, 1000, window=1000, batches_per_epoch=11)
    assert {len(batch) for batch in sampler} <= {90, 91, 92, 93, 94}


@pytest.mark.parametrize(
    "options",
    [{"window": 50}, {"samples_per_step": 50}, {"window": 40, "drop_last": True}],
    ids=str,
)
def test_auto_is_one_number(options: Any) -> None:
    """For every epoch, on every rank; with drop_last, too."""
    those = ranks_of(2, batches_per_epoch="auto", **options)
    number = len(those[0])
    for epoch in range(20):
        assert {len(sampler) for sampler in those} == {number}
        batches = [list(sampler) for sampler in those]
        assert {len(mine) for mine in batches} == {number}
        if "drop_last" not in options:
            assert counted(batch for mine in batches for batch in mine) == EVERY
        assert those[0].epoch == epoch + 1


def test_auto_costs_nothing_where_all_epochs_are_alike() -> None:
    plain = sampler_of(shuffle=False, window=50)
    assert len(sampler_of(shuffle=False, window=50, batches_per_epoch="auto")) == len(plain)


def test_auto_is_at_most_what_an_epoch_can_be_split_to() -> None:
    """Where every sample stands alone anyway."""
    assert len(sampler_of([50] * 8, 99, batches_per_epoch="auto")) == 8


# ---------------------------------------------------------------------- of every step


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_every_full_step_has_the_number(name: str, ranks: int) -> None:
    """The last one has at most as many, or goes with drop_last."""
    options = {"samples_per_step": 72, **ADVERSARIES[name]}  # the last one has 12
    plain = ranks_of(ranks, **options)[0]
    least, most = max(plain.steps), 72 // ranks
    for number in sorted({least, min(least + 1, most), most}):
        for drop_last in (False, True):
            those = ranks_of(ranks, micro_batches_per_step=number, drop_last=drop_last, **options)
            steps = list(those[0].steps)
            assert steps[:4] == [number] * 4
            assert len(steps) == (4 if drop_last else 5)
            assert steps[-1] <= number
            epochs = [list(sampler) for sampler in those]
            assert {len(batches) for batches in epochs} == {sum(steps)}
            indices = counted(batch for batches in epochs for batch in batches)
            assert indices.total() == (288 if drop_last else 300)
            assert set(indices.values()) == {1}
            those[0].set_epoch(0)
            assert those[0].report().over_budget == 0


def test_a_step_that_needs_more_raises_before_the_first_batch() -> None:
    """With the number that does, which is of any step of the epoch."""
    sizes = [10] * 250 + [100] * 50
    options: dict[str, Any] = {"samples_per_step": 50, "shuffle": False}
    steps = list(sampler_of(sizes, **options).steps)
    assert steps == [1] * 5 + [5]
    sampler = sampler_of(sizes, micro_batches_per_step=4, **options)
    for ask in (lambda: next(iter(sampler)), lambda: len(sampler), lambda: next(sampler.steps)):
        with pytest.raises(OptionError, match=r"needs 5 micro-batches .*=4: give at least 5"):
            ask()
    assert list(sampler_of(sizes, micro_batches_per_step=5, **options).steps) == [5] * 6


def test_a_last_step_that_needs_more_raises_too() -> None:
    """A trainer would step in the middle of it."""
    sizes = [10] * 250 + [100] * 49
    options: dict[str, Any] = {"samples_per_step": 50, "shuffle": False}
    with pytest.raises(OptionError, match="needs 5 micro-batches"):
        next(iter(sampler_of(sizes, micro_batches_per_step=4, **options)))
    kept = sampler_of(sizes, micro_batches_per_step=4, drop_last=True, **options)
    assert list(kept.steps) == [4] * 5


def test_fewer_samples_than_micro_batches() -> None:
    """A step cannot be split to more than its samples."""
    with pytest.raises(OptionError, match="samples_per_step must be at least 40, got 39"):
        sampler_of(samples_per_step=39, micro_batches_per_step=20, num_replicas=2)
    with pytest.raises(UnevenRanksError, match="2 samples cannot be dealt to 4 ranks"):
        sampler_of([1, 2], num_replicas=4, batches_per_epoch=3)


def test_both_numbers() -> None:
    """Full steps have the one; the last step takes what the other leaves."""
    options = {"samples_per_step": 70, "micro_batches_per_step": 30}
    sampler = sampler_of(batches_per_epoch=139, **options)
    assert list(sampler.steps) == [30, 30, 30, 30, 19]
    assert counted(sampler) == EVERY
    with pytest.raises(OptionError, match=r"split into 140 .*=141: give between"):
        next(iter(sampler_of(batches_per_epoch=141, **options)))


# ---------------------------------------------------------------------- going on


@pytest.mark.parametrize(
    "options",
    [
        {"window": 40, "batches_per_epoch": 70},
        {"window": 40, "batches_per_epoch": "auto", "num_replicas": 2},
        {"samples_per_step": 50, "batches_per_epoch": 80, "num_replicas": 3},
        {"samples_per_step": 70, "micro_batches_per_step": 12},
        {"samples_per_step": 70, "micro_batches_per_step": 12, "batches_per_epoch": 58},
        {"window": 40, "batches_per_epoch": 70, "drop_last": True},
    ],
    ids=str,
)
def test_it_goes_on_exactly_from_anywhere(options: Any) -> None:
    """From any batch, and from a state of a resumed run; `len` is the same number throughout."""
    whole = list(sampler_of(**options))
    for done in range(len(whole)):
        begun, resumed = sampler_of(**options), sampler_of(**options)
        list(itertools.islice(begun, done))
        state = begun.state_dict()
        assert len(json.dumps(state)) < 1500
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert len(resumed) == len(whole)
        assert resumed.batches_left == len(whole) - done
        assert list(resumed) == whole[done:]
    assert in_parts(lambda: sampler_of(**options), [7, 1, 5]) == whole


def test_an_epoch_that_goes_on_is_not_counted_again() -> None:
    """So the first batch after loading waits for one window, wherever it is."""
    options = {"window": 40, "batches_per_epoch": "auto"}
    begun, resumed = sampler_of(**options), sampler_of(**options)
    list(itertools.islice(begun, 11))
    resumed.load_state_dict(begun.state_dict())
    next(iter(resumed))
    assert len(resumed) == len(begun)
    assert resumed.plan._epoch_count is None


OTHERS: dict[str, dict[str, Any]] = {
    "ranks": {"num_replicas": 3},
    "budget": {"budget": 700},
    "cost": {"cost": PaddedCost(unit_bytes=1, sample_bytes=1)},
    "number": {"batches_per_epoch": 80},
}


@pytest.mark.parametrize("name", OTHERS)
def test_under_other_rules_the_number_is_suspended(name: str) -> None:
    """With a warning, for the epoch that goes on; every sample once. The next one has it again."""
    options = {"window": 40, "batches_per_epoch": 70, "num_replicas": 2}
    begun = ranks_of(2, **{k: v for k, v in options.items() if k != "num_replicas"})
    came = [batch for one in begun for batch in itertools.islice(one, 17)]
    changed = options | OTHERS[name]
    number = changed.pop("num_replicas")
    resumed = ranks_of(number, **changed)
    for sampler in resumed:
        sampler.load_state_dict(begun[0].state_dict())
        assert len(sampler) == 17 + sampler.batches_left != changed["batches_per_epoch"]
        left = sampler.batches_left
        with pytest.warns(
            OtherNumbersWarning, match=r"epoch 0 .* suspends batches_per_epoch="
        ) as w:
            batches = iter(sampler)
        assert w[0].filename == __file__
        rest = list(batches)
        assert len(rest) == left
        came += rest
        assert len(sampler) == len(list(sampler)) == changed["batches_per_epoch"]
    assert counted(came) == EVERY


def test_a_step_that_was_begun_elsewhere() -> None:
    """On other ranks its rest is a step of its own, with a warning; later ones have the number."""
    options: dict[str, Any] = {"samples_per_step": 60, "micro_batches_per_step": 14}
    begun = ranks_of(2, **options)
    came = [batch for one in begun for batch in itertools.islice(one, 20)]
    [resumed] = ranks_of(1, **options)
    resumed.load_state_dict(begun[0].state_dict())
    with pytest.warns(OtherNumbersWarning, match="micro_batches_per_step=14 for the step that was"):
        batches = iter(resumed)
    assert list(resumed.steps)[1:] == [14] * 3
    assert counted([*came, *batches]) == EVERY
    between = ranks_of(2, **options)
    came = [batch for one in between for batch in itertools.islice(one, 28)]
    resumed.load_state_dict(between[0].state_dict())  # no step was begun: no warning
    assert counted([*came, *resumed]) == EVERY


def test_between_epochs_nothing_is_suspended() -> None:
    """A state of an epoch's end, or of its beginning, under another budget: no warning."""
    sampler, other = (sampler_of(budget=b, batches_per_epoch=70) for b in (1000, 900))
    other.load_state_dict(sampler.state_dict())
    assert len(list(other)) == 70
    list(sampler)
    other.load_state_dict(sampler.state_dict())
    assert other.epoch == 1
    assert len(list(other)) == 70


@pytest.mark.parametrize("number", [60, "auto"])
def test_replan_suspends_it_until_the_epoch_ends(number: Any) -> None:
    """With a warning. What comes is exact after resuming, too, and the number holds again."""
    cost = measured(margin=0.01)
    options: dict[str, Any] = {"window": 50, "batches_per_epoch": number}
    sampler = MemoryBudgetBatchSampler(np.full(200, 100), cost, 500_000, **options)
    whole = len(sampler)
    batches = iter(sampler)
    came = [next(batches) for _ in range(20)]
    with pytest.warns(MeasureWarning):
        cost.observe(1, 100, int(1.2 * int(cost.batch_bytes(1, 100))))
    with pytest.warns(OtherNumbersWarning, match="suspends batches_per_epoch"):
        sampler.replan()
    came += itertools.islice(batches, 20)
    state = sampler.state_dict()
    came += batches
    assert counted(came) == Counter(range(200))
    again = MemoryBudgetBatchSampler(np.full(200, 100), cost, 500_000, **options)
    again.load_state_dict(state)
    with pytest.warns(OtherNumbersWarning):
        assert list(again) == came[40:]
    if number == 60:
        assert len(sampler) == len(list(sampler)) == 60
    else:
        assert len(sampler) == whole


def test_replan_where_a_later_step_needs_more() -> None:
    """The loop stops at the first step of the corrected cost, however often it is asked."""
    cost = measured(margin=0.01)
    options = {"samples_per_step": 40, "micro_batches_per_step": 10}
    sampler = MemoryBudgetBatchSampler(np.full(200, 100), cost, 500_000, **options)
    batches = iter(sampler)
    assert len([next(batches) for _ in range(5)]) == 5
    with pytest.warns(MeasureWarning):
        cost.observe(1, 100, int(2 * int(cost.batch_bytes(1, 100))))
    sampler.replan()
    assert len([next(batches) for _ in range(5)]) == 5
    for _ in range(2):
        with pytest.raises(OptionError, match=r"needs 20 micro-batches .*=10: give at least 20"):
            next(batches)
    enough = {"samples_per_step": 40, "micro_batches_per_step": 20}
    again = MemoryBudgetBatchSampler(
        np.full(200, 100), cost.with_observed_margin(), 500_000, **enough
    )
    again.load_state_dict(sampler.state_dict())
    assert list(again.steps) == [20] * 4


def test_a_loader_has_the_number() -> None:
    """`len(loader)`, which frameworks read once, in every epoch."""
    loader = loader_of(sampler_of(window=40, batches_per_epoch=65), num_workers=0)
    for _ in range(3):
        assert len(loader) == len(list(loader)) == 65


def test_a_copy_and_later_ranks_have_the_number() -> None:
    """Of `plan.for_ranks`, which a process group that starts later asks for."""
    plan = sampler_of(window=60, batches_per_epoch="auto").plan
    other = plan.for_ranks(3, window=60)
    assert other.numbers == plan.numbers
    assert other.batches_per_epoch == len(
        sampler_of(window=60, batches_per_epoch="auto", num_replicas=3)
    )


def test_a_state_with_malformed_counts_is_refused() -> None:
    sampler = sampler_of(window=40, batches_per_epoch=70)
    list(itertools.islice(sampler, 5))
    state = sampler.state_dict()
    for spoiled in ({"least": -1}, {"spare": None}, {"done": 0}):
        with pytest.raises(StateError):
            sampler_of(window=40, batches_per_epoch=70).load_state_dict(state | spoiled)


def test_len_refuses_what_an_epoch_would_refuse() -> None:
    """`drop_last` drops an incomplete last micro-batch, so that fewer samples can be split."""
    sampler = MemoryBudgetBatchSampler(
        [1] * 20, PaddedCost(sample_bytes=1), 2, drop_last=True, window=1, batches_per_epoch=20
    )
    for refused in (partial(len, sampler), partial(list, sampler)):
        with pytest.raises(OptionError, match=r"split into 19 .* give between 19 and 19"):
            refused()
