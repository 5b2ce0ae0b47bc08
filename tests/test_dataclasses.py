"""Classes of values: they do not change, and are equal where all that they have is."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchbudget

ROOT = Path(__file__).parent.parent
# What is counted, collected or bound while something goes on.
CHANGING = {
    "_Name": "of what a walk over objects has reached",
    "_Runs": "so far",
    "Subject": "collects notes",
    "Covering": "collects traces",
    "Expressions": "grow while a step is traced",
    "_Observations": "of a training",
    "StreamState": "made for each batch, in half the time",
    "Sent": "gives its batch away",
    "Standing": "moves with each batch",
    "Peak": "is filled in where its context ends",
    "Tally": "counts steps",
    "_Run": "a training that goes on",
    "Pending": "sums the losses of its micro-batch",
}
# Weak references, fields that are read late, and what `vars` is asked of.
WITHOUT_SLOTS = {"_Run", "_Hook", "Step", "Span"}
# Their fields are few, and in an order that everybody expects; or no user makes one.
BY_POSITION = {"Probe", "StepPlan", "Peak", "Piece", "Grid", "Surface"}
# Arrays and tensors have no one truth value, so that comparing them raises.
WITHOUT_TRUTH = re.compile(r"Tensor|NDArray|IntArray|FloatArray|BoolArray|\bSizes\b|\bGroups\b")


def own_dataclasses() -> Iterator[Any]:
    for module in pkgutil.walk_packages(torchbudget.__path__, "torchbudget."):
        if module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            is_own = isinstance(value, type) and value.__module__ == module.name
            if is_own and "__dataclass_params__" in vars(value):
                yield value


CLASSES = {f"{one.__module__}.{one.__qualname__}": one for one in own_dataclasses()}
DOCUMENTED = re.findall(r"autoclass:: ([\w.]+)", (ROOT / "docs" / "api.md").read_text("utf-8"))
PUBLIC = [
    one
    for name, one in CLASSES.items()
    if one.__name__ in torchbudget.__all__ or name in DOCUMENTED
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_value_does_not_change(name: str) -> None:
    one = CLASSES[name]
    is_changing = one.__name__ in CHANGING
    assert one.__dataclass_params__.frozen is not is_changing


@pytest.mark.parametrize("name", CLASSES)
def test_a_value_has_no_other_attributes_and_shows_those_it_has(name: str) -> None:
    one = CLASSES[name]
    assert ("__slots__" in vars(one)) is (one.__name__ not in WITHOUT_SLOTS)
    assert one.__dataclass_params__.repr
    assert not one.__dataclass_params__.order


# Their fields take arrays, and keep tuples.
KEEPING_TUPLES = {"_Quadratic", "PaddedCost", "PackedCost", "_PackedMeasuredCost"}


@pytest.mark.parametrize("name", CLASSES)
def test_values_with_arrays_are_the_same_or_not(name: str) -> None:
    """Of two equal ones with arrays, `==` would raise."""
    one = CLASSES[name]
    compared = [field for field in dataclasses.fields(one) if field.compare]
    has_arrays = any(WITHOUT_TRUTH.search(str(field.type)) for field in compared)
    if has_arrays and one.__name__ not in KEEPING_TUPLES:
        assert not one.__dataclass_params__.eq


@pytest.mark.parametrize("one", PUBLIC, ids=lambda one: one.__name__)
def test_fields_of_public_values_are_named(one: Any) -> None:
    """So that others can be added later on."""
    by_name = all(field.kw_only for field in dataclasses.fields(one) if field.init)
    assert by_name is (one.__name__ not in BY_POSITION)
