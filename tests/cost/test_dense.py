"""Samples of one shape: how many fit, and what a module and its optimizer need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.support.live_bytes import LiveBytes
from torchbudget.budget import MemoryBudget
from torchbudget.cost.dense import DenseCost
from torchbudget.errors import BudgetError, CostError, OptionError, OversizeError

LIMIT = 2**63 - 1


amounts = st.integers(0, 2**40) | st.integers(0, 2**53 - 1)


costs = st.builds(
    DenseCost,
    fixed_bytes=amounts,
    sample_bytes=st.integers(1, 2**40),
    floor_bytes=amounts,
    host_sample_bytes=st.integers(1, 2**40),
    variants_per_read=st.integers(1, 9),
)


@given(cost=costs, one=st.integers(0, 100))
def test_the_padded_size_is_ignored_but_for_its_shape(cost, one):
    """Both methods broadcast as the other cost models do, and give int64."""
    for shape in [(), (3,), (2, 3), (0,)]:
        for number in (one, np.full((2, 1, 1), one)):
            expected = np.broadcast_shapes(np.shape(number), shape)
            sizes = np.arange(int(np.prod(shape))).reshape(shape)
            result = cost.batch_bytes(number, sizes)
            assert (result.dtype, result.shape) == (np.int64, expected)
            result = cost.capacity(sizes, number)
            assert (result.dtype, result.shape) == (np.int64, expected)


@pytest.mark.parametrize("n", [2**63, 2**64, 2**100, [2**63, 2**63 + 1]])
def test_numbers_past_64_bits_are_refused(n):
    with pytest.raises(CostError, match="n must be"):
        DenseCost(sample_bytes=1).batch_bytes(n, 0)
    with pytest.raises(CostError, match="budget_bytes must be"):
        DenseCost(sample_bytes=1).capacity(0, n)


@pytest.mark.parametrize("n", [-1, 1.0, "1", None, True, [1, -1]])
def test_what_is_no_number_of_samples_is_refused(n):
    with pytest.raises(CostError):
        DenseCost(sample_bytes=1).batch_bytes(n, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"sample_bytes": 0},
        {"sample_bytes": -1},
        {"sample_bytes": 1, "unit_bytes": 2},
        {"sample_bytes": True},
        {"sample_bytes": "1 KiB"},
        {"sample_bytes": 2**63},
        {"sample_bytes": 1, "fixed_bytes": -1},
        {"sample_bytes": 1, "floor_bytes": None},
        {"sample_bytes": 1, "variants_per_read": 0},
    ],
)
def test_what_is_no_number_of_bytes_is_refused(values):
    with pytest.raises((CostError, OptionError), match=list(values)[-1]):
        DenseCost(**values)


@given(cost=costs, budget=st.integers(1, LIMIT), preferred=st.integers(1, 2**40))
def test_a_batch_fits_is_whole_reads_and_near_what_was_wanted(cost, budget, preferred):
    """A multiple of the read, within the budget; the nearest one wherever that fits."""
    variants = cost.variants_per_read
    if int(cost.capacity(0, budget)) < variants:
        for ask in (cost.largest_batch, lambda b: cost.batch_for(preferred, b)):
            with pytest.raises(OversizeError, match=str(max(cost.fixed_bytes, cost.floor_bytes))):
                ask(budget)
        return
    largest = cost.largest_batch(budget)
    assert largest % variants == 0
    assert largest <= cost.capacity(0, budget) < largest + variants
    batch = cost.batch_for(preferred, budget)
    assert batch % variants == 0
    assert 0 < batch <= largest
    if batch < largest:
        assert 2 * abs(batch - preferred) <= variants or batch == variants


def test_what_the_budget_does_not_limit():
    cost = DenseCost(sample_bytes=1, host_sample_bytes=1, variants_per_read=4)
    with pytest.raises(BudgetError, match="device"):
        cost.largest_batch(MemoryBudget(host=1))
    with pytest.raises(BudgetError, match="host"):
        cost.samples_in_host(MemoryBudget(device=1))
    with pytest.raises(CostError, match="host_sample_bytes"):
        DenseCost(sample_bytes=1).samples_in_host(100)
    assert cost.batch_for(9, MemoryBudget(host=1)) == 8


@pytest.mark.parametrize("preferred", [0, -1, 1.5, True, "8", None])
def test_what_is_no_batch_is_refused(preferred):
    with pytest.raises(OptionError, match="preferred"):
        DenseCost(sample_bytes=1).batch_for(preferred, 10)


def test_without_a_module_a_sample_is_its_input_and_target():
    cost = DenseCost.of((3, 32, 32), (), torch.float16, output_dtype=torch.int64)
    assert cost.sample_bytes == cost.host_sample_bytes == 3 * 32 * 32 * 2 + 8
    assert (cost.fixed_bytes, cost.floor_bytes, cost.variants_per_read) == (0, 0, 1)
    assert DenseCost.of([], (1,)).host_sample_bytes == 8  # a scalar and a number


@pytest.mark.parametrize("shape", [5, None, (0,), (-1, 2), (1.5,), "abc", [[1], 2], [[[1]]]])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(CostError, match="input_shape"):
        DenseCost.of(shape, (1,))


def test_an_optimizer_needs_a_module():
    with pytest.raises(CostError, match="pass module="):
        DenseCost.of((3,), (3,), optimizer=torch.optim.SGD)


# ---------------------------------------------------------------------- modules
# Traces on fake tensors, against real steps.


class Convolutions(nn.Module):
    """Batch norm, dropout, pooling, and a table that its forward stores in the module."""

    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, 5)
        self.cached = None

    def forward(self, images):
        x = functional.relu(self.norm(self.first(images)))
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        self.cached = x.mean((2, 3)).detach()
        return {"logits": self.head(self.dropout(x.mean((2, 3))))}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Tied(nn.Module):
    """One weight that is embedding and head, a frozen layer, two inputs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, scale):
        return self.head(torch.tanh(self.frozen(self.embedding(tokens))) * scale[:, None, None])


