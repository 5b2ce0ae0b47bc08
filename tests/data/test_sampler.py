"""`MemoryBudgetBatchSampler`: what it takes, what it refuses, and what it yields."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.samplers import LENGTHS, TOKENS, sampler_of
from torchbudget import (
    MemoryBudget,
    PackedCost,
    PaddedCost,
    TorchBudgetError,
)
from torchbudget.errors import BudgetError, OptionError, OversizeError, SizesError

SIZES = [3, 9, 4, 8, 1]
TWO_AXES = PaddedCost(unit_bytes=(1, 1))
PACKED = PackedCost(unit_bytes=1)
WHOLE: dict[str, Any] = {"budget": 99, "units": ([0, 0, 1, 1, 1], "micro_batch")}
WEIGHED: dict[str, Any] = {"batches_per_epoch": 3}

REFUSED: list[tuple[dict[str, Any], type[TorchBudgetError], str]] = [
    ({"sizes": []}, SizesError, r"no samples: sizes have the shape \(0,\)"),
    ({"sizes": np.ones((2, 2, 2), np.int64)}, SizesError, r"got \(2, 2, 2\)"),
    ({"sizes": [1.0, 2.0]}, SizesError, "expected integer sizes, got dtype float64"),
    ({"sizes": [True, False]}, SizesError, "expected integer sizes, got dtype bool"),
    ({"sizes": [1, 2, -3, -4]}, SizesError, r"sizes\[2\] is -3"),
    ({"sizes": [[1, 2], [3, -4]], "cost": TWO_AXES}, SizesError, r"sizes\[1\]\[1\] is -4"),
    ({"sizes": [[1, 2], [3, 4]]}, SizesError, r"of the shape \(N,\), got \(N, 2\)"),
    ({"cost": TWO_AXES}, SizesError, r"of the shape \(N, 2\), got \(N,\)"),
    ({"sizes": [[1, 2, 3]], "cost": TWO_AXES}, SizesError, r"\(N, 2\), got \(N, 3\)"),
    ({"cost": PaddedCost}, OptionError, "a cost model such as PaddedCost, got <class"),
    ({"budget": MemoryBudget(host=5)}, BudgetError, "must limit the device, got MemoryBudget"),
    ({"budget": 0}, BudgetError, "above 0 bytes"),
    ({"budget": "much"}, BudgetError, "much"),
    ({"budget": 2**63}, BudgetError, str(2**63)),
    ({"budget": 8}, OversizeError, r"1 of 5 samples .* first at index 1: size 9 needs 9"),
    ({"budget": 3, "oversize": "drop"}, OptionError, "'raise', 'skip', 'alone', got 'drop'"),
    ({"sizes": [9, 9], "budget": 8, "oversize": "skip"}, OversizeError, "none is left: raise it"),
    ({"samples_per_step": 4, "window": 4}, OptionError, "got window=4"),
    ({"samples_per_step": 0}, OptionError, "samples_per_step must be an int of at least 1, got 0"),
    ({"seed": -1}, OptionError, "seed must be an int of at least 0, got -1"),
    ({"shuffle": 1}, OptionError, "shuffle must be a bool, got 1"),
    ({"batch_size_multiple": 0}, OptionError, "batch_size_multiple .* got 0"),
    ({"batch_size_multiple": 8, "max_batch_size": 4}, OptionError, "max_batch_size=4 is below"),
    ({"batch_size_multiple": 2, "cost": PACKED}, OptionError, "no meaning for packed batches"),
    ({"limits": [(TOKENS, 64), 64]}, OptionError, "pairs of a cost model and an amount.* got 64"),
    ({"limits": [(TOKENS, "6 parsecs")]}, BudgetError, "parsecs"),
    (
        {"limits": [(TOKENS, 400), (PaddedCost(unit_bytes=8), 64)], "budget": 400},
        OversizeError,
        r"1 of 5 samples .* limits\[1\].* 64",
    ),
    (
        {"limits": [(PackedCost(unit_bytes=3, unit="nodes"), 26)], "budget": 400},
        OversizeError,
        r"index 1: size 9 needs 27 nodes of 26 nodes; raise limits\[0\], shorten",
    ),
    ({"limits": [(PackedCost(sample_bytes=2), 1)]}, OversizeError, r"5 of 5 .* exceed limits\[0\]"),
    (
        {"limits": [(TOKENS, 64)], "cost": PACKED},
        OptionError,
        r"limits\[0\] is a PaddedCost, .* state a PackedCost",
    ),
    ({"groups": [1, 2]}, OptionError, r"one label a sample, .* shape \(5,\), got int64 of the"),
    ({"groups": [0.5] * 5}, OptionError, "ints or text .* got float64"),
    (
        WEIGHED | {"weights": [1] * 5, "groups": [1] * 5},
        OptionError,
        "and groups, unless samples_per",
    ),
    (WEIGHED | {"weights": [1] * 5, "units": [1] * 5}, OptionError, "leave out units"),
    ({"units": [1, 2]}, OptionError, r"units must be one label a sample, .* shape \(5,\)"),
    ({"units": [1] * 5}, OptionError, "units need samples_per_step"),
    ({"units": ([1] * 5, "rank")}, OptionError, r"or \(labels, 'micro_batch'\), got 'rank'"),
    (WHOLE | {"drop_last": True}, OptionError, "units need samples_per_step"),
    (WHOLE | {"batch_size_multiple": 2}, OptionError, "leave batch_size_multiple at 1, got 2"),
    (WHOLE | {"groups": list("ababa")}, OptionError, "unit must have one group: sample 1 has"),
    ({"size_multiple": 10, "budget": 9}, OversizeError, "5 of 5 samples|needs 10"),
    ({"batches_per_epoch": 0}, OptionError, "batches_per_epoch .* got 0"),
    ({"batches_per_epoch": "auto"}, OptionError, "batches_per_epoch .* got 'auto'"),
    ({"batches_per_epoch": 4, "samples_per_step": 4}, OptionError, "by steps_per_epoch, got"),
    ({"steps_per_epoch": 4}, OptionError, "steps_per_epoch=4 needs samples_per_step"),
    ({"weights": [1] * 5}, OptionError, "pass batches_per_epoch"),
    (WEIGHED | {"weights": torch.ones(5, requires_grad=True)}, OptionError, "must be numbers"),
    (WEIGHED | {"weights": np.ma.masked_equal([1, 9, 1, 1, 1], 9)}, OptionError, "some are masked"),
    ({"sizes": np.ma.masked_equal([1, 9, 1, 1, 1], 9)}, SizesError, r"sizes\[1\] is masked"),
    ({"sizes": torch.ones(5, device="meta")}, SizesError, "expected sizes of shape"),
    ({"num_replicas": 0}, OptionError, "num_replicas .* got 0"),
    ({"num_replicas": 2, "rank": 2}, OptionError, "rank must be below num_replicas=2, got 2"),
    ({"num_replicas": 4, "rank": 0, "window": 3}, OptionError, "at least the 4 ranks, got 3"),
    ({"num_replicas": 4, "rank": 0, "samples_per_step": 3}, OptionError, "at least the 4"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED, ids=lambda value: repr(value)[:60])
def test_what_cannot_hold_is_refused_at_once(
    wrong: dict[str, Any], error: type[TorchBudgetError], message: str
) -> None:
    """Every bad argument raises when the sampler is made, and the message says what came."""
    options = {"sizes": SIZES, "cost": TOKENS, "budget": 18} | wrong
    with pytest.raises(error, match=message) as caught:
        sampler_of(**options)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)


def test_an_epoch_that_drop_last_empties() -> None:
    """Where `drop_last` drops the only micro-batch or step, no loop goes round in silence."""
    for options in ({}, {"samples_per_step": 6}):
        for use in (len, list, lambda sampler: sampler.report()):
            with pytest.raises(OptionError, match="drop_last=True drops all 3"):
                use(sampler_of([1, 2, 3], drop_last=True, **options))


def test_drop_last_drops_what_could_have_taken_a_sample() -> None:
    """A last micro-batch that is full stays; one with room for another sample goes."""
    assert list(sampler_of([5] * 6, 10, shuffle=False, drop_last=True)) == [[0, 1], [2, 3], [4, 5]]
    assert list(sampler_of([5] * 5, 10, shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]
    steps = sampler_of([5] * 5, 10, shuffle=False, drop_last=True, samples_per_step=3)
    assert list(steps) == [[0, 1], [2]]
    assert list(steps.steps) == [2]


def test_a_batch_is_a_list_of_ints() -> None:
    """Python's own ints, that any data set takes as an index."""
    for batch in sampler_of():
        assert type(batch) is list
        assert {type(index) for index in batch} == {int}


