"""Epochs of a sampler: their order, length, steps and ends."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.samplers import counted, sampler_of
from torchbudget.errors import OptionError


def test_taking_exactly_len_batches_is_drawing_to_the_end() -> None:
    """A loop that counts its batches, and never meets the end, goes on to the next epoch too."""
    sampler, expected = sampler_of(), sampler_of()
    list(expected)
    assert list(islice(sampler, len(sampler))) == list(sampler_of())
    assert sampler.epoch == 1
    assert list(sampler) == list(expected)


def test_loops_are_independent() -> None:
    """Two iterators over one epoch; the state is that of the one which was asked last."""
    sampler, whole = sampler_of(), list(sampler_of())
    earlier, later = iter(sampler), iter(sampler)
    assert [next(earlier) for _ in range(4)] == whole[:4]
    assert [next(later) for _ in range(2)] == whole[:2]
    assert sampler.state_dict()["done"] == 2
    assert next(earlier) == whole[4]
    assert sampler.state_dict()["done"] == 5
    assert list(later) == whole[2:]
    assert sampler.epoch == 1
    assert list(earlier) == whole[5:]
    assert sampler.epoch == 1


def test_set_epoch_is_idempotent() -> None:
    """Setting the epoch that comes anyway, any number of times, changes nothing."""
    for options in ({}, {"batches_per_epoch": 9, "window": 40}):
        sampler, expected = sampler_of(**options), sampler_of(**options)
        for number in range(3):
            for _ in range(2):
                sampler.set_epoch(number)
                sampler.sampler.set_epoch(number)  # as frameworks reach it
            assert list(sampler) == list(expected)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None, "1"], ids=repr)
def test_epochs_are_natural_numbers(epoch: Any) -> None:
    with pytest.raises(OptionError, match="epoch must be an int of at least 0"):
        sampler_of().set_epoch(epoch)


def test_steps_are_those_that_the_loop_has_begun() -> None:
    """Ints that are added window by window; each loop has its own, a resumed one the rest."""
    sampler = sampler_of(samples_per_step=50)
    assert len(sampler.steps) == 0
    batches, seen = iter(sampler), []
    for done, _ in enumerate(batches, 1):
        seen.append(len(sampler.steps))
        assert sum(sampler.steps[:-1]) < done <= sum(sampler.steps)
    steps = list(sampler.steps)
    assert (seen[0], seen[-1]) == (1, len(steps) == 6 and 6)
    begun = sampler.steps
    other = iter(sampler)
    next(other)
    assert sampler.steps is not begun
    resumed = sampler_of(samples_per_step=50)
    resumed.load_state_dict(sampler_after(1, samples_per_step=50).state_dict())
    list(resumed)
    assert list(resumed.steps) == [steps[0] - 1, *steps[1:]]
    assert set(sampler_after(20).steps) == {1}


def sampler_after(batches: int, **options: Any) -> Any:
    sampler = sampler_of(**options)
    list(islice(sampler, batches))
    return sampler


# ---------------------------------------------------------------------- of a given length


def epochs_of(number: int, epochs: int, **options: Any) -> list[list[int]]:
    """The batches of some epochs of a given length."""
    sampler = sampler_of(window=40, batches_per_epoch=number, **options)
    return list(chain.from_iterable(list(sampler) for _ in range(epochs)))


def test_the_given_length_changes_nothing_but_ends() -> None:
    """Epochs of any length are cuts of one sequence, which begins with a plain epoch."""
    sequence = epochs_of(250, 1)
    for number in (1, 7, 50):
        assert epochs_of(number, 250 // number) == sequence[: 250 // number * number]
    plain = list(sampler_of(window=40))
    assert sequence[: len(plain)] == plain
    second = counted(sequence[len(plain) : 2 * len(plain)])
    assert sequence[len(plain)] != plain[0]
    assert max(second.values()) <= 2


def test_another_epoch_has_a_pass_of_its_own() -> None:
    """The same one whatever was read before, and another one than those read in turn."""
    begun, fresh = (sampler_of(window=40, batches_per_epoch=9) for _ in range(2))
    list(begun)
    for sampler in (begun, fresh):
        sampler.set_epoch(5)
    assert list(begun) == list(fresh)
    assert begun.epoch == 6
    assert list(begun) == list(fresh) != epochs_of(9, 7)[-9:]


@pytest.mark.parametrize("number", [4, 6, 10])
def test_another_length_for_a_state(number: int) -> None:
    """`max(K − done, 0)` batches are left, and the next epoch goes on in the order."""
    sequence = epochs_of(100, 1)
    state = sampler_after(6, window=40, batches_per_epoch=20).state_dict()
    sampler = sampler_of(window=40, batches_per_epoch=number)
    sampler.load_state_dict(state)
    left = max(number - 6, 0)
    assert (sampler.batches_left, len(sampler)) == (left, 6 + left)
    assert list(sampler) == sequence[6 : 6 + left]
    assert sampler.epoch == 1
    assert list(sampler) == sequence[6 + left : 6 + left + number]


@pytest.mark.parametrize(
    "weights", [[1.0] * 300, torch.ones(300, dtype=torch.float64), np.ones(300), np.ones(300, "f4")]
)
def test_weights_of_any_kind_are_copied(weights: Any) -> None:
    """Lists, tensors and arrays mean the same; what becomes of them changes no draw."""
    options = {"weights": np.ones(300), "batches_per_epoch": 30}
    sampler, fresh = sampler_of(**options | {"weights": weights}), sampler_of(**options)
    state = sampler.state_dict()
    weights[:150] = [0.0] * 150 if isinstance(weights, list) else 0
    assert [list(sampler) for _ in range(2)] == [list(fresh) for _ in range(2)]
    fresh.load_state_dict(state)
