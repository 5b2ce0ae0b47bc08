"""Batches that are padded to more than was planned are noticed; others are not accused."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchbudget import (
    BudgetedIterableDataset,
    CostModel,
    MemoryBudgetBatchSampler,
    PackCollate,
    PackedCost,
    PadCollate,
    PaddedCost,
)
from torchbudget.data.padded_sizes import PaddedSizes
from torchbudget.errors import OtherNumbersWarning, OtherSizesWarning, PaddedSizeWarning

TOKENS = PaddedCost(unit_bytes=1)
SIZES = np.random.default_rng(0).integers(3, 60, 300)
RNG = np.random.default_rng(1)
SAMPLES = [
    {
        "input_ids": RNG.integers(1, 100, n).tolist(),
        "embedding": RNG.random(64).tolist(),
        "pixels": [1.0] * 80,
        "summary": RNG.integers(1, 100, 2 * n).tolist(),
    }
    for n in SIZES
]


class Foreign:
    """Pads as other libraries do: to a multiple, or to a constant, which no sampler knows."""

    def __init__(self, multiple: int = 1, side: str = "right", least: int = 0) -> None:
        self.multiple, self.side, self.least = multiple, side, least

    def __call__(self, samples: list[dict[str, list[float]]]) -> UserDict[str, torch.Tensor]:
        return UserDict(
            {
                name: self.pad([sample[name] for sample in samples], own=name != "input_ids")
                for name in samples[0]
            }
        )

    def pad(self, values: list[list[float]], *, own: bool) -> torch.Tensor:
        multiple, least = (1, 0) if own else (self.multiple, self.least)
        length = max(*map(len, values), least)
        length = -(-length // multiple) * multiple
        rows = [
            [0] * (length - len(row)) + row
            if self.side == "left"
            else row + [0] * (length - len(row))
            for row in values
        ]
        return torch.tensor(rows)


def sampled(collate: Any, workers: int, size_multiple: int = 1) -> Iterator[Any]:
    sampler = MemoryBudgetBatchSampler(SIZES, TOKENS, 1024, size_multiple=size_multiple)
    loader = DataLoader(
        SAMPLES,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
    )
    return sampler.tracked(loader)


def streamed(collate: Any, workers: int, size_multiple: int = 1) -> Iterator[Any]:
    stream = BudgetedIterableDataset(
        [SAMPLES], TOKENS, 1024, size="input_ids", size_multiple=size_multiple, collate_fn=collate
    )
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    return stream.tracked(loader)


Loop = Callable[..., Iterator[Any]]
loops = pytest.mark.parametrize("loop", [sampled, streamed])
forked = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@forked
@loops
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("collate", "match"),
    [
        (Foreign(64), "field 'input_ids' of a batch is padded to 64, where .* was planned"),
        (Foreign(16, "left"), "field 'input_ids' of a batch is padded to"),
        (Foreign(least=70), "field 'input_ids' of a batch is padded to 70"),
        (PadCollate(size_multiple=64, length_field="input_ids"), "a batch is padded to 64"),
    ],
)
def test_more_padding_than_planned_is_noticed(
    loop: Loop, collate: Any, match: str, workers: int
) -> None:
    """And names the next step; in workers too, which pass on what is raised."""
    if loop is streamed and workers:  # the stream's workers compare: their warnings are errors here
        with pytest.raises(PaddedSizeWarning, match=match):
            list(loop(collate, workers))
        return
    with pytest.warns(PaddedSizeWarning, match=match) as caught:
        for _ in loop(collate, workers):
            pass
    assert len(caught) == 1
    assert "size_multiple=1" in str(caught[0].message)
    if loop is sampled:
        assert caught[0].filename == __file__  # the loop


@forked
@loops
@pytest.mark.parametrize(
    ("collate", "multiple"),
    [
        (Foreign(), 1),
        (Foreign(side="left"), 1),
        (Foreign(64), 64),
        (Foreign(8), 16),
        (PadCollate(length_field="input_ids"), 1),
        (PadCollate(length_field="input_ids", size_multiple=8), 8),
        (PadCollate(length_field="input_ids", size_multiple=8), 16),
        (PadCollate(length_field="summary"), 1),  # longer than the sizes, and not by rounding
        (PackCollate(length_field="input_ids"), 1),
        (len, 1),
    ],
)
def test_what_is_planned_is_not_accused(loop: Loop, collate: Any, multiple: int) -> None:
    """Nor fields of one fixed shape, nor fields that are longer than the sizes say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loop(collate, 0, multiple))) > 4


