"""What else is limited beside memory: processors and open files."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from torchbudget.machine.cgroups import groups_of
from torchbudget.machine.kernel_files import ROOT, read_lines, read_number


def usable_processors(*, root: Path = ROOT) -> int:
    """The processors that this process may use at once, at least 1.

    Those that it may be scheduled on, or what the quotas of its control groups, its own and those
    above it, pay for where that is less.

    Sources:
        https://docs.kernel.org/scheduler/sched-bwc.html,
        https://docs.kernel.org/admin-guide/cgroup-v2.html

    >>> 1 <= usable_processors() <= os.cpu_count()
    True
    """
    _, folders = groups_of("cpu", root=root)
    quota = min(map(_quota, folders), default=math.inf)
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota)))


def _quota(folder: Path) -> float:
    """Processors that one control group's processes may use at once."""
    for line in read_lines(folder / "cpu.max"):  # version 2: "200000 100000", or "max 100000"
        allowed, _, period = line.partition(" ")
        return int(allowed) / int(period) if allowed.isdecimal() else math.inf
    allowed_us = read_number(folder / "cpu.cfs_quota_us")  # "-1" is none
    period_us = read_number(folder / "cpu.cfs_period_us")
    return allowed_us / period_us if allowed_us and period_us else math.inf


def free_descriptors() -> int:
    """How many more files this process may open.

    >>> free_descriptors() > 0
    True
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return 2**31
    return max(0, allowed - sum(1 for _ in (ROOT / "proc/self/fd").iterdir()))


def allow_more_descriptors() -> None:
    """Let this process open as many files as the system lets it ask for: the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