def perceptron():
    return nn.Sequential(
        nn.Linear(20, 50), nn.GELU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 5)
    )


def transformer():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


F32, I64 = torch.float32, torch.int64


# module, shapes and dtypes of the inputs, shapes and dtypes of the targets
CASES = {
    "convolutions": (Convolutions, [((3, 12, 12), F32)], [((), I64)]),
    "perceptron": (perceptron, [((20,), F32)], [((5,), F32)]),
    "transformer": (transformer, [((6, 16), F32)], [((6, 16), F32)]),
    "checkpointed": (Checkpointed, [((16,), F32)], [((16,), F32)]),
    "tied": (Tied, [((7,), I64), ((), F32)], [((7,), I64)]),
}


def predict(name, module=None, **options):
    make, inputs, targets = CASES[name]
    return DenseCost.of(
        [shape for shape, _ in inputs],
        [shape for shape, _ in targets],
        [dtype for _, dtype in inputs],
        output_dtype=[dtype for _, dtype in targets],
        module=make() if module is None else module,
        **options,
    )


def real_peak(name, n, make_optimizer):
    """Live tensor bytes at the peak of a real step on a CPU, the third one."""
    make, inputs, targets = CASES[name]
    module = make()
    optimizer = make_optimizer(module.parameters())
    for _ in range(3):
        states = [t for s in optimizer.state.values() for t in tree_leaves(dict(s))]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        existing = [*module.parameters(), *module.buffers(), *gradients]
        existing += [t for t in states if isinstance(t, torch.Tensor) and t.dim()]
        with LiveBytes("cpu") as live:
            for tensor in existing:
                live.count(tensor)
            batch = [torch.zeros((n, *shape), dtype=dtype) for shape, dtype in inputs]
            target = [torch.zeros((n, *shape), dtype=dtype) for shape, dtype in targets]
            output = module(*batch)
            roots = tree_leaves(output)
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            del batch, target, output, roots
            module.cached = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return max(live.history)


@pytest.mark.parametrize("name", CASES)
def test_what_a_sample_adds_is_exact(name):
    """Traced bytes are those of the real forward and backward, to the byte."""
    cost = predict(name, optimizer=torch.optim.SGD)
    first, second = (real_peak(name, n, torch.optim.SGD) for n in (500, 1000))
    assert second - first == 500 * cost.sample_bytes
    if name != "transformer":  # at n = 1 it attends by another path
        assert real_peak(name, 1, torch.optim.SGD) == cost.batch_bytes(1, 0)


