"""Runs over loaders with a sampler: what came counts, however far workers have read ahead."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.resuming import as_json, as_pickle, check_every_stop
from tests.support.samplers import LENGTHS, counted, forks, loader_of, sampler_of
from tests.support.streams import SIZES, make
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, PaddedCost
from torchbudget.data.stream.dataset import stop_together
from torchbudget.errors import OptionError, StateError

pytestmark = forks

LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2, "prefetch_factor": 4},
    "persistent": {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
}
every_loader = pytest.mark.parametrize("options", LOADERS.values(), ids=list(LOADERS))


def rest_of(state: Any, **options: Any) -> list[list[int]]:
    """What comes from a state on."""
    sampler = sampler_of(**options)
    sampler.load_state_dict(as_json(state))
    return list(sampler)


# ---------------------------------------------------------------------- positions


@every_loader
def test_the_rest_of_a_run_is_the_rest(options: Any) -> None:
    """From any batch, with the run's position as with the sampler's; epochs follow each other."""
    whole = list(sampler_of())

    def loop(sampler: Any) -> Any:
        return sampler.tracked(loader_of(sampler, **options))

    assert check_every_stop(sampler_of, loop=loop, every=7) == whole
    sampler, plain = sampler_of(), sampler_of()
    loader = loader_of(sampler, **options)
    for epoch in range(1, 4):
        number = len(sampler) + epoch % 2  # also without meeting the end
        assert list(islice(sampler.tracked(loader), number)) == list(plain)
        assert sampler.epoch == epoch == sampler.state_dict()["epoch"]


@every_loader
def test_positions_before_the_last_batch(options: Any) -> None:
    """For hosts that read ahead: up to two batches before, also after the end."""
    whole, sampler = list(sampler_of()), sampler_of()
    with sampler.tracked(loader_of(sampler, **options)) as run:
        assert run.position() == run.position(back=2) == sampler_of().state_dict()
        for done, batch in enumerate(run, 1):
            assert (run.last.indices.tolist(), run.last.ends_step) == (batch, True)
            assert run.position() == sampler.state_dict()
            if done in (1, 2, 9):
                for back in range(3):
                    assert rest_of(run.position(back=back)) == whole[max(done - back, 0) :]
        assert run.position()["epoch"] == 1
        for back in (1, 2):
            assert rest_of(run.position(back=back)) == whole[-back:]
        with pytest.raises(StateError, match="3 positions are kept"):
            run.position(back=3)
    assert next(run, None) is None


@every_loader
def test_a_run_that_is_broken_off_goes_on(options: Any) -> None:
    """In another run or in a plain loop; a plain one that is broken off starts over, there."""
    whole, sampler = list(sampler_of()), sampler_of()
    loader = loader_of(sampler, **options)
    came = list(islice(sampler.tracked(loader), 3))
    assert sampler.batches_left == len(whole) - 3
    came += islice(sampler.tracked(loader), 4)
    assert came == whole[:7]
    for _ in range(2):
        assert list(islice(sampler, 2)) == whole[7:9]
    assert list(loader) == whole[7:]
    assert sampler.epoch == 1


# ---------------------------------------------------------------------- several loops


@every_loader
def test_plain_loops_change_nothing_for_an_open_run(options: Any) -> None:
    """As of an evaluation within: the position, the steps and the epoch are as without it."""
    made = partial(sampler_of, samples_per_step=50)
    whole, sampler = list(made()), made()
    loader, inner = loader_of(sampler, **options), loader_of(sampler)
    run, came = sampler.tracked(loader), []
    for done, batch in enumerate(run, 1):
        came.append(batch)
        steps = sampler.steps
        if done % 8 == 3:
            assert list(inner) == list(islice(sampler, 10**6)) == whole[done:]
            next(iter(inner))
        assert sampler.steps is steps
        assert sampler.state_dict() == run.position()
        assert sampler.epoch == int(done == len(whole))
        if done % 8 == 3:
            assert rest_of(run.position(), samples_per_step=50) == whole[done:]
    assert came == whole
    assert (sampler.epoch, sum(sampler.steps)) == (1, len(whole))


def test_of_several_runs_the_last_that_delivered_counts() -> None:
    whole, sampler = list(sampler_of()), sampler_of()
    first = sampler.tracked(loader_of(sampler))
    assert list(islice(first, 2)) == whole[:2]
    second = sampler.tracked(loader_of(sampler))  # it begins where the first one stands
    assert sampler.state_dict()["done"] == 2
    assert list(islice(second, 3)) == whole[2:5]
    assert sampler.state_dict() == second.position()
    assert next(first) == whole[2]
    assert sampler.state_dict() == first.position()
    second.close()
    assert list(first) == whole[3:]
    assert sampler.epoch == 1


def test_a_chosen_position_ends_the_runs_before() -> None:
    """They go on to yield their batches, and change nothing any more."""
    whole, sampler, fresh = list(sampler_of()), sampler_of(), sampler_of()
    fresh.set_epoch(5)
    run, plain = sampler.tracked(loader_of(sampler)), iter(sampler)
    came = list(islice(run, 3))
    sampler.set_epoch(5)
    assert came + list(run) == whole == list(plain)
    assert sampler.state_dict() == fresh.state_dict()
    assert list(sampler) == list(fresh)


@pytest.mark.parametrize("other", ["plain", "tracked"])
def test_another_loop_over_the_same_persistent_workers_is_an_error(other: str) -> None:
    """Which would take the batches of the first; the sampler stands at the last that came."""
    whole, sampler = list(sampler_of()), sampler_of()
    loader = loader_of(sampler, **LOADERS["persistent"])
    run = sampler.tracked(loader)
    came = list(islice(run, 3))
    loop = iter(loader) if other == "plain" else sampler.tracked(loader)
    with pytest.raises(StateError, match="with persistent workers, another loop"):
        next(run)
    assert list(run) == []
    assert sampler.state_dict()["done"] == 3
    if other == "tracked":
        assert came + list(loop) == whole
        assert sampler.epoch == 1


def test_a_batch_that_no_sampler_has_drawn_is_an_error() -> None:
    """As by a loader that makes batches itself."""

    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            batches = super().__iter__()
            return (batch for one in batches for batch in (one, one))

    class Late(DataLoader[Any]):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    sampler = sampler_of()
    with pytest.raises(StateError, match=r"iter\(loader\) began no iteration.*a generator calls"):
        sampler.tracked(Late(range(300), batch_sampler=sampler, collate_fn=list))
    run = sampler.tracked(Twice(range(300), batch_sampler=sampler, collate_fn=list))
    with pytest.raises(StateError, match="returned batch 1, which its sampler did not draw"):
        list(run)
    assert sampler.state_dict()["done"] == 1


# ---------------------------------------------------------------------- loops that are not tracked


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_that_would_lose_what_workers_have_read_is_refused(persistent: bool) -> None:
    """Of a plain loop over workers; not of one without, nor once an epoch is chosen."""
    sampler = sampler_of()
    next(iter(loader_of(sampler)))
    assert sampler.state_dict()["done"] == 1
    batches = iter(loader_of(sampler, num_workers=2, persistent_workers=persistent))
    next(batches)
    with pytest.raises(StateError, match=r"prefetch batches.*sampler.tracked\(loader\)"):
        sampler.state_dict()
    del batches
    sampler.set_epoch(0)
    assert sampler.state_dict()["done"] == 0


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_at_every_batch(workers: int, every: int) -> None:
    """The StatefulDataLoader of torchdata saves and loads the sampler as it is, at every batch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(
            range(300),
            batch_sampler=sampler_of(budget=1500, window=100),
            collate_fn=list,
            num_workers=workers,
            snapshot_every_n_steps=every,
        )

    expected = sampler_of(budget=1500, window=100)
    whole, following = list(expected), list(expected)
    assert check_every_stop(loader, file=as_pickle, every=1 if workers == 0 else 3) == whole
    for stop in (0, 1, len(whole)):
        first, resumed = loader(), loader()
        batches = iter(first)
        assert list(islice(batches, stop)) == whole[:stop]
        resumed.load_state_dict(as_pickle(first.state_dict()))
        # After the last batch an end, or the next epoch, is what a loader may make of it.
        assert list(resumed) in ([whole[stop:]] if stop < len(whole) else [[], following])


