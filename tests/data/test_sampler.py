"""`MemoryBudgetBatchSampler` by example: refusals, epochs, states, loaders, ranks."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import multiprocessing
import pickle
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.oracles import chi_square
from tests.support.ranks import run_ranks, torchrun
from torchbudget import (
    MemoryBudget,
    MemoryBudgetBatchSampler,
    OversizeError,
    PackedCost,
    PaddedCost,
    StateMismatchError,
    TorchBudgetError,
)
from torchbudget.errors import (
    BudgetError,
    CostError,
    DiscardedStateWarning,
    OptionError,
    SizesError,
    StateError,
    UnevenRanksError,
)

TOKENS = PaddedCost(unit_bytes=1)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 300), 1, 400).astype(np.int64)

# Python 3.12 and later say so of every fork under pytest-xdist, which has threads.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Numbers(Dataset[int]):
    """Sample k is the number k."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def as_list(samples: list[int]) -> list[int]:
    return samples


def sampler_of(sizes: Any = LENGTHS, budget: Any = 1000, **options: Any) -> Any:
    return MemoryBudgetBatchSampler(sizes, options.pop("cost", TOKENS), budget, **options)


def loader_of(sampler: Any, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(len(LENGTHS)), batch_sampler=sampler, collate_fn=as_list, **options)


# ---------------------------------------------------------------------- refusals

SIZES = [3, 9, 4, 8, 1]
TWO_AXES = PaddedCost(unit_bytes=(1, 1))

