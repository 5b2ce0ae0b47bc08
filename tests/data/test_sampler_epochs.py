"""Epochs of a sampler: their order, length, steps and ends."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from tests.support.samplers import loader_of, sampler_of
from torchbudget.errors import DiscardedStateWarning, OptionError, RepeatedSamplesWarning


def test_epochs_follow_each_other() -> None:
    """An epoch that was drawn to its end is followed by the next one, of another order."""
    sampler = sampler_of()
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert epochs[0] != epochs[1] != epochs[2]
    for number, expected in enumerate(epochs):
        fresh = sampler_of()
        fresh.set_epoch(number)
        assert list(fresh) == expected


def test_taking_exactly_len_batches_is_drawing_to_the_end() -> None:
    """A loop that counts its batches, and never meets the end, goes on to the next epoch too."""
    sampler, expected = sampler_of(), sampler_of()
    list(expected)
    assert list(itertools.islice(sampler, len(sampler))) == list(sampler_of())
    assert sampler.epoch == 1
    assert list(sampler) == list(expected)


def test_what_is_left_of_an_epoch_is_not_its_whole_length() -> None:
    """Counted from a loaded position, and then from the beginning of the same epoch."""
    begun, resumed = sampler_of(), sampler_of()
    length = len(begun)
    list(itertools.islice(begun, length // 2))
    resumed.load_state_dict(begun.state_dict())
    assert resumed.batches_left == length - length // 2
    with pytest.warns(DiscardedStateWarning):
        resumed.set_epoch(1)
    resumed.set_epoch(0)
    assert resumed.batches_left == len(resumed) == length
    assert len(list(resumed)) == length


def test_set_epoch_is_idempotent() -> None:
    """Setting the epoch that comes anyway, any number of times, changes nothing."""
    sampler, expected = sampler_of(), sampler_of()
    for number in range(3):
        for _ in range(2):
            sampler.set_epoch(number)
            sampler.sampler.set_epoch(number)
        assert list(sampler) == list(expected)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None, "1"], ids=repr)
def test_epochs_are_natural_numbers(epoch: Any) -> None:
    with pytest.raises(OptionError, match="epoch must be an int of at least 0"):
        sampler_of().set_epoch(epoch)


def test_a_broken_epoch_starts_again() -> None:
    """Where a loop breaks off in mid-epoch, the next one draws the same epoch from its start."""
    sampler = sampler_of()
    expected = list(sampler_of())
    for _ in range(2):
        assert list(itertools.islice(sampler, 3)) == expected[:3]
        assert sampler.epoch == 0
        assert len(sampler) == len(expected)
    assert list(sampler) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_one_batch_a_loop_is_the_same_batch_each_time(workers: int) -> None:
    """Torch's random sampler draws another one, so whoever asks for it like this is told."""
    sampler = sampler_of()
    loader = loader_of(sampler, num_workers=workers)
    first = [next(iter(loader)) for _ in range(3)]
    with pytest.warns(RepeatedSamplesWarning, match="the same batch each time"):
        again = next(iter(loader))
    assert first == [again] * 3


