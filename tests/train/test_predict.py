"""Outputs of a forward-only pass, in order; over several ranks see `test_predict_ranks.py`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.support.samplers import LENGTHS, TOKENS, forks
from tests.support.strategies import costs, one_axis_sizes, rules
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedCost,
    predict,
)
from torchbudget.errors import OptionError, OtherNumbersWarning, SampleError, StateError


class Encoder(nn.Module):
    """Means over a sample's tokens, which padding must not change; dropout only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mix = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))
        self.double()

    def forward(self, batch: Any) -> Tensor:
        mixed = self.mix(self.embed(batch.data)) * batch.mask.unsqueeze(-1)
        return mixed.sum(1) / batch.mask.sum(1, keepdim=True).clamp(min=1)


def texts_of(sizes: Any) -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(0, 11, int(n))) for n in sizes]


def loader_of(
    sizes: Any = LENGTHS, budget: Any = 1000, cost: Any = TOKENS, **options: Any
) -> DataLoader[Any]:
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget, **{"shuffle": False} | options)
    return DataLoader(texts_of(sizes), batch_sampler=sampler, collate_fn=PadCollate())


class Made:
    """A batch that others may ask whether it is still there."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.num_samples = batch, batch.num_samples


def test_a_batch_and_its_outputs_are_gone_before_the_next_is_made() -> None:
    """Or the memory of two would be needed at once."""
    alive: list[weakref.ref[Any]] = []

    def collate(texts: list[Tensor]) -> Made:
        assert [one for one in alive if one() is not None] == []
        made = Made(PadCollate()(texts))
        alive.append(weakref.ref(made))
        return made

    def model(made: Made) -> Tensor:
        outputs = made.batch.data.double().sum(1)
        alive.append(weakref.ref(outputs))
        return outputs

    loader = loader_of()
    loader = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=collate)
    found = predict(model, loader)
    assert [float(one) for one in found] == [float(one.sum()) for one in texts_of(LENGTHS)]
    assert len(alive) == 2 * len(loader) > 4


def one_by_one(model: Encoder, sizes: Any) -> list[Tensor]:
    model.eval()
    collate = PadCollate()
    with torch.no_grad():
        return [model(collate([text]))[0] for text in texts_of(sizes)]


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


@given(plans())
def test_it_is_the_model_one_sample_at_a_time(plan: Any) -> None:
    """Whatever the sizes, the windows, the budget and the order of the epoch."""
    sizes, cost, budget, options = plan
    torch.manual_seed(0)
    model = Encoder()
    found = predict(model, loader_of(sizes, budget, cost, **options))
    expected = one_by_one(model, sizes)
    assert len(found) == len(sizes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def alone(n: int, **options: Any) -> Any:
    """Samples of which no two fit together."""
    return [10] * n, TOKENS, 15, options


@given(plans(), st.integers(1, 5))
@example(alone(7), 2)
@example(alone(3), 5)
@example(alone(1), 2)
@example(alone(13, window=6), 2)  # the last window has one sample more
@example(alone(11, window=5, samples_per_step=None, shuffle=True), 4)
@example(([3, 9, 8], TOKENS, 9, {"max_batch_size": 2, "window": 5}), 4)
def test_ranks_have_as_many_batches_and_each_sample_once(plan: Any, ranks: int) -> None:
    """Where samples cannot be dealt evenly some come again, each in a batch of its own."""
    sizes, cost, budget, options = plan
    every, numbers = [], set()
    for rank in range(ranks):
        sampler = MemoryBudgetBatchSampler(
            sizes, cost, budget, num_replicas=ranks, rank=rank, **options
        )
        loader = DataLoader(range(len(sizes)), batch_sampler=sampler, collate_fn=list)
        before = sampler.state_dict()
        with sampler.unchanged(), sampler.tracked(loader) as run:
            came = [(batch, run.is_repeated) for batch in run if run.indices == batch]
        assert sampler.state_dict() == before
        numbers.add(len(came))
        every += [index for batch, is_repeated in came for index in batch if not is_repeated]
        assert all(len(batch) == 1 for batch, is_repeated in came if is_repeated)
    assert len(numbers) == 1
    assert sorted(every) == list(range(len(sizes)))


# ---------------------------------------------------------------------- loaders


@forks
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_ahead(persistent: bool) -> None:
    """Also after a loop that was broken off, and in a second call."""
    sampler = MemoryBudgetBatchSampler(LENGTHS, TOKENS, 1000, shuffle=False)
    loader = DataLoader(
        texts_of(LENGTHS), batch_sampler=sampler, collate_fn=PadCollate(), num_workers=2,
        persistent_workers=persistent,
    )  # fmt: skip
    model = Encoder()
    expected = one_by_one(model, LENGTHS)
    for _ in loader:
        break
    for _ in range(2):
        torch.testing.assert_close(predict(model, loader), expected, rtol=1e-12, atol=1e-13)
    assert sampler.epoch == 0


def test_a_call_inside_a_loop_over_the_same_loader() -> None:
    """The loop's position is as without it, and so is the rest of its epoch."""
    loader = loader_of(shuffle=True)
    sampler: Any = loader.batch_sampler
    came = 0
    for place, batch in enumerate(sampler.tracked(loader)):
        came += batch.num_samples
        if place == 2:
            before = sampler.state_dict()
            predict(lambda batch: batch.lengths, loader)
            assert sampler.state_dict() == before
        if place == 5:
            break
    resumed: Any = loader_of(shuffle=True).batch_sampler
    resumed.load_state_dict(sampler.state_dict())
    assert came + sum(map(len, resumed)) == len(LENGTHS)


