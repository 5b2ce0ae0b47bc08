"""Batches of any structure: counted, halved, moved."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchbudget import PackCollate, PadCollate
from torchbudget.errors import OptionError
from torchbudget.protocols import SplittableBatch, SplittablePaddedBatch
from torchbudget.train.batches import (
    Replayed,
    check_splittable,
    halves,
    moved,
    num_samples,
)


class Pair(NamedTuple):
    x: Tensor
    rest: Any


def nested(n: int) -> Pair:
    """N samples in nested containers, with a `None`."""
    x = torch.arange(n)
    return Pair(x, {"y": [x.unsqueeze(1), None], "z": (x.float(),)})


@given(st.integers(2, 9))
def test_halves_are_the_batch(n: int) -> None:
    """In order, of the same structure; of an odd number the first has one more."""
    batch = nested(n)
    first, second = halves(batch)
    assert num_samples(batch) == n
    assert (num_samples(first), num_samples(second)) == ((n + 1) // 2, n // 2)
    assert torch.equal(torch.cat([first.x, second.x]), batch.x)
    assert torch.equal(torch.cat([first.rest["z"][0], second.rest["z"][0]]), batch.rest["z"][0])
    assert second.rest["y"][1] is None


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as transformers' `BatchEncoding`."""


@given(st.integers(2, 9))
def test_any_mapping_is_cut(n: int) -> None:
    """One that is no dict, alone and inside others: its parts are of its kind."""
    x = torch.arange(n)
    for batch in (Encoding(x=x, y=[x]), (Encoding(x=x), {"z": MappingProxyType({"x": x})})):
        check_splittable(batch)
        first, second = halves(batch)
        assert num_samples(batch) == n
        assert (num_samples(first), num_samples(second)) == ((n + 1) // 2, n // 2)
    first, second = halves(Encoding(x=x))
    assert isinstance(first, Encoding)
    assert torch.equal(torch.cat([first["x"], second["x"]]), x)
    with pytest.raises(OptionError, match="not made of tensors"):
        check_splittable(Encoding(x=x, texts=["a"] * n))


def test_batches_of_collates_split_themselves() -> None:
    samples = [{"x": torch.arange(n)} for n in (3, 1, 4)]
    for collate in (PadCollate(), PackCollate()):
        batch = collate(samples)
        assert isinstance(batch, SplittableBatch)
        assert [num_samples(part) for part in halves(batch)] == [1, 2]
        assert isinstance(batch, SplittablePaddedBatch) == isinstance(collate, PadCollate)


class Counted:
    """It says how many samples it has, and cannot be split."""

    num_samples = 4


@pytest.mark.parametrize(
    "batch", [torch.zeros(()), [], (torch.zeros(2), ["a", "b"]), (torch.zeros(2), torch.zeros(3))]
)
def test_what_cannot_be_counted(batch: Any) -> None:
    for function in (num_samples, halves, check_splittable):
        with pytest.raises(OptionError, match="not made of tensors"):
            function(batch)


def test_what_can_be_counted_but_not_split() -> None:
    assert num_samples(Counted()) == 4
    with pytest.raises(OptionError, match="not made of tensors"):
        check_splittable(Counted())


def test_tensors_and_batches_are_moved() -> None:
    batch = nested(2)
    assert moved(batch, None) is batch
    assert moved(batch, "meta").rest["y"][0].device.type == "meta"
    collated = PadCollate()([{"x": torch.arange(3)}])
    assert moved(collated, "meta")["x"].device.type == "meta"


class Own:
    """An object with a list and a tensor in its attributes."""

    def __init__(self) -> None:
        self.seen, self.x = [1], torch.zeros(2)


def test_a_batch_that_is_seen_twice() -> None:
    """Containers of its own for each run, and the same tensors, whose changes are named."""
    x = torch.zeros(2)
    batch = {"pair": Pair(x, [None]), "own": Own(), "enc": Encoding(ids=torch.zeros(2), n=3)}
    replayed = Replayed(batch)
    first = replayed.fresh()
    first["pair"].rest.append(1)
    first["own"].x = None
    del first["enc"]["ids"]
    second = replayed.fresh()
    assert second["pair"].rest == [None]
    assert second["pair"].x is x
    assert second["own"].x is batch["own"].x
    assert second["enc"]["ids"] is batch["enc"]["ids"]
    replayed.check()
    second["enc"]["ids"][:1].fill_(3)  # a view of it
    with pytest.raises(OptionError, match=r"changed batch\['enc'\]\['ids'\] in place"):
        replayed.check()
    with torch.inference_mode():
        alone = Replayed([torch.zeros(2)])  # which has no version
        alone.fresh()[0].fill_(1)
        alone.check()
    collated = PadCollate()([{"x": torch.arange(3)}])
    assert Replayed(collated).fresh()["x"] is collated["x"]
