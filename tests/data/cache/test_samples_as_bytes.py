"""Samples as bytes, through the cache that keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from torchbudget import SampleCache


class Image(torch.Tensor):
    """A tensor with a class of its own."""


dtypes = st.sampled_from([np.bool_, np.int8, np.uint16, np.int64, np.float16, np.float64, "U3"])


leaves = st.one_of(
    st.integers(),
    st.text(),
    st.binary(),
    st.none(),
    np_st.arrays(dtypes, np_st.array_shapes(min_dims=0, min_side=0, max_side=4)),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    ).flatmap(
        lambda dtype: st.sampled_from([(), (0,), (3,), (2, 3)]).map(
            lambda shape: torch.ones(shape).to(dtype)
        )
    ),
    st.just(torch.arange(12).reshape(3, 4).t()),  # not contiguous
    st.just(torch.eye(3).to_sparse()),
    st.just(torch.ones(2, requires_grad=True)),
    st.just(torch.ones(2).as_subclass(Image)),
)


samples = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = type(one) is type(other) and one.dtype == other.dtype
        return alike and one.to_dense().equal(other.to_dense())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(samples)
def test_what_comes_back_is_what_went_in(sample: Any) -> None:
    """Tensors of every dtype, arrays, texts, nested: the same, again and again."""
    cache = SampleCache([sample], "1MiB")
    for _ in range(3):
        assert same(sample, cache[0])
    assert (cache.misses, cache.hits) == (1, 2)


PARTS = {
    "plain": lambda: torch.rand(1000, 50)[3],
    "conjugate": lambda: torch.rand(1000, 50, dtype=torch.complex64).conj()[3],
    "negative": lambda: torch.rand(1000, 50, dtype=torch.complex64).conj().imag[3],
    "parameter": lambda: torch.nn.Parameter(torch.rand(1000, 50)[3]),
    "array": lambda: np.random.default_rng(0).random((1000, 50))[3],
}


@pytest.mark.parametrize("kind", PARTS)
def test_of_a_part_of_a_tensor_the_part_is_kept(kind: str) -> None:
    """Each is one's own: changed in place, it changes neither the cache nor later samples."""
    sample = PARTS[kind]()
    cache = SampleCache([sample], "1MiB")
    empty = cache.nbytes
    cache[0]
    assert cache.kept == 1
    assert cache.nbytes - empty < 3000
    again = cache[0]
    assert cache.hits == 1
    assert same(sample, again)
    assert type(again) is type(sample)
    with torch.no_grad():
        again[:] = 2
    assert same(sample, cache[0])
    if isinstance(sample, torch.Tensor):
        assert again.requires_grad == sample.requires_grad
        assert again.untyped_storage().nbytes() == sample.nbytes
