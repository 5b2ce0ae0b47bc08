"""States of a sampler: what they hold, and from where an epoch goes on."""

from __future__ import annotations

import copy
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.resuming import as_json
from tests.support.sampler_cases import check_state_size
from tests.support.samplers import LENGTHS, sampler_of
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PackedCost,
    PaddedCost,
)
from torchbudget.errors import StateError, StateMismatchError


def saved_after(batches: int, **options: Any) -> Any:
    """The state after so many batches."""
    sampler = sampler_of(**options)
    list(islice(sampler, batches))
    return sampler.state_dict()


def test_a_state_is_plain_and_shares_nothing() -> None:
    """Constant keys and plain types; what is done to a state, or loaded, changes no other."""
    sampler = sampler_of(window=50)
    states = [sampler.state_dict()] + [sampler.state_dict() for _ in sampler]
    assert len({tuple(sorted(state)) for state in states}) == 1
    for state in states:
        assert as_json(state) == state
    before = copy.deepcopy(states[2])
    one, other = sampler_of(window=50), sampler_of(window=50)
    one.load_state_dict(states[2])
    states[2]["order"].clear()
    states[2]["dealing"] = "another"
    assert one.state_dict() == before
    other.load_state_dict(one.state_dict())
    assert list(one) == list(other)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_numpys_integers_leave_no_trace_in_a_state(kind: Any, tmp_path: Path) -> None:
    """Of sampler and stream: JSON takes it, and `torch.load` with `weights_only`."""
    options: Any = {
        "seed": kind(3), "num_replicas": kind(2), "rank": kind(1), "window": kind(50),
        "max_batch_size": kind(20), "batch_size_multiple": kind(2), "size_multiple": kind(2),
    }  # fmt: skip
    lists = [[0] * length for length in LENGTHS]
    made = [partial(MemoryBudgetBatchSampler, LENGTHS)]
    made += [partial(BudgetedIterableDataset, [lists], size=len, collate_fn=list, threads=kind(1))]
    for make in made:
        for batches in (None, kind(5)):
            source: Any = make(PaddedCost(unit_bytes=1), 4000, batches_per_epoch=batches, **options)
            source.set_epoch(kind(1))
            for _ in zip(range(3), source, strict=False):
                state = source.state_dict()
                assert as_json(state) == json.loads(json.dumps(state))
                torch.save(state, tmp_path / "state.pt")
                assert torch.load(tmp_path / "state.pt", weights_only=True) == state


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
        ({"sizes": LENGTHS[:-1]}, "the number of samples: saved 300, now 299"),
        ({"sizes": LENGTHS[::-1]}, "the samples' sizes: saved '[0-9a-f]{32}', now '[0-9a-f]{32}'"),
        ({"weights": [1] * 300, "batches_per_epoch": 5}, "the weights: saved None, now"),
        ({"groups": [1] * 300}, "the samples' groups: saved None, now"),
        ({"budget": 300, "oversize": "skip"}, "the samples that are skipped as oversize"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_state_of_another_order_is_refused(other: Any, message: str) -> None:
    """Its position would mean other samples; the message names what differs, and both values."""
    sampler = sampler_of(**other)
    with pytest.raises(StateMismatchError, match=message):
        sampler.load_state_dict(sampler_of().state_dict())
    assert sampler.epoch == 0


@pytest.mark.parametrize(
    "changed",
    [None, [1], {}, {"rounds": ...}, {"epoch": -1}, {"stop": 99}, {"number": 1.0}, {"first": True},
     {"dealt": "!"}, {"left": 5}, {"order": {}}, {"dealing": None}],
    ids=str,
)  # fmt: skip
def test_a_malformed_state_is_refused(changed: Any) -> None:
    """What is no state, or lacks a part, is refused, and leaves the sampler as it was."""
    state = changed
    if isinstance(changed, dict) and changed:
        whole = saved_after(3, window=100) | changed
        state = {name: value for name, value in whole.items() if value is not ...}
    sampler = sampler_of(window=100)
    with pytest.raises(StateError, match="expected the unchanged result of state_dict"):
        sampler.load_state_dict(state)
    assert list(sampler) == list(sampler_of(window=100))


SMALL_STATES: dict[str, Any] = {
    "a length": (1, PaddedCost(unit_bytes=1), 20_000, {}),
    "a sample each": (1, PaddedCost(unit_bytes=1), 20_000, {"max_batch_size": 1}),
    "three axes": (3, PaddedCost(unit_bytes=[1, 1, 1]), 8_000, {}),
    "packed": (1, PackedCost(unit_bytes=1), 4_000, {}),
    "packed, two axes": (2, PackedCost(unit_bytes=[1, 1]), 20_000, {}),
    "units": (1, PackedCost(unit_bytes=1), 20_000, {"units": np.arange(40_000) // 8}),
}


@pytest.mark.parametrize("case", SMALL_STATES)
def test_a_state_within_a_window_is_small(case: str) -> None:
    """2 KB and a bit for each sample of the window, also where that was dealt anew, twice.

    On the same ranks it goes on as if nothing had been saved.
    """
    axes, cost, budget, options = SMALL_STATES[case]
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5, 0.7, (40_000, axes)), 1, 2000).astype(np.int64)
    make = partial(sampler_of, sizes, budget, cost=cost, samples_per_step=32_768, **options)
    state = None
    for number in (8, 4, 2):
        sampler, again = (make(num_replicas=number) for _ in range(2))
        if state is not None:
            sampler.load_state_dict(state)
        batches = iter(sampler)
        next(batches)
        list(islice(batches, sampler.steps[0] // 3))
        state = sampler.state_dict()
        check_state_size(json.dumps(state), 32_768)
        again.load_state_dict(as_json(state))
        assert list(again) == list(batches)