def test_samples_that_cost_nothing() -> None:
    """As many fit as 64 bits can count, and windows of more are those of the whole epoch."""
    for options in ({}, {"shuffle": False}, {"window": 2**70}):
        assert [sorted(batch) for batch in sampler_of([0, 0, 0], **options)] == [[0, 1, 2]]


@pytest.mark.parametrize(
    "sizes",
    [
        LENGTHS.tolist(),
        LENGTHS.astype(np.uint16),
        LENGTHS.astype(">i4"),
        LENGTHS[:, None],
        np.stack([LENGTHS, LENGTHS], axis=1)[:, 0],
        torch.from_numpy(LENGTHS),
        torch.from_numpy(LENGTHS).to(torch.int32),
    ],
    ids=["list", "uint16", "big-endian", "column", "strided", "tensor", "int32 tensor"],
)
def test_sizes_of_any_integer_kind_mean_the_same(sizes: Any) -> None:
    """Lists, arrays of any integer type and layout, tensors: one order, and one state."""
    assert sampler_of(sizes).state_dict() == sampler_of().state_dict()
    assert list(sampler_of(sizes)) == list(sampler_of())


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_a_big_memory_map_is_never_copied(tmp_path: Path, dtype: Any) -> None:
    """A sampler over a file of sizes holds a fraction of its bytes, and still draws at once."""
    length = 2**25 + 8  # past what is kept in a narrower type
    sizes = np.memmap(tmp_path / "sizes", dtype, "w+", shape=(length,))  # sparse: all 0
    sizes[::100_003] = 200
    tracemalloc.start()
    try:
        sampler = sampler_of(sizes, cost=PaddedCost(unit_bytes=1, sample_bytes=1))
        next(iter(sampler))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(sampler.plan.sizes.values, sizes)
    assert peak < 8 * 2**20 < sizes.nbytes