REFUSED: list[tuple[dict[str, Any], type[TorchBudgetError], str]] = [
    ({"sizes": []}, SizesError, r"no samples: sizes have the shape \(0,\)"),
    ({"sizes": np.empty((0, 2), np.int64)}, SizesError, r"no samples.*\(0, 2\)"),
    ({"sizes": np.empty((3, 0), np.int64)}, SizesError, r"no samples.*\(3, 0\)"),
    ({"sizes": 5}, SizesError, r"shape \(N,\) or \(N, d\), got \(\)"),
    ({"sizes": None}, SizesError, r"shape \(N,\) or \(N, d\)"),
    ({"sizes": np.ones((2, 2, 2), np.int64)}, SizesError, r"got \(2, 2, 2\)"),
    ({"sizes": [1.0, 2.0]}, SizesError, "expected integer sizes, got dtype float64"),
    ({"sizes": ["1", "2"]}, SizesError, "expected integer sizes, got dtype <U1"),
    ({"sizes": [True, False]}, SizesError, "expected integer sizes, got dtype bool"),
    ({"sizes": [1, 2, -3, -4]}, SizesError, r"sizes\[2\] is -3"),
    ({"sizes": [1, 2**48]}, SizesError, rf"sizes\[1\] is {2**48}"),
    ({"sizes": np.array([2**63], np.uint64)}, SizesError, rf"sizes\[0\] is {2**63}"),
    ({"sizes": [[1, 2], [3, -4]], "cost": TWO_AXES}, SizesError, r"sizes\[1\]\[1\] is -4"),
    ({"sizes": [[1, 2], [3]]}, SizesError, "sizes"),
    ({"sizes": [[1, 2], [3, 4]]}, SizesError, r"sizes of one axis, got .* shape \(2, 2\)"),
    ({"sizes": [[1, 200], [3, 4]]}, SizesError, "sizes of one axis"),
    ({"cost": TWO_AXES}, CostError, "2 axes"),
    ({"cost": TWO_AXES, "oversize": "alone"}, CostError, "2 axes"),
    ({"sizes": [[1, 2, 3]], "cost": TWO_AXES}, CostError, "2 axes"),
    ({"cost": None}, OptionError, "a cost model such as PaddedCost, got None"),
    ({"cost": PaddedCost}, OptionError, "a cost model such as PaddedCost, got <class"),
    ({"cost": 5}, OptionError, "a cost model such as PaddedCost, got 5"),
    ({"budget": MemoryBudget(host=5)}, BudgetError, "must limit the device, got MemoryBudget"),
    ({"budget": 0}, BudgetError, "0 holds nothing"),
    ({"budget": "0GiB"}, BudgetError, "holds nothing"),
    ({"budget": -5}, BudgetError, "-5"),
    ({"budget": None}, BudgetError, "at least one of device"),
    ({"budget": True}, BudgetError, "got True"),
    ({"budget": 18.0}, BudgetError, "got 18.0"),
    ({"budget": "much"}, BudgetError, "much"),
    ({"budget": 2**63}, BudgetError, str(2**63)),
    ({"budget": 8}, OversizeError, r"1 of 5 samples .* first at index 1: size 9 needs 9"),
    ({"budget": 3}, OversizeError, "3 of 5 samples"),
    ({"budget": 3, "oversize": "drop"}, OptionError, "'raise', 'skip', 'alone', got 'drop'"),
    ({"oversize": None}, OptionError, "got None"),
    ({"budget": 0.5, "oversize": "skip"}, BudgetError, "0.5"),
    ({"sizes": [9, 9], "budget": 8, "oversize": "skip"}, OversizeError, "nothing would be left"),
    ({"samples_per_step": 4, "window": 4}, OptionError, "window=4, samples_per_step=4"),
    ({"samples_per_step": 0}, OptionError, "samples_per_step must be an int of at least 1, got 0"),
    ({"samples_per_step": 2.0}, OptionError, "samples_per_step .* got 2.0"),
    ({"samples_per_step": True}, OptionError, "samples_per_step .* got True"),
    ({"window": 0}, OptionError, "window must be an int of at least 1, got 0"),
    ({"window": "8"}, OptionError, "window .* got '8'"),
    ({"seed": -1}, OptionError, "seed must be an int of at least 0, got -1"),
    ({"seed": 1.0}, OptionError, "seed .* got 1.0"),
    ({"seed": True}, OptionError, "seed .* got True"),
    ({"seed": None}, OptionError, "seed .* got None"),
    ({"shuffle": 1}, OptionError, "shuffle must be a bool, got 1"),
    ({"drop_last": 0}, OptionError, "drop_last must be a bool, got 0"),
    ({"replacement": "no"}, OptionError, "replacement must be a bool, got 'no'"),
    ({"max_batch_size": 0}, OptionError, "max_batch_size .* got 0"),
    ({"max_batch_size": True}, OptionError, "max_batch_size .* got True"),
    ({"batch_size_multiple": 0}, OptionError, "batch_size_multiple .* got 0"),
    ({"batch_size_multiple": None}, OptionError, "batch_size_multiple .* got None"),
    ({"batch_size_multiple": 8, "max_batch_size": 4}, OptionError, "max_batch_size=4 is below"),
    (
        {"batch_size_multiple": 2, "cost": PackedCost(unit_bytes=1)},
        OptionError,
        "no meaning for packed batches",
    ),
    ({"size_multiple": -8}, OptionError, "size_multiple .* got -8"),
    ({"size_multiple": 10, "budget": 9}, OversizeError, "5 of 5 samples|needs 10"),
    ({"num_samples": 0}, OptionError, "num_samples .* got 0"),
    ({"num_samples": 2.5}, OptionError, "num_samples .* got 2.5"),
    ({"replacement": True, "shuffle": False}, OptionError, "need shuffle=True"),
    ({"weights": [1] * 5, "shuffle": False}, OptionError, "need shuffle=True"),
    ({"weights": [1] * 4}, OptionError, r"shape \(5,\), got \(4,\)"),
    ({"weights": [[1] * 5]}, OptionError, r"shape \(5,\), got \(1, 5\)"),
    ({"weights": 1.0}, OptionError, r"shape \(5,\), got \(\)"),
    ({"weights": [1, 1, np.nan, 1, 1]}, OptionError, "weight 2 is nan"),
    ({"weights": [1, 1, 1, -1, 1]}, OptionError, "weight 3 is -1.0"),
    ({"weights": [1, 1, 0, 1, 1]}, OptionError, "only 4 samples have a weight above 0"),
    ({"weights": ["a"] * 5}, OptionError, "weights"),
    ({"num_replicas": 0}, OptionError, "num_replicas .* got 0"),
    ({"num_replicas": 2, "rank": 2}, OptionError, "rank must be below num_replicas=2, got 2"),
    ({"num_replicas": 2, "rank": -1}, OptionError, "rank must be an int of at least 0, got -1"),
    ({"rank": 1}, OptionError, "rank must be below num_replicas=1, got 1"),
    ({"num_replicas": True, "rank": 0}, OptionError, "num_replicas .* got True"),
    ({"num_replicas": 6, "rank": 0}, UnevenRanksError, "5 samples cannot be dealt to 6 ranks"),
    ({"num_replicas": 4, "rank": 0, "window": 3}, OptionError, "window=3 is below .* ranks, 4"),
    (
        {"num_replicas": 4, "rank": 0, "samples_per_step": 3},
        OptionError,
        "samples_per_step=3 is below the number of ranks, 4",
    ),
    ({"samples_per_step": 6, "drop_last": True}, OptionError, "drop_last=True leaves nothing"),
]


