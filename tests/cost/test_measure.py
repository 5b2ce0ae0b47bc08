"""`measure_cost`: its arguments, and steps and batches that it refuses or warns of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.steps import step_of
from tests.support.training_cases import CASES
from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PackCollate,
    measure_cost,
    trace_peak_bytes,
)
from torchbudget.errors import CostError, MeasureWarning, OptionError
from torchbudget.machine.process_tree import process_memory
from torchbudget.restoring import TrainingState
from torchbudget.units import MiB


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "guess"}, "method must be"),
        *(({"max_size": one}, "max_size must be") for one in (0, (3, 0.5), True, (3,) * 9)),
        *(({"size_multiple": one}, "size_multiple must be") for one in (1.5, 0)),
        ({"budget": None, "method": "auto"}, "pass a budget that it must not exceed"),
        ({"max_size": None}, "pass max_size=, or the data set's sizes="),
        ({"min_size": 11}, "is above the largest"),
        ({"min_size": 0}, "min_size must be"),
        ({"min_size": (2, 2)}, "same number of axes"),
        ({"sizes": [[2, 2]]}, "same number of axes"),
        *(({"max_size": None, "sizes": one}, "sizes must be integers") for one in ([0.5, 2], [])),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    training = CASES["heavy"]()
    given = {"max_size": 10, "budget": "1GiB", "method": "trace"}
    with pytest.raises((CostError, OptionError), match=said):
        measure_cost(training.step, training.make_batch, **given | arguments)


@pytest.mark.parametrize(
    "make_batch",
    [
        lambda _, size: torch.ones(4, size, 8),
        lambda n, _: torch.ones(n, 16, 8),
        lambda *_: [np.ones((4, 16, 8), np.float32)],
    ],
)
def test_make_batch_that_ignores_what_it_is_asked_for(make_batch: Any) -> None:
    """Also in batches of NumPy's arrays."""
    step = full_step(lambda model, x: model(torch.as_tensor(x[0])))
    with pytest.raises(CostError, match="make_batch must return n samples"):
        measure_cost(step, make_batch, max_size=128, budget="1GiB")


def test_batches_are_small_beside_the_budget() -> None:
    """A batch whose step is only traced takes memory, too: a quarter of what the budget leaves."""
    training, most = CASES["heavy"](), 0

    def make_batch(n: int, size: Any) -> Any:
        nonlocal most
        batch = training.make_batch(n, size)
        most = max(most, sum(one.nbytes for one in tree_leaves(batch)))
        return batch

    budget = process_memory().resident_bytes + MiB(200)
    measure_cost(training.step, make_batch, max_size=100, budget=budget, method="trace")
    assert most <= MiB(60)  # the step's own tensors are in the process, too


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_runs_on_cuda_are_refused_where_there_is_none() -> None:
    """A trace is offered, which does without one."""
    training = CASES["heavy"]()
    with pytest.raises(CostError, match="method='trace' predicts"):
        measure_cost(training.step, training.make_batch, max_size=9, budget="2GiB", device="cuda")


def packed_step() -> tuple[Any, Any]:
    """A step on packed samples, which takes the sum of each one's units, and batches of lengths."""
    embed, inner, outer = nn.Embedding(100, 32), nn.Linear(32, 256), nn.Linear(256, 10)
    collate = PackCollate()

    def loss_of(batch: Any) -> torch.Tensor:
        hidden = inner(embed(batch["x"])).tanh().cumsum(0)
        return outer(hidden[batch.cu_seqlens[1:].long() - 1]).square().mean()

    def batch_of(lengths: list[int]) -> Any:
        return collate([{"x": torch.zeros(one, dtype=torch.int64)} for one in lengths])

    return step_of(loss_of, embed, inner, outer, optimizer=torch.optim.AdamW), batch_of


