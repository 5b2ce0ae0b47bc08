"""Traces with symbols have the bytes of concrete ones, wherever their conditions hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.support.model_classes import CLASSES
from tests.support.steps import Step, of_shape, step_of
from torchbudget import PadCollate, measure_cost, trace_peak_bytes
from torchbudget.cost.batch_recipe import Recipe, batch_bytes, leaves_of
from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.pieces import EXACT
from torchbudget.cost.tracing import Tracer, ValueDependentError
from torchbudget.errors import MeasureWarning
from torchbudget.restoring import TrainingState


def training(forward: Callable[..., torch.Tensor], *layers: nn.Module) -> Step:
    adam = torch.optim.AdamW
    return step_of(lambda one: forward(one, *layers).square().mean(), *layers, optimizer=adam)


def frames(n: int, size: int) -> torch.Tensor:
    return torch.zeros(n, size, 16)


def compare(
    step: Step,
    make: Callable[[int, Any], Any],
    shapes: list[tuple[int, ...]],
    *,
    learned: list[tuple[int, ...]] | None = None,
) -> None:
    """Trace with symbols at the first shape, and compare it with concrete traces at all."""
    batch = partial(of_shape, make)
    tracer = Tracer(step, batch, TrainingState(step))
    learned = learned or [(n, size) for n in (3, 5) for size in (16, 20, 37)]
    trace = tracer.symbolic(Recipe(batch, learned), shapes[0])
    for shape in shapes:
        assert trace.piece([shape]).holds([shape]) == EXACT
        assert trace.peak(shape) == tracer.concrete(shape).peak(shape)


def padded(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return layer(F.pad(x, (0, 0, 0, -x.shape[1] % 16)))


def interpolated(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    half = layer(x)[:, ::2].mT
    up = [F.interpolate(half, size=x.shape[1], mode=mode) for mode in ("nearest", "linear")]
    return up[0] + up[1]


def resized(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    image = layer(x)[:, None]
    size = (2 * x.shape[1], 30)
    return F.interpolate(image, size, mode="bilinear") + F.interpolate(image, size, mode="bicubic")


def one_hot(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    places, classes = layer(x).argmax(-1).clamp(max=7), x.shape[1] // 2 + 8
    return F.one_hot(places, classes).float() @ torch.ones(classes, 16) * layer(x)


def contrastive(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    z = layer(x).mean(1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def capacity(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    rows = layer(x).flatten(0, 1)
    return torch.zeros(math.ceil(1.25 * len(rows) / 4), 16) + rows.mean(0)


def biased(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    hidden, length = layer(x), x.shape[1]
    bias = hidden.new_zeros(length, length)[None].expand(len(x), -1, -1)
    return bias.baddbmm(hidden, hidden.mT)


def grouped(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    rows = layer(x).flatten(0, 1)
    experts = rows.new_zeros(4, 16, 8, requires_grad=True)
    return torch._grouped_mm(rows, experts, offs=torch.arange(1, 5, dtype=torch.int32))


def products(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    heads = layer(x).unflatten(-1, (4, 4)).transpose(1, 2)
    weights = (heads @ heads.mT).softmax(-1)
    return torch.matmul(weights, heads) + weights.matmul(heads[0, :1])


def indexed(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """`:` beside other indexes; the last position, and one that follows from the shape."""
    y, last = layer(x), x.shape[1] - 1
    return y[:, 1:] * y[:, :-1] + y[:, 0, None] + y[:, last, None] * y[:, :1, ..., -1:]


@pytest.mark.parametrize(
    "forward",
    [
        padded, interpolated, resized, one_hot, contrastive, capacity, biased, grouped, products,
        indexed,
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_what_is_mended(forward: Any) -> None:
    """Functions that take only numbers: padding, interpolation, one_hot, len, products."""
    shapes = [(11, 50), (7, 33), (64, 200), (2, 17)]
    compare(training(forward, nn.Linear(16, 16)), frames, shapes)


def test_the_fast_path_of_transformers_is_taken() -> None:
    """In evaluation mode it is: a mode for functions would turn it off."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()

    @torch.no_grad()
    def step(batch: torch.Tensor) -> None:
        layer(batch)

    compare(step, frames, [(11, 50), (7, 33), (64, 200)])


class Pair(NamedTuple):
    x: torch.Tensor
    most: int


