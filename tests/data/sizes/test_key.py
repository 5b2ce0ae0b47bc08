from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from tests.support.map_datasets import Bulk, Samples, fields
from torchbudget.data.sizes.sizes_of import sizes_of
from torchbudget.errors import OptionError, SizesError


def height_and_width(sample):
    return tuple(sample.shape[-2:])


@given(samples=st.lists(fields.filter(lambda value: not isinstance(value, tuple)), max_size=9))
def test_without_a_key_it_is_the_length_of_the_sample(samples):
    """sizes_of(dataset)[i] == len(dataset[i]), whichever way is taken."""
    expected = [len(sample) for sample in samples]
    assert sizes_of(samples, progress=False).tolist() == expected
    assert sizes_of(Samples(samples), progress=False).tolist() == expected
    assert sizes_of(Bulk(samples), progress=False).tolist() == expected


@given(rows=st.lists(st.tuples(fields, fields), max_size=9))
def test_a_key_is_a_field(rows):
    """A name and a tuple's position mean the same field; several are the axes, in their order."""
    named = [dict(zip("ab", row, strict=True)) for row in rows]
    second = [len(b) for _, b in rows]
    both = [[len(b), len(a)] for a, b in rows]
    for wrap in (list, Samples, Bulk):
        assert sizes_of(wrap(rows), 1, progress=False).tolist() == second
        assert sizes_of(wrap(named), "b", progress=False).tolist() == second
        assert sizes_of(wrap(named), ("b", "a"), progress=False).tolist() == both
        assert sizes_of(wrap(rows), (1, 0), progress=False).shape == (len(rows), 2)
        assert sizes_of(wrap(named), ("a",), progress=False).shape == (len(rows), 1)


def test_a_callable_gives_an_int_or_one_int_per_axis():
    """Ints of every kind; `torch.Size` is a tuple of them. Arrays count along their first axis."""
    assert sizes_of(TensorDataset(torch.zeros(4, 3)), 0, progress=False).tolist() == [3] * 4
    assert sizes_of(np.zeros((4, 3)), progress=False).tolist() == [3] * 4
    images = [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)]
    assert sizes_of(images, height_and_width, progress=False).tolist() == [[4, 5], [6, 7]]
    assert sizes_of(images, lambda x: x.shape[1:], progress=False).tolist() == [[4, 5], [6, 7]]
    for kind in (int, np.int64, np.uint8, torch.tensor):
        sizes = sizes_of(images, lambda x, kind=kind: kind(x.shape[-1]), progress=False)
        assert sizes.tolist() == [5, 7]


BAD = [
    (None, 5),
    (None, None),
    (None, {"a": [1]}),
    (None, ([1], [2])),
    (None, torch.tensor(1.0)),
    ("a", {"b": [1]}),
    ("a", {"a": {"input_ids": [1]}}),
    (1, ([1],)),
    (("a", "b"), {"a": [1], "b": None}),
    (lambda _: -1, [1]),
    (lambda _: True, [1]),
    (lambda _: torch.tensor(True), [1]),
    (lambda _: 1.0, [1]),
    (lambda _: 2**63, [1]),
    (lambda _: (), [1]),
    (lambda sample: sample[9], [1]),
    (None, RuntimeError("torn file")),
]


GOOD = {"a": [1], "b": [1]}


@pytest.mark.parametrize("wrap", [list, Samples, Bulk])
@pytest.mark.parametrize("position", [0, 70])
@pytest.mark.parametrize(("key", "bad"), BAD)
def test_a_bad_sample_is_named(wrap, position, key, bad):
    """A SizesError names the index, whichever way was taken."""
    good = ([1], [1]) if key == 1 else [1] if key is None or callable(key) else GOOD
    samples = [good] * 100
    samples[position] = bad
    if callable(key):
        spoilt = key
        key = lambda sample: spoilt(sample) if sample is bad else 1  # noqa: E731
    with pytest.raises(SizesError, match=rf"sample {position}\b"):
        sizes_of(wrap(samples), key, progress=False)


@pytest.mark.parametrize("key", [1.5, True, (), ("a", None), ("a", 1.5), (len,), ["a"], {"a": 1}])
def test_another_kind_of_key_is_refused(key):
    with pytest.raises(OptionError, match="key"):
        sizes_of([{"a": [1]}], key)
