"""How long do sizes take from a column of Parquet, and how much memory?

Question: from a column of 10,000,000 integers, and of 1,000,000 lists of 50 tokens or texts, how
long does `sizes_of_columns` take, how much longer than pyarrow's own `iter_batches` with the kernel
that counts, and how much memory beyond that after importing?

Command: python examples/benchmarks/columns.py [--integers N] [--lists N] [--json PATH]
(the files are written to the temporary directory, and removed; TMPDIR chooses another disk)

Hardware: 2 cores of an Intel Xeon, which other programs used too, Python 3.11, pyarrow 26.0.

    column          rows     s  ratio  MiB
    integers  10,000,000  0.68   6.18   82
    lists      1,000,000  0.80   1.08  109
    texts      1,000,000  0.21   0.96  104
    integers, s ≤ 2: 0.67757, holds
    lists, times iter_batches ≤ 1.3: 1.0819, holds
    memory, MiB ≤ 1024: 109.14, holds

Integers are lengths below 1,024 in int32; tokens follow a Zipf distribution, in int32, and lists
have a Poisson number of them; texts have as many letters. Each is one file in pyarrow's default row
groups and compression, in the page cache. `s` is the median of three times, and `ratio` that of the
time over the time of `iter_batches` in its default batches, which take turns. `MiB` is the peak of
anonymous memory of a process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from _common import Results, alternate, lognormal, median, options, ratio, watched

from torchbudget import sizes_of_columns

REPETITIONS = 3
KERNELS: dict[str, Any] = {
    "integers": lambda column: column,
    "lists": pc.list_value_length,
    "texts": pc.utf8_length,
}


def child(path: str) -> None:
    """Print that all is imported, wait for a line, and read the sizes."""
    import pyarrow.dataset  # noqa: F401

    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"rows": len(sizes_of_columns(path, "column", progress=False))}))


def column_of(kind: str, rows: int) -> Any:
    """The column of a kind."""
    if kind == "integers":
        return pa.array(lognormal(rows, 3.2, 0.8, 1, 1024).astype(np.int32))
    rng = np.random.default_rng(0)
    ends = np.cumsum(np.append(0, rng.poisson(50, rows))).astype(np.int32)
    if kind == "texts":
        letters = rng.integers(97, 123, ends[-1], dtype=np.uint8)
        return pa.StringArray.from_buffers(rows, pa.py_buffer(ends), pa.py_buffer(letters))
    tokens = np.minimum(rng.zipf(1.3, ends[-1]), 50_000).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens))


def counted_by_pyarrow(path: str, kind: str) -> Any:
    """The lengths by `iter_batches`, in its default batches."""
    batches = pq.ParquetFile(path).iter_batches(columns=["column"])
    return np.concatenate([KERNELS[kind](batch.column(0)).to_numpy() for batch in batches])


def main() -> None:
    if "--child" in sys.argv:
        child(sys.argv[-1])
        return
    arguments = options(__doc__, integers=10_000_000, lists=1_000_000)
    results = Results({"column": "", "rows": ",", "s": ".2f", "ratio": ".2f", "MiB": ".0f"})
    with tempfile.TemporaryDirectory() as folder:
        for kind in KERNELS:
            rows = arguments.integers if kind == "integers" else arguments.lists
            path = str(Path(folder) / f"{kind}.parquet")
            pq.write_table(pa.table({"column": column_of(kind, rows)}), path)
            ours = sizes_of_columns(path, "column", progress=False)
            assert (ours == counted_by_pyarrow(path, kind)).all()
            times = alternate(
                {
                    "ours": lambda path=path: sizes_of_columns(path, "column", progress=False),
                    "pyarrow": lambda path=path, kind=kind: counted_by_pyarrow(path, kind),
                },
                REPETITIONS,
            )
            beyond = watched(__file__, "--child", path)["beyond_bytes"]
            results.row(
                column=kind,
                rows=rows,
                s=median(times["ours"]),
                ratio=ratio(times["ours"], times["pyarrow"]),
                MiB=None if beyond is None else beyond / 2**20,
            )
    integers, lists, _ = results.rows
    results.bar("integers, s", integers["s"], 2)
    results.bar("lists, times iter_batches", lists["ratio"], 1.3)
    if lists["MiB"] is not None:
        results.bar("memory, MiB", max(row["MiB"] for row in results.rows), 1024)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
