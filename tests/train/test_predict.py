"""Outputs of a forward-only pass, in the data set's order."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.predicting import Encoder, killed_after, loader_of, one_by_one, texts_of
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS, TOKENS, forks
from tests.support.strategies import costs, one_axis_sizes, rules
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PackCollate,
    PadCollate,
    predict,
)
from torchbudget.errors import (
    OptionError,
    OtherNumbersWarning,
    SampleError,
    StateError,
    StateMismatchError,
)

# ---------------------------------------------------------------------- laws


@st.composite
def plans(draw: st.DrawFn) -> tuple[Any, Any, int, dict[str, Any]]:
    """Sizes, a cost, a budget that each sample fits, and options that keep every sample."""
    sizes = draw(one_axis_sizes(most=60))
    cost = draw(costs(packed=False))
    alone = int(cost.batch_bytes(1, sizes.max()))
    options = draw(rules())
    options |= {"shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 9))}
    group = draw(st.sampled_from(["window", "samples_per_step", None]))
    if group:
        options[group] = draw(st.integers(5, 40))
    return sizes, cost, alone + draw(st.integers(0, 20)) * max(alone // 2, 1), options


@settings(max_examples=12)
@given(plans())
def test_it_is_the_model_one_sample_at_a_time(plan: Any) -> None:
    """Whatever the sizes, the windows, the budget, which is kept, and the order of the epoch."""
    sizes, cost, budget, options = plan
    torch.manual_seed(0)
    model, seen = Encoder(), []

    def noted(batch: Any) -> Tensor:
        seen.append(batch.data.shape)
        return model(batch)

    found = predict(noted, loader_of(sizes, budget, cost, **options))
    assert not any(one.requires_grad or one.is_inference() for one in found)  # to be trained on
    torch.testing.assert_close(list(found), one_by_one(model, sizes), rtol=1e-12, atol=1e-13)
    assert all(int(cost.batch_bytes(*shape)) <= budget for shape in seen)


def alone(n: int, **options: Any) -> Any:
    """Samples of which no two fit together."""
    return [10] * n, TOKENS, 15, options


@settings(max_examples=12)
@given(plans(), st.integers(1, 5))
@example(alone(7), 2)
@example(alone(3), 5)
@example(alone(1), 2)
@example(alone(13, window=6), 2)  # the last window has one sample more
@example(alone(11, window=5, samples_per_step=None, shuffle=True), 4)
@example(([3, 9, 8], TOKENS, 9, {"max_batch_size": 2, "window": 5}), 4)
@example(([3, 9, 8, 5, 5, 5, 2], TOKENS, 18, {"max_shapes": 2, "window": 6}), 4)
@example(([3, 9], TOKENS, 18, {"max_shapes": 2}), 3)
def test_ranks_have_as_many_batches_and_each_sample_once(plan: Any, ranks: int) -> None:
    """Where samples cannot be split evenly some are repeated, and marked; also after a stop."""
    sizes, cost, budget, options = plan
    every: list[int] = []

    def batches(number: int, rank: int, state: Any = None, stop: int = 10**6) -> tuple[int, Any]:
        sampler = MemoryBudgetBatchSampler(
            sizes, cost, budget, num_replicas=number, rank=rank, **options
        )
        loader = DataLoader(range(len(sizes)), batch_sampler=sampler, collate_fn=list)
        before, came = sampler.state_dict(), 0
        with sampler.whole_pass():
            if state is not None:
                sampler.load_state_dict(state)
            with sampler.tracked(loader) as run:
                for batch in islice(run, stop):
                    pairs = zip(batch, run.last.repeated, strict=True)
                    every.extend(index for index, again in pairs if not again)
                    came += 1
                after = run.position()
        assert sampler.state_dict() == before
        return came, after

    numbers = [batches(ranks, rank)[0] for rank in range(ranks)]
    assert len(set(numbers)) == 1
    assert sorted(every) == list(range(len(sizes)))
    every.clear()
    if numbers[0] > 1:  # the rest, on another number of ranks
        _, state = [batches(ranks, rank, stop=numbers[0] // 2) for rank in range(ranks)][-1]
        assert len({batches(ranks + 1, rank, state)[0] for rank in range(ranks + 1)}) == 1
        assert sorted(every) == list(range(len(sizes)))


# ---------------------------------------------------------------------- loaders


@forks
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_ahead(persistent: bool) -> None:
    """Also after a loop that was broken off, and in a second call."""
    loader, model = loader_of(num_workers=1, persistent_workers=persistent), Encoder()
    expected = one_by_one(model, LENGTHS)
    for _ in loader:
        break
    for _ in range(2):
        torch.testing.assert_close([*predict(model, loader)], expected, rtol=1e-12, atol=1e-13)
    assert loader.batch_sampler.epoch == 0


def test_a_call_inside_a_loop_over_the_same_loader() -> None:
    """The loop's position is as without it, and so is the rest of its epoch."""
    loader = loader_of(shuffle=True)
    sampler: Any = loader.batch_sampler
    came = 0
    for place, batch in enumerate(sampler.tracked(loader)):
        came += batch.num_samples
        if place == 2:
            before = sampler.state_dict()
            assert len(predict(lambda batch: batch.lengths, loader, progress=True)) == 300
            assert sampler.state_dict() == before
        if place == 5:
            break
    resumed: Any = loader_of(shuffle=True).batch_sampler
    resumed.load_state_dict(sampler.state_dict())
    assert came + sum(map(len, resumed)) == len(LENGTHS)


