"""Batches that differ from their plan are noticed, once; all others are not accused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.costs import measured
from torchbudget import MemoryBudgetBatchSampler, PackCollate, PackedCost, PadCollate, PaddedCost
from torchbudget.data.size_check import SizeCheck
from torchbudget.errors import (
    OtherNumbersWarning,
    OtherSizesWarning,
    PaddedSizeWarning,
)
from torchbudget.plan.rules import BatchRules

Ints = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]
seeds = pytest.mark.parametrize("seed", range(3))


def found(
    samples: Sequence[Any],
    sizes: Ints,
    collate: Collate | None = None,
    *,
    packed: bool = False,
    stream: bool = False,
    cost: Any = None,
    budget: int = 3000,
    **options: Any,
) -> list[tuple[type[Warning], str]]:
    """Warnings of an epoch in which each batch is compared with its plan."""
    kind: Any = PackedCost if packed else PaddedCost
    cost = cost or kind(unit_bytes=1 if sizes.ndim == 1 else [1, 1])
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget, max_batch_size=64, **options)
    multiple = options.get("size_multiple", 1)
    check = SizeCheck(sampler.plan.rules, None if stream else sizes)
    collate = collate or (PackCollate() if packed else PadCollate())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for indices in sampler:
            own = sizes[indices].reshape(len(indices), -1)
            planned = own.sum(axis=0) if packed else -(-own.max(axis=0) // multiple) * multiple
            batch = collate([samples[i] for i in indices])
            check.compare(batch, planned, np.array(indices))
    return [(one.category, str(one.message)) for one in caught]


def lengths_of(rng: np.random.Generator, count: int) -> Ints:
    return np.clip(rng.lognormal(4, 0.6, count), 3, 400).astype(np.int64)


def texts(lengths: Ints) -> list[dict[str, torch.Tensor]]:
    return [{"ids": torch.rand(n), "labels": torch.ones(n)} for n in lengths.tolist()]


def foreign(
    samples: Sequence[dict[str, torch.Tensor]], multiple: int = 1, side: str = "right"
) -> dict[str, torch.Tensor]:
    """A batch as transformers' collators make it, with nothing but tensors."""
    collate = PadCollate(mask="attention_mask", side=side, size_multiple=multiple)
    return dict(collate([{"input_ids": one["ids"]} for one in samples]))


FORMS: list[dict[str, Any]] = [{}, {"packed": True}, {"collate": foreign}, {"shuffle": False}]
forms = pytest.mark.parametrize("form", FORMS)


MEASURED: dict[str, Any] = {"cost": measured(), "budget": 3_000_000}


@pytest.mark.parametrize(
    "form", [*FORMS, *(one | MEASURED for one in FORMS if not one.get("packed"))]
)
def test_samples_that_are_longer_than_planned_are_named(form: dict[str, Any]) -> None:
    """A few stale sizes, or one sample that grew, or sizes that were shuffled or moved by one.

    Of a measured cost, whose sizes may be of another unit, the first two.
    """
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 2000)
    stale = lengths.copy()
    stale[rng.choice(2000, 60, replace=False)] //= 3
    grown = np.full(3000, 50)
    grown[::3] = 49
    one = grown.copy()
    one[1234] = 400
    cases = [(lengths, np.maximum(stale, 1)), (one, grown)]
    if "cost" not in form:
        assert found(texts(lengths), lengths, **form) == []
        cases += [(lengths, rng.permutation(lengths)), (lengths, np.roll(lengths, 1))]
    for now, sizes in cases:
        [(category, message)] = found(texts(now), sizes, **form)
        assert category is OtherSizesWarning
        index = int(message.split()[1])
        assert f"has a length of {now[index]}, but its size is {sizes[index]}: " in message
        assert now[index] > sizes[index]


@forms
def test_longer_samples_within_the_budget_are_not_accused(form: dict[str, Any]) -> None:
    lengths = lengths_of(np.random.default_rng(0), 600)
    assert found(texts(lengths + 1), lengths, **form, budget=100_000) == []


