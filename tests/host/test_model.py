"""The model of what a loader needs, on trials whose numbers are given and on real plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchbudget as tb
from tests.support.sampler_cases import samplers
from torchbudget.host.options import (
    HostModel,
    InFlight,
    PlannedShapes,
    Trial,
    batch_bytes,
    pinned_block,
)

RNG = np.random.default_rng(0)
PAGE = 4096


TRIAL = Trial(  # of one batch of two tensors; the worker copies 2 bytes per element
    numbers=[0],
    storages=[(5000, PAGE)],
    plain=[100],
    building=[700],
    private=1000,
    copied_each=2.0,
    common=10_000,
)


def model(of: Trial = TRIAL, elements: float = 0) -> HostModel:
    known = {"present": 10_000, "reserved": 500}
    return HostModel(trial=of, in_flight=InFlight(of), elements=elements, known=known)


@given(st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_everything_in_flight_counts(workers: int, prefetch: int, pins: bool) -> None:
    """Workers times prefetch, one that is returned and one that the loop has; margin on top."""
    needs = model().needs(workers, prefetch if workers else 0, pins=pins)
    parts = dict(needs.parts)
    batches = workers * prefetch + 2
    assert parts["batches in flight"] == batches * (3 * PAGE + 100)
    assert parts["samples of batches that are being built"] == max(workers, 1) * 700
    assert parts.get("pinned copies", 0) == pins * batches * (8192 + 4096)
    assert parts.get("workers", 0) == workers * 1000
    assert needs.shared_bytes == (workers > 0) * int(1.06 * batches * 3 * PAGE)
    assert needs.descriptors == (workers > 0) * (2 * batches + 8 * workers)
    assert needs.total_bytes == sum(parts.values())
    assert parts["margin"] == int(0.06 * (needs.total_bytes - 10_500 - parts["margin"]))


def test_workers_copy_the_objects_that_they_read() -> None:
    """All of the data set; never more than there is to copy."""
    key, objects = "workers' copies of this process's objects", model(elements=100)
    assert dict(objects.needs(2, 1, pins=False).parts)[key] == 2 * 2 * 100
    assert dict(model(elements=1e9).needs(2, 1, pins=False).parts)[key] == 2 * 10_000
    assert key not in dict(model().needs(2, 1, pins=False).parts)


def test_starting_workers_count_where_they_need_more_than_batches() -> None:
    key = "extra memory while workers start"
    large = model(replace(TRIAL, starting=100_000))
    later = 4 * (3 * PAGE + 100) + 2 * 700
    assert dict(large.needs(2, 1, pins=False).parts)[key] == 100_000 - later
    assert key not in dict(large.needs(0, 0, pins=False).parts)


def test_open_files_follow_the_sharing_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor in flight is one by file descriptors, and none by names."""
    monkeypatch.setattr("torchbudget.host.options.get_sharing_strategy", lambda: "file_system")
    assert model().needs(2, 3, pins=False).descriptors == 2 * 8


def made(n: int, length: int) -> tuple[int, ...]:
    """Storages of ids in int64, a label for each sample, a mask of all pairs, and a constant."""
    return (8 * n * length, 4 * n, n * length * length, 40)


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 900)), min_size=4, max_size=30)


@given(shapes, st.integers(2, 40), st.randoms(use_true_random=False))
def test_a_planned_peak_is_that_of_consecutive_batches(pairs, batches, random) -> None:
    """By a trial of a few of them, to a page for each tensor; epochs follow each other."""
    n, lengths = np.array(pairs).T
    places = random.sample(range(len(pairs)), 3)
    found = replace(
        TRIAL,
        numbers=[2, 0, 1],
        storages=[made(*pairs[places[number]]) for number in (2, 0, 1)],
        plain=[500] * 3,
        building=[0] * 3,
    )
    planned = PlannedShapes(np.arange(n.sum()), n.cumsum(), n, lengths[:, None])
    flight = InFlight(found, planned, places)
    assert [len(planned.batch(place)) for place in range(len(n))] == n.tolist()
    pages = [sum(-(-size // PAGE) * PAGE for size in made(*pair)) for pair in pairs]
    blocks = [pinned_block(made(*pair)).tolist() for pair in pairs]
    repeated = range(-(-batches // len(pairs)) * len(pairs))
    runs = [[at % len(pairs) for at in repeated[start:][:batches]] for start in repeated]
    runs = [run for run in runs if len(run) == batches]
    most = max(sum(pages[at] for at in run) for run in runs)
    assert most <= flight.peak_shared(batches) <= most + 2 * batches * PAGE
    assert flight.peak(batches) == flight.peak_shared(batches) + 500 * batches
    assert flight.peak_pinned(batches) >= max(sum(sum(blocks[at]) for at in run) for run in runs)


@pytest.mark.parametrize(("axes", "ranks", "packed"), [(1, 1, False), (2, 3, False), (1, 2, True)])
def test_planned_shapes_are_those_of_the_batches_that_come(axes, ranks, packed) -> None:
    """Indices, numbers of samples and padded sizes (sums, if packed), epoch after epoch."""
    sizes = RNG.integers(1, 60, (700, axes) if axes > 1 else 700)
    padded = tb.PaddedCost(unit_bytes=1 if axes == 1 else [1, 2])
    cost = tb.PackedCost(unit_bytes=1) if packed else padded
    for rank, sampler in enumerate(samplers(sizes, cost, 900, ranks, window=200)):
        found = PlannedShapes.read(sampler.plan, epoch=0, rank=rank)
        batches = [batch for _ in range(3) for batch in sampler]
        for place, batch in enumerate(batches):
            rows = sizes[batch].reshape(len(batch), -1)
            assert found.batch(place) == batch
            assert found.amounts[place].tolist() == rows.max(axis=0).tolist() or packed
            assert found.amounts[place].tolist() == rows.sum(axis=0).tolist() or not packed
        tried = found.to_try()
        assert tried[0] == tried[1] == found.elements.argmin()
        assert found.elements[tried[:10]].max() == found.elements.max()
        assert len(set(tried)) == len(tried) - 1


@pytest.mark.parametrize("collate", [tb.PadCollate(), tb.PackCollate()])
def test_a_batch_weighs_what_its_storages_do(collate) -> None:
    """Of any structure; tensors of one storage count once, texts by their pickle."""
    storages, plain = batch_bytes(
        collate([{"ids": torch.arange(n), "text": "word" * n} for n in (3, 9, 4)])
    )
    assert sum(storages) >= 8 * 16
    assert plain > 4 * 16
    base = torch.zeros(100)
    nested = [base[:10], (base[20:], {"y": np.zeros(1000)}), torch.eye(5).to_sparse()]
    storages, plain = batch_bytes(nested)
    assert storages[0] == 400
    assert len(storages) == 3
    assert plain > 8000
