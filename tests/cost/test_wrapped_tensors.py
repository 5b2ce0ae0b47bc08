"""Tensors made of tensors: quantized weights, jagged batches, sparse gradients and matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.support.live_bytes import allocated
from tests.support.steps import SGD, Step, measured_with, step_of
from torchbudget import measure_cost, memory_summary, trace_peak_bytes
from torchbudget.distributed import part_bytes, plain_parts
from torchbudget.errors import CostError

WIDTH = 64

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")


class Int8(torch.Tensor):
    """A weight in int8, with a scale for each row: a wrapper, as quantization libraries make it."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Int8:
        options: Any = {"dtype": scale.dtype, "device": codes.device}
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, **options)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Int8:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach())
        args, kwargs = tree_map_only(cls, lambda one: one.codes * one.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class Adjacency(nn.Module):
    """A product with a sparse matrix, which is a buffer."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("matrix", matrix)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.matrix @ self.layer(batch).reshape(-1, WIDTH).T


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.ReLU(), nn.Linear(512, WIDTH))
    model[0].weight = nn.Parameter(Int8.of(model[0].weight.detach()), requires_grad=False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "quantized weights": quantized,
    "a sparse matrix": lambda: Adjacency(torch.eye(WIDTH).to_sparse()),
    "compressed rows": lambda: Adjacency(torch.eye(WIDTH).to_sparse_csr()),
    "sparse gradients": lambda: nn.Embedding(1000, WIDTH, sparse=True),
}


def trained(parameters: Any) -> torch.optim.Optimizer:
    return SGD([one for one in parameters if one.requires_grad])


def squared(model: nn.Module) -> Step:
    return step_of(lambda batch: model(batch).square().sum(), model, optimizer=trained)


def batch_for(model: nn.Module, n: int, size: int) -> torch.Tensor:
    if isinstance(model, nn.Embedding):
        return torch.randint(0, 1000, (n, size))
    return torch.ones(n, size, WIDTH)


def dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    is_sparse = tensor.layout is not torch.strided
    return [one.clone() for one in ([tensor.to_dense()] if is_sparse else plain_parts(tensor))]


@pytest.mark.parametrize("name", ["quantized weights", "compressed rows"])
def test_traced_bytes_are_those_of_the_parts(name: str) -> None:
    """A trace counts what torch's profiler counts; buffers of sparse products are left out."""
    torch.manual_seed(0)
    model = MODELS[name]()
    step = squared(model)
    state = sum(map(part_bytes, [*model.parameters(), *model.buffers()]))

    def work() -> None:
        step(batch_for(model, 8, 100))

    work()
    real = state + allocated(work)
    assert trace_peak_bytes(step, batch_for(model, 8, 100)) == pytest.approx(real, rel=2e-2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_measuring_leaves_the_parts_as_they_were(name: str, runs: bool) -> None:
    """Values are restored, bit for bit; nothing dies of what has no storage."""
    torch.manual_seed(0)
    model = MODELS[name]()
    step, tensors = squared(model), [*model.parameters(), *model.buffers()]
    before = [dense(one) for one in tensors]
    if runs:
        measured_with(200, step, partial(batch_for, model), max_size=100)
    else:
        with suppress(CostError):  # sparse outputs are not traced
            trace_peak_bytes(step, batch_for(model, 8, 100))
    for old, now in zip(before, map(dense, tensors), strict=True):
        assert all(map(torch.equal, old, now))


def test_a_jagged_batch() -> None:
    """Torch cannot trace it: the error says so, and "auto" runs the step."""
    model = nn.Linear(WIDTH, WIDTH)
    step = step_of(lambda batch: model(batch).values().square().sum(), model)

    def make(n: int, size: int) -> torch.Tensor:
        rows = [torch.ones(size, WIDTH) for _ in range(n)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    with pytest.raises(CostError, match="fake tensors"):
        measure_cost(step, make, max_size=50, method="trace")
    cost = measured_with(50, step, make, max_size=50)
    assert any(note.startswith("only run") for note in cost.notes)


def test_a_summary_counts_the_parts() -> None:
    """Weights in int8 take a byte an element, and a scale a row."""
    total = memory_summary(quantized()).total
    assert total.weight_bytes == 512 * WIDTH + 512 * 4 + 4 * (512 * WIDTH + WIDTH)
    matrix = torch.eye(WIDTH).to_sparse()
    layer_bytes = 4 * (WIDTH + 1) * WIDTH
    assert memory_summary(Adjacency(matrix)).total.weight_bytes == WIDTH * 20 + layer_bytes
