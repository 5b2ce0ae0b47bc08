"""Given numbers of micro-batches: what windows get adds up, fits them, and is spread evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.errors import OptionError
from torchbudget.plan.numbers import (
    Allotment,
    Numbers,
    epochs_to_count,
    number_for_all,
    spare_of,
)


@st.composite
def windows(draw: st.DrawFn) -> Any:
    """What each window needs, the most that it can have, and how many there are to spare."""
    needs = draw(st.lists(st.integers(1, 50), min_size=1, max_size=40))
    least = np.array(needs)
    most = least + draw(st.lists(st.integers(0, 30), min_size=len(needs), max_size=len(needs)))
    return least, most, draw(st.integers(0, int((most - least).sum())))


def given_in_blocks(case: Any, blocks: list[int], first: int = 0) -> list[int]:
    """What windows get that are given theirs in blocks of one limit each."""
    least, most, spare = case
    allotment = Allotment(least=int(least.sum()), most=int(most.sum()), spare=spare)
    found: list[int] = []
    for start, stop in zip(blocks, [*blocks[1:], len(least)], strict=True):
        numbers = first + np.arange(start, stop)
        found += allotment.give(least[start:stop], int(most[start]), numbers).tolist()
    return found


@given(windows(), st.integers(0, 10**6))
def test_all_is_given_and_no_window_gets_more_than_it_can_have(case: Any, first: int) -> None:
    least, most, spare = case
    found = np.array(given_in_blocks(case, list(range(len(least))), first))
    assert found.sum() == least.sum() + spare
    assert (found >= least).all()
    assert (found <= most).all()


@given(windows(), st.data())
def test_it_goes_on_from_what_was_counted(case: Any, data: st.DataObject) -> None:
    """From any window, and however the windows are planned together, each gets the same."""
    least, most, spare = case
    most[:] = most.max()  # of one length
    whole = given_in_blocks(case, list(range(len(least))))
    assert given_in_blocks(case, [0]) == whole
    at = data.draw(st.integers(0, len(least) - 1))
    allotment = Allotment(least=int(least.sum()), most=int(most.sum()), spare=spare)
    allotment.give(least[:at], int(most[0]), np.arange(at))
    counted = allotment.counted()
    assert counted[0].tolist() == [least.sum(), spare]
    left, spared = counted[-1].tolist()
    again = Allotment(least=left, most=int(most[at:].sum()), spare=spared)
    found = again.give(least[at:], int(most[0]), np.arange(at, len(least)))
    assert found.tolist() == whole[at:]
    assert again.counted()[-1].tolist() == [0, 0]


@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 800), st.integers(0, 10**9))
def test_windows_that_need_as_many_get_as_many(
    windows: int, need: int, spare: int, first: int
) -> None:
    """Within one of each other; and any run of windows has its share, within two."""
    case = np.full(windows, need), np.full(windows, 10**6), spare
    beyond = np.array(given_in_blocks(case, list(range(windows)), first)) - need
    assert beyond.max() - beyond.min() <= 1
    sums = np.append(0, np.cumsum(beyond))
    assert abs(sums - np.arange(windows + 1) * spare / windows).max() < 3


def test_a_number_for_all_epochs() -> None:
    """The largest and half of what they differ by; at least one more, unless all are alike."""
    assert number_for_all([10, 17, 12], most=100) == 21
    assert number_for_all([10, 17, 12], most=18) == 18
    assert number_for_all([10, 10], most=100) == 11
    assert number_for_all([10], most=100) == 10
    assert len(epochs_to_count(1, shuffle=True)) == 100
    assert len(epochs_to_count(10**6, shuffle=True)) == 30
    assert len(epochs_to_count(10**9, shuffle=True)) == 10
    assert len(epochs_to_count(1, shuffle=False)) == 1


def test_a_number_that_an_epoch_cannot_have() -> None:
    """The refusal names those that it can."""
    assert spare_of(12, 10, 20, epoch=3, ranks=2) == 2
    with pytest.raises(OptionError, match=r"epoch 3 needs 10 .* on each of 2 ranks.* at least 10"):
        spare_of(9, 10, 20, epoch=3, ranks=2)
    with pytest.raises(OptionError, match=r"at the most, .*=21: give between 10 and 20"):
        spare_of(21, 10, 20, epoch=3, ranks=2)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "all", "4"], ids=repr)
def test_numbers_are_ints_of_at_least_one(wrong: Any) -> None:
    with pytest.raises(OptionError, match="batches_per_epoch must be"):
        Numbers.of(wrong, None, samples_per_step=None)
    with pytest.raises(OptionError, match="micro_batches_per_step must be"):
        Numbers.of(None, wrong, samples_per_step=100)


def test_a_number_of_each_step_needs_steps() -> None:
    with pytest.raises(OptionError, match="it needs samples_per_step"):
        Numbers.of(None, 4, samples_per_step=None)