@pytest.mark.parametrize(("wrong", "error", "told"), REFUSED, ids=lambda value: repr(value)[:60])
def test_what_cannot_hold_is_refused_at_once(
    wrong: dict[str, Any], error: type[TorchBudgetError], told: str
) -> None:
    """Every bad argument raises when the sampler is made, and the message says what came."""
    options = {"sizes": SIZES, "cost": TOKENS, "budget": 18} | wrong
    with pytest.raises(error, match=told) as caught:
        sampler_of(**options)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)


def test_subjects_come_first_and_options_are_named() -> None:
    """The budget has no default, and no option goes by its place."""
    with pytest.raises(TypeError):
        MemoryBudgetBatchSampler(SIZES, TOKENS)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        MemoryBudgetBatchSampler(SIZES, TOKENS, 18, 4)  # type: ignore[misc]


def test_numpy_ints_are_ints() -> None:
    """Options that come out of NumPy are taken like Python's own."""
    options = {"window": 50, "seed": 3, "max_batch_size": 7, "num_replicas": 2, "rank": 1}
    mine = sampler_of(**{name: np.int32(value) for name, value in options.items()})
    assert list(mine) == list(sampler_of(**options))
    assert json.loads(json.dumps(mine.state_dict())) == mine.state_dict()


def test_an_uneven_number_is_refused_before_the_first_batch() -> None:
    """Samples that stand alone and are no multiple of the ranks': `len` and `iter` say so.

    No rank has drawn a batch by then, and `drop_last=True` is the way out that they name.
    """
    options: dict[str, Any] = {"max_batch_size": 1, "num_replicas": 2}
    for rank in range(2):
        with pytest.raises(UnevenRanksError, match="3 samples that need 3 micro-batches"):
            len(sampler_of([1, 2, 3], rank=rank, **options))
        with pytest.raises(UnevenRanksError, match="drop_last=True"):
            next(iter(sampler_of([1, 2, 3], rank=rank, **options)))
    those = [sampler_of([1, 2, 3], rank=rank, drop_last=True, **options) for rank in range(2)]
    assert [len(sampler) for sampler in those] == [1, 1]
    drawn = [list(sampler) for sampler in those]
    assert [len(batches) for batches in drawn] == [1, 1]
    assert drawn[0] != drawn[1]


def test_an_epoch_that_drop_last_empties() -> None:
    """Where `drop_last` drops the only micro-batch, no loop goes round in silence."""
    for use in (len, list, lambda sampler: sampler.report()):
        with pytest.raises(OptionError, match="drop_last=True leaves nothing of the epoch's 3"):
            use(sampler_of([1, 2, 3], drop_last=True))


