"""`loader`: any kind of data set, measured on its own samples, and batches that keep the budget."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import torchbudget as tb
from tests.support.commands import ROOT, printed_by
from tests.support.costs import READER, measured, two_ways, way
from tests.support.loading import Graph, TakesMask, TakesNone, joined, padded
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.steps import step_of
from torchbudget import loader, predict
from torchbudget.cost.measured import WaysCost
from torchbudget.errors import (
    BatchError,
    BudgetError,
    CollateError,
    CostError,
    OptionError,
    SizesError,
)
from torchbudget.host import loader as loaders

LENGTHS = np.clip(np.random.default_rng(0).lognormal(2.5, 0.7, 60), 2, 60).astype(int).tolist()
EMPTY = [0, *LENGTHS[1:50], *[0] * 10]
PAIRS = [*zip(LENGTHS, LENGTHS[::-1], strict=True)]
TOKENIZER = SimpleNamespace(pad_token_id=7, padding_side="right")
TOKENS = tb.PaddedCost(unit_bytes=1)


def ids(n: int) -> Tensor:
    return torch.full((n,), 3)


def dicts(**fields: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [{"ids": ids(n), **{k: make(n) for k, make in fields.items()}} for n in LENGTHS]


def test_batches_of_slow_steps_are_as_planned() -> None:
    """The most elements of a batch follow from the bytes, and not from the time of a step."""
    seconds = (9.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # one for each element, and nine
    cost = measured(tb.PaddedCost(unit_bytes=100), seconds=seconds, largest=(60,))
    batches = [*loader(dicts(), cost, 50_000, samples_per_step=30)]
    assert max(batch["ids"].numel() for batch in batches) > 60


def columns() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {"text": ["ab" * n for n in LENGTHS], "input_ids": [[3] * n for n in LENGTHS]}
    )


# A data set, the options that it needs, and the sizes that are found.
KINDS: dict[str, Callable[[], tuple[Any, dict[str, Any], Any]]] = {
    "dicts": lambda: (dicts(labels=ids, fixed=lambda _: [1, 2], label=bool), {}, LENGTHS),
    "tuples": lambda: ([(torch.ones(n, 2), n % 3) for n in LENGTHS], {}, LENGTHS),
    "tensors": lambda: ([torch.ones(n) for n in LENGTHS], {}, LENGTHS),
    "arrays": lambda: ([np.ones((n, 3), np.float32) for n in LENGTHS], {}, LENGTHS),
    "texts": lambda: (["x" * n for n in LENGTHS], {}, LENGTHS),
    "columns": lambda: (columns(), {"tokenizer": TOKENIZER}, LENGTHS),
    "images": lambda: ([torch.ones(3, h, w) for h, w in PAIRS], {}, PAIRS),
    "pairs": lambda: (
        [{"source": ids(a), "target": ids(b)} for a, b in PAIRS],
        {"size": ("source", "target")},
        PAIRS,
    ),
    "graphs": lambda: (
        [Graph(*pair) for pair in PAIRS],
        {"size": lambda one: (len(one.x), len(one.edges)), "collate_fn": joined},
        PAIRS,
    ),
    "audio": lambda: ([(torch.ones(1, 80 * n), "x" * (n % 5)) for n in LENGTHS], {},
                      [80 * n for n in LENGTHS]),
    "nested": lambda: ([{"a": {"ids": ids(n)}, "b": (ids(n), 1.5)} for n in LENGTHS], {}, LENGTHS),
    "loader": lambda: (
        DataLoader([torch.ones(n) for n in LENGTHS], 8, collate_fn=padded), {}, LENGTHS
    ),
    "packed": lambda: (dicts(), {"collate_fn": tb.PackCollate(total_multiple=64)}, LENGTHS),
    "rounded": lambda: (dicts(), {"size_multiple": 8}, LENGTHS),
    "empty": lambda: ([torch.ones(n) for n in EMPTY], {}, EMPTY),
    "empty, rounded": lambda: ([torch.ones(n) for n in EMPTY], {"size_multiple": 64}, EMPTY),
    "a tuple of one": lambda: (
        [torch.ones(2, n) for n in LENGTHS], {"size": lambda one: one.shape[1:]}, LENGTHS
    ),
    "fixed": lambda: ([(torch.ones(6), n) for n in LENGTHS], {}, [6] * 60),
    "numbers": lambda: ([(1.0, n) for n in LENGTHS], {}, [1] * 60),
}  # fmt: skip


MODEL = nn.Linear(1, 16)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def step(batch: Any) -> None:
    """A step on the elements of whatever a batch has."""
    fields = batch.data if hasattr(batch, "num_samples") else batch
    values = [one for one in tree_leaves(fields) if isinstance(one, Tensor)]
    torch.stack([MODEL(one.float()[..., None]).square().mean() for one in values]).sum().backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()


def first_words(some: list[str]) -> Tensor:
    return padded([torch.ones(min(len(text.split()), 4)) for text in some])


def without_labels(some: list[Any]) -> dict[str, Tensor]:
    return {"ids": padded([one["ids"] for one in some])}


def reads_labels(batch: Any) -> None:
    step([batch["ids"], batch["labels"]])


def halved(batch: Any) -> None:
    """As a U-Net does: two adjacent elements become one, and two again."""
    x = batch.data
    half = nn.functional.avg_pool1d(x[:, None], 2)
    step([x[:, None] + nn.functional.interpolate(half, scale_factor=2)])


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Steps are traced, not run, which takes a second; the shapes that were asked for."""
    asked: list[tuple[int, Any]] = []

    def measure(step: Any, make_batch: Any, **options: Any) -> tb.MeasuredCost:
        def noted(n: int, size: Any) -> Any:
            asked.append((n, size))
            return make_batch(n, size)

        return tb.measure_cost(step, noted, method="trace", **options)

    monkeypatch.setattr(loaders, "measure_cost", measure)
    return asked