def test_one_sample() -> None:
    assert [len(one) for one in predict(Encoder(), loader_of([5]))] == [4]


def test_a_progress_bar_changes_nothing() -> None:
    model = Encoder()
    shown = predict(model, loader_of(), progress=True, device="cpu")
    torch.testing.assert_close(shown, predict(model, loader_of()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"weights": np.ones(300), "batches_per_epoch": 9, "shuffle": True},
            "weights leaves samples out or repeats them",
        ),
        ({"batches_per_epoch": 9}, "batches_per_epoch leaves samples out or repeats them"),
        ({"drop_last": True}, "drop_last leaves samples out"),
        ({"budget": 100, "oversize": "skip"}, r"leaves out \d+ samples, .* index \d+"),
        ({"num_replicas": 3, "rank": 1}, "deals to 3 ranks, of which this is number 1, but the"),
    ],
)
def test_an_epoch_that_is_not_each_sample_once(options: dict[str, Any], match: str) -> None:
    """It is refused before the first batch."""
    called: list[Any] = []
    with pytest.raises(OptionError, match=match):
        predict(called.append, loader_of(**options))
    assert not called


def test_samples_over_the_budget_may_come_alone() -> None:
    model = Encoder()
    found = predict(model, loader_of(budget=100, oversize="alone"))
    torch.testing.assert_close(found, one_by_one(model, LENGTHS), rtol=1e-12, atol=1e-13)


def test_sizes_of_another_data_set() -> None:
    loader = loader_of()
    sampler = MemoryBudgetBatchSampler(LENGTHS[:-1], TOKENS, 1000, shuffle=False)
    other = DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=PadCollate())
    with pytest.raises(OptionError, match="has 299 sizes, but the data set has 300 samples"):
        predict(Encoder(), other)


def test_a_position_within_an_epoch() -> None:
    """Every sample has an output, and the position stays."""
    loader = loader_of(window=50)
    sampler: Any = loader.batch_sampler
    batches = iter(sampler)
    for _ in range(7):
        next(batches)
    sampler.load_state_dict(sampler.state_dict())
    before = sampler.state_dict()
    assert len(predict(Encoder(), loader)) == 300
    assert sampler.state_dict() == before


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(texts_of([3, 4]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(texts_of([3, 3]), batch_size=2),
        lambda: DataLoader(Stream(), batch_size=None),
        lambda: DataLoader(
            BudgetedIterableDataset(Stream(), TOKENS, 100, size=len, window=8), batch_size=None
        ),
        lambda: [texts_of([3])],
    ],
    ids=["fixed batches", "iterable", "stream", "list"],
)
def test_loaders_whose_samples_are_unknown(make: Any) -> None:
    with pytest.raises(OptionError, match=r"predict needs a DataLoader.*shuffle=False.*a stream"):
        predict(Encoder(), make())


