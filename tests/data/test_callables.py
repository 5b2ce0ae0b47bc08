"""Fingerprints of functions: equal where they compute the same, in any process."""

from __future__ import annotations

import functools
import operator
import os
import random
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchbudget.data.callables import callable_fingerprint, values_fingerprint


def keeps(value: Any) -> Any:
    return lambda sample: (sample, value)


@dataclass
class Crop:
    """A transform in the style of torchvision's."""

    size: int
    also: Any = None

    def __call__(self, sample: Any) -> Any:
        return sample[: self.size]


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def crop(self, sample: Any) -> Any:
        return sample[: self.size]


def of_class(size: int) -> Any:
    class Cut:
        limit = size

        def __call__(self, sample: Any) -> Any:
            return sample[: self.limit]

    return Cut()


def nested(limit: int) -> Any:
    def cut(sample: Any) -> Any:
        return [one for one in sample if one < limit]

    return functools.partial(map, cut)


def counting(limit: int) -> Any:
    def count(sample: int) -> int:
        return sample if sample > limit else count(sample + 1)

    return count


def in_a_cycle(size: int) -> Any:
    crop = Crop(size)
    crop.also = [crop]
    return crop


def inherits(method: Any) -> Any:
    """An object whose class inherits a method, and a property that it uses."""
    base = type("Base", (), {"__call__": method, "__module__": __name__})
    return type("Heir", (base,), {"__module__": __name__})()


def reads(found: Any) -> Any:
    members = {"size": property(found), "__call__": lambda self, _: self.size}
    return type("Reads", (), {**members, "__module__": __name__})()


ONE = np.arange(5000)
OTHER = np.where(ONE == 4321, 0, ONE)
WEIGHTS = np.linspace(0, 1, 9)