def test_drop_last_drops_what_could_have_taken_a_sample() -> None:
    """A last micro-batch that is full stays; one with room for another sample goes."""
    assert list(sampler_of([5] * 6, 10, shuffle=False, drop_last=True)) == [[0, 1], [2, 3], [4, 5]]
    assert list(sampler_of([5] * 5, 10, shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]
    steps = sampler_of([5] * 5, 10, shuffle=False, drop_last=True, samples_per_step=3)
    assert list(steps) == [[0, 1], [2]]
    assert list(steps.steps) == [2]


# ---------------------------------------------------------------------- what a sampler is


def test_there_is_no_batch_size() -> None:
    """Frameworks take an int attribute of that name for a fixed size, and cut batches to it."""
    sampler = sampler_of()
    assert not hasattr(sampler, "batch_size")
    assert not hasattr(type(sampler), "batch_size")
    assert loader_of(sampler).batch_size is None


def test_a_batch_is_a_list_of_ints() -> None:
    """Python's own ints, that any data set takes as an index."""
    for batch in sampler_of():
        assert type(batch) is list
        assert {type(index) for index in batch} == {int}


def test_len_of_the_loader_is_that_of_the_sampler() -> None:
    sampler = sampler_of()
    loader = loader_of(sampler)
    assert len(loader) == len(sampler) == len(list(loader))


@pytest.mark.parametrize(
    "sizes",
    [
        LENGTHS.tolist(),
        tuple(LENGTHS.tolist()),
        LENGTHS.astype(np.uint16),
        LENGTHS.astype(">i4"),
        LENGTHS[:, None],
        np.stack([LENGTHS, LENGTHS], axis=1)[:, 0],
        torch.from_numpy(LENGTHS),
        torch.from_numpy(LENGTHS).to(torch.int32),
    ],
    ids=["list", "tuple", "uint16", "big-endian", "column", "strided", "tensor", "int32 tensor"],
)
def test_sizes_of_any_integer_kind_mean_the_same(sizes: Any) -> None:
    """Lists, arrays of any integer type and layout, tensors: one order, and one state."""
    expected = sampler_of()
    sampler = sampler_of(sizes)
    assert sampler.state_dict() == expected.state_dict()
    assert list(sampler) == list(expected)


def test_sizes_in_a_memory_map(tmp_path: Path) -> None:
    """A file of sizes is read where it lies."""
    np.save(tmp_path / "sizes.npy", LENGTHS)
    sampler = sampler_of(np.load(tmp_path / "sizes.npy", mmap_mode="r"))
    assert list(sampler) == list(sampler_of())


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
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert list(sampler_of(seed=5)) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert list(sampler_of(seed=6)) != expected


# ---------------------------------------------------------------------- epochs


def test_epochs_follow_each_other() -> None:
    """An epoch that was drawn to its end is followed by the next one, of another order."""
    sampler = sampler_of()
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert epochs[0] != epochs[1] != epochs[2]
    for number, expected in enumerate(epochs):
        fresh = sampler_of()
        fresh.set_epoch(number)
        assert list(fresh) == expected


def test_taking_exactly_len_batches_is_drawing_to_the_end() -> None:
    """A loop that counts its batches, and never meets the end, goes on to the next epoch too."""
    sampler, expected = sampler_of(), sampler_of()
    list(expected)
    assert list(itertools.islice(sampler, len(sampler))) == list(sampler_of())
    assert sampler.epoch == 1
    assert list(sampler) == list(expected)


def test_set_epoch_is_idempotent() -> None:
    """Setting the epoch that comes anyway, any number of times, changes nothing."""
    sampler, expected = sampler_of(), sampler_of()
    for number in range(3):
        for _ in range(2):
            sampler.set_epoch(number)
            sampler.sampler.set_epoch(number)
        assert list(sampler) == list(expected)


def test_frameworks_reach_it_through_sampler() -> None:
    """`batch_sampler.sampler.set_epoch`, which some frameworks call, is its own."""
    sampler = sampler_of()
    assert sampler.sampler is sampler
    loader_of(sampler).batch_sampler.sampler.set_epoch(4)
    assert sampler.epoch == 4


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None, "1"], ids=repr)
def test_epochs_are_natural_numbers(epoch: Any) -> None:
    with pytest.raises(OptionError, match="epoch must be an int of at least 0"):
        sampler_of().set_epoch(epoch)


def test_a_broken_epoch_starts_again() -> None:
    """Where a loop breaks off in mid-epoch, the next one draws the same epoch from its start."""
    sampler = sampler_of()
    expected = list(sampler_of())
    for _ in range(2):
        assert list(itertools.islice(sampler, 3)) == expected[:3]
        assert sampler.epoch == 0
        assert len(sampler) == len(expected)
    assert list(sampler) == expected


def test_an_earlier_loop_does_not_disturb_a_later_one() -> None:
    """Two iterators are independent; only the later one's end ends the epoch."""
    sampler = sampler_of()
    expected = list(sampler_of())
    earlier = iter(sampler)
    next(earlier)
    later = iter(sampler)
    assert list(earlier) == expected[1:]
    assert sampler.epoch == 0
    assert list(later) == expected
    assert sampler.epoch == 1


def test_set_epoch_in_mid_epoch_counts_from_the_next_loop() -> None:
    """The current loop goes on as it began; state, `steps` and the next loop are of the new one."""
    sampler = sampler_of(samples_per_step=40)
    expected = list(sampler_of(samples_per_step=40))
    batches = iter(sampler)
    first = next(batches)
    sampler.set_epoch(7)
    assert [first, *batches] == expected
    assert sampler.epoch == 7
    assert sampler.state_dict()["epoch"] == 7
    fresh = sampler_of(samples_per_step=40)
    fresh.set_epoch(7)
    assert list(sampler.steps) == list(fresh.steps)
    assert list(sampler) == list(fresh)


def test_setting_another_epoch_discards_a_loaded_position() -> None:
    """It says so: the rest of the saved epoch would be lost in silence."""
    saved = sampler_of()
    list(itertools.islice(saved, 3))
    sampler = sampler_of()
    sampler.load_state_dict(saved.state_dict())
    with pytest.warns(DiscardedStateWarning, match=r"set_epoch\(1\) discards .* in epoch 0"):
        sampler.set_epoch(1)
    fresh = sampler_of()
    fresh.set_epoch(1)
    assert list(sampler) == list(fresh)