def tokenized(
    multiple: int, side: str, begin: list[int], end: list[int]
) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    """Batches of texts that begin and end with special tokens, and with labels after a prompt."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        foreign = Foreign(multiple, side)
        ids = [[*begin, *sample["input_ids"], *end] for sample in samples]
        return {
            "input_ids": foreign.pad(ids, own=False),
            "labels": foreign.pad([[-100, -100, *row[2:]] for row in ids], own=False),
            "attention_mask": foreign.pad([[1] * len(row) for row in ids], own=False),
        }

    return collate


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_begins_or_ends_all_texts_is_no_padding(side: str) -> None:
    """An attention mask says what is."""
    for begin in ([101], [101, 101]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(sampled(tokenized(1, side, begin, []), 0))) > 4
            assert len(list(sampled(tokenized(1, side, begin, [102]), 0))) > 4
    with pytest.warns(PaddedSizeWarning, match="is padded to 64"):
        list(sampled(tokenized(64, side, [], []), 0))


def test_several_axes() -> None:
    sizes = RNG.integers(3, 40, (100, 2))
    images = [torch.rand(3, height, width) for height, width in sizes.tolist()]
    cost = PaddedCost(pair_bytes=[[0, 1], [0, 0]])
    for multiple, warns in ((1, True), (16, False)):
        sampler = MemoryBudgetBatchSampler(sizes, cost, 8192, size_multiple=multiple)
        loader = DataLoader(
            images,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=PadCollate(length_axes=(1, 2), size_multiple=16),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(sampler.tracked(loader))
        assert [one.category for one in caught] == [PaddedSizeWarning] * warns


def packed_rows(loop: str, planned: int, rounded: int) -> Iterator[Any]:
    """Rows of samples with room of a multiple, of a sampler or a stream that plans with another."""
    samples = [{"input_ids": sample["input_ids"]} for sample in SAMPLES]
    collate = PackCollate(layout="transformers", size_multiple=rounded, total=8192)
    cost = PackedCost(unit_bytes=1)
    if loop == "stream":
        stream = BudgetedIterableDataset(
            [samples], cost, 1024, size="input_ids", size_multiple=planned, collate_fn=collate
        )
        return iter(stream.tracked(DataLoader(stream, batch_size=None)))
    sampler = MemoryBudgetBatchSampler(SIZES, cost, 1024, size_multiple=planned)
    loader = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate,
    )
    return sampler.tracked(loader)


@pytest.mark.parametrize("loop", ["sampler", "stream"])
def test_more_room_in_a_row_than_planned_is_noticed(loop: str) -> None:
    """Room of the planned multiple, or of a divisor of it, is not."""
    for planned, rounded in ((1, 1), (8, 8), (16, 8)):
        batches = list(packed_rows(loop, planned, rounded))
        assert sum(batch.num_samples for batch in batches) == len(SIZES)
    match = r"a batch is padded to \d+, where \d+ was planned.*size_multiple=8"
    with pytest.warns(PaddedSizeWarning, match=match) as caught:
        list(packed_rows(loop, 8, 64))
    assert len(caught) == 1


def test_packed_batches_have_no_padding() -> None:
    """They are as long as all their samples together."""
    sampler = MemoryBudgetBatchSampler(SIZES, PackedCost(unit_bytes=1), 1024)
    loader = DataLoader(
        SAMPLES,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=PackCollate(length_field="input_ids"),
    )
    assert sum(batch.num_samples for batch in sampler.tracked(loader)) == len(SIZES)


def waves(length_axes: int, loop: str) -> Iterator[Any]:
    """Batches of audio, `(1, T)`, whose sizes are T."""
    samples = [torch.rand(1, int(size)) for size in SIZES]
    collate = PadCollate(length_axes=length_axes)
    if loop == "stream":
        return iter(
            BudgetedIterableDataset(
                [samples], TOKENS, 256, size=lambda wave: wave.shape[1], collate_fn=collate
            )
        )
    sampler = MemoryBudgetBatchSampler(SIZES, TOKENS, 256)
    return sampler.tracked(
        DataLoader(
            samples,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=collate,
        )
    )


@pytest.mark.parametrize("loop", ["sampler", "stream"])
def test_lengths_of_another_axis_than_the_sizes_are_noticed(loop: str) -> None:
    """By default they are those of the first axis, here the channels', and no mask is right."""
    assert sum(batch.num_tokens for batch in waves(1, loop)) == SIZES.sum()
    with pytest.warns(
        OtherSizesWarning, match=r"other axes: give the collate length_axes=1$"
    ) as all_:
        list(waves(0, loop))
    assert len(all_) == 1


