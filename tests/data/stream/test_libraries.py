"""Streams of other libraries' data sets: real ones, each sample once, resumed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.resuming import as_pickle, check_every_stop
from tests.support.streams import loader_of, make, same, tracked_loop
from torchbudget import BudgetedIterableDataset
from torchbudget.errors import OptionError

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'set_vital' is deprecated:UserWarning",
    "ignore::DeprecationWarning",  # of those libraries, in what they import
    "ignore::pytest.PytestUnraisableExceptionWarning",  # webdataset leaves its files open
)

N = 300


def rows() -> list[dict[str, Any]]:
    return [{"n": n, "x": [0] * (n * 7 % 50 + 1)} for n in range(N)]


def numbers(batches: Any) -> list[int]:
    return [row["n"] for batch in batches for row in batch]


def stream_of(source: Any, **options: Any) -> BudgetedIterableDataset:
    return make(source, size="x", budget=400, **options)


# ---------------------------------------------------------------------- datasets


KINDS = ("plain", "mapped", "filtered", "batched", "concatenated", "interleaved", "shuffled")


JOINED = {"concatenated": "concatenate_datasets", "interleaved": "interleave_datasets"}


def hugging_face(kind: str) -> Any:
    datasets = pytest.importorskip("datasets", reason="the test group has it")
    data = datasets.Dataset.from_list(rows()).to_iterable_dataset(num_shards=6)
    match kind:
        case "mapped":
            return data.map(same)
        case "filtered":
            return data.filter(all_of_them)
        case "batched":
            return data.map(same, batched=True, batch_size=7)
        case "concatenated" | "interleaved":
            half = datasets.Dataset.from_list(rows()[: N // 2]).to_iterable_dataset(num_shards=2)
            rest = datasets.Dataset.from_list(rows()[N // 2 :]).to_iterable_dataset(num_shards=3)
            return getattr(datasets, JOINED[kind])([half, rest])
        case "shuffled":
            return data.shuffle(seed=0, buffer_size=20)
    return data


def all_of_them(row: Any) -> bool:
    return "n" in row


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_of_a_datasets_stream_once_an_epoch(kind: str, workers: int) -> None:
    """And the rest is the rest, by the data set's state or by skipping through it."""
    stream = stream_of(hugging_face(kind))
    loader = loader_of(stream, workers, persistent_workers=workers > 0)
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs.append(numbers(loader))
        # Interleaving ends with the first of the two.
        assert sorted(epochs[-1]) == list(range(N)) or kind == "interleaved"
    assert epochs[0] != epochs[1]
    check_every_stop(
        lambda: stream_of(hugging_face(kind)),
        loop=partial(tracked_loop, workers=workers),
        file=as_pickle,
        every=15,
    )


def test_a_datasets_stream_that_is_split_by_node() -> None:
    """Each rank has its own part, so that their numbers of batches differ."""
    distributed = pytest.importorskip("datasets.distributed")
    found = []
    for rank in range(2):
        mine = distributed.split_dataset_by_node(hugging_face("plain"), rank=rank, world_size=2)
        with pytest.raises(OptionError, match="batches_per_epoch"):
            stream_of(mine, num_replicas=2, rank=rank)
        stream = stream_of(mine, num_replicas=2, rank=rank, uneven=True)
        found += numbers(DataLoader(stream, batch_size=None, num_workers=2))
    assert sorted(found) == list(range(N))


# ---------------------------------------------------------------------- webdataset


@pytest.fixture
def tars(tmp_path: Path) -> Iterator[list[str]]:
    webdataset = pytest.importorskip("webdataset", reason="the test group has it")
    with webdataset.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=40, verbose=0) as writer:
        for row in rows():
            writer.write({"__key__": f"{row['n']:04d}", "n.cls": row["n"], "x.json": row["x"]})
    yield sorted(map(str, tmp_path.glob("*.tar")))
    gc.collect()  # of the files that it leaves open, here and not in another test


def named(row: Any) -> Any:
    return {"n": row["n.cls"], "x": row["x.json"]}


def pipeline(tars: list[str], **options: Any) -> Any:
    import webdataset

    return webdataset.WebDataset(tars, **({"shardshuffle": False} | options)).decode().map(named)


def test_webdataset_pipelines_of_two_ranks(
    tars: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They split by node themselves: numbers of batches are unknown, and asked for."""
    import webdataset

    with pytest.raises(OptionError, match="batches_per_epoch"):
        stream_of(pipeline(tars), num_replicas=2, rank=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        mine = pipeline(tars, nodesplitter=webdataset.split_by_node)
        found.append(numbers(stream_of(mine, num_replicas=2, rank=rank, uneven=True)))
        repeated = stream_of(mine, num_replicas=2, rank=rank, batches_per_epoch=90)
        assert len(list(repeated)) == len(repeated) == 90
    assert sorted(found[0] + found[1]) == list(range(N))
    assert all(found)


@pytest.mark.parametrize("splitter", ["split_by_node", "single_node_only"])
def test_a_webdataset_pipeline_that_knows_of_other_ranks_is_refused(
    splitter: str, tars: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a spawned worker, which has no process group: each rank would read everything."""
    import webdataset

    mine = pipeline(tars, nodesplitter=getattr(webdataset, splitter))
    with pytest.raises(OptionError, match="rank 0 of 1 to webdataset, but rank 1 of 2"):
        list(stream_of(mine, num_replicas=2, rank=1, uneven=True))
    own = pipeline(tars, nodesplitter=every_second)
    assert 0 < len(numbers(stream_of(own, num_replicas=2, rank=1, uneven=True))) < N
    dealt = [
        numbers(stream_of(pipeline(tars), num_replicas=2, rank=rank, split="none"))
        for rank in range(2)
    ]
    assert sorted(dealt[0] + dealt[1]) == list(range(N))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(OptionError, match="rank 3 of 4 to webdataset, but rank 1 of 2"):
        list(stream_of(mine, num_replicas=2, rank=1, uneven=True))


def every_second(shards: Any) -> Any:
    return islice(shards, 1, None, 2)


def test_a_pipeline_that_splits_itself_goes_on_in_a_plain_loader(tars: list[str]) -> None:
    """Each worker goes on with its part, whichever's turn it was."""
    loop = partial(tracked_loop, workers=3)
    check_every_stop(lambda: stream_of(pipeline(tars)), loop=loop, every=15, file=as_pickle)


def test_stages_of_webdataset_that_count_their_passes_begin_with_the_streams_epoch(
    tars: list[str],
) -> None:
    """Else a new process, for a resume or as a worker, would read another order than the last."""

    def make() -> BudgetedIterableDataset:
        return stream_of(pipeline(tars, shardshuffle=8, detshuffle=True, seed=7))

    stream = make()
    epochs = [numbers(stream) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    loader = DataLoader(make(), batch_size=None, num_workers=1)
    assert [numbers(loader) for _ in range(3)] == epochs
    stream = make()
    stream.set_epoch(2)
    begun, resumed = list(islice(stream, 3)), make()
    resumed.load_state_dict(stream.state_dict())
    assert numbers([*begun, *resumed]) == epochs[2]