def test_setting_the_loaded_epoch_keeps_the_position() -> None:
    """A trainer that sets the epoch at its start resumes where the state says."""
    saved = sampler_of()
    whole = list(saved)
    saved.set_epoch(0)
    list(itertools.islice(saved, 3))
    sampler = sampler_of()
    sampler.load_state_dict(saved.state_dict())
    sampler.set_epoch(0)
    assert list(sampler) == whole[3:]
    sampler.set_epoch(1)  # after the rest was drawn there is nothing to discard: no warning


def test_a_state_at_an_epochs_start_is_not_discarded() -> None:
    """A state between two epochs holds no position that could be lost: no warning."""
    sampler = sampler_of()
    sampler.load_state_dict(sampler_of().state_dict())
    sampler.set_epoch(3)


def test_steps_are_of_the_current_loop() -> None:
    """During a loop `steps` counts from where it began, a resumed one from its position."""
    sampler = sampler_of(samples_per_step=50)
    whole = list(sampler.steps)
    assert sum(whole) == len(sampler)
    batches = iter(sampler)
    next(batches)
    assert list(sampler.steps) == whole
    resumed = sampler_of(samples_per_step=50)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed.steps) == [whole[0] - 1, *whole[1:]]


# ---------------------------------------------------------------------- states


def test_a_state_has_its_keys() -> None:
    """Constant keys, plain types, and copies: what is done to one state changes no other."""
    sampler = sampler_of(window=50)
    states = [sampler.state_dict()] + [sampler.state_dict() for _ in sampler]
    assert len({tuple(sorted(state)) for state in states}) == 1
    for state in states:
        assert json.loads(json.dumps(state)) == state
    before = copy.deepcopy(states[3])
    states[3]["order"].clear()
    states[3]["dealing"]["window"] = 0
    list(itertools.islice(sampler, 3))
    sampler.set_epoch(0)
    list(itertools.islice(sampler, 3))
    assert sampler.state_dict() == before


def test_loading_keeps_its_argument() -> None:
    """A state is read, not taken: loading it twice, or into two samplers, is the same."""
    saved = sampler_of()
    list(itertools.islice(saved, 4))
    state = saved.state_dict()
    before = copy.deepcopy(state)
    one, other = sampler_of(), sampler_of()
    one.load_state_dict(state)
    other.load_state_dict(state)
    rest = list(one)
    assert state == before
    assert list(other) == rest


def test_iter_before_and_after_loading() -> None:
    """Loaders call `iter` before they load a state, and again after it."""
    saved = sampler_of()
    whole = list(saved)
    saved.set_epoch(0)
    list(itertools.islice(saved, 4))
    sampler = sampler_of()
    stale = iter(sampler)
    sampler.load_state_dict(saved.state_dict())
    fresh = iter(sampler)
    next(stale)
    assert list(fresh) == whole[4:]


def test_a_second_resume() -> None:
    """A resumed epoch is saved and resumed again, at every batch."""
    whole = list(sampler_of(window=40))
    state = sampler_of(window=40).state_dict()
    for number, batch in enumerate(whole):
        sampler = sampler_of(window=40)
        sampler.load_state_dict(state)
        assert len(sampler) == len(whole) - number
        assert next(iter(sampler)) == batch
        state = sampler.state_dict()
    assert state["epoch"] == 1


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_dropped_end_is_an_end(window: int) -> None:
    """After the last batch that `drop_last` leaves, the state is of the next epoch."""
    for n in range(2, 9):
        sampler = sampler_of([5] * n, 10, window=window, drop_last=True)
        batches = list(sampler)
        again = sampler_of([5] * n, 10, window=window, drop_last=True)
        list(itertools.islice(again, len(batches)))
        resumed = sampler_of([5] * n, 10, window=window, drop_last=True)
        resumed.load_state_dict(again.state_dict())
        assert resumed.epoch == 1
        assert len(list(resumed)) == len(batches)


def test_batches_done_is_checked() -> None:
    """More than was drawn, or no number at all, is refused."""
    sampler = sampler_of()
    with pytest.raises(OptionError, match="batches_done=2, but no batch was yielded"):
        sampler.state_dict(batches_done=2)
    assert sampler.state_dict(batches_done=0) == sampler.state_dict()
    list(itertools.islice(sampler, 3))
    with pytest.raises(OptionError, match="batches_done=4, but only 3 were drawn"):
        sampler.state_dict(batches_done=4)
    for wrong in (-1, 1.0, True):
        with pytest.raises(OptionError, match="batches_done must be an int"):
            sampler.state_dict(batches_done=wrong)


