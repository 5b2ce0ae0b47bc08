"""`loader` with a collate of one's own that concatenates: seen, or stated, and never by mistake."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbudget as tb
from tests.support.loading import Graph, joined, padded
from torchbudget import loader
from torchbudget.errors import CostError
from torchbudget.host import loader as loaders
from torchbudget.host.real_batches import RealBatches

pytestmark = pytest.mark.filterwarnings(
    "ignore:the cost was traced:torchbudget.errors.MeasureWarning"
)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced, not run, which takes a second."""
    monkeypatch.setattr(loaders, "measure_cost", partial(tb.measure_cost, method="trace"))


SIZES = np.clip(np.random.default_rng(1).lognormal(2.5, 0.8, 2000), 2, 120).astype(int).tolist()
TOKENS_OF = [{"ids": torch.arange(n) % 9, "label": torch.tensor(n % 3)} for n in SIZES]
GRAPHS = [Graph(n, n * (2 + n % 3)) for n in SIZES]
WIDE = nn.Linear(2, 2**14)
EMBEDDING = nn.Embedding(9, 2**14)
SGD = torch.optim.SGD([*WIDE.parameters(), *EMBEDDING.parameters()], lr=0.1)


class GraphBatch:
    """No mapping and no tuple, as the batches of graph libraries."""

    def __init__(self, graphs: list[Graph]) -> None:
        counts = torch.tensor([len(one.x) for one in graphs])
        self.x, self.edges = joined(graphs).values()
        self.graph, self.num_graphs = torch.repeat_interleave(counts), len(graphs)


def of_graphs(batch: GraphBatch) -> None:
    sums = WIDE(batch.edges).new_zeros(batch.num_graphs, 2**14)
    nodes = sums.index_add(0, batch.graph, WIDE(batch.x)).square().mean()
    updated(nodes + WIDE(batch.edges).square().mean())


def of_tokens(batch: Any) -> None:
    updated(EMBEDDING(batch["ids"]).square().mean())


def updated(loss: Tensor) -> None:
    loss.backward()
    SGD.step()
    SGD.zero_grad()


def in_a_row(samples: list[Any], extra: int = 0) -> dict[str, Any]:
    """Concatenated token ids and their bounds, with some more ids for each sample."""
    ids = [torch.cat([one["ids"], torch.zeros(extra, dtype=torch.int64)]) for one in samples]
    bounds = torch.tensor([0, *map(len, ids)]).cumsum(0)
    label = torch.stack([one["label"] for one in samples])
    return {"ids": torch.cat(ids), "cu_seqlens": bounds, "label": label}


def in_rows(samples: list[Any]) -> dict[str, Any]:
    return {"ids": padded([one["ids"] for one in samples])}


def rounded(samples: list[Any]) -> dict[str, Any]:
    ids = torch.cat([one["ids"] for one in samples])
    return {"ids": nn.functional.pad(ids, (0, -len(ids) % 64))}


def with_longest(samples: list[Any]) -> dict[str, Any]:
    """The longest length, to which the step could pad."""
    longest = max(len(one["ids"]) for one in samples)
    return {"ids": torch.cat([one["ids"] for one in samples]), "longest": longest}


def cropped(samples: list[Any]) -> dict[str, Any]:
    length = int(torch.randint(3, 12, ()))
    return in_rows([{"ids": one["ids"][:length]} for one in samples])


def averaged(samples: list[Any]) -> dict[str, Any]:
    """Cropped to the median: of two samples as many elements as both have."""
    length = int(np.median([len(one["ids"]) for one in samples]))
    ids = [nn.functional.pad(one["ids"], (0, max(length - len(one["ids"]), 0))) for one in samples]
    return {"ids": torch.stack([one[:length] for one in ids])}


def sorted_rows(samples: list[Any]) -> dict[str, Any]:
    return in_rows(sorted(samples, key=lambda one: -len(one["ids"])))


def special_rows(samples: list[Any]) -> dict[str, Any]:
    return in_rows([{"ids": torch.cat([torch.zeros(1).long(), one["ids"]])} for one in samples])


def padded_edges(graphs: list[Graph]) -> dict[str, Tensor]:
    """Nodes are concatenated, edges padded."""
    return joined(graphs) | {"edges": padded([one.edges for one in graphs])}


def graph_size(one: Graph) -> tuple[int, int]:
    return len(one.x), len(one.edges)


PACKING: dict[str, tuple[Any, Any, Any, Any]] = {
    "graphs": (GRAPHS, graph_size, GraphBatch, of_graphs),
    "token ids": (TOKENS_OF, "ids", in_a_row, of_tokens),
    "token ids, one more of each sample": (TOKENS_OF, "ids", partial(in_a_row, extra=1), of_tokens),
}


