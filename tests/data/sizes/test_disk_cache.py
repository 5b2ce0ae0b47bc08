from __future__ import annotations

import functools
import logging
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.map_datasets import Bulk, Samples, example, of
from torchbudget.data.sizes.key import SizeDataset
from torchbudget.errors import OptionError


def truncated(sample, most):
    return min(len(sample), most)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "sizes.npz"


def test_the_cache_spares_the_pass(path):
    """The second time up to 64 samples are read, spread over the dataset, and no more."""
    data = Samples([[0] * (i % 7) for i in range(1000)])
    first = of(data, cache=path)
    data.reads = 0
    again = of(data, cache=str(path))
    assert data.reads == 64
    assert again.dtype == first.dtype
    assert again.tolist() == first.tolist()
    assert [entry.name for entry in path.parent.iterdir()] == ["sizes.npz"]


def test_the_cache_keeps_every_shape(path):
    rows = [{"a": [1] * i, "b": "x" * i} for i in range(5)]
    for key in ("a", ("a",), ("a", "b"), lambda _: 2**40):
        first = of(Samples(rows), key, cache=path)
        second = of(Samples(rows), key, cache=path)
        assert (second.dtype, second.tolist()) == (first.dtype, first.tolist())
    assert of(Samples([]), cache=path).shape == of(Samples([]), cache=path).shape == (0,)


def test_a_cache_of_something_else_is_measured_again_and_said(path, caplog):
    """A changed type, length, key or content is named, and the sizes are the new ones."""
    rows = [{"a": [1] * i, "b": "x" * (9 - i)} for i in range(9)]
    of(Samples(rows), "a", cache=path)
    changes = [
        (Samples(rows), "b", "key"),
        (Samples(rows), ("a", "b"), "key"),
        (Samples(rows[:5]), "a", "length"),
        (Bulk(rows), "a", "dataset"),
        (Samples(rows[::-1]), "a", "content"),
    ]
    for data, key, said in changes:
        of(Samples(rows), "a", cache=path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            sizes = of(data, key, cache=path)
        assert said in caplog.text
        assert sizes.tolist() == of(data, key).tolist()


def test_a_changed_callable_is_another_key(path):
    """A constant, a default, a closed-over value, an argument bound by `partial`: each is seen."""
    data = Samples([[0] * 3] * 200)
    data.samples[77] = [0] * 999  # between the probes

    def closed_over(most):
        return lambda sample: min(len(sample), most)

    keys = [
        (lambda s: min(len(s), 10), lambda s: min(len(s), 20)),
        (lambda s, m=10: min(len(s), m), lambda s, m=20: min(len(s), m)),
        (closed_over(10), closed_over(20)),
        (functools.partial(truncated, most=10), functools.partial(truncated, most=20)),
        (lambda s: max(min(n, 10) for n in [len(s)]), lambda s: max(min(n, 20) for n in [len(s)])),
    ]
    for small, large in keys:
        assert of(data, small, cache=path)[77] == 10
        assert of(data, large, cache=path)[77] == 20


def test_the_same_callable_is_the_same_key(path):
    data = Samples([[0] * 3] * 200)
    for key in (len, functools.partial(truncated, most=2), lambda s: len(s) + 1):
        of(data, key, cache=path)
        data.reads = 0
        of(data, key, cache=path)
        assert data.reads == 64


def test_closed_over_arrays_count_by_their_bytes(path):
    """One element of 5,000, which `repr` leaves out, between the probes: measured again."""
    data = Samples(list(range(5000)))
    for table in (np.full(5000, 3), torch.full((5000,), 3)):

        def of_table(table):
            return lambda number: int(table[number])

        assert of(data, of_table(table), cache=path)[4001] == 3
        changed = np.array(table) if isinstance(table, np.ndarray) else table.clone()
        changed[4001] = 9
        assert of(data, of_table(changed), cache=path)[4001] == 9


def test_a_callable_that_cannot_be_told_apart_is_refused(path):
    """One that keeps what has nothing but a name; without it there is no doubt."""
    locked = functools.partial(lambda s, lock: len(s) if lock else 0, lock=threading.Lock())
    with pytest.raises(OptionError, match=r"of _thread\.lock .* only the name is"):
        of(Samples([[1]]), locked, cache=path)
    assert of(Samples([[1]]), functools.partial(lambda s, n: len(s) + n, n=1), cache=path) == [2]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_broken_cache_is_measured_again(path, data):
    """Cut off anywhere, or with any byte changed: never an error, never another answer."""
    samples = Samples([[0] * (i % 5) for i in range(70)])
    expected = of(samples, cache=path).tolist()
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert of(samples, cache=path).tolist() == expected


@pytest.mark.parametrize("content", [b"", b"not a zip", pickle.dumps([1, 2, 3])])
def test_a_file_of_another_kind_is_measured_again(path, content, caplog):
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert of([[1], []], cache=path).tolist() == [1, 0]
    assert "unreadable" in caplog.text
    assert of([[1], []], cache=path).tolist() == [1, 0]


def test_a_cache_in_the_place_of_a_directory_is_refused(tmp_path):
    with pytest.raises(OptionError, match="directory"):
        of([[1]], cache=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_costs_no_sizes(tmp_path, caplog):
    tmp_path.chmod(0o500)
    assert of([[1]], cache=tmp_path / "sizes.npz").tolist() == [1]
    assert "not cached" in caplog.text


def test_a_full_disk_costs_no_sizes(path, monkeypatch, caplog):
    """What was measured comes back, and nothing half written stays."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert of([[1], []], cache=path).tolist() == [1, 0]
    assert list(path.parent.iterdir()) == []
    assert "not cached" in caplog.text


def test_the_fingerprint_of_a_hugging_face_dataset_vouches_for_it(path, monkeypatch, caplog):
    """The same data need no samples; data that were changed between the probes are seen."""
    dataset = example(300)
    first = of(dataset, "ids", cache=path)
    with monkeypatch.context() as patch:
        patch.setattr(SizeDataset, "__getitem__", None)  # reading a sample would raise
        assert of(dataset, "ids", cache=path).tolist() == first.tolist()
    swapped = dataset.select([*range(1, 77), 0, *range(77, 300)])
    assert of(swapped, "ids", cache=path).tolist() == [len(ids) for ids in swapped["ids"]]
    assert "content" in caplog.text


def test_a_wrapper_that_hands_on_the_fingerprint_is_probed(path):
    """Only the library's own dataset is believed."""

    class Halved:
        def __init__(self, inner, divisor):
            self.inner, self.divisor = inner, divisor

        def __getattr__(self, name):
            if name == "__getitems__":
                raise AttributeError(name)
            return getattr(self.__dict__["inner"], name)

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, index):
            return {"ids": self.inner[index]["ids"][:: self.divisor]}

    dataset = example(30)
    for divisor in (1, 2):
        wrapped = Halved(dataset, divisor)
        sizes = of(wrapped, "ids", cache=path).tolist()
        assert sizes == [len(wrapped[i]["ids"]) for i in range(30)]