def test_batches_done_counts_from_a_resumed_loops_start() -> None:
    """The loop that resumed counts its own batches, from 0."""
    whole = list(sampler_of())
    first = sampler_of()
    list(itertools.islice(first, 5))
    sampler = sampler_of()
    sampler.load_state_dict(first.state_dict())
    list(itertools.islice(sampler, 6))
    again = sampler_of()
    again.load_state_dict(sampler.state_dict(batches_done=2))
    assert list(again) == whole[7:]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
        ({"sizes": LENGTHS[:-1]}, "the number of samples: saved 300, now 299"),
        ({"sizes": LENGTHS[::-1]}, "the samples' sizes: saved '[0-9a-f]{32}', now '[0-9a-f]{32}'"),
        ({"num_samples": 200}, "num_samples: saved 300, now 200"),
        ({"replacement": True}, "replacement: saved False, now True"),
        ({"weights": [1] * 300}, "the weights: saved None, now"),
        ({"budget": 300, "oversize": "skip"}, "the samples that are skipped as oversize"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_state_of_another_order_is_refused(other: Any, told: str) -> None:
    """Its position would mean other samples; the message names what differs, and both values."""
    sampler = sampler_of(**other)
    with pytest.raises(StateMismatchError, match=told):
        sampler.load_state_dict(sampler_of().state_dict())
    assert sampler.epoch == 0


@pytest.mark.parametrize(
    "other",
    [
        {"budget": 2000},
        {"cost": PaddedCost(unit_bytes=1, sample_bytes=1)},
        {"max_batch_size": 5},
        {"batch_size_multiple": 4},
        {"size_multiple": 8},
        {"window": 77},
        {"num_replicas": 1, "rank": 0},
    ],
    ids=str,
)
def test_a_state_under_other_rules_goes_on(other: Any) -> None:
    """Budget, cost and rules may change at any batch: what is left comes once."""
    saved = sampler_of(window=100)
    done = {index for batch in itertools.islice(saved, 3) for index in batch}
    sampler = sampler_of(**({"window": 100} | other))
    sampler.load_state_dict(saved.state_dict())
    rest = Counter(index for batch in sampler for index in batch)
    assert rest == Counter(set(range(300)) - done)


def _with(**changed: Any) -> Any:
    return lambda state: state | changed


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda _: None, "expected a mapping from state_dict"),
        (lambda _: [1], "got list"),
        (lambda _: {}, "lacks dealing, dealt, epoch"),
        (lambda state: {k: v for k, v in state.items() if k != "rounds"}, "lacks rounds"),
        (_with(version=99), "version 99, this torchbudget reads 1"),
        (_with(version=None), "version None"),
        (_with(epoch=-1), "epoch must be an int of at least 0, got -1"),
        (_with(epoch=1.0), "epoch must be an int of at least 0, got 1.0"),
        (_with(epoch=True), "epoch must be an int of at least 0, got True"),
        (_with(start="0"), "start must be an int"),
        (_with(start=200), r"200 … 100 are not within the epoch's 300"),
        (_with(stop=301), r"0 … 301 are not within the epoch's 300"),
        (_with(order=None), "order is malformed"),
        (_with(order={}), "order is malformed"),
        (_with(dealing=None, left="!"), "window of 100 samples is malformed"),
        (_with(dealing=None, left="AAAA"), "window of 100 samples is malformed"),
        (_with(dealt="AAAA"), "window of 100 samples is malformed"),
        (_with(rounds=10**6), "rounds"),
    ],
    ids=itertools.count(),
)
def test_a_malformed_state_is_refused(spoil: Any, told: str) -> None:
    """What is no state, or lacks a part, is refused, and leaves the sampler as it was."""
    saved = sampler_of(window=100)
    list(itertools.islice(saved, 3))
    sampler = sampler_of(window=100)
    with pytest.raises(StateError, match=told):
        sampler.load_state_dict(spoil(saved.state_dict()))
    assert list(sampler) == list(sampler_of(window=100))


# ---------------------------------------------------------------------- pickle


@pytest.mark.parametrize("drawn", [0, 3, 10**6], ids=["fresh", "in mid-epoch", "after an epoch"])
def test_a_sampler_is_pickled(drawn: int) -> None:
    """A copy draws what the next loop of the original would, whatever was being drawn."""
    sampler = sampler_of()
    list(itertools.islice(sampler, drawn))
    copies = [pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)]  # noqa: S301
    expected = list(sampler)
    for twin in copies:
        assert len(twin) == len(expected)
        assert list(twin) == expected


