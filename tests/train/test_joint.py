"""A criterion over the whole batch, with the activations of one micro-batch."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.batches import Encoding
from tests.support.large_steps import difference
from torchbudget import GradAccumulator, PadCollate, joint_backward, trace_peak_bytes
from torchbudget.errors import OptionError, StepError


class Towers(nn.Module):
    """Two encoders of pairs, and the temperature of their contrast, which the criterion uses."""

    def __init__(self, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Dropout(dropout))
        self.right = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        left, right = pair
        return {
            "left": F.normalize(self.head(self.left(left)), dim=1),
            "right": F.normalize(self.head(self.right(right)), dim=1),
        }

    def contrast(self, found: dict[str, Tensor]) -> Tensor:
        """InfoNCE over all pairs, both ways."""
        scores = found["left"] @ found["right"].T * self.scale.exp()
        truth = torch.arange(len(scores))
        return (F.cross_entropy(scores, truth) + F.cross_entropy(scores.T, truth)) / 2


def pairs(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kwargs: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.randn(n, 6, **kwargs), torch.randn(n, 4, **kwargs)


def cut(data: tuple[Tensor, ...], sizes: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(sizes) for tensor in data), strict=True))


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_the_gradient_is_the_whole_batchs(sizes: list[int], dropout: bool) -> None:
    """Whatever the cut, at most 1e-12, with the same dropout in both passes."""
    model = Towers(0.3 if dropout else 0.0)
    data = cut(pairs(sum(sizes)), sizes)
    torch.manual_seed(5)
    loss = joint_backward(model, data, model.contrast)
    found, after = gradients(model), torch.rand(1)
    model.zero_grad()
    torch.manual_seed(5)
    parts = [model(part) for part in data]  # all graphs at once
    expected = model.contrast({k: torch.cat([p[k] for p in parts]) for k in parts[0]})
    assert torch.rand(1) == after  # generators are where one pass leaves them
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (found - gradients(model)).norm() <= 1e-12 * found.norm()


def test_five_steps_of_an_accumulator() -> None:
    """Scaled, divided, clipped: the steps are those of the whole batch."""
    model, large = Towers(), Towers()
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, large))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    accumulator = GradAccumulator(mine, model, max_norm=0.5, divisor=4, scaler=scaler)
    for seed in range(5):
        data = pairs(20, seed)
        loss = joint_backward(model, cut(data, [7, 7, 6]), model.contrast, accumulator)
        assert accumulator.stepped
        assert accumulator.last.loss == pytest.approx(loss.item(), rel=1e-12)
        large.contrast(large(data)).backward()
        nn.utils.clip_grad_norm_(large.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    assert difference(model, large) <= 1e-12


def test_an_autocast_around_both_passes_is_as_one_in_the_forward() -> None:
    """What the pass without gradients has cached is not used in the other one."""

    def forward(batch: Any, model: Towers) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found: dict[str, Tensor] = model(batch)
        return {name: values.float() for name, values in found.items()}

    batches = [(left.float(), right.float()) for left, right in cut(pairs(12), [4, 4, 4])]
    inside, around = Towers().float(), Towers().float()
    joint_backward(partial(forward, model=inside), batches, inside.contrast)
    with torch.autocast("cpu", torch.bfloat16):
        joint_backward(partial(forward, model=around), batches, around.contrast)
    for one, other in zip(inside.parameters(), around.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=0.1, atol=0.01)


class Normalised(nn.Module):
    """Running statistics, and a buffer that the first forward makes, and later ones move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.mean = mean if self.mean is None else (self.mean + mean) / 2
        return self.inner(x)


def similarity(z: Tensor) -> Tensor:
    return (z @ z.T).logsumexp(1).mean()


