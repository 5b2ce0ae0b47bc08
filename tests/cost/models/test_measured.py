"""The measured cost as a value: margin, packed batches, time, and what training observes."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import forms_of, measured
from torchbudget import (
    BudgetedIterableDataset,
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PaddedCost,
    TableCost,
    load_cost,
    plan_step,
)
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.vouched import VouchedRange
from torchbudget.errors import CostError, CostOverflowError, MeasureWarning, OversizeError
from torchbudget.machine.peaks import Peak
from torchbudget.units import MAX_BYTES


@st.composite
def costs(draw: st.DrawFn) -> MeasuredCost:
    """Forms with terms without n and in n², and maybe a range or a table."""
    powers = st.integers(0, 2)
    some = st.builds(Term, st.integers(0, 10**5), powers, st.tuples(powers))
    grows = st.builds(Term, st.integers(1, 10**4), st.just(1), st.tuples(st.just(0)))
    form = st.builds(
        lambda terms, one: Form(terms=(*terms, one)), st.lists(some, max_size=5), grows
    )
    forms = draw(st.lists(form, min_size=1, max_size=4))
    rows = st.tuples(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 10**11))
    table = vouched = None
    if probes := draw(st.lists(rows, max_size=4)):
        n, sizes, peaks = zip(*probes, strict=True)
        vouched = VouchedRange(
            numbers=n,
            sizes=tuple((size,) for size in sizes),
            peak_bytes=peaks,
            floor_bytes=draw(st.sampled_from([0, min(peaks), max(peaks)])),
        )
        if draw(st.booleans()):
            table = TableCost(numbers=n, sizes=vouched.sizes, peak_bytes=peaks)
    margin = draw(st.floats(0, 0.5))
    return MeasuredCost(forms=tuple(forms), margin=margin, vouched=vouched, table=table)


@given(costs(), st.data(), st.integers(0, 2**40))
def test_capacity_is_exact_with_a_margin(
    cost: MeasuredCost, data: st.DataObject, budget: int
) -> None:
    """As many samples as fit, and not one more, whatever the margin, the range and the table.

    Of any size, and of those at which a range begins.
    """
    measured_sizes = (
        [size for sizes in cost.vouched.sizes for size in sizes] if cost.vouched else []
    )
    size = data.draw(st.one_of(st.integers(0, 5000), *map(st.just, measured_sizes)))
    n = int(cost.capacity(size, budget))
    assert n == 0 or cost.batch_bytes(n, size) <= budget
    assert cost.batch_bytes(n + 1, size) > budget


@given(st.data(), st.integers(1, 2))
def test_the_largest_form_counts(data: st.DataObject, axes: int) -> None:
    """Whatever the shapes that are combined: each element is what its batch alone is."""
    powers = st.tuples(*[st.integers(0, 2)] * axes)
    terms = st.builds(Term, st.floats(0, 1e4), st.integers(0, 2), powers)
    forms = tuple(
        Form(terms=tuple(some))
        for some in data.draw(st.lists(st.lists(terms, min_size=1, max_size=4), min_size=1))
    )
    cost = MeasuredCost(forms=forms, margin=0)
    numbers, budgets = np.array([[0], [3], [70]]), np.array([[10**3], [10**6], [10**9]])
    sizes = np.array([0, 5, 300, 41]) if axes == 1 else np.array([[0, 9], [5, 5], [300, 1], [7, 8]])
    each = [
        [[int(form.batch_bytes(n, size)) for form in forms] for size in sizes]
        for n in numbers[:, 0].tolist()
    ]
    assert cost.batch_bytes(numbers, sizes).tolist() == np.max(each, axis=2).tolist()
    fitting = [
        [[int(form.capacity(size, budget)) for form in forms] for size in sizes]
        for budget in budgets[:, 0].tolist()
    ]
    assert cost.capacity(sizes, budgets).tolist() == np.min(fitting, axis=2).tolist()


def test_forms_of_other_numbers_of_axes() -> None:
    one, two = (Form(terms=(Term(1.0, 1, (1,) * axes),)) for axes in (1, 2))
    for forms in ((), (one, two)):
        with pytest.raises(CostError, match="forms, all of the same number of axes"):
            MeasuredCost(forms=forms, margin=0)


@given(costs(), st.lists(st.integers(0, 5500), max_size=6), st.lists(st.integers(0, 2**40)))
def test_many_at_once_are_each_alone(
    cost: MeasuredCost, sizes: list[int], budgets: list[int]
) -> None:
    """Sizes × budgets, of a cost that holds as far as measured batches have reached, too."""
    found = cost.capacity(np.array(sizes, int), np.array(budgets, int)[:, None])
    assert found.shape == (len(budgets), len(sizes))
    each = [[int(cost.capacity(size, budget)) for size in sizes] for budget in budgets]
    assert found.tolist() == each
    numbers = np.array([1, 3, 200])[:, None]
    each = [[int(cost.batch_bytes(n, size)) for size in sizes] for n in (1, 3, 200)]
    assert cost.batch_bytes(numbers, np.array(sizes, int)).tolist() == each


@given(costs(), st.integers(1, 100), st.integers(1, 1000))
def test_the_margin_is_added(cost: MeasuredCost, n: int, size: int) -> None:
    cost = replace(cost, vouched=None, table=None)
    fitted = int(cost.fitted_bytes(n, size))
    assert (
        fitted * (1 + cost.margin)
        <= int(cost.batch_bytes(n, size))
        <= (fitted * (1 + cost.margin + 2**-13) + 2**14)
    )


@given(costs())
def test_more_or_longer_samples_never_cost_less(cost: MeasuredCost) -> None:
    """Beyond what was measured, too."""
    n, sizes = np.arange(0, 400, 7), np.arange(0, 5500, 90)
    bytes_ = cost.batch_bytes(n[:, None], sizes)
    assert (np.diff(bytes_, axis=0) >= 0).all()
    assert (np.diff(bytes_, axis=1) >= 0).all()


@given(costs(), st.integers(1, 400), st.integers(1, 5500))
def test_nothing_is_predicted_beyond_what_was_reached(
    cost: MeasuredCost, n: int, size: int
) -> None:
    """A prediction has a batch of a shorter and one of a longer size that reached it.

    Or that of a larger batch has; and where none has left the floor, one has as many samples. The
    oracle looks at each larger size that was measured.
    """
    vouched = cost.vouched
    if vouched is None:
        return
    sizes = [one for (one,) in vouched.sizes]
    probes = list(zip(vouched.numbers, sizes, vouched.peak_bytes, strict=True))

    def trusted(start: int) -> bool:
        shorter = max((b for _, s, b in probes if s <= start), default=0)
        longer = max((b for _, s, b in probes if s >= start), default=0)
        if min(shorter, longer) <= vouched.floor_bytes and n > max(
            (m for m, s, _ in probes if s >= start), default=0
        ):
            return False
        return int(cost.fitted_bytes(n, start)) <= min(shorter, longer)

    known = any(trusted(max(size, one)) for one in sizes)
    table = MAX_BYTES if cost.table is None else int(cost.table.batch_bytes(n, size))
    assert (cost.batch_bytes(n, size) == MAX_BYTES) == (not known and table == MAX_BYTES)


@given(st.integers(0, 2**32))
def test_packed_is_above_every_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forms = [
        PaddedCost(
            fixed_bytes=rng.integers(0, 10**6),
            unit_bytes=rng.integers(1, 10**3, 2),
            pair_bytes=rng.integers(0, 9, (2, 2)),
            floor_bytes=rng.integers(0, 10**6),
        )
        for _ in range(3)
    ]
    together = tuple(form for cost in forms for form in forms_of(cost))
    cost = MeasuredCost(forms=together, margin=0.05)
    sizes = rng.integers(1, 100, (20, 2))
    n = np.arange(1, 21)
    exact = np.stack([form.batch_bytes(n, sizes) for form in forms]).max(axis=0) * 1.05
    assert (cost.packed().batch_bytes(n, sizes) >= exact - 1).all()


@given(st.data(), st.integers(1, 3))
def test_packed_is_above_forms_whose_sizes_count_as_more_or_less(
    data: st.DataObject, axes: int
) -> None:
    """Where layers round sizes, terms count them from another place than 0."""
    powers = st.lists(st.integers(0, 2), min_size=axes, max_size=axes).map(tuple)
    starts = st.lists(st.integers(-400, 400), min_size=axes, max_size=axes).map(tuple)
    some = st.builds(Term, st.integers(1, 10**5), st.just(1), powers.filter(lambda p: sum(p) < 3))
    moved = st.builds(replace, some, start=starts)
    terms = data.draw(st.lists(moved, min_size=1, max_size=5))
    forms = [(Term(10**6, 0, (0,) * axes), *terms[i::2]) for i in range(2) if terms[i::2]]
    cost = MeasuredCost(forms=tuple(Form(terms=form) for form in forms), margin=0.05)
    n = data.draw(st.integers(1, 50))
    size = data.draw(st.lists(st.integers(1, 1000), min_size=axes, max_size=axes))
    shape = n, size if axes > 1 else size[0]
    assert int(cost.packed().batch_bytes(*shape)) >= int(cost.batch_bytes(*shape)) - 1


@pytest.mark.parametrize("largest", [(512,), (512, 64)])
def test_packed_samples_beyond_the_measured_ones_are_over_every_budget(largest) -> None:
    """As padded ones are: a formula says nothing of what no step was seen on."""
    axes = len(largest)
    terms = (Term(10, 0, (0,) * axes), Term(4, 1, (1,) + (0,) * (axes - 1)))
    cost = MeasuredCost(forms=(Form(terms=terms),), margin=0.0, largest=largest)
    packed, budget = cost.packed(), 2**40
    sizes = np.array([largest, largest, largest, (1,) * axes])
    sizes[1, -1] += 1
    given = sizes if axes > 1 else sizes[:, 0]
    for one in (cost, packed):
        assert ((one.batch_bytes(1, given) == MAX_BYTES) == [False, True, False, False]).all()
        assert ((one.capacity(given, budget) == 0) == [False, True, False, False]).all()
        with pytest.raises(OversizeError, match=r"index 1: .* beyond what was measured"):
            plan_step(given, one, budget)
        assert plan_step(given, one, budget, oversize="skip").skipped_samples.tolist() == [1]
        alone = plan_step(given, one, budget, oversize="alone").micro_batches[0]
        assert [1] in alone
        assert len(alone) == 2
    with pytest.warns(MeasureWarning, match="was predicted for a budget of 1 MiB"):
        plan_step(given[2:], replace(cost, predicted_for=2**20).packed(), budget)


def test_what_is_not_packed() -> None:
    """A table, what holds only as far as was measured, terms of the size without n, terms in n²."""
    near = VouchedRange(numbers=(8,), sizes=((100,),), peak_bytes=(1000,), floor_bytes=0)
    with pytest.raises(CostError, match="as far as measured batches"):
        measured(vouched=near).packed()
    table = TableCost(numbers=(8,), sizes=((100,),), peak_bytes=(1000,))
    with pytest.raises(CostError, match="what each sample costs"):
        measured(table=table).packed()
    for term in (Term(1, 0, (1,)), Term(1, 2, (0,))):
        with pytest.raises(CostError, match="terms without n, in n²"):
            MeasuredCost(forms=(Form(terms=(term,)),), margin=0).packed()


@pytest.mark.parametrize("budget", ["800kB", "1200kB"])
def test_another_budget_than_was_predicted_for(budget: str) -> None:
    """Batches that fill it leave other gaps: every sampler and stream, and every step, says so."""
    cost, sizes = replace(measured(), predicted_for=10**6), np.full(50, 10)
    MemoryBudgetBatchSampler(sizes, cost, "1.05MB")  # warnings are errors here
    replace(cost, predicted_for=None).check_budget(1)
    with pytest.warns(MeasureWarning, match=r"for a budget of 977 KiB: what CUDA's .*predict it"):
        MemoryBudgetBatchSampler(sizes, cost, budget)
    with pytest.warns(MeasureWarning, match="was predicted for a budget"):
        plan_step(sizes, cost, budget)
    stream = BudgetedIterableDataset([sizes.tolist()], cost, budget, size=int, collate_fn=list)
    with pytest.warns(MeasureWarning, match="was predicted for a budget"):
        assert sum(map(len, stream)) == 50


def test_a_cost_that_cannot_be_saved_leaves_the_one_of_before(tmp_path: Path) -> None:
    """A file that may not grow, as on a full disk: none that is cut off, and nothing beside it."""
    path = tmp_path / "cost.json"
    measured(margin=0.01).save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            measured(margin=0.02).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_cost(path).margin == 0.01
    assert list(tmp_path.iterdir()) == [path]


def test_a_larger_margin_raises_the_table_too() -> None:
    table = TableCost(numbers=(80,), sizes=((100,),), peak_bytes=(100_000,))
    cost = measured(table=table, margin=0.1)
    with pytest.warns(MeasureWarning):
        cost.observe(10, 100, 150_000)
    assert 150_000 <= cost.with_observed_margin().batch_bytes(10, 100) <= 151_000


def test_observed_steps_correct_the_margin() -> None:
    """One warning for all that is over; the cost with the observed margin covers it."""
    cost = measured(margin=0.01)
    for needed in (900_000, int(cost.batch_bytes(10, 100))):  # as predicted is not more
        cost.observe(10, 100, needed)
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning, match=r"needed .*with_observed_margin"):
        cost.observe(10, 100, Peak(bytes=1_100_000))
    cost.observe(20, 100, 2_300_000)  # warnings are errors here: no second one
    assert cost.with_observed_margin().batch_bytes(20, 100) >= 2_300_000
    assert cost.batch_bytes(20, 100) < 2_300_000


def test_a_caching_allocator_keeps_what_the_largest_step_took() -> None:
    """A small step under what a large one left reserved is no surprise; more than that is."""
    cost = measured(margin=0.01)
    cost.observe(100, 100, Peak(bytes=10_000_000, allocated_bytes=9_000_000))
    cost.observe(1, 100, Peak(bytes=10_000_000, allocated_bytes=90_000))
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning):
        cost.observe(1, 100, Peak(bytes=10_200_000, allocated_bytes=90_000))
    assert 0.02 <= cost.with_observed_margin().margin <= 0.03


def test_a_batch_without_a_prediction_hides_no_later_one() -> None:
    """What a sample beyond all that was measured took is known; more than that is a surprise."""
    cost = measured(margin=0.01, largest=(100,))
    assert cost.batch_bytes(1, 101) == MAX_BYTES
    cost.observe(1, 101, Peak(bytes=10_000_000, allocated_bytes=9_000_000))
    cost.observe(1, 100, Peak(bytes=10_000_000, allocated_bytes=90_000))
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning, match="needed 9.73 MiB"):
        cost.observe(1, 100, Peak(bytes=10_200_000, allocated_bytes=90_000))


@given(st.floats(0, 1000), st.integers(0, 2**21))
def test_bytes_with_a_margin_do_not_wrap(margin: float, n: int) -> None:
    """A batch of 2⁶³ bytes or more is refused, and no other one is said to be free."""
    term = Term(float(2**42), 1, (0,))
    cost = MeasuredCost(forms=(Form(terms=(term,)),), margin=margin)
    exact = n * 2**42 * (1 + margin)
    try:
        assert int(cost.batch_bytes(n, 1)) == pytest.approx(exact, rel=1e-3, abs=2**25)
    except CostOverflowError:
        assert exact > 2**62.99


def test_what_was_reserved_before_a_step_is_no_surprise() -> None:
    """What earlier work left reserved, and was enough, does not show what the step needs."""
    cost = measured(margin=0.01)
    left = Peak(bytes=10_000_000, allocated_bytes=90_000, reserved_bytes=9_000_000)
    left.reserved_before_bytes = 9_000_000
    cost.observe(1, 100, left)
    assert cost.with_observed_margin() is cost
    left.reserved_before_bytes = 8_000_000  # now it grew
    with pytest.warns(MeasureWarning, match="needed 9.54 MiB"):
        cost.observe(1, 100, left)


def test_allocations_that_failed_raise_the_margin() -> None:
    """What such a step needed is unknown: each margin grows by 0.02, with one warning."""
    cost = measured(margin=0.01)
    with pytest.warns(MeasureWarning, match="did not get the memory"):
        cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, failures=1))
    once = cost.with_observed_margin().margin
    assert once > 0.03
    cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, failures=2))
    assert cost.with_observed_margin().margin == once  # later batches still have the old margin
    cost.planned_with(once)
    cost.observe(10, 100, None)
    assert once + 0.02 <= cost.with_observed_margin().margin <= once + 0.03


def test_allocations_that_succeeded_at_the_second_attempt_are_noted() -> None:
    """A flush of the cache is no lack of memory: no warning, no margin, a line in the report."""
    cost = measured(margin=0.01)
    assert "flushed" not in cost.report()
    for _ in range(2):
        cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, retries=3))
    assert cost.with_observed_margin() is cost
    assert "note: in training, 6 allocations succeeded only after" in cost.report()


def test_a_cost_that_was_only_traced_has_no_time() -> None:
    """The error says how to get one."""
    time = PaddedCost(sample_bytes=7)
    cost = measured(time_form=time)
    assert cost.time is time
    with pytest.raises(CostError, match=r"no time: .* method='auto' or 'run'"):
        measured().time  # noqa: B018
