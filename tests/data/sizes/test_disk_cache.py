"""The file of sizes: it spares the pass, and never gives sizes of something else."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.map_datasets import Bulk, Samples, example, of
from torchbudget.data.sizes import SizeDataset
from torchbudget.errors import OptionError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "sizes.npz"


@pytest.mark.parametrize("key", [None, len, lambda s: (len(s), 2**40)])
def test_the_cache_spares_the_pass(path, key):
    """The second time up to 64 samples are read, spread over the dataset, and no more."""
    data = Samples([[0] * (i % 7) for i in range(1000)])
    first = of(data, key, cache=path)
    data.reads = 0
    again = of(data, key, cache=str(path))
    assert data.reads == 64
    assert (again.dtype, again.tolist()) == (first.dtype, first.tolist())
    assert [entry.name for entry in path.parent.iterdir()] == ["sizes.npz"]


def length_of_a(row):
    return len(row["a"])


def test_a_cache_of_something_else_is_measured_again_and_said(path, caplog):
    """A changed type, length, key or content is named, and the sizes are the new ones."""
    rows = [{"a": [1] * i, "b": "x" * (9 - i)} for i in range(9)]
    changes = [
        (Samples(rows), "b", "key"),
        (Samples(rows), ("a", "b"), "key"),
        (Samples(rows), length_of_a, "key"),
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
    of(Samples(rows), lambda row: len(row["a"]), cache=path)
    assert of(Samples(rows), lambda row: len(row["b"]), cache=path).tolist() == [*range(9, 0, -1)]


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


def test_a_file_of_another_kind(path, caplog):
    """It is measured again; a directory is refused."""
    path.parent.mkdir()
    for content in (b"", b"not a zip", pickle.dumps([1, 2, 3])):
        path.write_bytes(content)
        for _ in range(2):
            assert of([[1], []], cache=path).tolist() == [1, 0]
        assert "unreadable" in caplog.text
    with pytest.raises(OptionError, match="directory"):
        of([[1]], cache=path.parent)


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