@pytest.mark.parametrize(
    "kind",
    [
        dict, lambda **items: list(items.values()), lambda **items: Pair(*items.values()),
        SimpleNamespace,
    ],
    ids=["dict", "list", "named tuple", "object"],
)  # fmt: skip
def test_ints_and_tensors_in_any_container(kind: Any) -> None:
    """An int that follows the shape is a symbol too."""

    def make(n: int, size: int) -> Any:
        return kind(x=frames(n, 2 * size + 1), most=size)

    def forward(batch: Any, layer: nn.Module) -> torch.Tensor:
        x, most = leaves_of(batch)
        return layer(x[:, :most])

    compare(training(forward, nn.Linear(16, 16)), make, [(11, 50), (7, 33), (64, 200)])


def test_batches_of_this_library() -> None:
    """Their mask and their lengths, which are arrays of NumPy in the batch, are symbolic too."""
    collate = PadCollate()

    def make(n: int, size: int) -> Any:
        return collate([{"x": torch.zeros(size, 16), "y": torch.zeros(size)}] * n)

    def forward(batch: Any, layer: nn.Module) -> torch.Tensor:
        hidden = (layer(batch["x"]) * batch.mask[..., None]).sum(1)
        return hidden / batch.lengths[:, None] + batch["y"].mean()

    compare(training(forward, nn.Linear(16, 16)), make, [(11, 50), (7, 33), (64, 200)])


def test_nodes_and_edges() -> None:
    def make(n: int, size: tuple[int, int]) -> Any:
        return torch.zeros(n * size[0], 16), torch.zeros(2, n * size[1], dtype=torch.long)

    def forward(batch: Any, layer: nn.Module) -> torch.Tensor:
        x, (source, target) = batch
        return torch.zeros_like(x).index_add(0, target, layer(x)[source])

    step = training(forward, nn.Linear(16, 16))
    learned = [(n, a, b) for n in (3, 5) for a in (20, 30) for b in (70, 100)]
    compare(step, make, [(11, 50, 170), (64, 20, 300), (2, 9, 31)], learned=learned)
    cost = measure_cost(step, make, max_size=(200, 900), method="trace")
    need = cost.batch_bytes(8, (100, 500))
    packed = cost.packed()
    assert (
        need <= packed.base_bytes + 8 * packed.item_bytes((100, 500)) <= 1.4 * need
    )  # the largest of each share


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda n, size: [frames(n, size), [1] * n], "structure changes"),
        (lambda n, size: frames(n, size * size), "depends on more than n"),
        (lambda n, size: frames(n, size).mT, "not contiguous"),
        (lambda n, size: [frames(n, size), 1.5 * size], "is not an int"),
    ],
)
def test_batches_that_symbols_cannot_describe(make: Any, said: str) -> None:
    """The reason is said; the grid then interpolates concrete traces."""
    shapes = [(n, size) for n in (3, 5) for size in (16, 20, 37)]
    with pytest.raises(UntraceableError, match=said):
        Recipe(lambda shape: make(*shape), shapes)


def test_what_depends_on_values_is_refused() -> None:
    """A mask as an index; an integer that becomes a shape, while a divisor is none."""

    def masked(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x)[x[..., 0] > 0]

    def cut(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x[:, : int((x[0, :, 0] > 0).sum())])

    def divided(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x) / int((x > 0).sum())

    for forward in (masked, cut):
        with pytest.raises(ValueDependentError):
            compare(training(forward, nn.Linear(16, 16)), frames, [(11, 50)])
    compare(training(divided, nn.Linear(16, 16)), frames, [(11, 50), (7, 33)])


def test_a_branch_makes_a_piece() -> None:
    """Each side is exact, and labelled so; so is a batch of one sample that takes another way."""

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        hidden = layer(x)
        if x.shape[1] > 128:
            return hidden
        return (hidden @ hidden.mT).softmax(-1) @ hidden

    step = training(forward, nn.Linear(16, 16))
    cost = measure_cost(step, frames, max_size=512, method="trace")
    for shape in [(50, 128), (50, 129), (1, 128), (1, 500), (200, 64), (2, 65), (3, 127)]:
        assert cost.traced_bytes(*shape) == trace_peak_bytes(step, frames(*shape))
        assert cost.label(*shape) in ("exact", "tested")
        assert cost.batch_bytes(*shape) >= cost.traced_bytes(*shape)
    assert cost.grid is None


def test_one_size_that_no_trace_holds() -> None:
    """Where samples are cut to a length: it costs what the next longer size does."""
    step = training(lambda x, layer: layer(x[:, :77]), nn.Linear(16, 16))
    cost = measure_cost(step, frames, max_size=300, min_size=2, method="trace")
    assert [cost.label(2, size) for size in (76, 77, 78)] == ["exact", "raised", "exact"]
    assert cost.batch_bytes(50, 76) < cost.batch_bytes(50, 77) == cost.batch_bytes(50, 78)
    assert 100 < cost.capacity(300, 2**28) <= cost.capacity(77, 2**28)