class Wrapper:
    """It calls a module that is an attribute of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def encode(self, x: Tensor) -> Tensor:
        return self.model(x)


def hiding(model: nn.Module) -> Any:
    """A forward whose reference to the module is weak."""
    hidden: Any = weakref.ref(model)

    def forward(x: Tensor) -> Tensor:
        return hidden()(x)

    return forward


FORWARDS: dict[str, Any] = {
    "module": lambda model: model,
    "lambda": lambda model: lambda x: model(x.clone()),
    "partial": lambda model: partial(nn.Module.__call__, model),
    "method": lambda model: Wrapper(model).encode,
    "nested": lambda model: lambda x: Wrapper(model).encode(x),
    "given": hiding,
}


@pytest.mark.parametrize("how", FORWARDS)
@pytest.mark.parametrize("accumulates", [False, True])
def test_buffers_are_updated_once(how: str, accumulates: bool) -> None:
    """As in one pass, in modules that a forward refers to, or that are given."""
    model, once = Normalised(), Normalised()
    parts = torch.randn(12, 6).split(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, nn.Linear(1, 1)) if accumulates else None
    modules = model if how == "given" else ()
    joint_backward(FORWARDS[how](model), parts, similarity, accumulator, modules=modules)
    for part in parts:
        once(part)
    found, expected = (dict(one.named_buffers()) for one in (model, once))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_one_number_for_all_samples() -> None:
    """A temperature without an axis, whose gradient is counted once, and a plain number."""
    whole, model = Towers(), Towers()

    def forward(pair: tuple[Tensor, Tensor], of: Towers) -> dict[str, Any]:
        return {**of(pair), "scale": of.scale.exp(), "margin": 0.1, "name": None}

    def contrast(found: dict[str, Any]) -> Tensor:
        scores = found["left"] @ found["right"].T * found["scale"] + found["margin"]
        return F.cross_entropy(scores, torch.arange(len(scores)))

    data = pairs(7)
    contrast(forward(data, whole)).backward()
    parts = cut(data, [3, 3, 1])
    joint_backward(partial(forward, of=model), parts, contrast)
    assert (gradients(model) - gradients(whole)).norm() <= 1e-12 * gradients(whole).norm()

    def squeezed(pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {**model(pair), "scale": model.scale.exp()[None]}

    with pytest.raises(OptionError, match=r"shape \(1,\) and others .* squeeze it"):
        joint_backward(squeezed, parts, contrast)
    outputs: list[Any] = [
        lambda pair: {**model(pair), "n": len(pair[0])},
        lambda pair: {**model(pair), "n": torch.ones(len(pair[0]), len(pair[0]))},
        lambda pair: dict(sorted(model(pair).items(), reverse=len(pair[0]) == 1)),
    ]
    for forward_ in outputs:
        with pytest.raises(OptionError, match=r"same in all .*n: got \{.*\}, \{.*\}\. Return"):
            joint_backward(forward_, parts, contrast)


class Own:
    """An object with a tensor in its attributes."""

    def __init__(self, x: Tensor) -> None:
        self.x: Any = x


def test_a_micro_batch_comes_as_it_was_into_both_passes() -> None:
    """A forward may take its containers apart; a tensor that it changes is refused by name."""
    model = nn.Linear(6, 5)
    with torch.inference_mode():
        unknown = torch.zeros(2)  # which has no version
    collated = PadCollate()([{"x": torch.arange(3)}])
    parts = [
        {"own": Own(x), "rest": [Encoding(x=x), (collated, unknown, None)]}
        for x in torch.randn(12, 6).split(4)
    ]

    def forward(batch: Any) -> Tensor:
        (encoding, (padded, *_)), own = batch.pop("rest"), batch["own"]
        x, own.x = own.x, None
        assert encoding.pop("x") is x
        assert padded["x"] is collated["x"]
        return model(x)

    joint_backward(forward, parts, similarity)
    assert [list(part) for part in parts] == [["own", "rest"]] * 3
    with pytest.raises(OptionError, match=r"changed batch\['rest'\]\[0\]\['x'\] in place"):
        joint_backward(lambda batch: model(batch["own"].x[:3].fill_(1)), parts, similarity)


@pytest.mark.slow
def test_the_peak_is_that_of_one_micro_batch() -> None:
    """Eight micro-batches need at most 1.1 times what one does, by the bytes that live."""

    def peak(number: int) -> int:
        model = Towers(0.1, width=65_536)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(data: Any) -> None:
            joint_backward(model, cut(data, [64] * number), model.contrast)
            optimizer.step()
            optimizer.zero_grad()

        return trace_peak_bytes(step, pairs(64 * number))

    assert peak(8) <= 1.1 * peak(1)


def test_bad_input() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="at least one micro-batch"):
        joint_backward(model, [], lambda z: z.sum())
    with pytest.raises(OptionError, match="a scalar"):
        joint_backward(model, [torch.ones(2, 2)], lambda z: z)
    with pytest.raises(OptionError, match="whose first axis is the sample"):
        joint_backward(lambda _: 3, [torch.ones(2, 2)], lambda z: z)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with accumulator.micro_batch(weight=2):
        accumulator.backward(model(torch.ones(2, 2)).sum())
    with pytest.raises(StepError, match=r"1 micro-batches are pending.*accumulator.step"):
        joint_backward(model, [torch.ones(2, 2)], similarity, accumulator)
    accumulator.flush()