def test_loops_that_are_broken_off_otherwise_are_no_surprise() -> None:
    """Between set epochs, tracked, begun for nothing, and in the data set's own order."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = sampler_of()
        for epoch in range(5):
            sampler.set_epoch(epoch)
            next(iter(sampler))
        for _ in range(5):
            next(sampler.tracked(loader_of(sampler)))
        for _ in range(5):
            iter(sampler)
        for _ in loader_of(sampler):
            list(loader_of(sampler))  # an evaluation within a training, say
        in_order = sampler_of(shuffle=False)
        for _ in range(5):
            next(iter(in_order))


def test_an_earlier_loop_does_not_disturb_a_later_one() -> None:
    """Two iterators are independent; the one that was asked for a batch last counts."""
    sampler = sampler_of()
    expected = list(sampler_of())
    earlier = iter(sampler)
    next(earlier)
    later = iter(sampler)
    assert list(earlier) == expected[1:]
    assert sampler.epoch == 1
    assert next(later) == expected[0]
    assert sampler.epoch == 0
    assert list(later) == expected[1:]
    assert sampler.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_that_is_kept_does_not_hold_the_epoch(workers: int) -> None:
    """A loop ends its epoch although another one, begun within it, is still open."""
    sampler = sampler_of()
    loader = loader_of(sampler, num_workers=workers)
    kept, epochs = [], []
    for epoch in range(3):
        assert sampler.epoch == epoch
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3:
                kept.append(iter(loader))
                next(kept[-1])
        epochs.append(batches)
    assert len({str(batches) for batches in epochs}) == 3


def test_set_epoch_in_mid_epoch_counts_from_the_next_loop() -> None:
    """The current loop goes on as it began; state, `steps` and the next loop are of the new one."""
    sampler = sampler_of(samples_per_step=40)
    expected = list(sampler_of(samples_per_step=40))
    batches = iter(sampler)
    first = next(batches)
    sampler.set_epoch(7)
    assert [first, *batches] == expected
    assert sampler.epoch == 7
    assert sampler.state_dict()["epoch"] == 7
    fresh = sampler_of(samples_per_step=40)
    fresh.set_epoch(7)
    assert list(sampler.steps) == list(fresh.steps)
    assert list(sampler) == list(fresh)


def test_setting_another_epoch_discards_a_loaded_position() -> None:
    """It says so: the rest of the saved epoch would be lost in silence."""
    saved = sampler_of()
    list(itertools.islice(saved, 3))
    sampler = sampler_of()
    sampler.load_state_dict(saved.state_dict())
    with pytest.warns(
        DiscardedStateWarning, match=r"set_epoch\(1\) discards .* in epoch 0"
    ) as found:
        sampler.set_epoch(1)
    assert found[0].filename == __file__  # the line that has to change
    fresh = sampler_of()
    fresh.set_epoch(1)
    assert list(sampler) == list(fresh)


def test_setting_the_loaded_epoch_keeps_the_position() -> None:
    """A trainer that sets the epoch at its start resumes where the state says."""
    saved = sampler_of()
    whole = list(saved)
    saved.set_epoch(0)
    list(itertools.islice(saved, 3))
    sampler = sampler_of()
    sampler.load_state_dict(saved.state_dict())
    sampler.set_epoch(0)
    assert list(sampler) == whole[3:]
    sampler.set_epoch(1)  # after the rest was drawn there is nothing to discard: no warning


def test_a_state_at_an_epochs_start_is_not_discarded() -> None:
    """A state between two epochs holds no position that could be lost: no warning."""
    sampler = sampler_of()
    sampler.load_state_dict(sampler_of().state_dict())
    sampler.set_epoch(3)


def test_going_back_to_an_epoch_that_was_over_is_said() -> None:
    """A state saved after the last batch, and a loop from epoch 0: all samples would come again."""
    saved = sampler_of()
    list(saved)
    sampler = sampler_of()
    sampler.load_state_dict(saved.state_dict())
    with pytest.warns(DiscardedStateWarning, match=r"set_epoch\(0\) goes back .* epoch 1"):
        sampler.set_epoch(0)
    sampler.set_epoch(1)
    sampler.set_epoch(0)  # a choice, where nothing is loaded any more: no warning
    sampler.load_state_dict(saved.state_dict())
    next(iter(sampler))
    sampler.set_epoch(0)  # likewise, after it was used


def test_steps_are_of_the_current_loop() -> None:
    """During a loop `steps` counts from where it began, a resumed one from its position."""
    sampler = sampler_of(samples_per_step=50)
    whole = list(sampler.steps)
    assert sum(whole) == len(sampler)
    batches = iter(sampler)
    next(batches)
    assert list(sampler.steps) == whole
    resumed = sampler_of(samples_per_step=50)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed.steps) == [whole[0] - 1, *whole[1:]]
