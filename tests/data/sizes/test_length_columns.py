"""The ways of docs/past-one-machine.md to compute a column of lengths, with a real tokenizer."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import ENVIRONMENT, ROOT, printed_by
from torchbudget import sizes_of_columns

PAGE = (ROOT / "docs" / "past-one-machine.md").read_text("utf-8")
SCRIPTS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["duckdb", "polars", "ray"])
def test_lengths_stand_beside_their_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row once, in whatever order, with the number of tokens of its own text."""
    tokenizers, pq = pytest.importorskip("tokenizers"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip(name)
    pa = pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    for script, text in SCRIPTS.items():
        Path(script).write_text(text, "utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40)
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    tokenizer.save("tokenizer.json")
    rng = np.random.default_rng(0)
    Path("data").mkdir()
    for part in range(3):
        texts = ["the cat sat on a mat " * times for times in rng.integers(1, 9, 2000)]
        table = pa.table({"id": range(2000 * part, 2000 * (part + 1)), "text": texts})
        pq.write_table(table, f"data/part-{part}.parquet", row_group_size=500)
    paths = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    printed_by([f"with_{name}.py"], PYTHONPATH=paths)
    files = sorted(map(str, Path("out").iterdir())) if name == "ray" else ["out.parquet"]
    rows = pa.concat_tables(map(pq.read_table, files))
    expected = [len(one.ids) for one in tokenizer.encode_batch(rows["text"].to_pylist())]
    assert sizes_of_columns(files, "length", progress=False).tolist() == expected
    assert sorted(rows["id"].to_pylist()) == list(range(6000))