@pytest.mark.slow
def test_packed_batches_are_measured() -> None:
    """Fitted to samples of one size, packed() holds for mixtures: none below, at most 3 % above.

    Two samples, which the optimizer's step outweighs, have more above them.
    """
    step, batch_of = packed_step()
    cost = measure_cost(step, lambda n, size: batch_of([size] * n), max_size=500, method="trace")
    packed = cost.packed()
    rng = np.random.default_rng(1)
    for n, above in ((2, 1.1), (17, 1.03), (200, 1.03)):
        lengths = rng.integers(1, 500, n)
        peak = trace_peak_bytes(step, batch_of(lengths.tolist()))
        predicted = packed.base_bytes + packed.item_bytes(lengths).sum()
        assert peak <= predicted <= above * peak
    sizes = rng.integers(1, 500, 300)
    budget = 20 * 2**20
    for batch in MemoryBudgetBatchSampler(sizes, packed, budget):
        assert trace_peak_bytes(step, batch_of(sizes[batch].tolist())) <= budget


# ---------------------------------------------------------------------- steps


WIDTH = 32


def full_step(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Any:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    return step_of(lambda batch: forward(model, batch).square().mean(), model)


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def traced(step: Any, make: Any = make_batch, **options: Any) -> MeasuredCost:
    return measure_cost(step, make, max_size=1024, method="trace", **options)


def test_an_optimizer_that_is_not_found() -> None:
    """One that the step reaches by a way that is not searched could not be restored."""
    model = nn.Linear(3, 3)
    hidden = {torch.optim.SGD(model.parameters(), lr=0.1): 0}

    def step(batch: Any) -> None:
        model(batch).sum().backward()
        next(iter(hidden)).step()

    with pytest.raises(CostError, match="does not refer to"):
        trace_peak_bytes(step, torch.zeros(2, 3))


@pytest.mark.parametrize("of_it", ["another", "the same", "frozen", "with its state"])
def test_one_of_several_optimizers_does_not_step(of_it: str) -> None:
    """Its state and its step are not in the cost: that is said, unless another one does both."""
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    steps = torch.optim.Adam(critic.parameters())
    idle = torch.optim.AdamW((critic if of_it == "the same" else generator).parameters())
    if of_it == "with its state":
        generator(torch.ones(1, 3)).sum().backward()
        idle.step()
    generator.requires_grad_(of_it != "frozen")
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        critic(generator(batch)).sum().backward()
        steps.step()
        if count % 1000 == 0:
            idle.step()
        generator.zero_grad()
        critic.zero_grad()

    warned = pytest.warns(MeasureWarning, match="AdamW did not step in any measured step")
    with warned if of_it == "another" else nullcontext():
        cost = measure_cost(
            step, lambda n, size: torch.ones(n, size, 3), max_size=64, method="trace"
        )
    assert any("AdamW did not step" in note for note in cost.notes) is (of_it == "another")


def test_no_model() -> None:
    with pytest.raises(CostError, match="refers to no module and no optimizer"):
        trace_peak_bytes(lambda batch: batch.sum(), torch.zeros(2, 3))


def measure(step: Callable[[torch.Tensor], Any], method: Any) -> None:
    """Refused before any budget matters."""
    measure_cost(step, make_batch, max_size=200, method=method, budget="1TiB")


def buffered(mean: torch.Tensor) -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_buffer("mean", mean)
    return layer


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


META = "is on the meta device"


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(
    ("second", "methods", "name", "match"),
    [
        (lambda: nn.Linear(8, 8, device="meta"), ["trace"], "weight", "is on meta, but"),
        (lambda: nn.Linear(8, 8, device="meta"), ["auto", "run"], "weight", META),
        (lambda: nn.LazyLinear(8), ["trace", "auto", "run"], "weight", "is uninitialized"),
        (lambda: buffered(torch.ones(1, device="meta")), ["auto", "run"], "mean", META),
        (lambda: buffered(quantized()), ["trace"], "mean", "cannot be traced"),
    ],
)
def test_a_model_that_cannot_be_measured(
    second: Callable[[], nn.Module], methods: list[str], name: str, match: str
) -> None:
    """The parameter or buffer is named before the step is called."""
    model = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), second=second()))
    calls: list[object] = []

    def step(batch: torch.Tensor) -> None:
        calls.append(object())
        model(batch)

    for method in methods:
        with pytest.raises(CostError, match=rf"second\.{name} of Sequential {match}"):
            measure(step, method)
    assert not calls