def test_loops_that_cannot_be_tracked() -> None:
    sampler, fewer = sampler_of(), sampler_of(LENGTHS[:150])
    with pytest.raises(OptionError, match="batch_sampler"):
        sampler.tracked(loader_of(sampler_of()))
    with pytest.raises(OptionError, match="in_order=False"):
        sampler.tracked(loader_of(sampler, num_workers=2, in_order=False))
    with pytest.raises(OptionError, match="has 150 sizes, but the data set has 300 samples"):
        fewer.tracked(loader_of(fewer))

    class WithoutLength(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    nobody_knows = DataLoader(WithoutLength(), batch_sampler=fewer, collate_fn=list)
    assert counted(fewer.tracked(nobody_knows)) == Counter(range(150))


@pytest.mark.parametrize("workers", [0, 1])
def test_as_a_sampler_of_samples_it_is_refused(workers: int) -> None:
    """`sampler=` instead of `batch_sampler=`: its batches would be batched again."""
    options: dict[str, Any] = {"sampler": sampler_of(), "num_workers": workers}
    for more in ({}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}):
        with pytest.raises(OptionError, match="as batch_sampler=, not as sampler="):
            next(iter(DataLoader(range(1000), **options, **more)))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- steps


@every_loader
@pytest.mark.parametrize("ahead", [0, 2])
def test_steps_end_where_they_are_planned_however_far_is_read(options: Any, ahead: int) -> None:
    """By workers, and by a host that takes batches before it accumulates them."""
    model = nn.Linear(1, 1)
    sampler = sampler_of(samples_per_step=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accumulator = GradAccumulator(optimizer, model, steps=sampler)
    found, samples = [], 0

    def accumulate(batch: Any) -> None:
        nonlocal samples
        samples += len(batch)
        with accumulator.micro_batch(weight=len(batch)):
            accumulator.backward(model(torch.ones(len(batch), 1)).sum())
        if accumulator.stepped:
            found.append(samples)
            samples = 0

    waiting: list[Any] = []
    for batch in sampler.tracked(loader_of(sampler, **options)):
        waiting.append(batch)
        if len(waiting) > ahead:
            accumulate(waiting.pop(0))
    for batch in waiting:
        accumulate(batch)
    assert found == [50] * 6
    assert samples == 0


# ---------------------------------------------------------------------- memory


def test_iterating_keeps_nothing_of_the_caller_alive() -> None:
    """What the caller lets go is freed, although sampler and stream ask who iterates."""
    for source in (sampler_of(), make()):
        batch = torch.zeros(1)
        gone = weakref.ref(batch)
        iter(source)
        del batch
        assert gone() is None


def tracked(loader: DataLoader[Any]) -> Iterable[Any]:
    planned: Any = loader.dataset if loader.batch_sampler is None else loader.batch_sampler
    batches: Iterable[Any] = planned.tracked(loader)
    return batches


@pytest.mark.parametrize("loop", [iter, tracked, stop_together])
@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_batch_is_gone_while_the_next_one_is_made(
    kind: str, loop: Callable[[DataLoader[Any]], Iterable[Any]]
) -> None:
    """A loop that drops its own has the memory of one."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def collate(samples: list[Any]) -> Any:
        assert not alive
        batch = torch.zeros(len(samples))
        alive.add(batch)
        return batch

    if kind == "stream":
        loader = DataLoader(make(collate_fn=collate), batch_size=None)
    else:
        sampler = MemoryBudgetBatchSampler(SIZES, PaddedCost(unit_bytes=1), 300)
        loader = DataLoader(range(len(SIZES)), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]  # a range is map-style
    found = 0
    for batch in loop(loader):
        found += len(batch)
        del batch
    assert found == len(SIZES)
