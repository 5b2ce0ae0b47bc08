"""Sizes of the right number that belong to other samples are noticed; all other sizes are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader

from torchbudget import (
    MemoryBudgetBatchSampler,
    PackCollate,
    PackedCost,
    PadCollate,
    PaddedCost,
)
from torchbudget.data.other_samples import OtherSamples
from torchbudget.errors import OtherSizesWarning

Ints = npt.NDArray[np.int64]


def foreign(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as transformers' collators make it, with nothing but tensors."""
    batch = PadCollate(mask="attention_mask")([{"input_ids": one["ids"]} for one in samples])
    return dict(batch)


def rows(samples: Sequence[dict[str, torch.Tensor]]) -> Any:
    """One row of all samples, as transformers takes them."""
    collate = PackCollate(layout="transformers")
    return collate([{"input_ids": one["ids"].long()} for one in samples])


def lengths_of(rng: np.random.Generator, count: int) -> Ints:
    return np.clip(rng.lognormal(4, 0.6, count), 3, 400).astype(np.int64)


def texts(lengths: Ints) -> list[dict[str, torch.Tensor]]:
    return [{"ids": torch.rand(n), "labels": torch.ones(n)} for n in lengths.tolist()]


def warned(
    samples: Sequence[Any],
    sizes: npt.ArrayLike,
    collate: Callable[..., Any] | None = None,
    *,
    packed: bool = False,
    workers: int = 0,
    **options: Any,
) -> list[str]:
    """What an epoch says of sizes, and nothing else, where it stands in the loop's own line."""
    unit: Any = 1 if np.ndim(sizes) == 1 else [1, 1]
    cost = PackedCost(unit_bytes=1) if packed else PaddedCost(unit_bytes=unit)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 100_000, max_batch_size=64, **options)
    default = PackCollate() if packed else PadCollate()
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate or default,
        num_workers=workers,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded")
        for _ in sampler.tracked(loader):
            pass
    assert all(one.category is OtherSizesWarning for one in caught)
    assert all(one.filename == __file__ for one in caught)
    assert len(caught) <= 1
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [600, 3000])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"packed": True},
        {"collate": foreign},
        {"shuffle": False},
        {"packed": True, "collate": PackCollate(length_field="labels")},
    ],
)
def test_sizes_of_shuffled_samples_are_noticed(form: dict[str, Any], count: int, seed: int) -> None:
    """Once, whatever the batches are, and also if sizes are moved by one sample alone."""
    rng = np.random.default_rng(seed)
    lengths = lengths_of(rng, count)
    samples = texts(lengths)
    assert warned(samples, lengths, **form) == []
    for sizes in (rng.permutation(lengths), np.roll(lengths, 1)):
        (message,) = warned(samples, sizes, **form)
        assert "the sizes have nothing to do with the samples that came" in message
        assert "sizes_of(dataset, …)" in message


@pytest.mark.parametrize("form", [{}, {"packed": True}, {"collate": foreign}, {"workers": 1}])
def test_stale_sizes_of_a_few_samples_are_noticed(form: dict[str, Any]) -> None:
    """The sample is named, with its length and its size."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 2000)
    stale = lengths.copy()
    stale[rng.choice(2000, 60, replace=False)] //= 3
    (message,) = warned(texts(lengths), np.maximum(stale, 1), **form)
    index = int(message.split()[1])
    assert f"came with a length of {lengths[index]}, and its size is {stale[index]}" in message


@pytest.mark.parametrize(
    "form", [{}, {"packed": True}, {"packed": True, "collate": rows}, {"collate": foreign}]
)
def test_one_sample_that_grew_is_noticed_wherever_it_comes(form: dict[str, Any]) -> None:
    lengths = np.full(3000, 50)
    lengths[::3] = 49
    sizes = lengths.copy()
    lengths[1234] = 400
    assert warned(texts(sizes), sizes, **form) == []
    (message,) = warned(texts(lengths), sizes, **form)
    assert "sample 1234 of the data set came with a length of 400, and its size is" in message


@pytest.mark.parametrize("seed", range(5))
def test_sizes_of_a_data_set_that_was_filtered_later_are_noticed(seed: int) -> None:
    """Those before the first sample that went are right."""
    rng = np.random.default_rng(seed)
    before = lengths_of(rng, 6000)
    stays = np.ones(6000, bool)
    stays[900:][rng.random(5100) < 0.1] = False
    after = before[stays][:4000]
    assert warned(texts(after), before[:4000])


def other_units(rng: np.random.Generator, lengths: Ints) -> dict[str, Ints]:
    count = len(lengths)
    return {
        "characters": (lengths * rng.normal(4.5, 0.8, count).clip(1)).astype(np.int64),
        "words": (lengths / rng.normal(1.3, 0.2, count).clip(1)).astype(np.int64),
        "bytes": lengths * 2,
        "constant": np.full(count, 400),
        "ones": np.ones(count, np.int64),
        "buckets": -(-lengths // 64) * 64,
        "without special tokens": lengths - 2,
        "noise": np.maximum(lengths * rng.normal(1, 0.4, count), 1).astype(np.int64),
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("unit", sorted(other_units(np.random.default_rng(0), np.ones(1, int))))
@pytest.mark.parametrize("form", [{}, {"packed": True}, {"collate": foreign}, {"shuffle": False}])
def test_sizes_of_another_unit_are_not_accused(form: dict[str, Any], unit: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = lengths_of(rng, 2000)
    assert warned(texts(lengths), other_units(rng, lengths)[unit], **form) == []


@pytest.mark.parametrize("seed", range(3))  # by chance, one epoch in 300 of others is not noticed
@pytest.mark.parametrize("of", ["source", "target", "sum", "maximum", "both", "swapped"])
def test_sizes_of_any_field_are_not_accused(of: str, seed: int) -> None:
    """Also of one that the batch's lengths are not of, and that has nothing to do with it."""
    rng = np.random.default_rng(seed)
    a, b = lengths_of(rng, 2000), lengths_of(rng, 2000)
    samples = [
        {"source": torch.ones(n), "target": torch.ones(m)}
        for n, m in zip(a.tolist(), b.tolist(), strict=True)
    ]
    sizes = {
        "source": a,
        "target": b,
        "sum": a + b,
        "maximum": np.maximum(a, b),
        "both": np.stack([a, b], 1),
        "swapped": np.stack([b, a], 1),
    }[of]
    for collate in (PadCollate(length_field="source"), PadCollate(length_field="target")):
        assert warned(samples, sizes, collate) == []
        assert warned(samples, rng.permutation(sizes), collate)