def test_lengths_of_another_axis_of_images() -> None:
    sizes = RNG.integers(10, 40, (100, 2))
    sampler = MemoryBudgetBatchSampler(sizes, PaddedCost(pair_bytes=[[0, 1], [0, 0]]), 8192)
    loader = DataLoader(
        [torch.rand(3, height, width) for height, width in sizes.tolist()],  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=PadCollate(),
    )
    with pytest.warns(OtherSizesWarning, match=r"length_axes=\(1, 2\)"):
        list(sampler.tracked(loader))


class Rebuilding:
    """A collate of a user that adds a field to the batches of another."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate([{"input_ids": sample["input_ids"]} for sample in samples])
        return type(batch)(dict(batch) | {"extra": torch.zeros(1)})


@forked
@loops
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "collate",
    [
        PadCollate(size_multiple=64),
        PackCollate(),
        PackCollate(layout="transformers", size_multiple=64),
    ],
)
def test_rebuilt_batches_are_not_judged(loop: Loop, collate: Any, workers: int) -> None:
    """They no longer know their lengths: loops go on, and do not guess."""
    batches = list(loop(Rebuilding(collate), workers))
    assert len(batches) > 4
    assert all("extra" in batch for batch in batches)


def test_every_batch_is_compared_with_its_own_plan() -> None:
    """Also after a loop that was broken off while workers had read ahead."""
    sampler = MemoryBudgetBatchSampler(SIZES, TOKENS, 1024)
    loader = DataLoader(
        SAMPLES,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=PadCollate(length_field="input_ids"),
        num_workers=1,
    )
    for _ in sampler.tracked(loader):
        break
    assert sum(batch.num_samples for batch in sampler.tracked(loader)) == len(SIZES)


def test_texts_alone_have_no_padded_size() -> None:
    PaddedSizes(1).compare(PadCollate()(["a", "bc"]), [2], 2)


@pytest.mark.parametrize(("count", "warns"), [(3, True), (100, False)])
def test_a_long_list_is_one_of_samples(count: int, warns: bool) -> None:
    """It is not looked through: that would take as long as to make the batch."""
    sizes = PaddedSizes(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            sizes.compare([torch.tensor([[1, 1, 0, 0]])] * count, [2], 1)
    assert [one.category for one in caught] == [PaddedSizeWarning] * warns


class ReadsMany(Dataset[Any]):
    """Reads a batch at once; after the first ones it returns another number than asked for."""

    def __init__(self, change: Callable[[list[Any]], list[Any]], first: int) -> None:
        self.change, self.first, self.batches = change, first, 0

    def __len__(self) -> int:
        return 10 * len(SAMPLES)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = [{"input_ids": SAMPLES[i % len(SAMPLES)]["input_ids"]} for i in indices]
        self.batches += 1
        return self.change(samples) if self.batches > self.first else samples


def all_but_one(samples: list[Any]) -> list[Any]:
    return samples[1:] or samples


def twice(samples: list[Any]) -> list[Any]:
    return samples * 2


@pytest.mark.parametrize("change", [all_but_one, twice])
@pytest.mark.parametrize("cost", [TOKENS, PackedCost(unit_bytes=1)])
@pytest.mark.parametrize("late", [False, True])
def test_other_numbers_of_samples_than_planned_are_noticed(
    change: Callable[[list[Any]], list[Any]], cost: CostModel, late: bool
) -> None:
    """Lost or uncounted ones, from the first batch or from a later one on."""
    collate = PadCollate() if cost is TOKENS else PackCollate()
    sampler = MemoryBudgetBatchSampler(np.tile(SIZES, 10), cost, 1024)
    dataset = ReadsMany(change, first=80 if late else 0)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    match = r"a batch came with \d+ samples, where \d+ were planned"
    with pytest.warns(OtherNumbersWarning, match=match) as caught:
        for _ in sampler.tracked(loader):
            pass
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the loop


@pytest.mark.parametrize("change", [all_but_one, twice])
def test_other_numbers_of_samples_in_a_stream_are_noticed(
    change: Callable[[list[Any]], list[Any]],
) -> None:
    """Its collate makes the batches."""
    samples = [{"input_ids": sample["input_ids"]} for sample in SAMPLES]
    with pytest.warns(OtherNumbersWarning, match="a batch came with") as caught:
        list(
            BudgetedIterableDataset(
                [samples],
                TOKENS,
                1024,
                size="input_ids",
                collate_fn=lambda samples: PadCollate()(change(samples)),
            )
        )
    assert len(caught) == 1
