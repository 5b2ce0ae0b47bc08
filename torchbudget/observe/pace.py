"""How often a monitor reads, so that reading takes a small share of one processor's time."""

from __future__ import annotations

from typing import Final

from torchbudget.observe.sample import MemorySample

# Of one processor's time: for quick readings, and for whole ones.
_QUICK_SHARE: Final = 0.0025
_WHOLE_SHARE: Final = 0.0055
# Beyond their shares they may take so much once, so that the first peaks of a run are seen.
_BURST_S: Final = 0.1
# Of the time, where the job's memory changes near its limit.
_NEAR_SHARE: Final = 0.1
# A whole reading is due when what is cheap to read has changed by this part, or after so long.
_CHANGE: Final = 0.01
_LONGEST_S: Final = 10.0


class Pace:
    """Decides when the next reading comes, and whether it is a whole one.

    Args:
        interval_s: between readings, at the least.

    Attributes:
        spent_s: processor time that readings have taken.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._quick_s = 0.0  # that the last quick reading took
        self._whole_s = 0.0
        self._whole: MemorySample | None = None  # the last whole one
        self.spent_s = 0.0

    def wait_s(self) -> float:
        """Seconds until the next reading."""
        return max(self._interval_s, self._quick_s / _QUICK_SHARE)

    def read(self, spent_s: float, sample: MemorySample) -> None:
        """Take note of a sample, and of the processor time that it and its outputs took."""
        self.spent_s += spent_s
        if sample.host_bytes is None:
            self._quick_s = spent_s
        else:
            self._whole_s, self._whole = spent_s, sample

    def wants_whole(self, sample: MemorySample, near_bytes: float) -> bool:
        """Whether a whole reading should follow a quick one.

        It is worth it where what is cheap to read has changed, and comes as long after the last
        one as its share demands: so a peak that lasts that long is always seen. Where the memory of
        the job may have come near its limit it may take a larger share.

        Args:
            sample: the quick one.
            near_bytes: of the job, from which on it is near its limit.
        """
        last = self._whole
        if last is None or last.host_bytes is None:
            return True
        since_s = sample.time_s - last.time_s
        grown_bytes = _cheap_bytes(sample) - _cheap_bytes(last)
        changed = abs(grown_bytes) > _CHANGE * last.host_bytes or sample.processes != last.processes
        is_near = last.host_bytes + grown_bytes >= near_bytes
        if changed and is_near and self._whole_s <= _NEAR_SHARE * since_s:
            return True
        affordable = self._whole_s <= _WHOLE_SHARE * since_s
        affordable = affordable or self.spent_s + self._whole_s <= _BURST_S
        return affordable and (changed or since_s >= _LONGEST_S)


def _cheap_bytes(sample: MemorySample) -> int:
    """Bytes that change with those of the job, though some are counted more than once."""
    return sample.resident_bytes + (sample.shared_bytes or 0)
