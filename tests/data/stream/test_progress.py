"""What the processes of a stream know together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from torchbudget.data.stream.progress import Progress

EPOCHS = 1000


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads are switched as often as they can be, as processes may be anywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_workers_that_begin_at_once_begin_the_same_epoch() -> None:
    """Also where one is done with its part of it, which may be empty, before another begins."""
    progress, together = Progress(), Barrier(2)

    def epochs_of(worker: int) -> list[int]:
        begun = []
        for epoch in range(EPOCHS):
            together.wait()
            begun.append(progress.advance())
            progress.end(epoch, worker, 2)
        return begun

    with ThreadPoolExecutor(2) as workers:
        begun = list(workers.map(epochs_of, range(2)))
    assert begun == [list(range(EPOCHS))] * 2
