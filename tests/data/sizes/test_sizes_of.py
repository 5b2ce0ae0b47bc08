import builtins
import functools
import logging
import os
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import torchbudget.data.sizes.sizes_of as module
from torchbudget.data.sizes.sizes_of import sizes_of
from torchbudget.errors import OptionError, SizesError

WHY = "a quick way for this library; it is in the test dependency group"

texts = st.text(st.characters(codec="utf-8"), max_size=12)
fields = st.one_of(
    texts,
    st.binary(max_size=6),
    st.lists(st.integers(), max_size=6),
    st.lists(st.integers(), max_size=6).map(tuple),
    st.integers(0, 5).map(lambda n: np.zeros((n, 2))),
    st.integers(0, 5).map(lambda n: torch.zeros(n, 3)),
)


class Samples(Dataset):
    """A map-style dataset that no quick way knows."""

    def __init__(self, samples):
        self.samples = samples
        self.reads = 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample


class Bulk(Samples):
    """One that reads many at once, as a Hugging Face dataset or a `Subset` does."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Streams(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


def height_and_width(sample):
    return tuple(sample.shape[-2:])


def length_of_text(sample):
    return len(sample["text"])


def truncated(sample, most):
    return min(len(sample), most)


def only_quick(monkeypatch):
    def slow(*args):
        raise AssertionError("the slow way was taken")

    monkeypatch.setattr(module, "_one_pass", slow)


def only_slow(monkeypatch):
    monkeypatch.setattr(module, "quick_sizes", lambda *_: None)


# What a size is


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
    """Ints of every kind; `torch.Size` is a tuple of them."""
    images = [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)]
    assert sizes_of(images, height_and_width, progress=False).tolist() == [[4, 5], [6, 7]]
    assert sizes_of(images, lambda x: x.shape[1:], progress=False).tolist() == [[4, 5], [6, 7]]
    for kind in (int, np.int64, np.uint8, torch.tensor):
        sizes = sizes_of(images, lambda x, kind=kind: kind(x.shape[-1]), progress=False)
        assert sizes.tolist() == [5, 7]


def test_arrays_count_along_their_first_axis():
    """shape[0], also of what has no `len`."""

    class Sparse:
        shape = (7, 2)

    assert sizes_of(Samples([Sparse()]), progress=False).tolist() == [7]
    assert sizes_of(TensorDataset(torch.zeros(4, 3)), 0, progress=False).tolist() == [3] * 4
    assert sizes_of(np.zeros((4, 3)), progress=False).tolist() == [3] * 4


@pytest.mark.parametrize("largest", [0, 2**31 - 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 100])
def test_the_array_is_as_narrow_as_the_sizes_allow(largest, position):
    """int32 up to 2**31 - 1, int64 from there, wherever the largest stands; nothing wraps."""
    values = [1] * 150
    values[position] = largest
    sizes = sizes_of(Samples(values), int, progress=False)
    assert sizes.dtype == (np.int32 if largest < 2**31 else np.int64)
    assert sizes.tolist() == values


@pytest.mark.parametrize("samples", [[], Samples([])])
def test_an_empty_dataset_has_empty_sizes(samples):
    assert sizes_of(samples).shape == (0,)
    assert sizes_of(samples, ("a", "b")).shape == (0, 2)
    assert sizes_of(samples, len).dtype == np.int32


# Samples that have no size

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
    """A SizesError tells the index, whichever way was taken."""
    good = ([1], [1]) if key == 1 else [1] if key is None or callable(key) else GOOD
    samples = [good] * 100
    samples[position] = bad
    if callable(key):
        spoilt = key
        key = lambda sample: spoilt(sample) if sample is bad else 1  # noqa: E731
    with pytest.raises(SizesError, match=rf"sample {position}\b"):
        sizes_of(wrap(samples), key, progress=False)


@pytest.mark.parametrize("position", [1, 64, 70])
@pytest.mark.parametrize("other", [(1, 2, 3), 4, (1,)])
def test_every_sample_has_the_same_axes(position, other):
    """Another number of axes is named by index, within a worker's chunk and between chunks."""
    samples = [(1, 2)] * 100
    samples[position] = other
    with pytest.raises(SizesError, match=rf"same ragged axes: .*sample {position}\b"):
        sizes_of(Samples(samples), lambda sample: sample, progress=False)


