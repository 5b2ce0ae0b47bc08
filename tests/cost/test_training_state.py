"""What a step changes is found and restored, and a step that is not a full one is refused."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.training_cases import CASES, Training
from torchbudget import measure_cost, trace_peak_bytes
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.process_tree import process_memory


def everything(training: Training) -> list[Any]:
    """All that measuring must leave as it was, bit for bit."""
    found = [t.clone() for t in training.model.state_dict().values()]
    found += [torch.tensor([part.training for part in training.model.modules()])]
    found += [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
    for parameter in training.model.parameters():
        found += [
            torch.as_tensor(v).clone() for v in training.optimizer.state.get(parameter, {}).values()
        ]
    found += [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(int))]
    return [*found, torch.tensor(random.getstate()[1])]


def same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("name", "method"), [("encoder, momentum", "trace"), ("images", "auto"), ("heavy", "auto")]
)
def test_nothing_is_changed(name: str, warm: bool, method: str) -> None:
    """Parameters, buffers, gradients, optimizer state and generators are as before, bit for bit.

    Whether the optimizer has stepped before or not, and whether gradients are there or not.
    """
    training = CASES[name]()
    if warm:
        training.step(training.make_batch(2, training.max_size))
        for parameter in training.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        training.model.eval()
    parameters = list(training.model.parameters())
    before, states = everything(training), len(training.optimizer.state)
    torch.manual_seed(3)
    before[-3] = torch.get_rng_state()
    parameter_bytes = sum(parameter.nbytes for parameter in parameters)
    budget = process_memory().resident_bytes + 120 * 2**20
    # The optimizer's own temporaries; at first its two averages too.
    budget += (3 if warm else 5) * parameter_bytes
    measure_cost(
        training.step,
        training.make_batch,
        max_size=training.max_size,
        method=method,
        budget=budget,
    )
    assert same(before, everything(training))
    assert all(map(lambda a, b: a is b, parameters, training.model.parameters()))
    assert len(training.optimizer.state) == states
    loss = training.step(training.make_batch(2, training.max_size))
    assert torch.isfinite(loss)


class Trainer(nn.Module):
    """What a step changes beside parameters: everything that a model may hold."""

    __slots__ = ("noise",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.average = torch.zeros(8)
        self.noise = torch.Generator().manual_seed(1)
        self.draws = np.random.default_rng(2)
        self.chance = random.Random(3)
        self.history: list[float] = []
        self.optimizer = torch.optim.AdamW(self.layer.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1.0, 100)

    def fit(self, batch: torch.Tensor) -> None:
        loss = self.layer(batch + torch.randn(8, generator=self.noise)).square().mean()
        self.draws.random(3)
        self.chance.random()
        self.history.append(1.0)
        self.average.mul_(0.9).add_(self.layer.weight.detach().mean(0))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        states = [self.layer.weight.clone(), self.average.clone(), self.noise.get_state()]
        more = [self.draws.bit_generator.state, self.chance.getstate(), list(self.history)]
        more += [self.schedule.state_dict(), self.scaler.state_dict()]
        more += [len(self.optimizer.state), self.optimizer.param_groups[0]["lr"]]
        return [[s.tolist() for s in states], repr(more)]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("method", ["trace", "auto"])
def test_everything_in_a_trainer_is_restored(warm: bool, method: str) -> None:
    """Scaler, schedule, optimizer in the module, generators, lists, plain tensors; hooks stay."""
    trainer = Trainer()
    if warm:
        trainer.fit(torch.ones(2, 4, 8))
    before = trainer.state()
    calls: list[int] = []
    handle = trainer.layer.register_forward_hook(lambda *_: calls.append(1))
    cost = measure_cost(
        trainer.fit,
        lambda n, size: torch.ones(n, size, 8),
        max_size=2000,
        method=method,
        budget=process_memory().resident_bytes + 200 * 2**20,
    )
    assert method == "trace" or not cost.notes
    assert trainer.state() == before
    calls.clear()
    handle.remove()
    trainer.fit(torch.ones(2, 4, 8))
    assert not calls
    assert trainer.state()[0] != before[0]


def test_an_optimizer_that_is_not_found() -> None:
    """One that the step reaches by a way that is not searched could not be restored."""
    model = nn.Linear(3, 3)
    hidden = {torch.optim.SGD(model.parameters(), lr=0.1): 0}

    def step(batch: Any) -> None:
        model(batch).sum().backward()
        next(iter(hidden)).step()

    with pytest.raises(CostError, match="does not refer to"):
        trace_peak_bytes(step, torch.zeros(2, 3))


def test_no_optimizer_step() -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(MeasureWarning, match="no optimizer stepped"):
        trace_peak_bytes(lambda batch: model(batch).sum().backward(), torch.zeros(2, 3))


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