def other_units(rng: np.random.Generator, lengths: Ints) -> dict[str, Ints]:
    count = len(lengths)
    return {
        "characters": (lengths * rng.normal(4.5, 0.8, count).clip(1)).astype(np.int64),
        "bytes": lengths * 2,
        "buckets": -(-lengths // 64) * 64,
        "words": (lengths / rng.normal(1.3, 0.2, count).clip(1)).astype(np.int64),
        "noise": np.maximum(lengths * rng.normal(1, 0.4, count), 1).astype(np.int64),
        "without special tokens": lengths - 2,
    }


@seeds
@forms
def test_sizes_of_another_unit_are_accused_by_a_stated_cost_alone(
    form: dict[str, Any], seed: int
) -> None:
    """If they are smaller than the lengths; a measured cost was measured on sizes of that unit."""
    rng = np.random.default_rng(seed)
    lengths = lengths_of(rng, 2000)
    for unit, sizes in other_units(rng, lengths).items():
        accused = [one[0] for one in found(texts(lengths), sizes, **form)]
        smaller = unit in ("words", "noise", "without special tokens")
        assert accused == [OtherSizesWarning] * smaller, unit
        if not form.get("packed"):
            assert found(texts(lengths), sizes, **form, **MEASURED) == [], unit


@seeds
def test_sizes_of_several_axes_and_of_other_fields(seed: int) -> None:
    """Height and width are compared; sizes of other axes than the batch's are not."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(8, 60, (2, 2000))
    pairs = [
        {"source": torch.ones(n), "target": torch.ones(m)}
        for n, m in zip(a.tolist(), b.tolist(), strict=True)
    ]
    images = [torch.ones(3, n, m) for n, m in zip(a.tolist(), b.tolist(), strict=True)]
    both, first, axes = np.stack([a, b], 1), PadCollate(fields={"source": "padded"}), (1, 2)
    assert found(images, both, PadCollate(length_axes=axes)) == []
    [(category, message)] = found(images, rng.permutation(both), PadCollate(length_axes=axes))
    assert category is OtherSizesWarning
    assert " × " in message
    for sizes in (a * b, rng.permutation(a * b)):
        assert found(images, sizes, PadCollate(length_axes=axes), budget=100_000) == []
    for sizes in (both, both[:, ::-1]):
        assert found(pairs, sizes, first) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_collate_may_order_its_samples(packed: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 3000)
    collate = PackCollate() if packed else PadCollate()

    def shuffled(samples: list[Any]) -> Any:
        return collate([samples[i] for i in rng.permutation(len(samples))])

    assert found(texts(lengths), lengths, shuffled, packed=packed) == []
    assert found(texts(lengths), rng.permutation(lengths), shuffled, packed=packed)


def test_batches_that_do_not_know_their_samples_are_not_compared() -> None:
    """Rebuilt ones, foreign ones without a mask, and no tensors."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 2000)

    def rebuilt(samples: list[Any]) -> Any:
        batch = PadCollate(size_multiple=64)(samples)
        return type(batch)(dict(batch))

    def without_mask(samples: list[Any]) -> Any:
        return {"ids": foreign(samples, 64)["input_ids"]}

    for collate in (rebuilt, without_mask, len):
        assert found(texts(lengths), rng.permutation(lengths), collate) == []
    assert found([{"label": 1.0}] * 2000, lengths) == []
    assert found([{"text": "a" * n} for n in lengths.tolist()], rng.permutation(lengths)) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_more_padding_than_planned_is_noticed(side: str, stream: bool) -> None:
    """Of this library's batches and of masked ones; not that of the planned multiple."""
    samples = texts(lengths_of(np.random.default_rng(0), 300))
    sizes = np.array([len(one["ids"]) for one in samples])
    for planned, rounded, warns in ((1, 1, False), (1, 8, True), (8, 8, False), (16, 8, False)):
        for collate in (
            lambda batch, rounded=rounded: foreign(batch, rounded, side),
            PadCollate(size_multiple=rounded, side=side),
        ):
            options: dict[str, Any] = {"size_multiple": planned, "stream": stream}
            options["budget"] = 100_000
            caught = found(samples, sizes, collate, **options)
            assert [category for category, _ in caught] == [PaddedSizeWarning] * warns
            assert not warns or f"now size_multiple={planned}" in caught[0][1]


def test_padding_of_several_axes_and_of_another_field() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 40, (300, 2))
    images = [torch.rand(3, *size) for size in sizes.tolist()]
    for multiple, warns in ((1, True), (16, False)):
        collate = PadCollate(length_axes=(1, 2), size_multiple=16)
        caught = found(images, sizes, collate, size_multiple=multiple)
        assert [category for category, _ in caught] == [PaddedSizeWarning] * warns
    longer = [{"b": torch.ones(2 * a), "a": torch.ones(a)} for a, _ in sizes.tolist()]
    assert found(longer, sizes[:, 0], PadCollate(fields={"a": "padded"})) == []


@pytest.mark.parametrize("collate", [PadCollate(), PackCollate()])
@pytest.mark.parametrize("first", [0, 30])
def test_other_numbers_of_samples_are_noticed(collate: Any, first: int) -> None:
    """Lost or uncounted ones, from the first batch or from a later one on."""
    lengths = lengths_of(np.random.default_rng(0), 3000)
    for change in (lambda some: some[1:] or some * 2, lambda some: some * 2):
        number = itertools.count()

        def changed(samples: list[Any], number: Any = number, change: Any = change) -> Any:
            return collate(samples if next(number) < first else change(samples))

        packed = isinstance(collate, PackCollate)
        [(category, message)] = found(texts(lengths), lengths, changed, packed=packed)
        assert category is OtherNumbersWarning
        assert "samples, but" in message


@pytest.mark.parametrize("layout", [None, "transformers"])
def test_more_room_in_a_row_than_planned_is_noticed(layout: Any) -> None:
    """Room of the planned multiples, or of divisors of them, is not."""
    sizes = np.arange(1, 51)
    samples = [{"input_ids": torch.arange(n)} for n in sizes.tolist()]
    for planned, rounded, warns in (
        ((1, 1), (1, 1), False),
        ((8, 64), (8, 64), False),
        ((16, 1), (8, 1), False),
        ((1, 1), (8, 1), True),
        ((1, 1), (1, 64), True),
    ):
        collate = PackCollate(layout=layout, size_multiple=rounded[0], total_multiple=rounded[1])
        cost = PackedCost(unit_bytes=1, total_multiple=planned[1])
        rules = BatchRules(cost=cost, budget_bytes=100_000, size_multiple=planned[0])
        check = SizeCheck(rules, sizes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check.compare(collate(samples), [sizes.sum()], np.arange(50))
        assert [one.category for one in caught] == [PaddedSizeWarning] * warns


def test_a_substituted_sample_is_named_in_its_own_batch() -> None:
    """A long one in place of a broken one: told with the first batch over the budget."""
    rng = np.random.default_rng(0)
    sizes = lengths_of(rng, 3000)
    lengths = sizes.copy()
    lengths[rng.permutation(3000)[:60]] = 400
    sampler = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 6000)
    loader = torch.utils.data.DataLoader(
        texts(lengths), batch_sampler=sampler, collate_fn=PadCollate()
    )
    over = (batch for batch in sampler.tracked(loader) if batch["ids"].numel() > 6000)
    with pytest.warns(OtherSizesWarning, match="has a length of 400, but its size is"):
        next(over)