@pytest.mark.parametrize("key", [1.5, True, (), ("a", None), ("a", 1.5), (len,), ["a"], {"a": 1}])
def test_another_kind_of_key_is_refused(key):
    with pytest.raises(OptionError, match="key"):
        sizes_of([{"a": [1]}], key)


@pytest.mark.parametrize("dataset", [Streams(), iter([]), 5, None])
def test_what_is_no_map_style_dataset_is_refused(dataset):
    with pytest.raises(SizesError, match="map-style"):
        sizes_of(dataset)


def test_a_subclass_of_a_list_is_read_as_it_says():
    """What overrides `__getitem__` is not measured behind its back."""

    class Doubled(list):
        def __getitem__(self, index):
            return super().__getitem__(index) * 2

    assert sizes_of(Doubled([[1], [2, 3]]), progress=False).tolist() == [2, 4]


# Workers, the random state, the bar


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_tell_what_one_process_tells(context):
    """In order, with a picklable key, over several chunks."""
    samples = [{"text": "x" * (i % 50)} for i in range(1000)]
    sizes = sizes_of(
        Samples(samples),
        length_of_text,
        num_workers=2,
        progress=False,
        multiprocessing_context=context,
    )
    assert sizes.tolist() == [i % 50 for i in range(1000)]


def test_a_bad_sample_in_a_worker_is_named():
    samples = [[1]] * 200
    samples[150] = RuntimeError("torn file")
    with pytest.raises(SizesError, match=r"sample 150 cannot be read: RuntimeError: torn file"):
        sizes_of(
            Samples(samples), num_workers=1, progress=False, multiprocessing_context="forkserver"
        )


def test_what_travels_is_sizes():
    """A worker's answer is smaller than a kilobyte, however large its samples are."""
    measured = module._Measured(Samples([torch.zeros(10_000)] * 64), None)
    assert len(pickle.dumps(measured[range(64)])) < 1024


def test_only_one_sample_is_held_at_a_time():
    """A dataset without `__getitems__` is read sample by sample."""
    alive = []

    class Counted(Samples):
        def __getitem__(self, index):
            held = sum(ref() is not None for ref in alive)
            assert held <= 1
            value = torch.zeros(index)
            alive.append(weakref.ref(value))
            return value

    assert sizes_of(Counted(range(100)), progress=False).tolist() == list(range(100))


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sizes_of(Samples([[1]] * 10), progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_tqdm_there_is_no_bar(monkeypatch):
    """The bar is optional; sizes come without it."""
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert sizes_of(Samples([[1], []]), progress=True).tolist() == [1, 0]


def test_the_bar_counts_samples(monkeypatch):
    tqdm_auto = pytest.importorskip("tqdm.auto", reason="the progress extra")
    seen = []

    class Bar(tqdm_auto.tqdm):
        def update(self, n=1):
            seen.append((n, self.total))

    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)
    sizes_of(Samples([[1]] * 100))
    assert seen == [(64, 100), (36, 100)]
    sizes_of(Samples([[1]] * 100), progress=False)
    assert len(seen) == 2


# The cache


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "sizes.npz"


def of(dataset, key=None, **options):
    return sizes_of(dataset, key, progress=False, **options)


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


def test_a_cache_of_something_else_is_measured_anew_and_said(path, caplog):
    """Type, length, key or content: whatever changed is named, and the sizes are the new ones."""
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