def other_loader(kind: str) -> Any:
    if kind == "stream":
        stream = BudgetedIterableDataset([texts_of([3, 4])], TOKENS, 100, size=len)
        return DataLoader(stream, batch_size=None)
    return [texts_of([3])] if kind == "list" else DataLoader(texts_of([3, 3]), batch_size=2)


UNKNOWN = r"predict without a budget needs a DataLoader.*shuffle=False"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"weights": np.ones(300), "batches_per_epoch": 9, "shuffle": True},
            "weights drops or repeats samples",
        ),
        ({"batches_per_epoch": 9}, "steps_per_epoch drops or repeats samples"),
        ({"drop_last": True}, "drop_last drops or repeats"),
        ({"units": (range(300), "micro_batch")}, "predict takes no units"),
        ({"budget": 100, "oversize": "skip"}, r"index \d+ first.* drops or repeats"),
        ({"num_replicas": 3, "rank": 1}, "plans for rank 1 of 3, but this process is rank 0 of 1"),
        ({"sizes": LENGTHS[:-1], "texts": LENGTHS}, "299 sizes, but the data set has 300 samples"),
        ({"num_workers": 1, "in_order": False}, "in_order=True"),
        ("fixed batches", UNKNOWN),
        ("stream", UNKNOWN),
        ("list", UNKNOWN),
    ],
)
def test_an_epoch_that_is_not_each_sample_once(options: Any, match: str) -> None:
    """It is refused before the first batch."""
    called: list[Any] = []
    loader = other_loader(options) if isinstance(options, str) else loader_of(**options)
    with pytest.raises(OptionError, match=match):
        predict(called.append, loader)
    assert not called


class Short(DataLoader[Any]):
    """Ends early, or goes on."""

    more = -1

    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        return iter(batches[: self.more] if self.more < 0 else [*batches, batches[0]])


@pytest.mark.parametrize(("more", "error"), [(-1, SampleError), (1, StateError)])
def test_a_loader_that_changes_the_plan(more: int, error: type[Exception]) -> None:
    plain = loader_of()
    loader = Short(plain.dataset, batch_sampler=plain.batch_sampler, collate_fn=PadCollate())
    loader.more = more
    with pytest.raises(error, match=r"after the collate|the loader (ended|returned)"):
        predict(Encoder(), loader)
    losing = loader_of([3, 4, 5], collate_fn=lambda some: PadCollate()(some[1:]))
    match = r"batch 0, of 3 .* \[2, 1, 0\], has 2 samples"
    with pytest.warns(OtherNumbersWarning), pytest.raises(OptionError, match=match):
        predict(Encoder(), losing)