# The first two of each compute the same, the third one something else.
DIFFERENT: dict[str, tuple[Any, Any, Any]] = {
    "code": (lambda s: s + 1, lambda s: s + 1, lambda s: s + 2),
    "a global name": (lambda s: len(s) + 1, lambda s: len(s) + 1, lambda s: max(s) + 1),
    "an attribute": (lambda s: s.a, lambda s: s.a, lambda s: s.b),
    "a default": (lambda s, n=1: s + n, lambda s, n=1: s + n, lambda s, n=2: s + n),
    "a keyword": (lambda s, *, n=1: s + n, lambda s, *, n=1: s + n, lambda s, *, n=2: s + n),
    "a constant's type": (lambda s: s + 1, lambda s: s + 1, lambda s: s + 1.0),
    "a closed-over number": (keeps(1), keeps(1), keeps(True)),
    "a closed-over array": (keeps(ONE), keeps(ONE.copy()), keeps(OTHER)),
    "another dtype": (keeps(ONE), keeps(ONE[::1]), keeps(ONE.astype(np.int32))),
    "another shape": (keeps(ONE), keeps(ONE.copy()), keeps(ONE.reshape(2, -1))),
    "objects": (
        keeps(np.array([ONE, None], object)),
        keeps(np.array([ONE.copy(), None], object)),
        keeps(np.array([OTHER, None], object)),
    ),
    "a tensor": (
        keeps(torch.tensor(ONE)),
        keeps(torch.tensor(ONE).clone()),
        keeps(torch.tensor(OTHER)),
    ),
    "a tensor of bfloat16": (
        keeps(torch.tensor(WEIGHTS).bfloat16().requires_grad_()),
        keeps(torch.tensor(WEIGHTS).bfloat16()),
        keeps(torch.tensor(WEIGHTS).half()),
    ),
    "a set": (keeps({"a", "b", "c"}), keeps({"c", "b", "a"}), keeps({"a", "b"})),
    "bytes": (keeps(b"ab"), keeps(b"ab"), keeps(bytearray(b"ab"))),
    "a generator": (
        keeps(np.random.default_rng()),
        keeps(np.random.default_rng()),
        keeps(random.Random()),
    ),
    "a dict": (keeps({"a": 1}), keeps({"a": 1}), keeps({"a": 2})),
    "a nested dict": (keeps({"a": [1, {2}]}), keeps({"a": [1, {2}]}), keeps({"a": [1, {3}]})),
    "an ordered dict": (
        keeps(OrderedDict(a=1)),
        keeps(OrderedDict(a=1)),
        keeps(OrderedDict(a=2)),
    ),
    "a partial": (nested(1), nested(1), nested(2)),
    "an object": (Crop(3), Crop(3), Crop(4)),
    "a class attribute": (of_class(3), of_class(3), of_class(4)),
    "an inherited method": (
        inherits(lambda _, s: s + 1),
        inherits(lambda _, s: s + 1),
        inherits(lambda _, s: s + 2),
    ),
    "a property": (reads(lambda _: 1), reads(lambda _: 1), reads(lambda _: 2)),
    "slots": (Slotted(3).crop, Slotted(3).crop, Slotted(4).crop),
    "a method": (Crop(3).__call__, Crop(3).__call__, Crop(4).__call__),
    "a class": (Crop, Crop, Slotted),
    "an item": (operator.itemgetter("a"), operator.itemgetter("a"), operator.itemgetter("b")),
    "a pattern": (re.compile("a").sub, re.compile("a").sub, re.compile("b").sub),
    "a built-in method": ("a".join, "a".join, "b".join),
    "a C function": (len, len, repr),
    "a function of torch": (torch.numel, torch.numel, torch.relu),
    "what is wrapped": (
        functools.lru_cache(keeps(1)),
        functools.lru_cache(keeps(1)),
        functools.lru_cache(keeps(2)),
    ),
    "itself": (counting(3), counting(3), counting(4)),
    "a cycle": (in_a_cycle(3), in_a_cycle(3), in_a_cycle(4)),
    "a device, of each rank its own": (
        keeps(torch.device("cuda", 0)),
        keeps(torch.device("cuda", 1)),
        keeps(torch.device("cpu")),
    ),
    "a module": (nn.ReLU(), nn.ReLU(), nn.Tanh()),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_is_computed_counts(kind: str) -> None:
    """Made again it is the same; with another part it is not. Nothing of it is unknown."""
    one, same, other = DIFFERENT[kind]
    assert values_fingerprint(one) == values_fingerprint(same)
    assert callable_fingerprint(one) != callable_fingerprint(other)
    assert values_fingerprint(one)[1] == []


def test_what_has_no_value_counts_by_its_name() -> None:
    """A lock, a sparse tensor; a chain without an end; and all else still counts."""
    for value in (threading.Lock(), torch.ones(3).to_sparse()):
        one, unknown = values_fingerprint(Crop(3, value))
        assert unknown == [f"{type(value).__module__}.{type(value).__qualname__}"]
        assert one != callable_fingerprint(Crop(4, value))
    chain: Any = None
    for _ in range(5000):
        chain = [chain]
    assert values_fingerprint(chain)[1] == ["builtins.list"]


def test_a_memory_map_counts_by_its_shape(tmp_path: Path) -> None:
    """It may be as large as the data, which must not be read to make a stream."""
    maps = [np.memmap(tmp_path / name, np.uint8, "w+", shape=(9,)) for name in "ab"]
    maps[1][:] = 1
    assert callable_fingerprint(keeps(maps[0])) == callable_fingerprint(keeps(maps[1]))
    assert callable_fingerprint(keeps(maps[0])) != callable_fingerprint(keeps(maps[0][:3]))


PROGRAM = """
import sys
from torchbudget.data.callables import callable_fingerprint
{blank}
class Upper:
    words = None
    def __init__(self, words):
        self.words = words
    def __call__(self, sample, also={{"x", "y"}}):
        def inner(one):
            return one in {{"ab", "cd", "ef"}} or one in self.words
        return [one.upper() for one in sample if inner(one)]

print(callable_fingerprint(Upper({{"gh", "ij", "kl"}})))
"""


@pytest.mark.slow
def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Under another hash seed, in another file and at another line; sets have no order."""
    found = set()
    for number in range(3):
        path = tmp_path / f"program_{number}.py"
        path.write_text(PROGRAM.format(blank="\n" * number))
        environment = os.environ | {"PYTHONHASHSEED": str(number)}
        done = subprocess.run(
            [sys.executable, path], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