@pytest.mark.slow
def test_lengths_that_become_numbers() -> None:
    """`int(L)`, rounded up to a multiple: stairs are not taken for a line."""

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(F.pad(x, (0, 0, 0, -int(x.shape[1]) % 24)))

    step = training(forward, nn.Linear(16, 16))
    cost = measure_cost(step, frames, max_size=64, min_size=8, size_multiple=8, method="trace")
    for shape in product((1, 2, 3, 40, 3000), range(8, 65, 8)):
        real = trace_peak_bytes(step, frames(*shape))
        assert cost.batch_bytes(*shape) >= real
        assert cost.label(*shape) == "raised" or cost.traced_bytes(*shape) == real


@pytest.mark.slow
def test_windows_of_images() -> None:
    """Both axes are padded to whole windows, in each of which positions attend to each other."""

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        x = layer(x)
        height, width = x.shape[2:]
        padded = F.pad(x, (0, -width % 7, 0, -height % 7))
        windows = padded.unflatten(3, (-1, 7)).unflatten(2, (-1, 7))
        windows = windows.permute(0, 2, 4, 3, 5, 1).flatten(3, 4)
        windows = (windows @ windows.mT).softmax(-1) @ windows
        folded = windows.unflatten(3, (7, 7)).permute(0, 5, 1, 3, 2, 4)
        return x + folded.flatten(4, 5).flatten(2, 3)[:, :, :height, :width]

    step = training(forward, nn.Conv2d(3, 8, 2, 2))
    make = lambda n, size: torch.zeros(n, 3, *size)  # noqa: E731
    cost = measure_cost(step, make, max_size=(96, 96), min_size=(8, 8), method="trace")
    assert cost.grid is None
    for n, *size in product((1, 2, 30), (8, 29, 58, 96), (8, 17, 44, 96)):
        peak = trace_peak_bytes(step, make(n, size))
        assert cost.traced_bytes(n, size) == peak or cost.label(n, size) == "raised"
        assert peak <= cost.batch_bytes(n, size) < 2**30


def power(base: float, least: int) -> int:
    found = 1
    while found < least:
        found = max(found + 1, int(found * base))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("base", [2, 1.5])
def test_stairs_that_are_interpolated(base: float) -> None:
    """No shape is too low if lengths are padded by Python's numbers, wherever the stairs are."""
    rng = np.random.default_rng(0)

    def forward(x: torch.Tensor, one: nn.Module, other: nn.Module) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, power(base, int(x.shape[1])) - x.shape[1]))
        return other(one(padded).relu())

    step = training(forward, nn.Linear(16, 32), nn.Linear(32, 16))
    cost = measure_cost(step, frames, max_size=130, min_size=4, method="trace")
    assert cost.grid is not None
    assert any(cost.grid.jumps)
    sizes = [*rng.integers(4, 131, 30).tolist(), 16, 17, 32, 33, 64, 65, 96, 97, 128, 129]
    numbers = np.rint(256 ** rng.random(len(sizes))).astype(int).tolist()
    shapes = [*zip(numbers, sizes, strict=True)]
    real = np.array([trace_peak_bytes(step, frames(*shape)) for shape in shapes])
    found = np.array([cost.batch_bytes(*shape) for shape in shapes])
    assert (found >= 0.998 * real).all()
    assert np.median(found / real) < 1.03


@pytest.mark.slow
def test_stairs_on_two_axes() -> None:
    """Bytes that jump on one axis and grow smoothly on another: none is too low."""

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        width = int(x.shape[2])
        hidden = layer(F.pad(x, (0, 0, 0, power(2, width) - width)))
        return torch.stack([row.exp() for row in hidden.unbind(1)])

    step, rng = training(forward, nn.Linear(4, 8)), np.random.default_rng(0)
    make = lambda n, size: torch.zeros(n, *size, 4)  # noqa: E731
    cost = measure_cost(step, make, max_size=(12, 80), min_size=(2, 8), method="trace")
    for n in np.rint(200 ** rng.random(30)).astype(int).tolist():
        size = int(rng.integers(2, 13)), int(rng.integers(8, 81))
        assert cost.batch_bytes(n, size) >= 0.998 * trace_peak_bytes(step, make(n, size))