# ---------------------------------------------------------------------- a folder


def test_a_killed_pass_goes_on_from_its_folder(tmp_path: Path) -> None:
    """Under another budget too, without a batch that was done; another pass is refused."""
    model, folder = Encoder(), tmp_path / "new" / "folder"
    seen: list[int] = []
    expected = one_by_one(model, LENGTHS)
    with pytest.raises(ZeroDivisionError):
        predict(killed_after(3, model, seen), loader_of(window=100), folder=folder)
    for budget, number in ((700, -1), (700, 0), (1000, 0)):  # the rest; then nothing is left
        if number == 0:
            number = len(seen)
        called = killed_after(number, model, seen)
        found = predict(called, loader_of(budget=budget, window=100), folder=folder)
        torch.testing.assert_close([*found], expected, rtol=1e-12, atol=1e-13)
        assert sum(seen) == 300
    with torch.no_grad():
        model.embed.weight[:] = model.embed.weight.flip(0)
    with pytest.raises(StateMismatchError, match=r"another model: model is .*, was .*or remove"):
        predict(called, loader_of(window=100), folder=folder)


# ---------------------------------------------------------------------- the model


class Fixed(nn.Module):
    """A part that stays in evaluation mode, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Dropout(0.5)
        self.first, self.second = nn.Sequential(Encoder(), shared), nn.Sequential(shared)
        self.first.train()
        self.second.eval()
        shared.train()
        self.first[0].mix.eval()

    def forward(self, batch: Any) -> Tensor:
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        return self.second(self.first[0](batch))


@pytest.mark.parametrize("wrap", ["module", "function", "partial", "method", "unregistered"])
@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_restored(wrap: str, fails: bool) -> None:
    """Bit for bit, also after an error, wherever the module is."""
    model = Fixed()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2

    def call(model: Any, batch: Any) -> Any:
        return model(batch)

    listing: Any = nn.Module()
    listing.inner = [model]  # which registers nothing
    called: Any = {
        "module": model,
        "function": lambda batch: call(model, batch),
        "partial": partial(call, model),
        "method": model.forward,
        "unregistered": lambda batch: call(listing.inner[0], batch),
    }[wrap]
    split = {"split_outputs": lambda *_: []} if fails else {}
    with pytest.raises(OptionError) if fails else nullcontext():
        predict(called, loader_of(), **split)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------- outputs


class Pair(NamedTuple):
    length: Tensor
    rows: list[Any]


STRUCTURES: dict[str, Any] = {
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, x + 1],
    "dict": lambda x: {"a": x, "b": {"c": x + 1}},
    "ordered": lambda x: OrderedDict(b=x, a=x + 1),
    "named": lambda x: Pair(x[..., 0], [x, None]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_split_into_structures(name: str) -> None:
    """Each sample's output is of the same kind as the batch's."""
    make = STRUCTURES[name]
    sizes = [3, 1, 4, 1, 5, 9]
    totals = predict(lambda batch: make(batch.data.sum(1, keepdim=True)), loader_of(sizes, 12))
    for found, text in zip(totals, texts_of(sizes), strict=True):
        expected = make(text.sum(0, keepdim=True))
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.peer
def test_model_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="in the test group")
    kind = outputs.BaseModelOutput
    found = predict(lambda batch: kind(last_hidden_state=batch.data), loader_of([3, 1]))
    assert [type(one) for one in found] == [kind, kind]
    assert found[0].last_hidden_state.equal(texts_of([3, 1])[0])


@pytest.mark.parametrize("packs", [False, True])
def test_rows_keep_their_padding_unless_they_are_split(packs: bool) -> None:
    """Packed rows must be split."""
    sizes = [3, 1, 4]
    loader = loader_of(sizes, collate_fn=PackCollate() if packs else PadCollate())

    def split(rows: Tensor, batch: Any) -> Any:
        lengths = batch.lengths.tolist()
        return rows.split(lengths) if packs else map(lambda row, n: row[:n], rows, lengths)

    cut = predict(lambda batch: batch.data, loader, split_outputs=split)
    assert all(map(torch.equal, cut, texts_of(sizes)))
    match = r"must be tensors of shape \(3, …\), got a tensor of sh"
    with pytest.raises(OptionError, match=match) if packs else nullcontext():
        assert [len(one) for one in predict(lambda batch: batch.data, loader)] == [4, 4, 4]


class Made:
    """A batch that others may ask whether it is still there."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.num_samples = batch, batch.num_samples


