"""Loops over loaders with a sampler or a stream: what came counts, not what workers have read."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support import samplers, streams
from tests.support.resuming import as_json, as_pickle, check_every_stop, in_parts
from tests.support.samplers import LENGTHS, counted, forks, sampler_of
from tests.support.streams import SIZES
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, PaddedCost
from torchbudget.data.stream.dataset import stop_together
from torchbudget.errors import DiscardedStateWarning, OptionError, StateError

pytestmark = [
    forks,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own
]

LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"workers": 2, "prefetch_factor": 4},
    "persistent": {"workers": 2, "prefetch_factor": 4, "persistent_workers": True},
}
KINDS = ("sampler", *streams.KINDS)
both = pytest.mark.parametrize("kind", ["sampler", "shards"])
every_loader = pytest.mark.parametrize("options", LOADERS.values(), ids=list(LOADERS))


def make(kind: str, **options: Any) -> Any:
    return sampler_of(**options) if kind == "sampler" else streams.make(kind, **options)


def loader_of(source: Any, workers: int = 0, **options: Any) -> DataLoader[Any]:
    if isinstance(source, MemoryBudgetBatchSampler):
        return samplers.loader_of(source, num_workers=workers, **options)
    return streams.loader_of(source, workers, **options)


def loop(source: Any, **options: Any) -> Any:
    return source.tracked(loader_of(source, **options))


def whole_of(kind: str, epoch: int = 0, **options: Any) -> list[Any]:
    """The batches of an epoch, in a plain loop."""
    source = make(kind)
    source.set_epoch(epoch)
    return list(loader_of(source, **options))


def loaded(kind: str, state: Any) -> Any:
    source = make(kind)
    source.load_state_dict(as_json(state))
    return source


def begun_at(kind: str, done: int, **options: Any) -> tuple[list[Any], Any]:
    """A whole epoch's batches, and a source that begins after so many of them."""
    running = make(kind)
    list(islice(loop(running, **options), done))
    return whole_of(kind, **options), loaded(kind, running.state_dict())


# ---------------------------------------------------------------------- positions


@every_loader
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_run_is_the_rest(kind: str, options: Any) -> None:
    """From any batch, again within the rest, and epochs follow each other."""
    made, tracked = partial(make, kind), partial(loop, **options)
    whole = whole_of(kind, **options)
    every = 17 if options and kind != "sampler" else 7
    assert check_every_stop(made, loop=tracked, every=every) == whole
    assert in_parts(made, [every, 3], loop=tracked) == whole
    source = make(kind)
    loader = loader_of(source, **options)
    assert whole != whole_of(kind, 1, **options)
    for epoch in range(3):
        expected = whole_of(kind, epoch, **options)
        ends = epoch % 2 or kind != "sampler"  # the loop over a sampler need not meet the end
        found = list(islice(source.tracked(loader), len(expected) + ends))
        assert found == expected
        assert source.epoch == epoch + 1 == source.state_dict()["epoch"]


@pytest.mark.parametrize("done", [1, 4])
def test_a_stream_goes_on_out_of_order(done: int) -> None:
    """Every sample once, though the order of batches is unknown."""
    tracked = partial(loop, workers=2, in_order=False)
    found = in_parts(partial(make, "iterable"), [done], loop=tracked)
    assert sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(whole_of("iterable")))


@every_loader
@both
def test_positions_before_the_last_batch(kind: str, options: Any) -> None:
    """For hosts that read ahead: up to two batches before, also after the end."""
    whole, source = whole_of(kind, **options), make(kind)

    def rest(state: Any) -> list[Any]:
        return list(loop(loaded(kind, state), **options))

    with loop(source, **options) as run:
        assert rest(run.position()) == rest(run.position(back=2)) == whole
        for done, batch in enumerate(run, 1):
            if kind == "sampler":
                assert (run.last.indices.tolist(), run.last.ends_step) == (batch, True)
            assert run.position() == source.state_dict()
            if done in (1, 2, 9):
                for back in range(3):
                    assert rest(run.position(back=back)) == whole[max(done - back, 0) :]
        assert run.position()["epoch"] == 1
        for back in (1, 2):
            assert rest(run.position(back=back)) == whole[-back:]
        with pytest.raises(StateError, match="3 positions are kept"):
            run.position(back=3)
    assert next(run, None) is None


