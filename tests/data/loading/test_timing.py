"""Which number of workers is found to be the fastest, on clocks of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.data.loading import timing
from torchbudget.data.loading.timing import fastest, speeds_of, time_cycles


class Pipeline:
    """A loader whose workers take the given times for their batches, and its clock."""

    def __init__(self, times_s: list[float], workers: int, prefetch: int) -> None:
        self.times_s, self.workers, self.ahead = times_s, workers, workers * prefetch
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def __iter__(self) -> Iterator[int]:
        free_s = [0.0] * self.workers
        came_s: list[float] = []
        for number in count():
            asked_s = came_s[number - self.ahead] if number >= self.ahead else 0.0
            worker = number % self.workers
            took_s = self.times_s[number % len(self.times_s)]
            free_s[worker] = max(free_s[worker], asked_s) + took_s
            self.now_s = max(self.now_s, free_s[worker])  # batches come in order
            came_s.append(self.now_s)
            yield number


uneven = st.lists(st.integers(1, 400), min_size=8, max_size=32)


@given(uneven, st.integers(1, 8), st.integers(1, 3))
def test_any_setting_is_timed_on_the_same_batches(samples, workers, prefetch) -> None:
    """Batches whose times follow their samples, so uneven as they may be: a worker's own speed.

    However many were ready when the clock began: so many settings of equal speed are equally fast.
    """
    cycle = [[0] * n for n in samples]
    # Workers share one processor: together they are as fast as one.
    loader = Pipeline([0.001 * n for n in samples], 1, workers * prefetch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", loader)
        speed, took = time_cycles(loader, cycle, workers * prefetch, 0.05)
    assert speed == pytest.approx(1000)
    assert took >= 0.05


@given(uneven)
def test_the_faster_of_two_wins_with_few_batches(samples) -> None:
    """4 % between them, and one begins where the other is two batches further."""
    cycle, speeds = [[0] * n for n in samples], []
    for warm_up, pace in ((1, 0.001), (3, 0.00096)):
        loader = Pipeline([pace * n for n in samples], 1, warm_up)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing, "time", loader)
            speeds.append(time_cycles(loader, cycle, warm_up, 0.0001 * sum(samples))[0])
    assert speeds[1] == pytest.approx(speeds[0] / 0.96)


def test_a_cycle_that_takes_too_long_is_broken_off() -> None:
    """What came until then counts."""
    loader = Pipeline([1.0] * 100, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", loader)
        assert time_cycles(loader, [[0, 0]] * 100, 1, 1.0) == (2.0, 5.0)


@given(st.integers(1, 8), st.integers(1, 8))
def test_the_choice_is_nearly_the_best_of_all(most, processors) -> None:
    """Workers are as fast as processors, and each beyond them costs 4 %."""

    def speed(workers: int) -> float:
        useful = min(max(workers, 1), processors)
        return useful * (1 - 0.04 * max(0, workers - processors))

    found = speeds_of(lambda workers: (speed(workers), 0.1), most, seconds=2, rounds=3)
    best = max(map(speed, range(most + 1)))
    assert speed(fastest(found)) >= 0.95 * best
    assert fastest(found) > 0  # workers also read while the step runs
    assert found == {workers: speed(workers) for workers in found}


def test_one_disturbed_slice_does_not_decide() -> None:
    """Whatever else the machine does meanwhile, in one slice of each number of workers."""
    disturbed: set[int] = set()

    def time_slice(workers: int) -> tuple[float, float]:
        first = workers not in disturbed
        disturbed.add(workers)
        return (1 + workers) * (0.3 if first else 1.0), 0.01

    assert fastest(speeds_of(time_slice, 4, seconds=2, rounds=3)) == 4
    disturbed.clear()
    assert speeds_of(time_slice, 4, seconds=2, rounds=3)[4] == 5


def test_slow_batches_end_it_after_one_round() -> None:
    """The time that is given bounds the rounds; each number of workers is timed once anyway."""
    asked: list[int] = []

    def time_slice(workers: int) -> tuple[float, float]:
        asked.append(workers)
        return 1.0, 10.0

    speeds_of(time_slice, 8, seconds=2, rounds=3)
    assert asked == [0, 2, 4, 8]
