"""Several ways to make a step: their cost, the shapes of batches, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from tests.support.costs import READER, measured, two_ways, way
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget import (
    BudgetedIterableDataset,
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    alternatives,
    fit,
    load_cost,
    measure_cost,
    plan_step,
)
from torchbudget.cost import measure
from torchbudget.cost.batch_recipe import ShapeReader
from torchbudget.cost.measured import MeasuredCost, WaysCost
from torchbudget.errors import BatchError, CostError, MeasureWarning, OptionError
from torchbudget.machine.peaks import Peak

SIZES = np.array([1, 3, 10, 99, 500])
SHAPES = [(3, 8), (5, 40), (3, 41), (5, 9)]  # from which shapes of batches are learned

costs = st.builds(
    way,
    st.integers(1, 200),
    st.floats(0, 1e-2),
    st.floats(1e-7, 1e-4),
    margin=st.sampled_from([0.0, 0.01, 0.3]),
)


@given(st.lists(costs, min_size=2, max_size=3), st.integers(500, 10**6), st.integers(1, 10**9))
def test_the_fastest_way_that_fits_is_taken(
    ways: list[MeasuredCost], budget: int, amount_ns: int
) -> None:
    """Bytes are the least, the capacity is the greatest, and both agree with what is taken."""
    cost = replace(WaysCost.of(ways, READER), room=budget)
    n = np.arange(1, 40)[:, None]
    needed = np.stack([one.batch_bytes(n, SIZES) for one in cost.ways])
    times = np.stack([one.time.batch_bytes(n, SIZES) for one in cost.ways])
    assert (cost.batch_bytes(n, SIZES) == needed.min(axis=0)).all()
    taken = cost.way(n, SIZES)
    chosen, seconds = (one.batch_bytes(n, SIZES) for one in (cost.chosen, cost.time))
    for place in np.ndindex(taken.shape):
        fitting = [k for k in range(len(ways)) if needed[(k, *place)] <= budget]
        if fitting:
            assert taken[place] == min(fitting, key=lambda k: times[(k, *place)])
        else:
            assert needed[(taken[place], *place)] == needed[(slice(None), *place)].min()
        assert chosen[place] == needed[(taken[place], *place)]
        assert seconds[place] == times[(taken[place], *place)]
    fits = cost.batch_bytes(n, SIZES) <= budget
    assert ((cost.capacity(SIZES, budget) >= n) == fits).all()
    in_time = fits & (seconds <= amount_ns)
    assert ((cost.time.capacity(SIZES, amount_ns) >= n) == in_time).all()
    both = fits[1:] & fits[:-1]
    assert (np.diff(seconds, axis=0)[both] >= 0).all()


def test_a_saved_cost_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = two_ways(50_000, margin=0.07)
    cost.save(path)
    for same in (load_cost(path), pickle.loads(pickle.dumps(cost))):  # noqa: S301
        assert isinstance(same, WaysCost)
        assert same.reader == cost.reader
        assert (same.chosen.batch_bytes(7, SIZES) == cost.chosen.batch_bytes(7, SIZES)).all()
        assert (same.time.batch_bytes(7, SIZES) == cost.time.batch_bytes(7, SIZES)).all()


# ---------------------------------------------------------------------- the shapes of batches


BATCHES: dict[str, Callable[[int, int], Any]] = {
    "tensor": torch.zeros,
    "padded": lambda n, length: PadCollate()([torch.zeros(length)] * n),
    "mapping": lambda n, length: {"labels": torch.zeros(n), "ids": torch.zeros(n, length)},
    "pair, sequence first": lambda n, length: (torch.zeros(length, n, 4), n * length),
    "one label fewer": lambda n, length: torch.zeros(n, 2 * length - 1),
    "frames": lambda n, length: {"frames": torch.zeros(n, 80, length // 4), "n": np.zeros(n)},
}


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
@given(n=st.integers(1, 70), length=st.integers(1, 900))
def test_a_shape_is_read_off_a_batch(make: Callable[[int, int], Any], n: int, length: int) -> None:
    """Of sizes that make the same tensors, it is the largest."""
    reader = ShapeReader.of(lambda shape: make(*shape), SHAPES)
    rows, size = reader.shape_of(make(n, length))
    assert rows == n
    assert length <= size < length + (4 if isinstance(make(1, 1), dict) else 1)


@pytest.mark.parametrize("n", [1, 3, 60])
def test_a_shape_of_two_axes(n: int) -> None:
    def make(shape: tuple[int, ...]) -> Tensor:
        rows, height, width = shape
        return torch.zeros(rows, 3, height, width)

    shapes = [(n, h, w) for n in (3, 5) for h in (8, 16) for w in (24, 40)]
    assert ShapeReader.of(make, shapes).shape_of(make((n, 32, 80))) == (n, 32, 80)
    one_width = [(n, h, 24) for n, h, _ in shapes]
    assert ShapeReader.of(make, one_width).shape_of(make((n, 32, 24))) == (n, 32, 24)


SHAPELESS: dict[str, Callable[[int, int], Any]] = {
    # Sizes that small ones alone show: the longest would be taken for shorter ones.
    r"\(1, 4096\) looks like one of \(1, 512\)": lambda n, size: torch.zeros(n, min(size, 512)),
    "structure changes": lambda n, size: [torch.zeros(size) for _ in range(n)],
    "follows from its number of samples alone": lambda n, size: torch.zeros(n * size),
}


@pytest.mark.parametrize("said", SHAPELESS, ids=["cropped", "listed", "packed"])
def test_batches_without_a_shape_are_refused(said: str) -> None:
    model = nn.Linear(1, 1)
    step = alternatives(lambda x: model(x).sum(), model)
    with pytest.raises(CostError, match=said):
        measure_cost(step, SHAPELESS[said], max_size=4096, min_size=8, method="trace")


def test_another_batch_than_was_measured_is_refused() -> None:
    with pytest.raises(BatchError, match="let make_batch make batches as the loader does"):
        READER.shape_of({"ids": torch.zeros(2, 5), "mask": torch.zeros(2, 5)})


# ---------------------------------------------------------------------- plans


def sizes_of(count: int) -> Any:
    return np.random.default_rng(0).geometric(0.02, count).clip(1, 800)


def test_a_step_takes_each_sample_once_and_no_batch_exceeds_the_budget() -> None:
    sizes, cost = sizes_of(600), two_ways(40_000)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 40_000, samples_per_step=200)
    batches = [*sampler]
    assert sorted(i for batch in batches for i in batch) == [*range(600)]
    shapes = [(len(batch), sizes[batch].max()) for batch in batches]
    taken = [int(sampler.cost.chosen.batch_bytes(*shape)) for shape in shapes]
    ways = [int(sampler.cost.way(*shape)) for shape in shapes]
    assert max(taken) <= 40_000
    assert {0, 1} == set(ways)
    assert sampler.report().fullest <= 1
    assert max(sampler.batch_bytes(np.array(batch)) for batch in batches) == max(taken)
    # Faster than with the way alone in which all samples fit.
    alone = MemoryBudgetBatchSampler(sizes, cost.ways[1], 40_000, samples_per_step=200)
    assert sampler.report().epoch_s < 0.8 * alone.report().epoch_s  # type: ignore[operator]


def test_a_larger_margin_changes_the_ways_and_their_time() -> None:
    """A step that needed more than predicted is planned anew, and a resumed run takes the same."""
    sizes, cost = sizes_of(600), two_ways(40_000)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 40_000, samples_per_step=200)
    n, size = 4, 95
    before = int(sampler.plan.rules.work.batch_bytes(n, size))
    predicted = int(sampler.cost.chosen.batch_bytes(n, size))
    assert predicted == int(cost.ways[0].batch_bytes(n, size))
    sampler.cost.observe(n, size, predicted)  # plain, and as predicted: no surprise
    assert sampler.replan() == 0
    with pytest.warns(MeasureWarning):
        sampler.cost.observe(n, size, int(predicted * 1.1))
    assert sampler.replan() == pytest.approx(0.101)
    assert int(sampler.cost.way(n, size)) == 1
    assert int(sampler.plan.rules.work.batch_bytes(n, size)) > before
    again = MemoryBudgetBatchSampler(sizes, two_ways(40_000), 40_000, samples_per_step=200)
    again.load_state_dict(sampler.state_dict())
    shapes = np.arange(1, 30)[:, None], np.arange(1, 800, 7)
    assert (again.cost.way(*shapes) == sampler.cost.way(*shapes)).all()
    assert [*again] == [*sampler]


def test_ways_are_chosen_under_the_budget_of_the_plan() -> None:
    """Not of the measurement: an int tensor of 4 × 95 fits plain in one, and not in the other."""
    step, cost, batch = alternatives(lambda _: 0, lambda _: 1), two_ways(), torch.zeros(4, 95)
    for budget, expected in ((40_000, 0), (30_000, 1)):
        sampler = MemoryBudgetBatchSampler([95] * 64, cost, budget, samples_per_step=32)
        step.bind(sampler)
        assert step.choose(batch) == step(batch) == expected
    plan = plan_step([95] * 64, cost, 40_000)
    step.bind(plan)
    assert step(batch) == 0
    # A time that is passed is one under the plan's budget as well.
    passed = plan_step([95] * 64, cost, 30_000, time=cost.time).micro_batches
    assert passed == plan_step([95] * 64, cost, 30_000).micro_batches
    assert step(torch.zeros(99, 8000)) == 1  # as with oversize="alone"


def test_full_batches_are_refused() -> None:
    """Where each batch is a step; with given shapes; and without a time to choose by."""
    cost = two_ways()
    untimed = WaysCost.of([replace(one, seconds=None) for one in cost.ways], READER)
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (OptionError, "samples are given", lambda: [*MemoryBudgetBatchSampler([5], cost, 10**5)]),
        (
            OptionError,
            "samples are given",
            lambda: BudgetedIterableDataset([torch.zeros(3)], cost, 10**5),
        ),
        (OptionError, "max_shapes is for", lambda: plan_step([5, 6], cost, 10**5, max_shapes=2)),
        (CostError, "has no time", lambda: plan_step([5, 6], untimed, 10**5)),
        (CostError, "has no time", lambda: untimed.time),
        (CostError, "padded batches", cost.packed),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


def test_what_is_no_alternative_is_refused() -> None:
    step = alternatives(len, len)
    for ways in ((), (len,), (len, 3), (len, step)):
        with pytest.raises(OptionError, match="at least two functions"):
            alternatives(*ways)
    with pytest.raises(OptionError, match="loader with this step"):
        step(torch.zeros(1, 1))
    plain = MemoryBudgetBatchSampler([5, 6], measured(), 10**5)
    with pytest.raises(OptionError, match="not planned by a cost of alternatives"):
        step.bind(plain)


# ---------------------------------------------------------------------- the same gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.keys = nn.MultiheadAttention(16, 2, batch_first=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.head(self.drop(self.keys(x, x, x)[0]))
        return out


def made_with(seed: int, **ways: Callable[[Net, Tensor], Tensor]) -> MeasuredCost:
    """A cost, once the gradients of ways that differ in the loss were compared."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step_of(loss: Callable[[Net, Tensor], Tensor]) -> Callable[[Tensor], None]:
        def step(ids: Tensor) -> None:
            loss(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    before = [one.clone() for one in model.parameters()]
    step = alternatives(*map(step_of, ways.values()))
    try:
        make_batch = partial(torch.ones, dtype=torch.long)
        with patch.object(measure, "_cost_of", lambda *_: way(1, 1.0, 1.0)):
            return measure_cost(step, make_batch, max_size=64, min_size=8, budget="2GiB")
    finally:
        for one, then in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(one, then, rtol=0, atol=0)


def whole(model: Net, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")


def chunked(model: Net, ids: Tensor) -> Tensor:
    """The same loss, in chunks of two samples' logits."""
    out = model(ids)
    chunks = zip(out.split(2), ids.split(2), strict=True)
    losses = [F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in chunks]
    return torch.stack(losses).sum()


def chunks_of_means(model: Net, ids: Tensor) -> Tensor:
    """Wrong: the mean over chunks, of which the last one may have fewer samples."""
    out = model(ids)
    chunks = zip(out.split(2), ids.split(2), strict=True)
    return torch.stack([F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in chunks]).mean()


def mean(model: Net, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def in_half(model: Net, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return chunked(model, ids)


def half_whole(model: Net, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return whole(model, ids)


def without_a_head(model: Net, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model.drop(model.keys(*[model.embed(ids)] * 3)[0])
    return F.cross_entropy(model.head(out).flatten(0, 1), ids.flatten(), reduction="sum")


def other_draws(model: Net, ids: Tensor) -> Tensor:
    torch.rand(1)
    return whole(model, ids)


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        (whole, chunked, True),
        (half_whole, in_half, True),
        (mean, chunks_of_means, False),
        (whole, mean, False),
        (whole, without_a_head, False),
        (whole, other_draws, False),
        (half_whole, without_a_head, False),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_ways_of_other_gradients_are_refused(one: Any, other: Any, are_alike: bool) -> None:
    """Rounding is none; nor does the check change the weights."""
    if are_alike:
        assert isinstance(made_with(0, one=one, other=other), WaysCost)
        return
    with pytest.raises(CostError, match="way 1 of alternatives gives another gradient"):
        made_with(0, one=one, other=other)


@torch.no_grad()
def test_forwards_are_compared_by_what_they_return() -> None:
    """Also inside an object; without any tensor they cannot be compared."""
    model = nn.Linear(1, 1)

    def compared(*factors: float | None) -> object:
        def forward_of(factor: float | None) -> Callable[[Tensor], Any]:
            def forward(x: Tensor) -> Any:
                out = model(x[..., None])
                return SimpleNamespace(out=factor * out) if factor else out.sum().item()

            return forward

        step = alternatives(*map(forward_of, factors))
        with patch.object(measure, "_cost_of", lambda *_: way(1, 1.0, 1.0)):
            return measure_cost(step, torch.ones, max_size=64, min_size=8, budget="2GiB")

    compared(1.0, 1.0)
    for factors, message in (((1.0, 1.5), "gives another"), ((None, None), "cannot be compared")):
        with pytest.raises(CostError, match=message):
            compared(*factors)


def test_a_report_has_each_way(tmp_path: Path) -> None:
    cost = made_with(1, one=whole, other=chunked)
    assert cost.measured_on["checkpointing"] == "in 2 ways"
    text = cost.report()
    assert text.count("rests on:") == 2
    assert "way 0" in text
    assert "way 1" in str(cost)
    assert len(cost.errors()) == len(cost.probes)
    cost.observe(1, 8, Peak(retries=3))
    assert "3 allocations succeeded only after" in cost.report()
    cost.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json").report() == text
    with pytest.warns(MeasureWarning):
        cost.observe(1, 8, 10**9)
    assert "before training steps were observed" in cost.with_observed_margin().report()


# ---------------------------------------------------------------------- whole trainings


def test_fit_lets_its_criterion_choose_the_way() -> None:
    lengths = [80, 3, 40, 9, 60, 5, 70, 12]
    data: Any = [torch.arange(float(n)) / n for n in lengths]
    reader = ShapeReader.of(lambda shape: PadCollate()([torch.ones(shape[1])] * shape[0]), SHAPES)
    cost = WaysCost.of(two_ways().ways, reader)
    sampler = MemoryBudgetBatchSampler(lengths, cost, 6000, samples_per_step=4)
    step, model = alternatives(len, len), nn.Linear(1, 1)
    step.bind(sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    accumulator = GradAccumulator(optimizer, model, steps=sampler)
    seen: list[tuple[int, int]] = []

    def criterion(model: nn.Module, batch: Any) -> Tensor:
        seen.append((batch.data.numel(), step.choose(batch)))
        return model(batch.data[..., None]).square().sum()

    loader: Any = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())
    fit(model, loader, criterion, accumulator, epochs=2, progress=False)
    assert {way for _, way in seen} == {0, 1}
    assert all(way == (1000 + 100 * numel > 6000) for numel, way in seen)


# ---------------------------------------------------------------------- ranks


@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", ["replicated", "sharded"])
def test_ranks_of_one_round_take_different_ways(wrapped: str, tmp_path: Path) -> None:
    """With DDP, and with FSDP2 around what is computed again: the step is that of all samples."""
    found = run_ranks(script("measuring.in_ways"), tmp_path, 2, wrapped)
    one, other = (ways for ways, *_ in found)
    assert len(one) == len(other)
    assert any(a != b for a, b in zip(one, other, strict=True))
    assert max(off for _, off, _ in found) < 1e-12
    assert all(error.startswith("CostError: way 1 of") for *_, error in found)