@pytest.mark.parametrize("name", ["mps", "xpu", "hpu"])
def test_a_device_whose_memory_is_not_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CPU nor a CUDA device: the host's figures would say nothing about it."""
    model = nn.Linear(8, 8).eval()
    monkeypatch.setattr(TrainingState, "device", property(lambda _: torch.device(name)))
    for method in ("trace", "auto", "run"):
        with pytest.raises(CostError, match=f"parameters are on {name}: only the memory of CPUs"):
            measure(model, method)


def test_parameters_that_only_an_optimizer_has_are_on_the_same_device() -> None:
    """Such as a loss's temperature, which is in no module."""
    model = nn.Linear(8, 8)
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    with pytest.raises(CostError, match="a tensor of the step is on meta, but the first parameter"):
        measure(step, "trace")


def test_an_integer_beside_a_table_that_grows() -> None:
    """The integer is only computed with; a buffer that grows with the longest sample is said."""
    table = [torch.zeros(1, 1)]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(table[0]) < x.shape[1]:
            table[0] = torch.zeros(x.shape[1], 1)
        return model(x + table[0][: x.shape[1]]) / int((x > 0).sum())

    cost = traced(full_step(forward))
    for n, size in ((3, 900), (200, 64)):
        assert cost.batch_bytes(n, size) >= trace_peak_bytes(
            full_step(forward), make_batch(n, size)
        )
    assert len(table[0]) == 1


def test_a_batch_that_cannot_be_made() -> None:
    """The shape is named, and what to do about short ones."""

    def refuse(n: int, size: int) -> torch.Tensor:
        if size < 50:
            raise ValueError("too short")
        return make_batch(n, size)

    step = full_step(lambda model, x: model(x))
    with pytest.raises(
        CostError, match=r"make_batch\(\d+, \d+\), or .* raised .*too short.* pass min_size"
    ):
        traced(step, refuse)
    traced(step, refuse, min_size=50)


def test_autocast_takes_the_ways_of_cuda() -> None:
    """Softmax is run in float32 there, while the CPU keeps the precision of its input."""

    @torch.autocast("cpu", torch.bfloat16)
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(model[0](x), dim=-1)

    step = full_step(forward)
    here, there = (traced(step, device=device).traced_bytes(64, 1024) for device in ("cpu", "cuda"))
    assert there >= here + 64 * 1024 * WIDTH * 2


# ---------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", ["sharded", "replicated"])
def test_ranks_measure_together(wrapped: str, tmp_path: Path) -> None:
    """They run the same shapes, though one has less memory left, and find one cost.

    Parameters, shards, buffers and the optimizer's state are restored bit for bit. Where one fails
    all raise: it its own error, the other one with its number and its text.
    """
    results = run_ranks(script("measuring.together"), tmp_path, 2, wrapped)
    found, (first, second) = zip(*results, strict=True)
    assert all(restored for rank in found for restored, *_ in rank)
    assert all(rank == found[0] for rank in found)
    assert not any(notes for *_, notes in found[0])
    assert all("rank 1 failed" in said and "no such file" in said for said in first)
    assert all("make_batch(" in said and "rank 1" not in said for said in second)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", ["sharded", "in buckets"])
def test_micro_batches_of_ranks_keep_the_budget(wrapped: str, tmp_path: Path) -> None:
    """Real ones, whose gradients FSDP2 keeps unsharded, though the step clears its own."""
    peaks = run_ranks(script("measuring.accumulated"), tmp_path, 2, wrapped)
    assert 0.8 < max(peaks) <= 1
