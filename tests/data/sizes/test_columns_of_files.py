"""Sizes from columns: those of the samples, in the samples' order, or an error that says why."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.map_datasets import WHY, texts
from torchbudget import BudgetedIterableDataset, MemoryBudgetBatchSampler, PaddedCost, sizes_of
from torchbudget import sizes_of_columns as every_column
from torchbudget.errors import MissingExtraError, OptionError, SizesError

pa = pytest.importorskip("pyarrow", reason="the extra arrow")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra arrow")
COST = PaddedCost(unit_bytes=1)


def of(source: Any, columns: Any = "n", **options: Any) -> Any:
    return every_column(source, columns, progress=False, **options)


def write(path: Path | str, table: Any = None, **columns: Any) -> str:
    """A Parquet file of several row groups."""
    table = pa.table(columns) if table is None else table
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=3)
    return str(path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------- what a size is

KINDS = {
    **{str(kind): kind for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(kind): kind for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    "lists": pa.list_(pa.int16()),
    "large lists": pa.large_list(pa.float32()),
    "lists of texts": pa.list_(pa.string()),
    "texts": pa.string(),
    "large texts": pa.large_string(),
    "texts in views": pa.string_view(),
    "bytes": pa.binary(),
    "large bytes": pa.large_binary(),
    "bytes in views": pa.binary_view(),
}


def values_of(kind: str) -> st.SearchStrategy[Any]:
    if "int" in kind:
        return st.integers(0, 100)
    if "lists" in kind:
        return st.lists(texts if "texts" in kind else st.integers(0, 9), max_size=5)
    return texts if "texts" in kind else st.binary(max_size=5)


def size(value: Any) -> int:
    return value if isinstance(value, int) else len(value)


def whole(table: Any) -> Any:
    """A frame of polars, whose texts are views."""
    return pytest.importorskip("polars").from_arrow(table)


SOURCES: dict[str, Callable[[Any], Any]] = {
    "file": lambda table: write("one.parquet", table),
    "table": lambda table: table,
    "stream": lambda table: table.to_reader(2),
    "data set": lambda table: pytest.importorskip("pyarrow.dataset").dataset(table),
    "pandas": lambda table: pytest.importorskip("pandas") and table.to_pandas(),
    "polars": whole,
}


@pytest.mark.parametrize("source", SOURCES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_integers_are_sizes_and_others_have_lengths(source: str, data: Any) -> None:
    """As Python counts them; of any type of Arrow, in chunks, and in slices of a column."""
    kind = data.draw(st.sampled_from([*KINDS]))
    chunks = data.draw(st.lists(st.lists(values_of(kind), max_size=7), min_size=1, max_size=3))
    column = pa.chunked_array(chunks, KINDS[kind])
    first = data.draw(st.integers(0, 3))
    expected = [size(value) for value in chain(*chunks)][first:]
    others = pa.array([{"a": 1}] * len(column))  # no sizes, and nobody asks for them
    table = pa.table({"n": column, "others": others}).slice(first)
    if source != "pandas" or expected:  # of no value the type is unknown
        assert of(SOURCES[source](table)).tolist() == expected
        assert of(SOURCES[source](table), ["n"]).tolist() == [[one] for one in expected]


def test_several_columns_are_several_axes() -> None:
    path = write("a.parquet", n=[1, 2**40], t=["é🙂", ""], ids=[[], [7, None]])
    assert of(path, ["t", "ids"]).tolist() == [[2, 0], [0, 2]]
    assert (of(path, ["t"]).shape, of(path, "t").shape, of(path, "t").dtype) == ((2, 1), (2,), "i4")
    assert of(path, ("n", "t")).dtype == np.int64
    assert of(write("dots.parquet", **{"n.x": [5], "n": [[1]]}), ["n.x", "n"]).tolist() == [[5, 1]]


# ---------------------------------------------------------------------- the rows they belong to

TREE = (
    "p10.parquet", "p2.parquet", "P1.parquet", "p-1.parquet", ".hidden.parquet", "__p.parquet",
    "deep/a.parquet", "deep/.cache/b.parquet", "__old__/c.parquet", "deep/er/d.parquet",
    ".git/e.parquet", "é.parquet", "deep.parquet/f.parquet",
)  # fmt: skip
PATTERNS = (
    "*.parquet", "p*.parquet", "./*.parquet", "**/*.parquet", "**", "deep/*", "*/*.parquet",
    ".*.parquet", "*/.*/*.parquet", "__*/*.parquet", ".git/*", "p[0-9]*.parquet", "p?.parquet",
    "p2.parquet", "../*/p2.parquet", "deep/../*.parquet", "{cwd}/*.parquet", "file://{cwd}/*.parquet",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_files_of_a_pattern_are_those_of_load_dataset(pattern: str, folder: Path) -> None:
    """The same files in the same order, or an error on both sides."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    for number, name in enumerate(TREE):
        write(name, n=[number])
    (folder / "link.parquet").symlink_to(folder / "p2.parquet")
    pattern = pattern.format(cwd=folder)
    try:
        files = datasets.data_files.DataFilesList.from_patterns([pattern])
    except FileNotFoundError:
        files = []
    if not files:
        with pytest.raises(SizesError, match="no file matches"):
            of(pattern)
        return
    expected = [pq.read_table(file)["n"][0].as_py() for file in files]
    assert of(pattern).tolist() == expected
    assert of([Path(pattern), "p2.parquet"] if "://" not in pattern else [pattern]) is not None