@every_loader
@both
@pytest.mark.parametrize("ended", ["dropped", "closed", "the present epoch"])
def test_a_tracked_loop_that_is_broken_off_goes_on(kind: str, ended: str, options: Any) -> None:
    """In its order, and again; and the epoch after it is whole."""
    whole, source = begun_at(kind, 9, **options)
    loader = loader_of(source, **options)
    for place in (9, 10, 11):
        batches = source.tracked(loader)
        assert next(batches) == whole[place]
        if ended == "closed":
            batches.close()
        elif ended == "the present epoch":
            source.set_epoch(0)  # it changes nothing
        del batches
        gc.collect()
    assert list(source.tracked(loader)) == whole[12:]
    assert source.epoch == 1
    assert sorted(source.tracked(loader)) == sorted(whole_of(kind, 1, **options))


@pytest.mark.parametrize(("kind", "workers"), [("sampler", 0), ("shards", 0), ("shards", 2)])
def test_a_plain_loop_that_is_broken_off_starts_over(kind: str, workers: int) -> None:
    """Where a tracked one has ended."""
    whole, source = begun_at(kind, 9, workers=workers)
    loader = loader_of(source, workers)
    for _ in range(2):
        assert next(iter(loader)) == whole[9]
    assert list(loader) == whole[9:]


@every_loader
@both
def test_plain_loops_after_the_one_that_went_on(kind: str, options: Any) -> None:
    """A state is used up where its epoch has ended: the next one comes as a whole."""
    whole, source = begun_at(kind, 5, **options)
    loader = loader_of(source, **options)
    assert list(loader) == whole[5:]
    assert list(loader) == whole_of(kind, 1, **options)


# ---------------------------------------------------------------------- several loops


@pytest.mark.parametrize("workers", [0, 2])
@both
def test_plain_loops_change_nothing_for_an_open_run(kind: str, workers: int) -> None:
    """As of an evaluation within, whole or broken off: position, epoch and the rest stay.

    They begin at the position of the sampler, and where the loop over a stream began.
    """
    whole, source = whole_of(kind, workers=workers), make(kind)
    run, came = loop(source, workers=workers), []
    for done, batch in enumerate(run, 1):
        came.append(batch)
        if done in (3, 11):
            inner = list(loader_of(source, workers=0 if kind == "sampler" else workers))
            assert inner == whole[done if kind == "sampler" else 0 :]
            next(iter(source))
            rest = loop(loaded(kind, run.position()), workers=workers)
            assert list(rest) == whole[done:]
        assert source.state_dict() == run.position()
        assert source.epoch == 0 or done == len(whole)
    assert came == whole
    assert source.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
@both
def test_of_several_runs_the_last_that_delivered_counts(kind: str, workers: int) -> None:
    whole, source = whole_of(kind, workers=workers), make(kind)
    options = {"workers": workers, "prefetch_factor": 8 if workers else None}
    first = loop(source, **options)
    assert list(islice(first, 2)) == whole[:2]
    second = loop(source, **options)  # it begins where the first one stands
    assert list(islice(second, 3)) == whole[2:5]
    assert source.state_dict() == second.position()
    assert list(loop(loaded(kind, source.state_dict()), workers=workers)) == whole[5:]
    assert next(first) == whole[2]
    assert source.state_dict() == first.position()
    second.close()
    assert list(first) == whole[3:]
    assert source.epoch == 1


@both
def test_a_chosen_position_ends_the_runs_before(kind: str) -> None:
    """They go on to yield their batches, and change nothing any more."""
    whole, source, fresh = whole_of(kind), make(kind), make(kind)
    fresh.set_epoch(5)
    run, plain = loop(source), iter(source)
    came, first = list(islice(run, 3)), next(plain)
    source.set_epoch(5)
    assert came + list(run) == [first, *plain] == whole
    assert source.state_dict() == fresh.state_dict()
    assert list(source) == list(fresh)


