"""The pace of readings, on times that are made up: no clock is asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchbudget.observe.pace import _BURST_S, _NEAR_SHARE, _QUICK_SHARE, _WHOLE_SHARE, Pace
from torchbudget.observe.sample import MemorySample
from torchbudget.units import GiB, MiB


class Run:
    """A run whose readings take so long; `run` returns when whole readings were made."""

    def __init__(self, quick_s: float, whole_s: float, interval_s: float) -> None:
        self.quick_s, self.whole_s = quick_s, whole_s
        self.pace, self.now_s = Pace(interval_s), 0.0
        self.wholes: list[float] = []
        self.samples = 0

    def sample(self, resident: int, host: int | None = None, processes: int = 1) -> MemorySample:
        return MemorySample(
            time_s=self.now_s, resident_bytes=resident, host_bytes=host, processes=processes
        )

    def until(self, end_s: float, resident: int, near: float = float("inf")) -> None:
        while self.now_s < end_s:
            self.now_s += self.pace.wait_s()
            self.samples += 1
            quick = self.sample(resident)
            if self.pace.wants_whole(quick, near):
                spent_s = self.quick_s + self.whole_s
                self.pace.read(spent_s, self.sample(resident, host=resident))
                self.wholes.append(self.now_s)
            else:
                self.pace.read(self.quick_s, quick)


@given(st.floats(1e-5, 0.05), st.floats(1e-4, 2.0), st.floats(0.01, 1.0), st.data())
def test_readings_take_their_share_at_the_most(
    quick_s: float, whole_s: float, interval_s: float, data: st.DataObject
) -> None:
    """However long they take, and however memory changes; beside it a burst and two readings."""
    run = Run(quick_s, whole_s, interval_s)
    for _ in range(20):
        resident = data.draw(st.integers(MiB(1), GiB(4)))
        run.until(run.now_s + 2.0, resident)
    share = _QUICK_SHARE + _WHOLE_SHARE
    assert share < 0.01
    assert run.pace.spent_s <= share * run.now_s + _BURST_S + 2 * (whole_s + quick_s)


def test_what_changes_is_read_soon() -> None:
    """A worker or 1 % of memory more: the next sample is a whole one; without, after long only."""
    run = Run(quick_s=0.0003, whole_s=0.004, interval_s=0.1)
    run.until(5.0, MiB(400))
    assert len(run.wholes) == 1
    run.until(5.2, MiB(410))
    assert len(run.wholes) == 2
    run.until(18.0, MiB(410))
    assert len(run.wholes) == 3
    assert run.pace.wants_whole(run.sample(MiB(410), processes=2), float("inf"))


def test_a_peak_that_lasts_is_seen_whatever_came_before() -> None:
    """After a minute in which memory changed all the time, too."""
    run = Run(quick_s=0.001, whole_s=0.015, interval_s=0.1)
    for number in range(600):
        run.until(run.now_s + 0.1, MiB(500 + 50 * (number % 7)))
    began_s = run.now_s
    run.until(began_s + 4.0, GiB(1))
    assert run.wholes[-1] > began_s


def test_near_the_limit_more_may_be_spent() -> None:
    """An expensive reading that its share forbids is made where the job may be near its limit."""
    run = Run(quick_s=0.0003, whole_s=1.0, interval_s=0.1)
    run.until(30.0, GiB(50))
    assert len(run.wholes) == 1
    run.until(30.2, GiB(58), near=GiB(60))
    assert len(run.wholes) == 1
    run.until(30.4, GiB(61), near=GiB(60))
    assert len(run.wholes) == 2
    for number in range(100):
        run.until(run.now_s + 1.0, GiB(61 + 2 * (number % 2)), near=GiB(60))
    assert run.whole_s * (len(run.wholes) - 2) <= _NEAR_SHARE * 100.0