@pytest.mark.parametrize("num_proc", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_order_is_that_of_load_dataset(num_proc: int | None) -> None:
    """Files in the order of the list, twice if they are twice in it; sampler and data agree."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    rng = np.random.default_rng(0)
    for name, rows in {"b": 40_000, "a": 30_000, "c10": 20_000, "c9": 10_000}.items():
        lengths = rng.integers(1, 60, rows)
        ids = np.split(np.zeros(lengths.sum(), np.int32), np.cumsum(lengths)[:-1])
        table = pa.table({"n": lengths, "text": ["é" * n for n in lengths], "ids": ids})
        pq.write_table(table, f"{name}.parquet", row_group_size=7000)
    pq.ParquetWriter("empty.parquet", table.schema).close()
    files = ["b.parquet", "empty.parquet", "a.parquet", "c*.parquet", "empty.parquet", "c9.parquet"]
    data = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir="cache", num_proc=num_proc
    )
    sizes = of(files)
    assert len(sizes) == 110_000
    assert sizes.tolist() == data["n"][:]
    assert (of(files, ["n", "text", "ids"]) == sizes[:, None]).all()
    sampler = MemoryBudgetBatchSampler(sizes, COST, 60_000)
    for indices in sampler:
        assert data[indices]["n"] == sizes[indices].tolist()


def test_a_stream_takes_the_column_as_sizes() -> None:
    """Over the same files, without a function; the values bound its batches."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    rng = np.random.default_rng(0)
    for name in "ab":
        write(f"{name}.parquet", n=rng.integers(1, 50, 100))
    rows = datasets.load_dataset(
        "parquet", data_files="*.parquet", split="train", streaming=True, cache_dir="cache"
    )
    stream = BudgetedIterableDataset(rows, COST, 100, size="n", collate_fn=list)
    batches = [[row["n"] for row in batch] for batch in stream]
    assert sorted(chain(*batches)) == sorted(of("*.parquet").tolist())
    assert max(len(batch) * max(batch) for batch in batches) <= 100
    assert sum(map(len, batches)) == 200


def test_integers_of_a_hugging_face_dataset_are_sizes_in_its_order() -> None:
    """Selected, shuffled, sorted, joined and formatted: size i is `dataset[i][column]`."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    data = datasets.Dataset.from_dict({"n": [5, 3, 8, 1, 9], "f": [1.0] * 5, "t": list("abcde")})
    changes: list[Callable[[Any], Any]] = [
        lambda one: one,
        lambda one: one.shuffle(seed=1).select([3, 0, 0, 2]),
        lambda one: datasets.concatenate_datasets([one.select([4, 1]), one]).shuffle(seed=2),
        lambda one: one.filter(lambda row: row["n"] > 3).with_format("torch"),
        lambda one: one.select(range(1, 4)).with_format("numpy"),
        lambda one: one.with_transform(lambda batch: {"n": [2 * n for n in batch["n"]]}),
    ]
    for change in changes:
        changed = change(data)
        expected = [int(changed[index]["n"]) for index in range(len(changed))]
        assert sizes_of(changed, "n", progress=False).tolist() == expected
        assert sizes_of(changed, ("n", "n"), progress=False).tolist() == [[n, n] for n in expected]
    with pytest.raises(SizesError, match="sample 0 has no size"):
        sizes_of(data, "f", progress=False)
    assert sizes_of([{"n": 5}, {"n": 0}], "n", progress=False).tolist() == [5, 0]
    with pytest.raises(SizesError, match="sample 1 has no size for key 'n'"):
        sizes_of([{"n": 5}, {"n": -1}], "n", progress=False)
    with pytest.raises(SizesError, match=r"the Dataset cannot be read: .* sizes_of"):
        of(data)
    with pytest.raises(SizesError, match="Table cannot be read"):  # its rows are not the data set's
        of(data.shuffle(seed=1).data)


# ---------------------------------------------------------------------- errors


def pandas(**columns: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


def polars(**columns: Any) -> Any:
    return pytest.importorskip("polars").DataFrame(columns)


def one_after_the_other(**second: Any) -> list[str]:
    return [write("1.parquet", n=[1, 2]), write("2.parquet", **second)]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no such column": (lambda: write("a.parquet", m=[1]), r"a\.parquet has no column 'n'"),
    "none in a table": (lambda: pa.table({"m": [1]}), "the Table has no column 'n'"),
    "none in a frame": (lambda: pandas(m=[1]), "the DataFrame has no column 'n'"),
    "none in a data set": (
        lambda: pytest.importorskip("pyarrow.dataset").dataset(pa.table({"m": [1]})),
        r"No match for FieldRef.Name\(n\)",
    ),
    "a column twice": (lambda: pa.table([[1], [2]], names=["n", "n"]), "no column 'n', or several"),
    "a null": (lambda: write("a.parquet", n=[1, 2, None]), "has None at sample 2"),
    "a null text": (lambda: polars(n=["a", None]), "has None at sample 1"),
    "a null list": (lambda: pa.table({"n": [[1], None]}), "has None at sample 1"),
    "coded texts": (
        lambda: write("a.parquet", n=pa.array(["a"]).dictionary_encode()),
        "type dictionary<values=string.*; expected",
    ),
    "nulls alone": (lambda: write("a.parquet", n=pa.nulls(2)), "has the type null"),
    "a null in the second file": (lambda: one_after_the_other(n=[3, None]), "2.*None at sample 3"),
    "NaN": (lambda: pandas(n=[1, np.nan]), "the type double"),
    "a negative integer": (lambda: write("a.parquet", n=[4, -3]), "has -3 at sample 1"),
    "beyond int64": (lambda: pa.table({"n": pa.array([2**63], "uint64")}), f"has {2**63} at"),
    "floats": (lambda: write("a.parquet", n=[1.0]), "type double; expected integers"),
    "truth values": (lambda: pa.table({"n": [True]}), "type bool; expected"),
    "lists of lists": (lambda: write("a.parquet", n=[[[1]], []]), r"list<element: list<.*expected"),
    "lists of pairs": (
        lambda: pa.table({"n": pa.array([[[1, 2]]], pa.list_(pa.list_(pa.int8(), 2)))}),
        "list<.*fixed_size_list.*expected",
    ),
    "an unknown protocol": (lambda: "nope://a/b.parquet", "nope://a/b.parquet cannot be read"),
    "a map": (lambda: pa.table({"n": pa.array([[("a", 1)]], pa.map_("string", "int8"))}), "map<"),
    "categories of polars": (
        lambda: polars(n=["a"]).cast(pytest.importorskip("polars").Categorical),
        "dictionary<values=string_view",
    ),
    "objects": (lambda: pandas(n=[1, "a"]), "the DataFrame cannot be read"),
    "lists, then integers": (lambda: one_after_the_other(n=[[1]]), "list<.*, but int64 in a file"),
    "texts, then integers": (lambda: one_after_the_other(n=["a"]), "string, but int64 in a file"),
    "another column": (lambda: one_after_the_other(m=[1]), r"2\.parquet has no column 'n'"),
    "no file": (lambda: "no*.parquet", "no file matches 'no.*of a folder, pass its"),
    "no file of one pattern": (lambda: [write("a.parquet", n=[1]), "b*"], r"no file matches 'b\*'"),
    "a folder": (lambda: str(Path(write("deep/a.parquet", n=[1])).parent), "no file matches 'deep"),
    "an empty file": (lambda: file_of(b""), "size is 0 bytes"),
    "no Parquet": (lambda: file_of(b"n" * 99), "not a parquet file"),
    "a torn file": (lambda: file_of(torn()), r"a\.parquet cannot be read"),
    "a column of pandas twice": (
        lambda: pandas(n=[1], m=[2]).set_axis(["n", "n"], axis=1),
        "DataFrame cannot be read: .*duplicate",
    ),
    "a series of pandas": (lambda: pandas(n=[1])["n"], r"the Series cannot be read.*to_frame\(\)"),
    "a series of polars": (lambda: polars(n=[1])["n"], r"the Series cannot be read.*to_frame\(\)"),
    "a lazy frame": (lambda: polars(n=[1]).lazy(), "the LazyFrame cannot be read"),
    "samples": (lambda: [{"n": 1}], "the list cannot be read.*sizes_of"),
    "nothing": (lambda: None, "the NoneType cannot be read"),
}  # fmt: skip


def file_of(content: bytes) -> str:
    Path("a.parquet").write_bytes(content)
    return "a.parquet"


def torn() -> bytes:
    content = Path(write("whole.parquet", n=list(range(9999)))).read_bytes()
    return content[:2000] + content[-1000:]


@pytest.mark.parametrize("case", BAD)
def test_what_has_no_sizes_is_named(case: str) -> None:
    make, message = BAD[case]
    source = make()
    with pytest.raises(SizesError, match=f"(?s){message}"):
        of(source)
    if isinstance(source, str):
        with pytest.raises(SizesError, match=f"(?s){message}"):
            of(source, cache="sizes.npz")


def test_sizes_are_by_position_whatever_the_labels_are() -> None:
    """Other columns may hold anything."""
    frame = pandas(n=[3, 1, 2], other=[{1}, "a", 2])
    assert of(frame).tolist() == [3, 1, 2]
    assert of(frame.set_index(np.array(["x", "y", "z"]))).tolist() == [3, 1, 2]
    assert of(frame.sort_values("n")).tolist() == [1, 2, 3]


@pytest.mark.parametrize("columns", [None, 3, [], [3], ["n", None]])
def test_columns_are_names(columns: Any) -> None:
    with pytest.raises(OptionError, match=r"columns must|one column at least"):
        of(pa.table({"n": [1]}), columns)
    with pytest.raises(OptionError, match="one file"):
        of([])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow.parquet", "fsspec"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(
                MissingExtraError, match=rf"{package} is not .*torchbudget\[arrow\]"
            ):
                of("a.parquet")


# ---------------------------------------------------------------------- files that change


@pytest.fixture
def meddling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system on which others work: it calls `on_open` with each path that is opened."""
    fsspec = pytest.importorskip("fsspec")
    local = fsspec.get_filesystem_class("file")

    class Meddling(local):  # type: ignore[valid-type, misc]
        protocol = ("meddling",)
        on_open: Any = staticmethod(lambda _: None)

        def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
            type(self).on_open(path)
            return super()._open(path, *arguments, **options)

    fsspec.register_implementation("meddling", Meddling, clobber=True)
    return Meddling


def test_a_file_that_changes_or_vanishes_while_others_are_read(meddling: Any, folder: Path) -> None:
    """Never sizes of one version, and samples of the other."""
    source = [f"meddling://{write(folder / name, n=[1])}" for name in ("a.parquet", "b.parquet")]
    assert of(source).tolist() == [1, 1]

    def replaced(path: str) -> None:
        write(f"{path}.new", n=[2])
        Path(f"{path}.new").replace(path)

    for on_open, message in (
        (replaced, r"a\.parquet cannot be read: it changed meanwhile"),
        (lambda path: os.utime(path, ns=(1, 1)), r"a\.parquet cannot be read: it changed"),
        (lambda _: (folder / "b.parquet").unlink(missing_ok=True), "b.parquet.*No such file"),
    ):
        write("a.parquet", n=[1])
        write("b.parquet", n=[1])
        meddling.on_open = staticmethod(on_open)
        with pytest.raises(SizesError, match=message):
            of(source)


def test_the_cache_is_of_these_files(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another order of the same rows leaves the footer as it is, and is seen all the same."""
    forth, back = list(range(1, 100)), list(range(99, 0, -1))
    write("a.parquet", n=forth, m=[7] * 99)
    write("b.parquet", n=[5], m=[6])

    def cached(columns: Any = "n", source: Any = "*.parquet") -> Any:
        return of(source, columns, cache="kept/sizes.npz").tolist()

    assert cached() == [*forth, 5]
    with caplog.at_level(logging.WARNING):
        assert cached() == [*forth, 5]
    assert not caplog.text
    for change, expected in (
        (lambda: write("a.parquet", n=back, m=[7] * 99), [*back, 5]),
        (lambda: write("c.parquet", n=[9], m=[1]), [*back, 5, 9]),
        ((folder / "b.parquet").unlink, [*back, 9]),
    ):
        change()
        caplog.clear()
        assert cached() == expected
        assert "of another content" in caplog.text
    assert cached(["n", "m"]) == [*([n, 7] for n in back), [9, 1]]
    assert cached(["n"]) == [[n] for n in [*back, 9]]
    assert cached(source=["c.parquet", "a.parquet"]) == [9, *back]
    with pytest.raises(OptionError, match="leave it out for a table"):
        of(pa.table({"n": [1]}), cache="kept/sizes.npz")


# ---------------------------------------------------------------------- an object store


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bucket of a server on this machine."""
    server_module = pytest.importorskip("moto.server", reason="a server of S3")
    s3fs = pytest.importorskip("s3fs", reason="reads S3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_files_of_an_object_store(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of `load_dataset`; only the column's bytes are read; new files are seen."""
    datasets = pytest.importorskip("datasets", reason=WHY)
    s3fs = pytest.importorskip("s3fs")

    def put(name: str, lengths: list[int]) -> None:
        table = pa.table({"n": lengths, "text": [os.urandom(n).hex() for n in lengths]})
        with bucket.open(f"bucket/data/{name}.parquet", "wb") as file:
            pq.write_table(table, file)

    for name, lengths in {"p10": [10**6, 1], "p9": [5], "P1": [4, 4]}.items():
        put(name, lengths)
    source = "s3://bucket/data/*.parquet"
    fetched: list[int] = []
    fetch = s3fs.core.S3File._fetch_range

    def counted(file: Any, start: int, end: int) -> Any:
        fetched.append(end - start)
        return fetch(file, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", counted)
    assert of(source).tolist() == [4, 4, 10**6, 1, 5]
    assert sum(fetched) < 250_000  # of 2 MB: footers, and the columns
    data = datasets.load_dataset("parquet", data_files=source, split="train", cache_dir="cache")
    assert data["n"][:] == of(source, cache="sizes.npz").tolist()
    put("p95", [3])
    assert of(source, cache="sizes.npz").tolist() == [4, 4, 10**6, 1, 5, 3]
    put("p95", [2])
    assert of(source, cache="sizes.npz").tolist() == [4, 4, 10**6, 1, 5, 2]
    with pytest.raises(SizesError, match="no file matches 's3://bucket/none"):
        of("s3://bucket/none/*.parquet")