def test_a_callable_that_cannot_be_told_apart_is_refused(path):
    with pytest.raises(OptionError, match="picklable"):
        of(Samples([[1]]), functools.partial(lambda s, n: len(s) + n, n=1), cache=path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_torn_cache_is_measured_anew(path, data):
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
def test_a_file_of_another_kind_is_measured_anew(path, content, caplog):
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


# The quick ways


def test_a_plain_list_needs_no_pass(monkeypatch):
    only_quick(monkeypatch)
    assert of([[1], "ab", torch.zeros(3), np.zeros(4), b"12345"]).tolist() == [1, 2, 3, 4, 5]
    assert of([([1], "ab"), ([], "a")], (0, 1)).tolist() == [[1, 2], [0, 1]]


cells = st.one_of(texts, st.lists(st.integers(0, 9), max_size=5), st.none(), st.just(float("nan")))


@given(
    rows=st.lists(st.tuples(cells, texts), max_size=8),
    seed=st.integers(0, 9),
    key=st.sampled_from(["a", "b", ("a", "b"), ("b",), "absent", len]),
)
@settings(deadline=None)
def test_pandas_quick_equals_slow(rows, seed, key):
    """A frame of any index is read by position; both ways agree on the sizes and on the error."""
    pandas = pytest.importorskip("pandas", reason=WHY)
    frame = pandas.DataFrame(rows, columns=["a", "b"]).sample(frac=1, random_state=seed)
    assert_same_both_ways(frame, key)
    for column in ("a", "b"):
        assert_same_both_ways(frame[column], None)


def assert_same_both_ways(dataset, key):
    with pytest.MonkeyPatch.context() as patch:
        only_slow(patch)
        expected = outcome(dataset, key)
    assert outcome(dataset, key) == expected


def outcome(dataset, key):
    try:
        sizes = of(dataset, key)
    except SizesError as error:
        return str(error).partition(" has no size")[0]
    return str(sizes.dtype), sizes.shape, sizes.tolist()


def test_pandas_columns_need_no_pass(monkeypatch):
    pandas = pytest.importorskip("pandas", reason=WHY)
    frame = pandas.DataFrame({"text": ["abc", "é🙂"], "ids": [[1], [2, 3]]}, index=[7, 3])
    only_quick(monkeypatch)
    assert of(frame, ("text", "ids")).tolist() == [[3, 1], [2, 2]]
    assert of(frame["text"]).tolist() == [3, 2]
    assert of(frame["text"].astype("category").astype(object)).tolist() == [3, 2]


def test_a_subclass_of_a_frame_is_read_by_position_as_it_says():
    pandas = pytest.importorskip("pandas", reason=WHY)

    class Frame(pandas.DataFrame):
        pass

    frame = Frame({"text": ["abc", "é🙂"]}, index=[7, 3])
    assert of(frame, "text").tolist() == [3, 2]


def hugging_face(rows):
    datasets = pytest.importorskip("datasets", reason=WHY)
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "large": datasets.Value("large_string"),
            "raw": datasets.Value("binary"),
            "ids": datasets.Sequence(datasets.Value("int64")),
            "nested": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
            "pair": datasets.Sequence(datasets.Value("int32"), length=2),
            "words": datasets.Sequence(datasets.Value("string")),
            "number": datasets.Value("int64"),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


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


def example(rows=100):
    return hugging_face(
        [
            {
                "text": "é🙂x" * (i % 5),
                "large": "x" * i,
                "raw": b"1" * i,
                "ids": [0] * (i % 9),
                "nested": [[1.0]] * (i % 4),
                "pair": [1, 2],
                "words": ["a"] * (i % 3),
                "number": i,
            }
            for i in range(rows)
        ]
    )


def test_hugging_face_columns_need_no_pass(monkeypatch):
    dataset = example().shuffle(seed=0).select(range(5, 60))
    expected = {name: [len(value) for value in dataset[name]] for name in ("text", "ids", "words")}
    only_quick(monkeypatch)
    for name, lengths in expected.items():
        assert of(dataset, name).tolist() == lengths
    assert of(dataset.with_format("torch", columns=["ids"]), "ids").tolist() == expected["ids"]


def test_a_transform_is_measured_and_not_its_column():
    """What `set_transform` gives is what the model will see."""
    dataset = example(8).with_transform(lambda batch: {"ids": [v * 2 for v in batch["ids"]]})
    assert of(dataset, "ids").tolist() == [2 * i for i in range(8)]


def test_a_null_is_named_by_its_index_in_the_selection():
    """Where the row stands now; rows that were left out do not matter."""
    rows = [{**example(1)[0], "ids": None if i == 5 else [i]} for i in range(20)]
    dataset = hugging_face(rows)
    with pytest.raises(SizesError, match=r"sample 2\b"):
        of(dataset.select([9, 8, 5, 7]), "ids")
    assert of(dataset.select([9, 8, 7]), "ids").tolist() == [1, 1, 1]


def test_a_subset_and_a_dict_of_datasets():
    """A `Subset` is measured through its samples; a dict of splits says what is wrong."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    assert of(Subset(example(9), [8, 2]), "raw").tolist() == [8, 2]
    with pytest.raises(SizesError, match="sample 0 cannot be read: KeyError"):
        of(datasets.DatasetDict(train=example(2)), "raw")


def test_the_fingerprint_of_a_hugging_face_dataset_vouches_for_it(path, monkeypatch, caplog):
    """The same data need no samples; data that were changed behind the probes are seen."""
    dataset = example(300)
    first = of(dataset, "ids", cache=path)
    with monkeypatch.context() as patch:
        only_quick(patch)
        patch.setattr(module._Measured, "__getitem__", None)
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
