"""What is run under each framework, and what must hold of it: one cell is a source and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchbudget import BudgetedIterableDataset, MemoryBudgetBatchSampler, PaddedCost

RecordProperty: TypeAlias = Callable[[str, object], None]

# Windows and a budget of which each epoch has a batch more than the one before, on 1 and 2 ranks.
OPTIONS = {"window": 24, "seed": 3}
BUDGET = 600
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 203), 1, 400).astype(np.int64).tolist()
EPOCHS = 3
STOP = 5  # batches into the second epoch
MATRIX = Path(__file__).parents[2] / "docs" / "frameworks_matrix.md"
CELLS = [(source, workers) for source in ("sampler", "stream") for workers in (0, 2)]


def ids_of(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch that every framework can move: the numbers of its samples."""
    return {"ids": torch.tensor([number for number, _ in samples])}


def length_of(sample: tuple[int, int]) -> int:
    return sample[1]


def loader_of(
    source: str, workers: int, kind: type[DataLoader[Any]] = DataLoader, **options: Any
) -> DataLoader[Any]:
    """A loader over 203 samples, each with its number."""
    options = OPTIONS | options
    collate_fn = options.pop("collate_fn", ids_of)
    cost, samples = PaddedCost(unit_bytes=1), list(enumerate(LENGTHS))
    forked = {"multiprocessing_context": "fork"} if workers else {}
    if source == "sampler":
        sampler = MemoryBudgetBatchSampler(LENGTHS, cost, BUDGET, **options)
        return kind(
            samples, batch_sampler=sampler, collate_fn=collate_fn, num_workers=workers, **forked
        )
    shards = [samples[number::4] for number in range(4)]
    stream = BudgetedIterableDataset(
        shards, cost, BUDGET, size=length_of, collate_fn=collate_fn, **options
    )
    return kind(stream, batch_size=None, num_workers=workers, **forked)


def ids(batches: Iterable[Any]) -> Iterator[list[int]]:
    """The samples of each batch, as it comes."""
    for batch in batches:
        yield batch["ids"].tolist()


def name_of(*cell: Any) -> str:
    return ", ".join(map(str, cell))


def check_story(of_ranks: list[dict[str, Any]]) -> None:
    """Each sample once an epoch, equal counts, other orders; resumed equals uninterrupted.

    Args:
        of_ranks: of each rank, its epochs `whole`, its batches up to a `stop`, and those of the
            run that was `resumed` there.
    """
    for epoch in range(EPOCHS):
        batches = [one["whole"][epoch] for one in of_ranks]
        assert sorted(chain(*chain(*batches))) == list(range(len(LENGTHS)))
        assert len({len(one) for one in batches}) == 1
    for one in of_ranks:
        assert len({str(epoch) for epoch in one["whole"]}) == EPOCHS
        assert one["stopped"] + one["resumed"] == [*chain(*one["whole"])]


def check_rows(
    found: list[dict[str, Any]], rows: dict[str, str], record_property: RecordProperty
) -> None:
    """The story of each cell holds, and is a cell of the matrix in the docs.

    Args:
        found: of each rank, what came in each cell, by name.
        rows: what follows source and workers in such a name, and its row in the matrix.
        record_property: pytest's, of which the matrix is written.
    """
    assert {name_of(*cell, setting) for cell in CELLS for setting in rows} <= {*found[0]}
    for setting, row in rows.items():
        for cell in CELLS:
            check_story([one[name_of(*cell, setting)] for one in found])
            record_property(name_of(len(found), *cell, row), "✓")
    check_written(len(found), [matrix_row(row) for row in rows.values()])


def check_refused(
    found: list[dict[str, Any]],
    rows: dict[str, tuple[str, str, list[str]]],
    record_property: RecordProperty,
) -> None:
    """Each cell is an error, which names setting and adapter, and a cell of the matrix.

    Args:
        found: of each rank, the name of each cell's error and its text.
        rows: by what follows source and workers in such a name: its row in the matrix, the error,
            and what its text has to name.
        record_property: see `check_rows`.
    """
    for setting, (row, error, names) in rows.items():
        for cell in CELLS:
            for one in found:
                raised, text = one[name_of(*cell, setting)]
                assert raised == error
                assert [name for name in names if name not in text] == []
            record_property(name_of(len(found), *cell, row), f"`{error}`")
    lines = [matrix_row(row, f"`{error}`") for row, error, _ in rows.values()]
    check_written(len(found), lines)


def check_written(processes: int, lines: list[str]) -> None:
    """The lines are in the matrix, among those about a number of processes."""
    written = section_of(processes, MATRIX.read_text())
    assert [line for line in lines if line not in written] == []


def matrix_row(row: str, cell: str = "✓") -> str:
    """A line of the matrix, all of whose cells are alike."""
    return f"| {row} |{f' {cell} |' * len(CELLS)}\n"


def section_of(processes: int, matrix: str) -> str:
    """The lines of the matrix about a number of processes."""
    return matrix.partition(heading_of(processes))[2].partition("| **")[0]


def heading_of(processes: int) -> str:
    """The line above them."""
    return f"| **{processes} process{'es' * (processes > 1)}** |{' |' * len(CELLS)}\n"


def assert_epochs_grow(of_rank: dict[str, Any]) -> None:
    """A framework that reads `len` once would cut the later epochs short."""
    first, second, third = map(len, of_rank["whole"])
    assert first < second < third


def each_cell(run: Callable[..., Any], *more: Any) -> dict[str, Any]:
    """What a function of source, workers and more returns for each cell, by name."""
    return {name_of(*cell, *more): run(*cell, *more) for cell in CELLS}