@pytest.mark.slow
def test_late_turns_of_a_loop() -> None:
    """Turns that begin to keep something late are not taken to be like the first ones."""

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        hidden, kept = layer(x), []
        state = hidden[:, 0]
        for at in range(x.shape[1]):
            state = torch.tanh(hidden[:, at] + state)
            kept += [state.exp()] if at >= 14 else []
        return torch.stack([state, *kept], 1)

    step = training(forward, nn.Linear(16, 16))
    cost = measure_cost(step, frames, max_size=40, min_size=4, method="trace")
    for shape in product((2, 30, 200), (4, 9, 14, 15, 17, 23, 40)):
        real = trace_peak_bytes(step, frames(*shape))
        assert cost.batch_bytes(*shape) >= 0.998 * real
        assert cost.label(*shape) == "interpolated" or cost.traced_bytes(*shape) == real


@pytest.mark.slow
def test_bytes_that_are_no_polynomial_of_n_are_interpolated() -> None:
    """Even if they are the peak of few samples alone, and not where the step was traced."""

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        x.new_zeros(10**5 // x.shape[0])
        return layer(x)

    step = training(forward, nn.Linear(16, 16))
    cost = measure_cost(step, frames, max_size=32, method="trace")
    assert 4 * 10**5 <= cost.batch_bytes(1, 1) <= cost.batch_bytes(50, 1)
    assert cost.capacity(1, 2**18) == 0 < cost.capacity(1, 2**20)


def over_the_length(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    hidden = x[:, 0]
    for t in range(1, x.shape[1]):
        hidden = layer(hidden + x[:, t]).tanh()
    return hidden


def of_a_cell(x: torch.Tensor, layer: nn.Module, cell: nn.GRUCell) -> torch.Tensor:
    """Its kernel turns the number of samples into a number as well."""
    hidden = x.new_zeros(len(x), 16)
    for one in layer(x).unbind(1):
        hidden = cell(one, hidden)
    return hidden


def of_chunks(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    parts = (checkpoint(layer, one, use_reentrant=False) for one in x.flatten(0, 1).split(24))
    return torch.stack([part.square().sum() for part in parts])


def of_slices(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Each turn has a condition of its own, and the last slice may be shorter."""
    rows = x.flatten(0, 1)
    parts = [layer(rows[at : at + 24]).exp() for at in range(0, len(rows), 24)]
    return torch.stack([part.square().sum() for part in parts])


def of_levels(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Each level is half as long: no number grows as much in each turn."""
    while x.shape[1] > 1:
        x = F.max_pool1d(layer(x).mT, 2).mT
    return x


@pytest.mark.parametrize(
    "forward",
    [
        over_the_length,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (of_slices, of_a_cell, of_chunks)),
        pytest.param(of_levels, marks=pytest.mark.nightly),
    ],
)
def test_loops(forward: Any) -> None:
    """Any number of turns is one expression; what only looks like it is interpolated."""
    step = training(forward, nn.Linear(16, 16), *[nn.GRUCell(16, 16)] * (forward is of_a_cell))
    cost = measure_cost(step, frames, max_size=20, min_size=2, method="trace", budget="1GiB")
    rng = np.random.default_rng(0)
    for n, size in [(1, 20), (3, 17), (200, 2), (37, 13), *rng.integers(2, 20, (8, 2)).tolist()]:
        peak = trace_peak_bytes(step, frames(n, size))
        is_known = cost.label(n, size) in ("exact", "tested")
        assert is_known or forward is of_levels
        assert cost.traced_bytes(n, size) == peak or not is_known
        assert cost.batch_bytes(n, size) - cost.offset >= 0.99 * peak


def over_padded_chunks(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """What always has the same value, as the length of a chunk, is no second loop."""
    chunks = layer(F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)))
    state = chunks[:, 0]
    for at in range(1, chunks.shape[1]):
        state = (state + chunks[:, at]).tanh()
    return state


def with_linspace(fields: list[torch.Tensor], layer: nn.Module) -> torch.Tensor:
    """It turns the second axis into a number, also of one sample."""
    hidden, targets = layer(fields[0]), fields[1]
    hidden = hidden.exp().sin() if len(hidden) == 1 else hidden
    at = torch.linspace(0, 1, targets.shape[1])[:, None].expand(-1, 16)
    found = torch.einsum("hc,npc->nhp", at, hidden).softmax(-1) @ hidden
    return layer(found) * targets[..., None]


def with_an_and(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Where the first part is false, a trace knows nothing of the second one."""
    rare = x.shape[1] % 4 == 0 and x.shape[1] % 3 != 1
    return layer(x).exp().sin().cos() if rare else layer(x)


@pytest.mark.parametrize(
    ("forward", "least", "most"),
    [
        (with_an_and, 4, 64),
        pytest.param(over_padded_chunks, 2, 60, marks=pytest.mark.slow),
        pytest.param(with_linspace, (8, 4), (400, 100), marks=pytest.mark.slow),
    ],
)
def test_every_shape_is_known(forward: Any, least: Any, most: Any) -> None:
    step = training(forward, nn.Linear(16, 16))
    pairs = lambda n, size: [torch.zeros(n, size[0], 16), torch.zeros(n, size[1])]  # noqa: E731
    make = frames if isinstance(most, int) else pairs
    cost = measure_cost(step, make, max_size=most, min_size=least, method="trace")
    for n, share in product((1, 2, 130), (0, 0.14, 0.4, 0.54, 0.94, 1)):
        size = np.rint(np.add(least, share * np.subtract(most, least))).astype(int).tolist()
        assert cost.label(n, size) in ("exact", "tested")
        assert cost.traced_bytes(n, size) == trace_peak_bytes(step, make(n, size))


FEW = "encoder, padding masked", "spectrogram", "U-Net", "graphs"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.nightly)
        for name in CLASSES
    ],
)
def test_classes(name: str) -> None:
    """Where a shape is called exact it is, and none is below what it needs by 0.2 %.

    Bytes are monotone in the number of samples and on each axis.
    """
    case = CLASSES[name]()
    ends = np.atleast_1d(case.max_size).tolist()
    options: Any = {"max_size": case.max_size, "min_size": [case.min_size] * len(ends)}
    try:
        with np.errstate(all="ignore"):
            cost = measure_cost(
                case.step, case.make_batch, method="trace", size_multiple=case.multiple, **options
            )
    except ValueDependentError:
        return

    tracer = Tracer(case.step, partial(of_shape, case.make_batch), TrainingState(case.step))
    rng = np.random.default_rng(3)
    low = np.log([1, *[case.min_size] * len(ends)])
    drawn = np.exp(rng.uniform(low, np.log([case.max_n, *ends]), (5, len(low)))).round().astype(int)
    drawn[:, 1:] = np.minimum(-(-drawn[:, 1:] // case.multiple) * case.multiple, ends)
    for n, *size in [(1, *ends), *drawn.tolist()]:
        peak = tracer.concrete((n, *size)).peak((n, *size))
        asked = tuple(size) if len(size) > 1 else size[0]
        assert cost.label(n, asked) != "exact" or cost.traced_bytes(n, asked) == peak
        assert cost.batch_bytes(n, asked) >= (1 - 0.002) * peak
    shapes = np.exp(rng.uniform(low, np.log([2 * case.max_n, *ends]), (300, len(low)))).astype(int)
    for axis, most in enumerate([2 * case.max_n, *ends]):
        more = shapes.copy()
        more[:, axis] = rng.integers(shapes[:, axis], np.maximum(shapes[:, axis], most) + 1)
        few, many = (
            cost.batch_bytes(one[:, 0], one[:, 1:] if len(ends) > 1 else one[:, 1])
            for one in (shapes, more)
        )
        assert (few <= many).all()


def test_bytes_of_batches_of_any_type() -> None:
    """Tensors and arrays in attributes count, each once."""
    x = torch.zeros(5, 10, 64)
    batch = [SimpleNamespace(a=x, b=[x, {"y": np.zeros((5, 10))}, "text"])]
    assert batch_bytes(batch) == 5 * 10 * (4 * 64 + 8)


def test_tensors_are_no_sequences_after_a_trace() -> None:
    """As before it; else `torch.tensor` of a list of losses asks for their `len`, and raises."""
    step = training(lambda x, layer: layer(x)[:, :2, None], nn.Linear(16, 16))
    measure_cost(step, frames, max_size=64, method="trace")
    assert torch.tensor([torch.tensor(2.0), torch.tensor(3.0)]).tolist() == [2, 3]
    assert not {"__getitem__", "__matmul__", "matmul"} & vars(torch.Tensor).keys()


def test_a_leak_is_said() -> None:
    kept: list[torch.Tensor] = []

    def forward(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        kept.append(layer(x).detach())
        return layer(x)

    with pytest.warns(MeasureWarning, match="allocated: does it keep losses"):
        measure_cost(training(forward, nn.Linear(16, 16)), frames, max_size=64, method="trace")
    assert not kept