def test_no_batch_is_kept() -> None:
    """A batch and its outputs are gone before the next is made, or two would need memory at once.

    An output keeps its own bytes only, and is not the model's buffer for the next batch.
    """
    alive: list[weakref.ref[Any]] = []
    buffer = torch.zeros(300, 1000)

    def collate(texts: list[Tensor]) -> Made:
        assert [one for one in alive if one() is not None] == []
        made = Made(PadCollate()(texts))
        alive.append(weakref.ref(made))
        return made

    def model(made: Made) -> tuple[Tensor, Tensor]:
        sums = made.batch.data.double().sum(1)
        alive.append(weakref.ref(sums))
        buffer[: made.num_samples] = made.batch.lengths.reshape(-1, 1)
        return sums, buffer[: made.num_samples]

    loader = loader_of(collate_fn=collate)
    found = predict(model, loader)
    assert [float(one) for one, _ in found] == [float(one.sum()) for one in texts_of(LENGTHS)]
    assert [int(one[0]) for _, one in found] == LENGTHS.tolist()
    assert all(one.untyped_storage().nbytes() == 4000 for _, one in found)
    assert len(alive) == 2 * len(loader) > 4


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        (lambda _: torch.tensor(1.0), r"shape \(3, …\), got a tensor of shape \(\); pass split_ou"),
        (lambda b: (b.data, b.data.sum()), r"got a tensor of shape \(\)"),
        (lambda b: b.data[:2], r"got a tensor of shape \(2, 5\)"),
        (lambda b: {"rows": b.data, "name": "x"}, "got a str"),
        (lambda _: None, "got a NoneType"),
        (lambda _: [], "got a NoneType"),
        *((n, f"must return 3 outputs, got {n}") for n in (0, 2, 4)),
    ],
)
def test_outputs_that_are_no_rows(outputs: Any, match: str) -> None:
    """Or another number of outputs, of a function that splits them."""
    model, split = (outputs, None) if callable(outputs) else (Encoder(), lambda *_: [0] * outputs)
    where = r"batch 0, of 3 planned samples, first indices \[2, 1, 0\]: "
    with pytest.raises(OptionError, match=where + ".*" + match):
        predict(model, loader_of([3, 4, 5]), split_outputs=split)


def test_outputs_are_gathered_somewhere() -> None:
    with pytest.raises(OptionError, match="gather must be 'all' or 'first', got 'last'"):
        predict(Encoder(), loader_of(), gather="last")


# ---------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "workers", "chunk_bytes"), [(1, 0, 10**6), (2, 1, 1)])
def test_outputs_over_ranks(tmp_path: Path, ranks: int, workers: int, chunk_bytes: int) -> None:
    """Every rank or the first one gets all; a rank that fails, or plans otherwise, fails on all."""
    told = run_ranks(script("predicting.outputs"), tmp_path, ranks, workers, chunk_bytes)
    assert [one["all"] for one in told] == [300] * ranks
    assert [one["first"] for one in told] == [300] + [0] * (ranks - 1)
    assert sum(one["samples"] for one in told) == 300
    if ranks == 1:
        return
    first, second = told
    for where, error in (
        ("model", "ZeroDivisionError: here"),
        ("pickle", "TypeError: no pickle"),
        ("sizes", "OptionError: the sampler has 299 sizes"),
    ):
        assert second[where].startswith(error)
        assert first[where].startswith(f"RankError: rank 1 failed, see its traceback: {error}")
    for one in told:
        assert one["after"] == 300
        assert "ZeroDivisionError" in one["killed"]
        assert "every rank must plan with the same sizes" in one["plans"]
        assert "plans for rank" in one["ranks"]
