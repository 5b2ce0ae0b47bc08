"""What an optimizer keeps for each parameter."""

import pytest
import torch
from torch import nn

from torchbudget.cost.dense import DenseCost
from torchbudget.errors import CostError

O = torch.optim  # noqa: E741


STATES = {
    "sgd": (lambda p: O.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: O.SGD(p, lr=0.1, momentum=0.9), 1),
    "adam": (O.Adam, 2),
    "adamw": (O.AdamW, 2),
    "amsgrad": (lambda p: O.AdamW(p, amsgrad=True), 3),
    "fused": (lambda p: O.Adam(p, fused=True), 2),
    "adagrad": (O.Adagrad, 1),
    "rmsprop": (O.RMSprop, 1),
    "rmsprop_all": (lambda p: O.RMSprop(p, momentum=0.9, centered=True), 3),
    "adadelta": (O.Adadelta, 2),
    "adamax": (O.Adamax, 2),
    "factored": (O.Adafactor, 0),
}


def states_of(module, optimizer):
    """The states per parameter in the prediction."""
    with_states = DenseCost.of((4,), (6,), module=module, optimizer=optimizer)
    without = DenseCost.of((4,), (6,), module=module)
    trained = sum(p.numel() for p in module.parameters()) * 4
    return (with_states.fixed_bytes - without.fixed_bytes) / trained


@pytest.mark.parametrize("name", STATES)
def test_states_are_counted_by_stepping(name):
    """For a class, an instance that has not stepped, and one that has."""
    make, states = STATES[name]
    module = nn.Linear(4, 6)
    assert states_of(module, make) == states
    optimizer = make(module.parameters())
    before = module.weight.detach().clone()
    assert states_of(module, optimizer) == states
    assert torch.equal(module.weight, before)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert states_of(module, optimizer) == states


def test_asking_does_not_step_the_users_optimizer():
    """Neither through a scheduler's patch of `step` nor through hooks."""
    module = nn.Linear(4, 6)
    optimizer = torch.optim.Adam(module.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    assert states_of(module, optimizer) == 2
    assert not calls
    assert not optimizer.state
    assert optimizer.step.__wrapped__ is not None
    assert getattr(optimizer, "_opt_called", False) is False


class InNumPy(torch.optim.SGD):
    """An optimizer whose step leaves torch, so that fake tensors cannot follow it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().numpy()[:] -= parameter.grad.numpy()


def test_an_optimizer_that_refuses_fake_tensors_is_named():
    """The given one is not stepped for it, either."""
    module = nn.Linear(4, 6)
    before = module.weight.detach().clone()
    for optimizer in (InNumPy, InNumPy(module.parameters())):
        with pytest.raises(CostError, match=r"InNumPy .*fake tensors; .*number of states"):
            DenseCost.of((4,), (6,), module=module, optimizer=optimizer)
    assert torch.equal(module.weight, before)


def test_groups_with_options_of_their_own_are_charged_the_largest():
    module = nn.Linear(4, 6)
    groups = [{"params": [module.weight], "momentum": 0.9}, {"params": [module.bias]}]
    assert states_of(module, torch.optim.SGD(groups, lr=0.1)) == 1


def test_options_that_ask_for_a_gpu_are_no_obstacle():
    module = nn.Linear(4, 6)
    assert states_of(module, O.Adam(module.parameters(), capturable=True)) == 2


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, lambda _: None, -1, True, 1.5, "adam"])
def test_an_unknown_optimizer_says_what_to_do(optimizer):
    with pytest.raises(CostError, match="number of states"):
        DenseCost.of((4,), (6,), module=nn.Linear(4, 6), optimizer=optimizer)