def test_a_sampler_crosses_into_a_spawned_process() -> None:
    """A process that starts from nothing reads it, and draws the same."""
    sampler = sampler_of()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(list, (sampler,)) == list(sampler_of())


# ---------------------------------------------------------------------- loaders


@forks
@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_a_stock_loader_covers_every_sample(context: str | None) -> None:
    """Without workers and with two of each kind: every index once, in the sampler's order."""
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    loader = loader_of(sampler_of(), **(workers if context else {}))
    assert list(loader) == list(sampler_of())


@forks
def test_persistent_workers_draw_new_epochs() -> None:
    """Workers that live on get each epoch's own batches: the sampler stays in this process."""
    loader = loader_of(sampler_of(), num_workers=2, persistent_workers=True)
    expected = sampler_of()
    for _ in range(3):
        assert list(loader) == list(expected)


@forks
def test_the_state_of_a_loop_whose_workers_run_ahead() -> None:
    """The loader has drawn more than the loop has seen; the loop's own count makes it exact."""
    whole = list(sampler_of())
    for done in (0, 1, 4, len(whole) - 1, len(whole)):
        sampler = sampler_of()
        batches = iter(loader_of(sampler, num_workers=2, prefetch_factor=2))
        for _ in range(done):
            next(batches)
        resumed = sampler_of()
        resumed.load_state_dict(sampler.state_dict(batches_done=done))
        if done == len(whole):
            assert resumed.epoch == 1
            continue
        assert list(loader_of(resumed, num_workers=2)) == whole[done:]
        ahead = sampler_of()
        ahead.load_state_dict(sampler.state_dict())
        assert len(ahead) < len(whole) - done or ahead.epoch == 1