@pytest.mark.filterwarnings("ignore:the cost was traced:torchbudget.errors.MeasureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_of_any_kind(
    kind: str, traced: list[tuple[int, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Sizes are found, real samples measured at sizes that occur, and every sample comes once."""
    data, options, sizes = KINDS[kind]()
    before = MODEL.weight.clone()
    # Texts are tokenized in the step, which no symbol does: traces of many shapes.
    made = loader(data, TOKENS if kind == "texts" else step, "2GiB", max_batch_size=9, **options)
    sampler: Any = made.batch_sampler
    assert np.array_equal(sampler.plan.sizes.values, sizes)
    assert len(sampler) == 7
    assert sorted(index for batch in sampler for index in batch) == list(range(60))
    assert len([*sampler.tracked(made)]) == len(sampler)
    multiple = options.get("size_multiple", 1)
    occurring = {-(-s // multiple) * multiple for s in sizes} if np.ndim(sizes) == 1 else {*sizes}
    alone = {size for n, size in traced if n == 1}
    assert alone <= occurring - {0}
    if kind != "texts":
        assert alone
        packs = kind in ("packed", "graphs")
        assert isinstance(sampler.cost, tb.PackedCost if packs else tb.MeasuredCost)
    assert torch.equal(before, MODEL.weight)
    printed = capfd.readouterr().err
    assert "\nfits   longest sample" in printed
    assert ("batch_size=8 of the loader is ignored" in printed) is (kind == "loader")
    assert sampler.plan.order.shuffle is (kind != "loader")


@pytest.mark.filterwarnings("ignore:the cost was traced:torchbudget.errors.MeasureWarning")
def test_a_cost_is_cached(
    tmp_path: Path, traced: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used where everything is the same and a real step stays within it, else measured."""
    path = tmp_path / "cost.json"

    def is_measured(budget: str = "2GiB", least: int = 0, **options: Any) -> bool:
        traced.clear()
        data = [one for one in dicts() if len(one["ids"]) >= least]
        loader(data, step, budget, cost_cache=path, **options)
        return bool(traced)

    monkeypatch.setattr(loaders, "why_not", lambda *_: "")
    assert [is_measured(), is_measured()] == [True, False]
    assert [is_measured("3GiB"), is_measured("3GiB"), is_measured("3GiB", least=9)] == [1, 0, 1]
    # A cost without a time does not do for steps of given samples; one with it does for all.
    steps = {"samples_per_step": 4}
    assert [is_measured(**steps), is_measured(**steps), is_measured()] == [True, False, False]
    assert not is_measured(**steps, time=tb.PaddedCost(unit_bytes=1))
    path.write_text("{}")
    assert [is_measured(), is_measured()] == [True, False]
    monkeypatch.setattr(loaders, "why_not", lambda *_: "it needed more")
    assert is_measured()


@pytest.mark.filterwarnings("ignore:the cost was traced:torchbudget.errors.MeasureWarning")
def test_a_cache_keeps_a_cost_for_each_description(
    tmp_path: Path,
    traced: list[tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Loaders with one file do not measure in turn; a line says why a file is not used."""
    path = tmp_path / "cost.json"

    def printed(budget: str) -> str:
        traced.clear()
        loader(dicts(), step, budget, cost_cache=path)
        return capfd.readouterr().err

    monkeypatch.setattr(loaders, "why_not", lambda *_: "")
    assert "not used" not in printed("2GiB")
    first = tb.load_cost(path)
    differs = f"{path} is not used: budget: '{tb.GiB(2)} bytes' then, '{tb.GiB(3)} bytes' now\n"
    assert differs in printed("3GiB")
    assert traced
    for budget in ("2GiB", "3GiB"):
        assert "measuring" not in printed(budget)
        assert not traced
    assert tb.load_cost(path).room == tb.GiB(3)  # the last one
    assert tb.load_cost(path, first.measured_on).room == tb.GiB(2)
    monkeypatch.setattr(loaders, "why_not", lambda *_: "it needed more")
    assert f"{path} is not used: it needed more" in printed("2GiB")
    assert len(json.loads(path.read_text())) == 2  # measured again in place of the former
    monkeypatch.setattr(loaders, "why_not", Mock(side_effect=CostError("it was changed")))
    assert f"{path} is not used: it was changed" in printed("2GiB")
    path.write_text("[]")
    assert f"{path} is not used: {path} is not a saved cost" in printed("2GiB")


def test_a_cache_keeps_the_cost_of_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one cost; of more ways, or of one, it is another."""
    measurements: list[Any] = []

    def measure(measured_step: Any, *_: Any, **__: Any) -> Any:
        measurements.append(measured_step)
        ways = getattr(measured_step, "ways", [])
        return WaysCost.of([way(100, 1e-3, 1e-5) for _ in ways], READER) if ways else two_ways()

    monkeypatch.setattr(loaders, "measure_cost", measure)
    monkeypatch.setattr(loaders, "why_not", lambda *_: "")
    options: Any = {"samples_per_step": 30, "cost_cache": tmp_path / "cost.json"}
    two, three = (tb.alternatives(*[step] * number) for number in (2, 3))
    for one, number in ((two, 1), (two, 1), (three, 2), (two, 2), (step, 3)):
        found = loader(dicts(), one, 200_000, **options).batch_sampler
        assert len(measurements) == number
        assert len(found.cost.ways) == (3 if one is three else 2)  # type: ignore[union-attr]


class Tokenizer:
    """Makes one token of each two letters, once for each text."""

    pad_token_id, padding_side = 0, "right"

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        self.seen += len(texts)
        return {"input_ids": [[1 + ord(letter) % 7 for letter in text[::2]] for text in texts]}


def test_a_text_without_tokens() -> None:
    """It is a row of padding, of the other rows' kind of number."""
    [batch] = loader(["ab", "", "abcd"], TOKENS, 60, tokenizer=Tokenizer(), shuffle=False)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].sum(1).tolist() == [2, 1, 0]


@pytest.mark.filterwarnings("ignore:the cost was traced:torchbudget.errors.MeasureWarning")
def test_outputs_of_texts(traced: list[tuple[int, Any]], tmp_path: Path) -> None:
    """One tensor, in the data set's order, of a model that is measured in evaluation mode."""
    model, tokenizer = nn.Sequential(nn.Embedding(9, 4), nn.Dropout(0.5)), Tokenizer()
    texts = ["ab" * n + "c" for n in LENGTHS]

    def embed(batch: Any) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return (model(batch["input_ids"]) * mask).sum(1) / mask.sum(1)

    found = predict(embed, texts, "2GiB", tokenizer=tokenizer, max_batch_size=7, folder=tmp_path)
    assert traced
    assert tokenizer.seen == len(texts)
    assert model.training
    model.eval()
    ids = [torch.tensor(tokenizer([text])["input_ids"]) for text in texts]
    expected = [embed({"input_ids": one, "attention_mask": torch.ones_like(one)}) for one in ids]
    torch.testing.assert_close(found, torch.cat(expected))


class Cropped:
    def __len__(self) -> int:
        return 99

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(int(torch.randint(3, 2000, ())))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


SWAPPED: Any = (9, step)
PAIRED = [{"source": ids(a), "target": ids(b)} for a, b in PAIRS]
ODD = [{"ids": ids(2 + i % 9), "fixed": torch.ones(99 if i == 1 else 4)} for i in range(200)]
FEWER = DataLoader(dicts(), 8, sampler=RandomSampler(dicts(), num_samples=20))
WEIGHTED = DataLoader(dicts(), 8, sampler=WeightedRandomSampler(LENGTHS, 60))
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "several fields": (
        SizesError,
        r"'source': 2 to 48; field 'target': 2 to 48\).*size='source'.*size=\('source', 'target'\)",
        lambda: loader(PAIRED, step, "2GiB"),
    ),
    "objects": (
        SizesError,
        "pass size=, a function .* and a collate_fn",
        lambda: loader([Graph(2, 3)] * 9, step, "2GiB"),
    ),
    "cropped": (
        SizesError,
        r"sample \d+ had the size \d+ when sizes were read, but has \d+ now",
        lambda: loader(Cropped(), step, "2GiB"),
    ),
    "stream": (SizesError, "BudgetedIterable", lambda: loader(DataLoader(Stream()), step, 9)),
    "sizes": (OptionError, "a key of sizes is", lambda: loader(dicts(), step, 9, size=SWAPPED)),
    "both": (
        OptionError,
        "leave collate_fn out",
        lambda: loader([{"input_ids": [3]}], step, 9, tokenizer=TOKENIZER, collate_fn=padded),
    ),
    "texts in a column": (
        OptionError,
        r"tokenizer= takes texts, or samples with 'input_ids'.* dataset\['text'\]",
        lambda: loader([{"text": "ab"}] * 9, step, 9, tokenizer=TOKENIZER),
    ),
    "another tokenizer's samples": (
        OptionError,
        "tokenizer= takes texts, or samples with 'input_ids', got",
        lambda: loader([("ab", 1)] * 9, step, 9, tokenizer=TOKENIZER),
    ),
    "tokenized by the collate": (
        BatchError,
        "A collate_fn of loader that tokenizes needs size=.* pass tokenizer=",
        lambda: loader(["ab " * n for n in LENGTHS], step, "2GiB", collate_fn=first_words),
    ),
    "a field that the collate drops": (
        CostError,
        "KeyError: 'labels'.* or the collate_fn of loader, must give all fields",
        lambda: loader(dicts(labels=ids), reads_labels, "2GiB", collate_fn=without_labels),
    ),
    "a field that the collate misses": (
        BatchError,
        "or the collate_fn of loader, raised KeyError",
        lambda: loader(
            dicts(), step, "2GiB", collate_fn=lambda some: padded([one["x"] for one in some])
        ),
    ),
    "odd images in a U-Net": (
        CostError,
        "size of tensor .* U-Net .* size_multiple=",
        lambda: loader([torch.ones(n) for n in (4, 5, 6)], halved, "2GiB"),
    ),
    "seconds": (
        SizesError,
        "0.5 has no length; .* an int: of seconds, the number of frames",
        lambda: loader([{"x": ids(3), "seconds": 0.5}], step, 9, size="seconds"),
    ),
    "seconds by a function": (
        SizesError,
        "expected an int: of seconds, the number of frames.* got 0.5",
        lambda: loader([ids(3)], step, 9, size=lambda _: 0.5),
    ),
    "seconds as sizes": (
        SizesError,
        "expected integer sizes.* of seconds, count frames",
        lambda: tb.plan_step([0.5, 1.5], TOKENS, 9),
    ),
    "sampler": (
        OptionError,
        "'sampler'; expected loader.* shuffle= and weights=",
        lambda: loader(dicts(), TOKENS, 99, sampler=None),
    ),
    "a loader's option of a sampler": (
        OptionError,
        "'pin_memory'; .* other options of a DataLoader go to the DataLoader",
        lambda: ANY.MemoryBudgetBatchSampler([3], TOKENS, 9, pin_memory=True),
    ),
    "batch size": (
        OptionError,
        "'batch_size'; expected loader.* max_batch_size= caps",
        lambda: loader(dicts(), step, 9, batch_size=4),
    ),
    "option": (
        OptionError,
        "argument 'limit'; expected loader",
        lambda: loader(dicts(), step, 9, limit=4),
    ),
    "swapped": (OptionError, "swapped", lambda: loader(dicts(), *SWAPPED)),
    "weighted": (OptionError, "weights= and batches_per", lambda: loader(WEIGHTED, step, 9)),
    "drawn less often": (OptionError, "of the data, a Subset", lambda: loader(FEWER, TOKENS, 99)),
    "another axis": (
        SizesError,
        r"sample 1 has no size .* \(3, 64\), has another length .* pass size=",
        lambda: loader([torch.ones(3, 64 if i == 1 else 32) for i in range(200)], TOKENS, 99),
    ),
    "another field": (
        CollateError,
        "field 'fixed': expected the fixed shape",
        lambda: [*loader(ODD, TOKENS, 99, shuffle=False)],
    ),
    "of ours": (
        OptionError,
        "the order of a MemoryBudgetBatchSampler",
        lambda: loader(loader(dicts(), TOKENS, 99), step, 9),
    ),
    "no budget": (
        BudgetError,
        "a budget must state at least one of device",
        lambda: predict(MODEL, PAIRED, size="source"),
    ),
    "no loader": (
        OptionError,
        r"predict without a budget needs a DataLoader with .* got list",
        lambda: predict(MODEL, PAIRED),
    ),
    "outputs": (
        BudgetError,
        "the outputs of all samples take about 2.68 GiB, of a budget of 2 GiB: return less",
        lambda: predict(lambda _: MODEL.weight.new_zeros(1, 12 * 10**6), dicts(), "2GiB"),
    ),
    "packed cost": (
        CollateError,
        "planned without padding, by a PackedCost, .* Collate with PackCollate",
        lambda: [*loader(dicts(), tb.PackedCost(unit_bytes=1), 99)],
    ),
}


# What other functions refuse.
ANY: Any = tb
ANY_DICTS: Any = dicts()
ROWS = [torch.ones(3), torch.ones(5)]
PAD, PACKED = tb.PadCollate(), tb.MemoryBudgetBatchSampler(LENGTHS, tb.PackedCost(unit_bytes=1), 99)
REFUSED |= {
    "cost and budget": (
        OptionError,
        r"swapped: expected \(sizes, cost, budget\), got cost='8GiB'",
        lambda: ANY.MemoryBudgetBatchSampler([3], "8GiB", TOKENS),
    ),
    "a step as cost": (
        OptionError,
        r"cost must be a cost model .* measure_cost\(step, …\) makes one",
        lambda: ANY.plan_step([3], step, 9),
    ),
    "no cost": (
        OptionError,
        r"argument: 'budget'; expected MemoryBudgetBatchSampler\(sizes, cost, budget, …\)",
        lambda: ANY.MemoryBudgetBatchSampler([3], "8GiB"),
    ),
    "batch size of a sampler": (
        OptionError,
        "unexpected .* 'batch_size'; .* max_batch_size= caps",
        lambda: ANY.MemoryBudgetBatchSampler([3], TOKENS, 9, batch_size=3),
    ),
    "steps of a stream": (
        OptionError,
        "'samples_per_step'; expected BudgetedIterableDataset",
        lambda: ANY.BudgetedIterableDataset(dicts, TOKENS, 9, samples_per_step=3),
    ),
    "a function without a shard": (
        OptionError,
        r"too many positional .* expected a function \(shard, num_shards\)",
        lambda: tb.BudgetedIterableDataset(lambda: iter(()), TOKENS, 9, size="ids"),
    ),
    "no labels": (
        CostError,
        "the step raised KeyError: 'y', on 1 samples of size",
        lambda: tb.measure_cost(
            lambda batch: MODEL(batch["y"]).sum().backward(),
            lambda n, _: {"x": torch.ones(n, 1)},
            max_size=9,
            budget="2GiB",
        ),
    ),
    "samples as sizes": (
        SizesError,
        r"sizes_of\(dataset, …\)",
        lambda: tb.MemoryBudgetBatchSampler(["ab", "c"], TOKENS, 9),
    ),
    "a loader as make_batch": (
        CostError,
        r"make_batch must be a function .* got DataLoader; loader\(dataset, step, budget\)",
        lambda: ANY.measure_cost(step, WEIGHTED, budget="8GiB"),
    ),
    "no samples": (
        SizesError,
        "there are no samples: the data set has the length 0",
        lambda: loader([], step, "2GiB"),
    ),
    "a loss as outputs": (
        OptionError,
        r"must be tensors of shape \(1, …\), got a tensor of shape \(\); pass split_outputs",
        lambda: tb.predict(lambda batch: MODEL(batch.data[..., None]).mean(), ROWS, "2GiB"),
    ),
    "packed cost in a tracked loop": (
        CollateError,
        "planned without padding, by a PackedCost",
        lambda: [*PACKED.tracked(DataLoader(ANY_DICTS, batch_sampler=PACKED, collate_fn=PAD))],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_pass(case: str) -> None:
    kind, message, act = REFUSED[case]
    with pytest.raises(kind, match=f"(?s){message}"):
        act()


def test_options_and_workers(capfd: pytest.CaptureFixture[str]) -> None:
    """Those of the sampler are passed on, those of a loader taken, and the host's budget kept."""
    given = DataLoader(dicts(), 8, shuffle=True, num_workers=1, persistent_workers=True)
    made = loader(given, TOKENS, 99, samples_per_step=20, seed=4)
    sampler: Any = made.batch_sampler
    assert (made.num_workers, made.persistent_workers) == (1, True)
    assert sampler.report().steps == 3
    assert len(sampler) == len([*made])
    assert pickle.loads(pickle.dumps(made.collate_fn))(dicts()[:2])["ids"].ndim == 2  # noqa: S301
    given = DataLoader(dicts(), 8, drop_last=True)
    capfd.readouterr()
    made = loader(given, TOKENS, 99, num_workers=1, prefetch_factor=3, timeout=60)
    assert (made.prefetch_factor, made.timeout) == (3, 60)
    generator = torch.Generator()
    assert loader(dicts(), TOKENS, 99, generator=generator).generator is generator
    assert not loader(dicts(), TOKENS, 99, in_order=False, num_workers=1).in_order
    assert sum(len(batch) for batch in made.batch_sampler) == len(dicts())
    assert "the budget sets it; so is drop_last" in capfd.readouterr().err
    with pytest.raises(OptionError, match="host bytes choose prefetch_factor: leave it out"):
        loader(dicts(), TOKENS, tb.MemoryBudget(device=99, host="64GiB"), prefetch_factor=3)
    host = loader(dicts(), TOKENS, tb.MemoryBudget(device=99, host="64GiB"), num_workers=1)
    assert (host.num_workers, host.prefetch_factor) == (1, 8)
    assert "\nhost   num_workers=1, prefetch_factor=8" in capfd.readouterr().err
    loader(ROWS, TOKENS, 99)
    assert "sizes  2 samples of 3 to 5\n" in capfd.readouterr().err


def ids_and_tags(*masked: str) -> list[dict[str, Tensor]]:
    names = ("input_ids", "tags", "labels", *masked)
    return [{name: torch.full((n,), 9) for name in names} for n in (3, 9, 4, 8, 1, 9)]


@pytest.mark.filterwarnings("ignore:the cost was traced:torchbudget.errors.MeasureWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("config", "token"), [({"pad_token_id": 7}, 7), ({}, 0)])
def test_a_mask_for_a_model_that_takes_one(
    config: Any, token: int, compiled: bool, traced: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is in measured batches too, ids are padded as the model says, and the summary says so."""
    model = TakesMask(**config)
    outer: Any = torch.compile(model, backend="eager") if compiled else model

    def call(batch: Any) -> Any:
        assert "attention_mask" in batch
        return outer(**batch)

    with torch.compiler.set_stance("force_eager"):
        (batch,) = loader(ids_and_tags(), step_of(call, model), "1GiB", shuffle=False)
    assert batch["attention_mask"].sum(1).tolist() == batch.lengths.tolist()
    padding = batch["attention_mask"] == 0
    assert {*batch["input_ids"][padding].tolist()} == {token}
    told = f"\npads   'input_ids' with {token}, 'tags' with 0, 'labels' with -100, 'attention_mask'"
    printed = capfd.readouterr().err
    assert told in printed
    assert "the step must pass 'attention_mask' to the model" in printed


@pytest.mark.filterwarnings("ignore:the cost was traced:torchbudget.errors.MeasureWarning")
@pytest.mark.parametrize("kind", ["in the data", "model of its own", "a cost", "a collate"])
def test_no_mask_is_made(kind: str, traced: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Of data with one, for another model, or by the user's collate; what pads fields is told."""
    model = TakesNone() if kind == "model of its own" else TakesMask(pad_token_id=7)
    step = step_of(lambda batch: model(batch["input_ids"]), model)
    data = ids_and_tags(*["attention_mask"] * (kind == "in the data"))
    options = (
        {"collate_fn": tb.PadCollate(padding_value={"tags": -1})} if kind == "a collate" else {}
    )
    cost: Any = TOKENS if kind == "a cost" else step
    (batch,) = loader(data, cost, "1GiB", **options)
    assert ("attention_mask" in batch) is (kind == "in the data")
    assert 7 not in batch["input_ids"]
    tags = -1 if kind == "a collate" else 0
    told = f"pads   'input_ids' with 0, 'tags' with {tags}, 'labels' with -100"
    printed = capfd.readouterr().err
    assert told in printed
    assert "must pass" not in printed


def test_a_batch_of_more_elements_than_planned_raises() -> None:
    """At any time, since samples came longer than their sizes; not one that exceeds alone."""
    made = loader(dicts(), TOKENS, 120)
    made.collate_fn([{"ids": ids(9)}])
    with pytest.raises(CollateError, match="4,000 elements, but at most"):
        made.collate_fn([{"ids": ids(1000)}] * 4)
    alone = loader([{"ids": ids(n)} for n in (3, 50, 9)], TOKENS, 18, oversize="alone")
    assert sorted(batch["ids"].shape[1] for batch in alone) == [9, 50]


@pytest.mark.distributed
def test_ranks_measure_together(tmp_path: Path) -> None:
    """All have one cost and every sample comes once; more than the machine has is refused."""
    results = run_ranks(script("planning.with_loader"), tmp_path, 2)
    (cost, mine, refused), (others_cost, other, _) = results
    assert cost == others_cost
    assert sorted(mine + other) == list(range(64))
    assert "2 ranks of 1024 TiB exceed machine" in refused


@pytest.mark.slow
def test_an_encoder_trains_within_its_budget(tmp_path: Path) -> None:
    """The real peak of a process, with sizes, cost and plan of one line; the next one reads it."""
    path = ROOT / "tests" / "support" / "script_loader.py"
    told = json.loads(printed_by([path, tmp_path / "cost.json"]))
    assert 0.9 <= told["peak"] <= 1.0
    assert 0.8 <= told["peak of outputs"] <= 1.0
    assert told["outputs"] == [5_000, 64]
    (first, second), (cost, read) = told["runs"], told["costs"]
    assert (read, second) == (cost, 2)
    assert first > 3


def test_what_is_printed_is_short() -> None:
    """Summaries, not lists of all indices."""
    sampler = tb.MemoryBudgetBatchSampler(LENGTHS, TOKENS, 99)
    assert str(sampler) == "<MemoryBudgetBatchSampler: 60 samples, at most 99 B; epoch 0, rank 0>"
    plan = tb.plan_step(LENGTHS, TOKENS, 99, num_replicas=2)
    assert str(plan) == "<StepPlan: 60 samples, 6 micro-batches on each of 2 ranks>"
