"""`sizes_of_columns`: sizes from the columns of Parquet files and tables, batch by batch."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from torchbudget.checks import several
from torchbudget.cost.protocol import Sizes
from torchbudget.data.sizes import column_sizes, kept_in, narrowed
from torchbudget.display import counting
from torchbudget.errors import MissingExtraError, OptionError, SizesError

# Rows of a batch. With half as many, 10⁷ integers took three times as long, and 12,000 texts of
# 100 KB took 0.6 GiB instead of 1.4.
_ROWS: Final = 2**12


def sizes_of_columns(
    source: Any,
    columns: str | Sequence[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sizes:
    """Read the sizes of all rows from columns of Parquet files or of a table.

    Integers are sizes. The size of a list is its number of elements, of a string its number of
    characters, of binary data its number of bytes. A column of integers is read the fastest: a
    list column of Parquet must be decoded whole to know its lengths.

    Size i is that of row i: rows of a table in their order, and rows of files one file after the
    other, in the order of `load_dataset("parquet", data_files=source)` of Hugging Face `datasets`.
    Needs pyarrow and fsspec, the extra `arrow`.

    Args:
        source: a path, a glob or a URL of Parquet files, or a list of these; the files of a glob
            are sorted by name, without hidden ones. Or a `pyarrow.dataset.Dataset`; or a table: of
            Arrow, a polars or a pandas `DataFrame`, anything with `__arrow_c_stream__`.
        columns: name of the column, or a list of names, each of which is one ragged axis.
        cache: file that keeps the sizes of Parquet files for the next call (`.npz`). It is used if
            names, metadata (size and time, or ETag) and footers of the files are the same.
        progress: show a progress bar, or a line every ten seconds.

    Returns:
        Shape `(N,)`, or `(N, d)` for a list of d names; int32 if every size fits into that, else
        int64.

    Raises:
        SizesError: `source` is none of the above; there is no such file or column; a file cannot be
            read, or changes while it is read; a column has nulls, negative integers, lists of lists
            or values of another type, or not the same type in all files.
        OptionError: `columns` are no names; or `cache` is a directory, or goes with a table.
        MissingExtraError: pyarrow or fsspec is not installed.

    Complexity:
        O(N), in batches of 4,096 rows; a `pyarrow.dataset.Dataset` decodes row groups whole.

    >>> import pyarrow
    >>> table = pyarrow.table({"length": [3, 1, 2], "text": ["a b c", "d", "é"]})
    >>> sizes_of_columns(table, "length")
    array([3, 1, 2], dtype=int32)
    >>> sizes_of_columns(table, ["length", "text"])
    array([[3, 5],
           [1, 1],
           [2, 1]], dtype=int32)
    """
    names = several("columns", columns, str)
    paths = source if isinstance(source, (list, tuple)) else [source]
    if not names or not paths:
        raise OptionError("expected one file and one column at least, got none")
    is_files = all(isinstance(path, (str, os.PathLike)) for path in paths)
    if cache is not None and not is_files:
        raise OptionError("cache= keeps the sizes of Parquet files: leave it out for a table")
    try:
        import pyarrow.parquet as pq

        files = [file for path in paths for file in _files(path)] if is_files else []
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error.name or "pyarrow", "arrow") from error

    def fingerprint() -> dict[str, Any]:
        found = []
        for system, path in files:
            with _named(path):
                footer = pq.read_metadata(path, filesystem=system)
                found.append((path, _state(system, path), footer))
        content = hashlib.blake2b(pickle.dumps(found), digest_size=16).hexdigest()
        return {"dataset": "Parquet", "key": columns, "content": content}

    def measure() -> Sizes:
        chunks: list[Sizes] = [np.empty((0, len(names)), np.int32)]
        kinds: dict[str, Any] = {}
        rows = 0
        with counting(unit="rows", description="sizes", shown=progress) as advance:
            for where, batch in _batches(source, files, names):
                axes = [_axis(batch, name, where, rows, kinds) for name in names]
                chunks.append(narrowed(np.stack(axes, axis=-1)))
                advance(len(batch))
                rows += len(batch)
        sizes = np.concatenate(chunks)
        return sizes[:, 0] if isinstance(columns, str) else sizes

    return kept_in(cache, fingerprint, measure)


def _axis(batch: Any, name: str, where: str, first: int, kinds: dict[str, Any]) -> Sizes:
    """The sizes in a column of a batch, shape `(n,)`.

    Args:
        batch: a `pyarrow.RecordBatch`.
        name: of the column.
        where: the file or the table.
        first: number of the first sample.
        kinds: type of each column in the batches before.
    """
    if batch.schema.names.count(name) != 1:
        raise SizesError(f"{where} has no column {name!r}, or several")
    column = batch.column(name)
    kind, sizes = column.type, column_sizes(column)
    lists = ("list", "large_list", "fixed_size_list")
    if sizes is None or str(getattr(kind, "value_type", "")).startswith(lists):
        problem = f"has the type {kind}; expected integers, text, binary data, or lists of values"
    elif kinds.setdefault(name, kind) != kind:
        problem = f"has the type {kind}, but {kinds[name]} in a file before: write one type"
    elif sizes.min(initial=0) < 0:
        row = int((sizes < 0).argmax())
        problem = f"has {column[row].as_py()} at sample {first + row}, which is no size"
    else:
        return sizes
    raise SizesError(f"column {name!r} of {where} {problem}")


def _files(path: str | os.PathLike[str]) -> list[tuple[Any, str]]:
    """The file systems and names of the files of a path, as `datasets` chooses and sorts them.

    Raises:
        SizesError: there is none.
    """
    import fsspec

    with _named(os.fspath(path)):
        system, pattern = fsspec.url_to_fs(os.fspath(path))
        system.invalidate_cache()  # of earlier listings
        found = [name for name in system.glob(pattern) if system.isfile(name)]
    files = [(system, name) for name in found if _hidden(name) == _hidden(pattern)]
    if not files:
        raise SizesError(f"no file matches {str(path)!r}; of a folder, pass its /*.parquet")
    return files


def _hidden(path: str) -> tuple[int, int]:
    """The numbers of hidden files and folders in a path, and of folders like `__pycache__`."""
    parts = path.split("/")
    hidden = [part for part in parts if part.startswith(".") and part.strip(".")]
    return len(hidden), sum(part.startswith("__") for part in parts[:-1])


@contextmanager
def _named(where: str, hint: str = "") -> Iterator[None]:
    """Raise errors of reading as a `SizesError` that names what is read."""
    try:
        yield
    except (TypeError, ValueError, OSError, NotImplementedError) as error:
        raise SizesError(f"{where} cannot be read: {error}{hint}") from error


def _state(system: Any, path: str) -> str:
    """A digest of a file's metadata, such as its size, and its time or ETag."""
    system.invalidate_cache()
    return str(system.ukey(path))


def _batches(
    source: Any, files: list[tuple[Any, str]], names: list[str]
) -> Iterator[tuple[str, Any]]:
    """Batches of rows, each with the name of its file, or of the table `source`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.dataset import Dataset

    for system, where in files:
        with _named(where):
            state = _state(system, where)
            # Of an object store, without reading ahead: only the column's bytes.
            with system.open(where, cache_type="none") as opened:
                for batch in pq.ParquetFile(opened).iter_batches(_ROWS, columns=names):
                    yield where, batch
            if _state(system, where) != state:
                raise OSError("it changed meanwhile")
    if files:
        return
    where = f"the {type(source).__name__}"
    expected = "Parquet files, a data set or table of Arrow, or a DataFrame: series.to_frame()"
    with _named(where, f"; expected {expected}; for others there is sizes_of(dataset, …)"):
        if isinstance(source, Dataset):
            reader = source.scanner(columns=names, batch_size=_ROWS).to_reader()
        else:  # of pandas, other columns may have no type of Arrow
            chosen = source.filter(names) if hasattr(source, "iloc") else source
            reader = pa.table(chosen).to_reader(_ROWS)
        for batch in reader:
            yield where, batch