def test_fixed_bytes_are_weights_gradients_states_and_buffers():
    """Tied weights once, frozen ones without gradient and state."""
    module = Tied()
    everything = sum(p.numel() for p in module.parameters()) * 4
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad) * 4
    for states, optimizer in [(0, None), (2, torch.optim.Adam), (5, 5)]:
        cost = predict("tied", module=module, optimizer=optimizer)
        state = everything + trained * (1 + states)
        assert cost.floor_bytes == state + (2 * trained if states else 0)
        assert cost.fixed_bytes >= state


def test_a_class_a_factory_and_an_instance_cost_the_same():
    shapes = {"input_shape": (3, 12, 12), "output_shape": (), "output_dtype": I64}
    built = DenseCost.of(**shapes, module=Convolutions(width=7))
    assert DenseCost.of(**shapes, module=lambda: Convolutions(7)) == built
    assert DenseCost.of(**shapes, module=Convolutions(7).to("meta")) == built
    assert DenseCost.of(**shapes, module=Convolutions(7).eval()) == built
    default = DenseCost.of(**shapes, module=Convolutions())
    assert DenseCost.of(**shapes, module=Convolutions) == default


def test_a_context_without_gradients_changes_nothing():
    """The cost is that of training wherever it is asked for."""
    expected = predict("perceptron", optimizer=torch.optim.Adam)
    for context in (torch.no_grad(), torch.inference_mode()):
        module = perceptron()
        with context:
            assert predict("perceptron", module, optimizer=torch.optim.Adam) == expected


def test_the_module_and_the_random_state_stay_as_they_are():
    """Parameters, gradients, buffers, mode, attributes, generators: nothing is touched."""
    module = Convolutions().eval()
    module.head.train()
    expected = predict("convolutions", optimizer=torch.optim.Adam)
    module.first.weight.grad = torch.ones_like(module.first.weight)
    identities = {name: (id(t), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    modes = [part.training for part in module.modules()]
    torch.manual_seed(3)
    random_state = torch.get_rng_state()

    assert predict("convolutions", module=module, optimizer=torch.optim.Adam) == expected

    for name, tensor in module.state_dict(keep_vars=True).items():
        assert id(tensor) == identities[name][0]
        assert torch.equal(tensor, identities[name][1])
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(module.first.weight.grad, torch.ones_like(module.first.weight))
    assert module.second.weight.grad is None
    assert module.cached is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_frozen_module_costs_a_forward():
    module = perceptron().requires_grad_(False)
    cost = predict("perceptron", module=module)
    assert cost.fixed_bytes == sum(p.numel() for p in module.parameters()) * 4
    assert cost.sample_bytes < predict("perceptron").sample_bytes


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Unregistered(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.table = torch.ones(3, device="cpu")

    def forward(self, x):
        return super().forward(x) * self.table


class Similarities(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x @ x.T


class Hidden(nn.Linear):
    def forward(self, x):
        return {super().forward(x)}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: Branches(3, 3), "output contains no tensor"),
        (lambda: Hidden(3, 3), "output contains no tensor"),
        (lambda: Unregistered(3, 3), "fake tensors"),
        (lambda: nn.Linear(5, 3), "fake tensors"),
        (lambda: "no module", "fake tensors"),
        (nn.Linear, "fake tensors"),
        (lambda: nn.LSTM(3, 3), "an RNN"),
        (lambda: Similarities(3, 3), "proportion"),
    ],
)
def test_a_module_that_cannot_be_traced_says_what_to_do(module, said):
    """The error names what is wrong and the bytes to state by hand."""
    with pytest.raises(CostError, match=rf"(?s){said}.*sample_bytes"):
        DenseCost.of((3,), (3,), module=module)


# ---------------------------------------------------------------------- optimizers


O = torch.optim  # noqa: E741


STATES = {
    "sgd": (lambda p: O.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: O.SGD(p, lr=0.1, momentum=0.9), 1),
    "adam": (O.Adam, 2),
    "amsgrad": (lambda p: O.AdamW(p, amsgrad=True), 3),
    "fused": (lambda p: O.Adam(p, fused=True), 2),
    "adagrad": (O.Adagrad, 1),
    "rmsprop": (lambda p: O.RMSprop(p, momentum=0.9, centered=True), 3),
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
    """For a class, an instance that has not stepped, one that has, and their number."""
    make, states = STATES[name]
    module = nn.Linear(4, 6)
    assert states_of(module, make) == states_of(module, states) == states
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