@pytest.mark.parametrize("case", PACKING)
def test_what_a_collate_concatenates_is_planned_as_a_sum(case: str, traced: None) -> None:
    """Batches of mixed sizes nearly fill the budget by their own traces, and none exceeds it."""
    data, size, collate, of_batch = PACKING[case]
    made = loader(data, of_batch, "2GiB", size=size, collate_fn=collate, window=2000)
    sampler: Any = made.batch_sampler
    assert isinstance(sampler.cost, tb.PackedCost)
    beside = sampler.cost.base_bytes
    room = tb.GiB(2) - beside
    fixed = tb.trace_peak_bytes(of_batch, collate(data[:1]))
    peaks = [tb.trace_peak_bytes(of_batch, batch) - fixed for batch in made]
    assert len(peaks) > 3
    assert max(peaks) <= room
    assert np.mean(peaks) > 0.85 * room
    told = loader(data, of_batch, "2GiB", size=size, collate_fn=collate, packed=False)
    assert isinstance(told.batch_sampler.cost, tb.MeasuredCost)
    assert len(told) > len(peaks)


@pytest.mark.parametrize(
    ("collate", "data", "size"),
    [
        *((one, TOKENS_OF, "ids") for one in (in_rows, sorted_rows, special_rows, rounded)),
        (cropped, TOKENS_OF, "ids"),
        (averaged, TOKENS_OF, "ids"),
        (lambda samples: [one["ids"] for one in samples], TOKENS_OF, "ids"),
        (padded_edges, GRAPHS, graph_size),
        (in_a_row, TOKENS_OF[:1] * 9, "ids"),
    ],
    ids=["padded", "sorted", "with a token", "rounded", "cropped at random",
         "cropped to the median", "a list", "one axis padded", "of one size"],
)  # fmt: skip
def test_what_does_not_show_a_sum_is_planned_as_padded(collate: Any, data: Any, size: Any) -> None:
    """A batch of mixed sizes that has other elements than its samples may exceed their sum."""
    batches = RealBatches.of(data, size, collate, None, multiple=1, num_workers=0, modules=[])
    assert not batches.concatenates()


def test_packed_is_stated(traced: list[tuple[int, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    """Where the loader cannot see it, the line or the error says what to pass."""
    options: Any = {"size": "ids", "collate_fn": with_longest}
    made = loader(TOKENS_OF, of_tokens, "2GiB", **options)
    assert isinstance(made.batch_sampler.cost, tb.MeasuredCost)
    assert "as if it padded: an int in the batch grows" in capfd.readouterr().err
    made = loader(TOKENS_OF, of_tokens, "2GiB", packed=True, **options)
    assert isinstance(made.batch_sampler.cost, tb.PackedCost)

    def squared(batch: Any) -> None:
        """Every position attends to all of the row."""
        row = EMBEDDING(batch["ids"])[:, :8]
        updated((row @ row.T).softmax(1).square().mean())

    made = loader(TOKENS_OF, squared, "2GiB", size="ids", collate_fn=in_a_row)
    assert isinstance(made.batch_sampler.cost, tb.MeasuredCost)
    assert "as if it padded: a packed cost must be a constant" in capfd.readouterr().err
    with pytest.raises(CostError, match=r"n², .* pass a make_batch\(n, size\) .* PackedCost\. "):
        loader(TOKENS_OF, squared, "2GiB", size="ids", collate_fn=in_a_row, packed=True)


@pytest.mark.slow
def test_a_step_that_pads_is_planned_as_padded(
    traced: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The collate concatenates, but the step makes rows of the longest length that it is told."""

    def told(samples: list[Any]) -> dict[str, Any]:
        lengths = np.array([len(one["ids"]) for one in samples])
        return {"ids": torch.cat([one["ids"] for one in samples]), "lengths": lengths}

    def in_rows_again(batch: Any) -> None:
        rows = EMBEDDING.weight.new_zeros(len(batch["lengths"]), int(batch["lengths"].max()), 64)
        updated((rows + EMBEDDING(batch["ids"])[:, :64].mean(0)).square().mean())

    data = [{"ids": torch.zeros(n, dtype=torch.int64)} for n in range(2, 12)]
    made = loader(data, in_rows_again, "2GiB", size="ids", collate_fn=told)
    assert isinstance(made.batch_sampler.cost, tb.MeasuredCost)
    assert "as if it padded: a packed cost must be a constant" in capfd.readouterr().err
