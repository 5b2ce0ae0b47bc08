"""What the parts of the model add up to, on trials whose numbers are given.

Given numbers stand in for a trial where this machine has no accelerator to pin memory for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.data.loading.batch_bytes import BatchBytes
from torchbudget.data.loading.host_model import HostModel, Setting
from torchbudget.data.loading.in_flight import Observed, TriedBatch
from torchbudget.data.loading.trial import Trial

BATCH = TriedBatch(BatchBytes(storages=(5000, 4096), plain=100), 700, 0.01, 4)
TRIAL = Trial(
    batches=[BATCH],
    numbers=[0],
    private=1000,
    originals=30,
    kept=50,
    reads=(0, 10, 20),
    copied=(0, 400, 600),
    common=10_000,
    starting=0,
    sent=0,
    mapped=0,
)


def model(**changes: object) -> HostModel:
    given = {"samples": 1000, "present": 10_000, "later": 500, "caches": 0, "forks": True} | changes
    return HostModel(trial=TRIAL, in_flight=Observed([BATCH]), **given)  # type: ignore[arg-type]


def setting(workers: int, prefetch: int, **changes: bool) -> Setting:
    return Setting(
        workers=workers, prefetch=prefetch, **{"pins": False, "persists": True} | changes
    )


@given(st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_what_is_in_flight_is_what_torch_asks_for(workers, prefetch, pins) -> None:
    """Workers times prefetch, one that is returned and one that the loop has."""
    prefetch = prefetch if workers else 0
    needs = model().needs(setting(workers, prefetch, pins=pins))
    parts, batches = dict(needs.parts), workers * prefetch + 2
    assert parts["batches in flight"] == batches * (8192 + 4096 + 100)
    assert parts["samples of batches that are being built"] == max(workers, 1) * 700
    assert parts.get("pinned copies", 0) == pins * batches * (8192 + 4096)
    assert parts.get("workers", 0) == workers * 1000
    assert parts.get("what this process has written to since", 0) == 30 * (workers > 0)
    assert needs.shared_bytes == (workers > 0) * batches * (8192 + 4096)
    assert needs.total_bytes == sum(parts.values())
    assert parts["this process and its descendants now"] == 10_000
    assert parts["reserved for later"] == 500


def test_copies_of_objects_level_off() -> None:
    """The second half of the trial copied half of what the first did: twice as much in the end."""
    assert TRIAL.copied_after(20) == 0  # that is in `private`
    assert TRIAL.copied_after(30) == 100
    assert TRIAL.copied_after(10**9) == pytest.approx(200, abs=1)
    steady = replace(TRIAL, copied=(0, 300, 600))
    assert steady.copied_after(40) == 600
    assert steady.copied_after(10**9) == steady.common  # no more than there is


def test_workers_that_end_with_the_epoch_copy_their_part_only() -> None:
    """Those that persist read all of the data set sooner or later."""
    key = "their copies of this process's objects"
    few = replace(TRIAL, copied=(0, 300, 600))
    host = replace(model(samples=100), trial=few)
    assert dict(host.needs(setting(2, 1)).parts)[key] == 2 * 30 * 80
    assert dict(host.needs(setting(2, 1, persists=False)).parts)[key] == 2 * 30 * 30
    alone = replace(host, forks=False)
    assert key not in dict(alone.needs(setting(2, 1)).parts)


def test_a_data_set_is_sent_before_batches_are_on_their_way() -> None:
    """What starting takes counts where it is more than what comes later."""
    host = model(forks=False)
    large = replace(host, trial=replace(TRIAL, sent=100_000, starting=30_000))
    later = 4 * (8192 + 4096 + 100) + 2 * 700
    key = "workers while they start, beyond that"
    assert dict(large.needs(setting(2, 1)).parts)[key] == 130_000 - later
    assert key not in dict(large.needs(setting(0, 0)).parts)
    assert key not in dict(host.needs(setting(2, 1)).parts)


def test_open_files_follow_the_sharing_strategy(monkeypatch) -> None:
    """Each tensor in flight is one by file descriptors, and none by names."""
    assert model().needs(setting(2, 3)).descriptors == 2 * 8 + 2 * 8
    assert model().needs(setting(0, 0)).descriptors == 0  # nothing is handed over
    where = "torchbudget.data.loading.host_model.get_sharing_strategy"
    monkeypatch.setattr(where, lambda: "file_system")
    assert model().needs(setting(2, 3)).descriptors == 2 * 8
