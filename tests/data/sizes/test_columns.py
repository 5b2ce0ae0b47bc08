from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.map_datasets import WHY, example, hugging_face, of, texts
from torchbudget.data.sizes import _stored_sizes
from torchbudget.errors import SizesError


def test_columns_need_no_pass():
    dataset = example().shuffle(seed=0).select(range(5, 60))
    for name in ("text", "ids", "words"):
        assert _stored_sizes(dataset, name).tolist() == [len(value) for value in dataset[name]]
    columns = dataset.with_format("torch", columns=["ids"])
    assert _stored_sizes(columns, "ids").tolist() == [len(ids) for ids in dataset["ids"]]


class Opaque:
    """The same samples in a class whose columns are not known."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]

    def __getattr__(self, name):
        if name == "__getitems__":
            return self.dataset.__getitems__
        raise AttributeError(name)


def assert_same_both_ways(dataset, key):
    assert outcome(dataset, key) == outcome(Opaque(dataset), key)


def outcome(dataset, key):
    try:
        sizes = of(dataset, key)
    except SizesError as error:
        return str(error).partition(" has no size")[0]
    return str(sizes.dtype), sizes.shape, sizes.tolist()


numbers = st.integers(-5, 5)


row = st.fixed_dictionaries(
    {
        "text": texts,
        "large": texts,
        "raw": st.binary(max_size=5),
        "ids": st.lists(numbers, max_size=5),
        "nested": st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=3), max_size=3),
        "pair": st.lists(numbers, min_size=2, max_size=2),
        "words": st.lists(texts, max_size=3),
        "number": numbers,
    }
)


hf_keys = st.sampled_from(
    ["text", "large", "raw", "ids", "nested", "pair", "words", "number", "absent", ("ids", "text")]
)


@given(data=st.data(), rows=st.lists(row, min_size=1, max_size=8), key=hf_keys)
@settings(max_examples=60, deadline=None)
def test_hugging_face_quick_equals_slow(data, rows, key):
    """Through concatenation, selection, shuffling, slicing, nulls and formats, in any order."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    nulls = data.draw(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(sorted(rows[0])))))
    for index, name in nulls[:1]:
        rows[index % len(rows)] = {**rows[index % len(rows)], name: None}
    dataset = hugging_face(rows)
    for step in data.draw(st.lists(st.sampled_from(["join", "pick", "shuffle", "slice"]))):
        if step == "join" and len(dataset) < 50:
            dataset = datasets.concatenate_datasets([dataset, dataset])
        elif step == "pick":
            picks = st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9)
            dataset = dataset.select(data.draw(picks))
        elif step == "shuffle":
            dataset = dataset.shuffle(seed=3)
        elif step == "slice":
            dataset = dataset.select(range(len(dataset) // 3, len(dataset)))
    layout = data.draw(st.sampled_from([None, "numpy", "torch", "pandas"]))
    columns = data.draw(st.sampled_from([None, ["ids", "text"], ["number"]]))
    dataset = dataset.with_format(layout, columns=columns)
    assert_same_both_ways(dataset, key)


def test_a_null_is_named_by_its_index_in_the_selection():
    """Where the row stands now; rows that were left out do not matter."""
    rows = [{**example(1)[0], "ids": None if i == 5 else [i]} for i in range(20)]
    dataset = hugging_face(rows)
    with pytest.raises(SizesError, match=r"sample 2\b"):
        of(dataset.select([9, 8, 5, 7]), "ids")
    assert of(dataset.select([9, 8, 7]), "ids").tolist() == [1, 1, 1]