def test_the_order_depends_on_nothing_outside() -> None:
    """Neither the global generators nor earlier samplers have a say, nor are they touched."""
    expected = list(sampler_of(seed=5))
    np.random.seed(1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert list(sampler_of(seed=5)) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert list(sampler_of(seed=6)) != expected


def test_there_is_no_batch_size() -> None:
    """Frameworks take an int attribute of that name for a fixed size, and cut batches to it."""
    assert not hasattr(sampler_of(), "batch_size")


# ---------------------------------------------------------------------- oversize


def test_skipping_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning when the sampler is made, with the number and an example; epochs are silent."""
    with caplog.at_level(logging.INFO, logger="torchbudget"):
        sampler = sampler_of([5, 50, 5, 60, 5], 20, oversize="skip")
        for _ in range(3):
            list(sampler)
        len(sampler)
        sampler.report()
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "torchbudget")
    assert re.search("2 of 5 samples.*index 1: size 50 needs 50.*skipped$", record.getMessage())


def test_alone_means_alone() -> None:
    """An oversize sample takes nothing beside it; packed samples of no size neither."""
    batches = list(sampler_of([5, 50, 5, 60, 5], 20, oversize="alone"))
    assert sorted(map(sorted, batches)) == [[0, 2, 4], [1], [3]]
    cost = PackedCost(unit_bytes=1, fixed_bytes=100)
    assert sorted(sampler_of([0, 0, 0], 50, cost=cost, oversize="alone")) == [[0], [1], [2]]


@pytest.mark.parametrize("oversize", ["raise", "skip"])
def test_a_model_that_does_not_fit_is_named(oversize: Any) -> None:
    """Where no sample is left room, it is not the samples that are to be shortened."""
    for kind in (PaddedCost, PackedCost):
        cost = kind(fixed_bytes=500, unit_bytes=1)
        with pytest.raises(OversizeError, match="without samples needs 500 B of 400 B") as caught:
            sampler_of([3, 9, 4], 400, cost=cost, oversize=oversize)
        assert "shorten" not in str(caught.value)
        with pytest.raises(OversizeError, match=r"1 of 3 samples .* shorten"):
            sampler_of([3, 9, 4], 508, cost=cost)


def test_oversize_is_found_beyond_the_first_chunk() -> None:
    """The first over the budget is named, wherever it stands."""
    sizes = np.ones(300_000, np.int64)
    sizes[[200_000, 299_999]] = 50
    with pytest.raises(OversizeError, match=r"2 of 300,000 samples .* at index 200000"):
        sampler_of(sizes, 49)


# ---------------------------------------------------------------------- size


def test_a_million_samples_cost_no_memory() -> None:
    """Beside the sizes there is nothing per sample: not made, not drawn, not counted, not saved."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5, 1, 10**6), 16, 4096).astype(np.uint16)
    tracemalloc.start()
    try:
        sampler = sampler_of(sizes, 16_384)
        batches = iter(sampler)
        next(batches)
        first = tracemalloc.get_traced_memory()[1]
        deque(islice(batches, 5000), maxlen=0)
        state = sampler.state_dict()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first < 4 * 2**20
    assert peak < 48 * 2**20  # blocks of windows grow up to a fixed size
    assert len(json.dumps(state)) < 3000
    assert sum(map(len, sampler)) == 10**6
    assert len(sampler) > 10**6 * 100 // 16_384
