"""What a module needs, by its trace on fake tensors, against real steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.support.live_bytes import LiveBytes
from torchbudget.cost.dense import DenseCost
from torchbudget.errors import CostError


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


def test_an_output_without_tensors_is_refused():
    with pytest.raises(CostError, match="output contains no tensor"):
        DenseCost.of((3,), (3,), module=Hidden(3, 3))