def test_batches_out_of_order() -> None:
    sampler = MemoryBudgetBatchSampler(LENGTHS, TOKENS, 1000, shuffle=False)
    loader = DataLoader(
        texts_of(LENGTHS), batch_sampler=sampler, num_workers=1, in_order=False,
        collate_fn=PadCollate(),
    )  # fmt: skip
    with pytest.raises(OptionError, match="in_order=True"):
        predict(Encoder(), loader)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_loader() -> None:
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="in the peer dependency group"
    )
    sampler = MemoryBudgetBatchSampler(LENGTHS, TOKENS, 1000, shuffle=False)
    loader = stateful.StatefulDataLoader(texts_of(LENGTHS), batch_sampler=sampler)
    with pytest.raises(OptionError, match="tracked needs a DataLoader"):
        predict(Encoder(), loader)


def test_another_place_to_gather() -> None:
    with pytest.raises(OptionError, match="gather must be 'all' or 'first', got 'last'"):
        predict(Encoder(), loader_of(), gather="last")  # type: ignore[call-overload]


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
    with pytest.raises(error, match=r"came from the loader|the loader ended after"):
        predict(Encoder(), loader)


def test_batches_are_named_by_their_number() -> None:
    plain, seen = loader_of(), []

    def model(batch: Any) -> Tensor:
        seen.append(batch)
        return batch.data.sum(1)[1 if len(seen) == 3 else 0 :]

    with pytest.raises(OptionError, match=r"batch 2, of \d+ samples"):
        predict(model, plain)


def test_a_collate_that_loses_a_sample() -> None:
    collate = PadCollate()
    plain = loader_of([3, 4, 5])
    loader = DataLoader(
        plain.dataset, batch_sampler=plain.batch_sampler, collate_fn=lambda some: collate(some[1:])
    )
    with (
        pytest.warns(OtherNumbersWarning),
        pytest.raises(OptionError, match=r"batch 0, of 3 .* \[2, 1, 0\], came .* 2 samples"),
    ):
        predict(Encoder(), loader)


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


@pytest.mark.parametrize("wrap", ["module", "function", "partial", "method"])
@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_restored(wrap: str, fails: bool) -> None:
    """Bit for bit, also after an error, wherever the module is."""
    model = Fixed()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2

    def call(model: Any, batch: Any) -> Any:
        return model(batch)

    called: Any = {
        "module": model,
        "function": lambda batch: call(model, batch),
        "partial": partial(call, model),
        "method": model.forward,
    }[wrap]
    if fails:
        with pytest.raises(OptionError):
            predict(called, loader_of(), split_outputs=lambda *_: [])
    else:
        predict(called, loader_of())
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_a_network_that_is_not_registered_is_set_to_evaluation_too() -> None:
    model = Fixed()

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = [model]

        def forward(self, batch: Any) -> Tensor:
            return self.inner[0](batch)

    assert len(predict(Wrapper(), loader_of())) == len(LENGTHS)


@dataclass(frozen=True)
class Output:
    values: Tensor


def test_dataclasses_are_copied_too() -> None:
    """A model that writes every batch into one buffer."""
    buffer = torch.zeros(4096)

    def call(batch: Any) -> Tensor:
        return buffer[: batch.num_samples].copy_(batch.lengths)

    def split(outputs: Tensor, _: Any) -> list[Output]:
        return [Output(one) for one in outputs]

    found = predict(call, loader_of(), split_outputs=split)
    assert [int(one.values) for one in found] == list(LENGTHS)


def test_outputs_can_be_trained_on() -> None:
    """They are plain tensors without a graph."""
    embedded = torch.stack(predict(Encoder(), loader_of()))
    assert not embedded.requires_grad
    head = nn.Linear(4, 1).double()
    head(embedded).sum().backward()
    assert head.weight.grad is not None


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        predict(lambda _: 1 / 0, loader_of())


def test_no_batch_is_over_the_budget() -> None:
    """Predicted bytes of what the model really sees."""
    cost, seen = PaddedCost(unit_bytes=3, sample_bytes=2), []
    predict(
        lambda batch: seen.append(batch.data.shape) or batch.data, loader_of(budget=2000, cost=cost)
    )
    assert all(int(cost.batch_bytes(*shape)) <= 2000 for shape in seen)