@pytest.mark.parametrize("seed", range(5))
def test_sizes_of_images_and_graphs_are_not_accused(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(8, 40, (2, 2000))
    images = [torch.ones(3, h, w) for h, w in zip(height.tolist(), width.tolist(), strict=True)]
    axes = PadCollate(length_axes=(1, 2))
    for sizes in (height * width, height, np.stack([height, width], 1)):
        assert warned(images, sizes, axes) == []
    assert warned(images, rng.permutation(height * width), axes)
    alike = [torch.ones(3, h, 640 // h) for h in height.tolist()]
    assert warned(alike, height * (640 // height), axes) == []  # hardly differ: any order will do
    graphs = [
        {"nodes": torch.ones(n, 4), "edges": torch.ones(2, e)}
        for n, e in zip(height.tolist(), width.tolist(), strict=True)
    ]
    collate = PadCollate(length_axes={"nodes": 0, "edges": 1}, length_field="nodes")
    assert warned(graphs, width, collate) == []
    assert warned(graphs, width + height, collate) == []
    assert warned(graphs, rng.permutation(width), collate)


@pytest.mark.parametrize("seed", range(5))
def test_crops_are_not_accused(seed: int) -> None:
    """None is longer than its size, so that no batch is over the budget."""
    rng = np.random.default_rng(seed)
    lengths = lengths_of(rng, 2000) + 40
    crops = [torch.ones(n, 8) for n in rng.integers(5, 40, 2000).tolist()]
    assert warned(crops, lengths) == []
    assert warned([torch.ones(n) for n in lengths.clip(max=64).tolist()], lengths) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_collate_may_order_its_samples(packed: bool) -> None:
    """As those do that sort them for a recurrent network, or shuffle them."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 3000)
    collate = PackCollate() if packed else PadCollate()

    def shuffled(samples: list[Any]) -> Any:
        return collate([samples[i] for i in rng.permutation(len(samples))])

    def ascending(samples: list[Any]) -> Any:
        return collate(sorted(samples, key=lambda sample: len(sample["ids"])))

    for ordered in (shuffled, ascending):
        assert warned(texts(lengths), lengths, ordered, packed=packed) == []
        assert warned(texts(lengths), rng.permutation(lengths), ordered, packed=packed)


def test_batches_without_lengths_are_not_judged() -> None:
    """Those that were rebuilt, foreign ones with a field of their own, and texts of no length."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 2000)
    sizes = rng.permutation(lengths)

    def rebuilt(samples: list[Any]) -> Any:
        batch = PadCollate()(samples)
        return type(batch)(dict(batch))

    def with_images(samples: list[Any]) -> Any:
        return foreign(samples) | {"pixel_values": torch.ones(len(samples), 3, 8, 8)}

    for collate in (rebuilt, with_images, len):
        assert warned(texts(lengths), sizes, collate) == []
    assert warned([{"label": 1.0}] * 2000, sizes) == []
    assert warned([{"text": "a" * n} for n in lengths.tolist()], sizes)


def test_batches_of_other_fields_are_not_compared_with_each_other() -> None:
    """What was seen before a field came, or went, says nothing of those with other fields."""
    check = OtherSamples(np.arange(1, 2001), packed=False)
    for start in range(0, 2000, 50):
        indices = np.arange(start, start + 50)
        one = {"ids": torch.ones(0)} | ({"more": torch.ones(3)} if start % 100 else {})
        batch = PadCollate(length_field="ids")([one] * 50)
        assert check.compare(batch, indices, [start + 50]) is None
    assert check.judge() is None