@pytest.mark.parametrize(
    ("kind", "other"), [("sampler", "plain"), ("sampler", "tracked"), ("shards", "plain")]
)
def test_another_loop_over_the_same_persistent_workers_is_an_error(kind: str, other: str) -> None:
    """Which would take the batches of the first; the source stands at the last that came."""
    source, options = make(kind), LOADERS["persistent"]
    whole, loader = whole_of(kind, **options), loader_of(source, **options)
    run = source.tracked(loader)
    came = list(islice(run, 3))
    following = iter(loader) if other == "plain" else source.tracked(loader)
    message = {"sampler": "with persistent workers, another loop", "shards": "a loader of its own"}
    with pytest.raises(StateError, match=message[kind]):
        next(run)
    assert list(run) == []
    assert list(loop(loaded(kind, source.state_dict()), **options)) == whole[3:]
    if other == "tracked":
        assert came + list(following) == whole
        assert source.epoch == 1


# ---------------------------------------------------------------------- states and epochs


@both
def test_a_loaded_position_is_not_discarded_in_silence(kind: str) -> None:
    """The rest of the saved epoch would be lost, or an epoch that was over would come again."""
    saved, whole = make(kind), whole_of(kind)
    list(islice(saved, 3))
    within = saved.state_dict()
    list(saved)
    over = saved.state_dict()
    source = loaded(kind, within)
    source.set_epoch(0)  # as trainers do at their start
    assert list(source) == whole[3:]
    source.load_state_dict(within)
    with pytest.warns(DiscardedStateWarning, match=r"set_epoch\(1\) discards .* epoch 0") as found:
        source.set_epoch(1)
    assert found[0].filename == __file__  # the line that has to change
    assert list(source) == whole_of(kind, 1)
    source.load_state_dict(over)
    with pytest.warns(DiscardedStateWarning, match=r"set_epoch\(0\) discards .* epoch 1"):
        source.set_epoch(0)
    assert list(source) == whole
    source.set_epoch(5)  # a choice, where nothing is loaded any more: no warning
    source.load_state_dict(over)
    source.set_epoch(3)  # nothing of an epoch is lost
    source = loaded(kind, over)
    list(source)
    source.set_epoch(0)  # nor after the state was used


def test_another_epoch_puts_a_state_aside_in_workers_that_persist() -> None:
    whole, stream = begun_at("iterable", 7, workers=2)
    loader = loader_of(stream, 2, persistent_workers=True)
    assert next(iter(loader)) == whole[7]
    stream.set_epoch(1)
    next(iter(loader))
    stream.set_epoch(0)
    assert list(loader) == whole


def test_a_state_that_comes_too_late_for_workers() -> None:
    """They live already, and would go on without it; a tracked loop starts new ones."""
    whole, stream = begun_at("iterable", 7, workers=2)
    loader = loader_of(stream, 2, persistent_workers=True)
    next(iter(loader))
    stream.load_state_dict(begun_at("iterable", 9, workers=2)[1].state_dict())
    with pytest.raises(StateError, match="before the first loop"):
        list(loader)
    assert list(stream.tracked(loader)) == whole[9:]


@pytest.mark.parametrize("drawn", [0, 3, 10**6], ids=["fresh", "in mid-epoch", "after an epoch"])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, as_pickle])
@both
def test_a_copy_goes_on_too(kind: str, copied: Any, drawn: int) -> None:
    """It draws what the next loop of the original would, and its loops are its own."""
    source = make(kind)
    batches = iter(source)
    begun, state = list(islice(batches, drawn)), source.state_dict()
    twin = copied(source)
    assert list(twin) == whole_of(kind, source.epoch)
    assert twin.epoch == source.epoch + 1
    assert source.state_dict() == state
    assert begun + list(batches) == whole_of(kind)


