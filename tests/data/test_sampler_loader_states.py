"""States of a sampler in loaders, whose workers run ahead of the loop."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.resuming import as_pickle, check_every_stop, counted_state
from tests.support.samplers import LENGTHS, Numbers, as_list, counted, forks, loader_of, sampler_of
from tests.support.tracked_streams import make
from torchbudget.errors import OptionError, StateError


@forks
def test_the_state_of_a_loop_whose_workers_run_ahead() -> None:
    """The loader has drawn more than the loop has seen; the loop's own count makes it exact."""
    loop = partial(loader_of, num_workers=2, prefetch_factor=2)
    whole = check_every_stop(sampler_of, loop=loop, save=counted_state, every=4)
    assert whole == list(sampler_of())
    sampler = sampler_of()
    for _ in loop(sampler):
        pass
    ended = sampler_of()
    ended.load_state_dict(sampler.state_dict(batches_done=len(whole)))
    assert ended.epoch == 1


@forks
@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_that_would_lose_what_workers_have_read_is_refused(persistent: bool) -> None:
    """In a loop that counts nothing; when it is over, nothing is ahead."""
    sampler = sampler_of()
    loader = loader_of(sampler, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateError, match=r"ahead of what the loop has taken.*tracked"):
        sampler.state_dict()
    assert sampler.state_dict(batches_done=1)["done"] == 1
    del batches
    with pytest.raises(StateError, match="ahead of what the loop has taken"):
        sampler.state_dict()
    sampler.set_epoch(0)
    assert sampler.state_dict()["done"] == 0
    for _ in loader:
        pass
    assert sampler.state_dict()["epoch"] == 1


def test_iterating_keeps_nothing_of_the_caller_alive() -> None:
    """What the caller lets go is freed, although sampler and stream ask who iterates."""
    for source in (sampler_of(), make()):
        batch = torch.zeros(1)
        gone = weakref.ref(batch)
        iter(source)
        del batch
        assert gone() is None


@forks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_tracked_loop_counts_what_came(workers: int, persistent: bool) -> None:
    """From any batch the rest equals the rest; epochs advance, and loops broken off begin anew."""
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options |= {"persistent_workers": persistent, "prefetch_factor": 8}

    def loop(sampler: Any) -> Any:
        return sampler.tracked(loader_of(sampler, **options))

    whole = check_every_stop(sampler_of, loop=loop, every=4)
    assert whole == list(sampler_of())
    sampler, plain = sampler_of(), sampler_of()
    loader = loader_of(sampler, **options)
    for epoch in range(2):
        batches = sampler.tracked(loader)
        assert next(batches) == next(iter(plain))
        del batches  # its workers have read ahead, to the end perhaps
        assert list(sampler.tracked(loader)) == list(plain)
        assert sampler.epoch == epoch + 1 == sampler.state_dict()["epoch"]


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_tracked_loop_of_exactly_len_batches_is_over(workers: int) -> None:
    """The sampler goes on with the epoch that its state names; a look within does not count."""
    sampler = sampler_of()
    whole = list(sampler_of())
    for done, batch in enumerate(sampler.tracked(loader_of(sampler, num_workers=workers)), 1):
        assert batch == whole[done - 1]
        if done == 3:
            assert next(iter(sampler)) == whole[0]
            with pytest.raises(StateError, match="unclear which one counts"):
                sampler.state_dict()
        if done == 4:
            following = sampler_of()
            following.load_state_dict(sampler.state_dict())
            assert list(following) == whole[4:]
        if done == len(whole):
            break
    assert sampler.state_dict()["epoch"] == sampler.epoch == 1


@forks
def test_a_tracked_loop_that_is_kept_is_no_longer_the_sampler() -> None:
    """As by a traceback: a plain loop after it advances the epoch, and its steps are those."""
    sampler, plain = sampler_of(samples_per_step=50), sampler_of(samples_per_step=50)
    kept = sampler.tracked(loader_of(sampler))
    next(kept)
    assert list(loader_of(sampler)) == list(plain)
    assert list(sampler.steps) == list(plain.steps)
    assert sampler.epoch == 1
    sampler.set_epoch(1)
    kept.close()
    assert list(sampler) == list(plain)
    assert sampler.state_dict()["epoch"] == 2


@forks
@pytest.mark.parametrize("inner_is_tracked", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_inside_a_loop(workers: int, inner_is_tracked: bool) -> None:
    """As of an evaluation: the outer loop's position, steps and epoch are as without it."""
    plain = sampler_of(samples_per_step=50)
    whole, steps = list(plain), list(plain.steps)
    sampler = sampler_of(samples_per_step=50)
    loader = loader_of(sampler, num_workers=workers)
    states, numbers, came = [], set(), []
    for place, batch in enumerate(sampler.tracked(loader)):
        numbers.add(sampler.iterations)
        assert workers or sampler.epoch == int(place + 1 == len(whole))
        states.append(sampler.state_dict())
        came.append(batch)
        if place in (2, 4):
            inner = sampler.tracked(loader) if inner_is_tracked else loader
            assert counted(inner).total() == len(LENGTHS)
    assert came == whole
    assert list(sampler.steps) == steps
    assert len(numbers) == 1
    assert sampler.epoch == 1
    assert states.pop()["epoch"] == 1
    for place, state in enumerate(states, 1):
        resumed = sampler_of(samples_per_step=50)
        resumed.load_state_dict(state)
        assert list(resumed) == whole[place:]


def test_a_loop_inside_a_plain_loop() -> None:
    """The state is that of the loop which asked for a batch last."""
    whole = list(sampler_of())
    sampler = sampler_of()
    for place, _ in enumerate(loader_of(sampler), 1):
        if place == 3:
            list(loader_of(sampler))
        if place == 6:
            break
    resumed = sampler_of()
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == whole[6:]
    assert list(sampler) == whole  # broken off: it begins again


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_loops_that_cannot_be_tracked() -> None:
    sampler = sampler_of()
    with pytest.raises(OptionError, match="batch_sampler"):
        sampler.tracked(loader_of(sampler_of()))
    with pytest.raises(OptionError, match="in_order=False"):
        sampler.tracked(loader_of(sampler, num_workers=2, in_order=False))
    fewer = sampler_of(LENGTHS[:150])
    with pytest.raises(OptionError, match="has 150 sizes, but the data set has 300 samples"):
        fewer.tracked(loader_of(fewer))
    nobody_knows = DataLoader(WithoutLength(), batch_sampler=fewer, collate_fn=as_list)
    assert counted(fewer.tracked(nobody_knows)) == Counter(range(150))


@forks
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_at_every_batch(workers: int) -> None:
    """The StatefulDataLoader of torchdata saves and loads the sampler as it is, at every batch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        sampler = sampler_of(budget=1500, window=100)
        return stateful.StatefulDataLoader(
            Numbers(300), batch_sampler=sampler, collate_fn=as_list, num_workers=workers
        )

    whole = check_every_stop(loader, file=as_pickle)
    expected = sampler_of(budget=1500, window=100)
    assert whole == list(expected)
    following = list(expected)
    first = loader()
    next(iter(first))
    resumed = loader()
    resumed.load_state_dict(as_pickle(first.state_dict()))
    assert list(resumed) == whole[1:]
    assert list(resumed) == following
    for _ in (ended := loader()):
        state = ended.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    # After the last batch an end, or the next epoch, is what a loader may make of it.
    assert list(resumed) in ([], following)