@forks
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_at_every_batch(workers: int) -> None:
    """The StatefulDataLoader of torchdata saves and loads the sampler as it is, at every batch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        sampler = sampler_of(budget=1500, window=100)
        return stateful.StatefulDataLoader(
            Numbers(300), batch_sampler=sampler, collate_fn=as_list, num_workers=workers
        )

    expected = sampler_of(budget=1500, window=100)
    whole, following = list(expected), list(expected)
    first = loader()
    states = [pickle.loads(pickle.dumps(first.state_dict())) for _ in first]  # noqa: S301
    assert len(states) == len(whole)
    for place in range(len(whole)):
        resumed = loader()
        resumed.load_state_dict(states[place])
        rest = list(resumed)
        if place == len(whole) - 1:
            # Behind the last batch an end, or the next epoch, is what a loader may make of it.
            assert rest in ([], following)
            continue
        assert rest == whole[place + 1 :]
        if place == 1:
            assert list(resumed) == following


# ---------------------------------------------------------------------- ranks

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
from torchbudget import MemoryBudgetBatchSampler, PaddedCost

sizes = np.array(json.loads(sys.argv[2]))
cost = PaddedCost(unit_bytes=1)
before = MemoryBudgetBatchSampler(sizes, cost, 1000)
dist.init_process_group("gloo")
sampler = MemoryBudgetBatchSampler(sizes, cost, 1000, samples_per_step=64)
found = {
    "before": [before.rank, before.num_replicas],
    "ranks": [sampler.rank, sampler.num_replicas],
    "len": len(sampler),
    "steps": list(sampler.steps),
    "batches": list(sampler),
    "explicit": [sampler.rank, MemoryBudgetBatchSampler(sizes, cost, 1000, rank=0).rank],
}
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_torch_distributed(ranks: int, tmp_path: Path) -> None:
    """Each process takes its own part: as many batches each, every sample once."""
    start = torchrun if ranks == 2 else run_ranks
    found = start(SCRIPT, tmp_path, ranks, json.dumps(LENGTHS.tolist()))
    assert [one["ranks"] for one in found] == [[rank, ranks] for rank in range(ranks)]
    assert [one["before"] for one in found] == [[0, 1]] * ranks
    assert [one["explicit"] for one in found] == [[rank, 0] for rank in range(ranks)]
    assert len({(one["len"], tuple(one["steps"])) for one in found}) == 1
    assert {len(one["batches"]) for one in found} == {found[0]["len"]}
    drawn = Counter(index for one in found for batch in one["batches"] for index in batch)
    assert drawn == Counter(range(300))
    for rank, one in enumerate(found):
        here = sampler_of(samples_per_step=64, num_replicas=ranks, rank=rank)
        assert list(here) == one["batches"]


def test_one_process_can_play_any_rank() -> None:
    """Given both, no process group is asked; given none, it is the only rank."""
    assert (sampler_of().num_replicas, sampler_of().rank) == (1, 0)
    parts = [list(sampler_of(num_replicas=3, rank=rank)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    assert Counter(i for part in parts for b in part for i in b) == Counter(range(300))


# ---------------------------------------------------------------------- sampling


def test_weights_are_frequencies() -> None:
    """Over epochs each sample comes in proportion to its weight; 0 never comes."""
    weights = np.array([0, 1, 2, 3, 4, 0])
    sampler = sampler_of([5] * 6, 25, weights=weights, replacement=True, num_samples=1000)
    drawn = Counter(i for _ in range(10) for batch in sampler for i in batch)
    assert drawn.total() == 10_000
    assert set(drawn) == {1, 2, 3, 4}
    counts = [drawn[index] for index in (1, 2, 3, 4)]
    assert abs(chi_square(counts, 10_000 * weights[1:5] / 10)) < 4


def test_weights_without_replacement() -> None:
    """Fewer samples than there are, none twice, the heavy ones more often than the light."""
    weights = np.array([1.0] * 10 + [9.0] * 10)
    sampler = sampler_of([5] * 20, 25, weights=weights, num_samples=8)
    drawn: Counter[int] = Counter()
    for _ in range(300):
        epoch = [index for batch in sampler for index in batch]
        assert len(epoch) == len(set(epoch)) == 8
        drawn.update(epoch)
    assert sum(drawn[i] for i in range(10, 20)) > 4 * sum(drawn[i] for i in range(10))


@pytest.mark.parametrize("weights", [[1.0] * 300, torch.ones(300), np.ones(300, np.float32)])
def test_weights_of_any_kind(weights: Any) -> None:
    """Lists, tensors and arrays of any float type mean the same weights."""
    expected = list(sampler_of(weights=np.ones(300), replacement=True))
    assert list(sampler_of(weights=weights, replacement=True)) == expected


def test_replacement_draws_each_position_anew() -> None:
    """Some come twice and some not at all; as many as asked for."""
    drawn = Counter(i for batch in sampler_of(replacement=True, num_samples=900) for i in batch)
    assert drawn.total() == 900
    assert 1 < max(drawn.values()) < 20
    assert len(drawn) < 300


@pytest.mark.parametrize("num_samples", [1, 299, 301, 750])
def test_num_samples(num_samples: int) -> None:
    """Fewer are a part of the samples; more are several passes."""
    drawn = Counter(i for batch in sampler_of(num_samples=num_samples) for i in batch)
    assert drawn.total() == num_samples
    assert max(drawn.values()) == -(-num_samples // 300)
    assert len(drawn) == min(num_samples, 300)


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
    assert record.levelno == logging.WARNING
    assert record.name == "torchbudget"
    told = record.getMessage()
    assert "2 of 5 samples" in told
    assert "index 1: size 50 needs 50" in told
    assert told.endswith("skipped")


@pytest.mark.parametrize("oversize", ["raise", "alone", "skip"])
def test_where_everything_fits_nothing_is_logged(
    oversize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="torchbudget"):
        assert len(list(sampler_of([5, 50, 5], 150, oversize=oversize))) == 1
    assert not caplog.records


def test_alone_means_alone() -> None:
    """An oversize sample takes nothing beside it; packed samples of no size neither."""
    batches = list(sampler_of([5, 50, 5, 60, 5], 20, oversize="alone"))
    assert sorted(map(sorted, batches)) == [[0, 2, 4], [1], [3]]
    cost = PackedCost(unit_bytes=1, fixed_bytes=100)
    assert sorted(sampler_of([0, 0, 0], 50, cost=cost, oversize="alone")) == [[0], [1], [2]]


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
        for _ in itertools.islice(batches, 5000):
            pass
        state = sampler.state_dict()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first < 4 * 2**20
    assert peak < 48 * 2**20  # blocks of windows grow up to a fixed size
    assert len(json.dumps(state)) < 3000
    batches = iter(sampler)
    drawn = sum(len(batch) for batch in batches)
    assert drawn == 10**6
    assert len(sampler) > 10**6 * 100 // 16_384


def test_nothing_is_warned_about_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = sampler_of()
        sampler.set_epoch(2)
        list(sampler)
        sampler.set_epoch(0)
        sampler.load_state_dict(sampler.state_dict())
        list(sampler)