@both
@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_that_would_lose_what_workers_have_read_is_refused(
    kind: str, persistent: bool
) -> None:
    """Of a plain loop over workers; not of one without, nor once an epoch is chosen."""
    source, message = make(kind), r"tracked\(loader\)"
    next(iter(loader_of(source)))
    assert list(loaded(kind, source.state_dict())) == whole_of(kind)[1:]
    batches = iter(loader_of(source, 2, persistent_workers=persistent))
    next(batches)
    with pytest.raises(StateError, match=message):
        source.state_dict()
    if kind == "shards":  # nor is it known where its workers have ended
        list(batches)
        with pytest.raises(StateError, match=message):
            source.state_dict()
    del batches
    source.set_epoch(0)
    assert source.state_dict() == make(kind).state_dict()


STATEFUL: list[tuple[str, dict[str, Any]]] = [
    ("sampler", {"budget": 1500, "window": 100}), ("iterable", {}),
    ("iterable", {"look_ahead": 6000}), ("iterable", {"batches_per_epoch": 20}),
]  # fmt: skip


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "options"), STATEFUL)
def test_a_stateful_loader_resumes_at_every_batch(
    kind: str, options: Any, workers: int, every: int
) -> None:
    """The StatefulDataLoader of torchdata saves and loads sampler and stream as they are."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        more = {"num_workers": workers, "snapshot_every_n_steps": every}
        if kind == "sampler":
            return stateful(
                range(300), batch_sampler=make(kind, **options), collate_fn=list, **more
            )
        return stateful(make(kind, **options), batch_size=None, **more)

    whole = check_every_stop(loader, file=as_pickle, every=5 if workers else 1)
    if kind == "sampler":
        expected = make(kind, **options)
        assert whole == list(expected)
        following = list(expected)
        for stop in (0, len(whole)):
            first, resumed = loader(), loader()
            batches = iter(first)
            assert list(islice(batches, stop)) == whole[:stop]
            resumed.load_state_dict(as_pickle(first.state_dict()))
            # After the last batch an end, or the next epoch, is what a loader may make of it.
            assert list(resumed) in ([whole] if not stop else [[], following])


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = super().__iter__()
        return (batch for one in batches for batch in (one, one))


class Late(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_a_batch_that_no_sampler_has_drawn_is_an_error() -> None:
    """As by a loader that makes batches itself."""
    sampler = sampler_of()
    with pytest.raises(StateError, match=r"iter\(loader\) began no iteration.*a generator calls"):
        sampler.tracked(Late(range(300), batch_sampler=sampler, collate_fn=list))
    run = sampler.tracked(Twice(range(300), batch_sampler=sampler, collate_fn=list))
    with pytest.raises(StateError, match="returned batch 1, which its sampler did not draw"):
        list(run)
    assert sampler.state_dict()["done"] == 1


def saves_itself(stream: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(stream, batch_size=None)


# Loaders over a source; the same loader of another source is no loader of it.
UNTRACKED: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "another sampler": (sampler_of, lambda _: loader_of(sampler_of()), "batch_sampler"),
    "out of order": (
        sampler_of, lambda one: loader_of(one, 2, in_order=False), "in_order=False"
    ),
    "fewer sizes": (
        partial(sampler_of, LENGTHS[:150]), loader_of,
        "has 150 sizes, but the data set has 300 samples",
    ),
    "another stream": (
        streams.make, lambda _: loader_of(streams.make(), 2), "tracked needs a DataLoader"
    ),
    "batched again": (streams.make, DataLoader, "tracked needs a DataLoader"),
    "stateful": (streams.make, saves_itself, "saves its position itself"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNTRACKED)
def test_loops_that_cannot_be_tracked(case: str) -> None:
    made, loader, message = UNTRACKED[case]
    source = made()
    with pytest.raises(OptionError, match=message):
        source.tracked(loader(source))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_of_unknown_length_is_tracked() -> None:
    fewer = sampler_of(LENGTHS[:150])
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
    for source in (sampler_of(), streams.make()):
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
        loader = DataLoader(streams.make(collate_fn=collate), batch_size=None)
    else:
        sampler = MemoryBudgetBatchSampler(SIZES, PaddedCost(unit_bytes=1), 300)
        loader = DataLoader(range(len(SIZES)), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]  # a range is map-style
    found = 0
    for batch in loop(loader):
        found += len(batch)
        del batch
    assert found == len(SIZES)
