"""Models in float64, and the step of one large batch that accumulated ones must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.support.training_cases import Recurrent
from torchbudget import GradAccumulator

LENGTH = 7
CLASSES = 5
EXACT = 1e-12  # the relative difference that sums in another order may make in float64


class Attention(nn.Module):
    """An encoder layer without dropout, and logits of each position.

    Nor has it biases: that of the keys has no gradient but rounding, which AdamW divides by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.inner = nn.Sequential(nn.Conv1d(6, 9, 3, padding=1), nn.GroupNorm(3, 9), nn.ReLU())
        self.outer = nn.Conv1d(9, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.embed(x).transpose(1, 2))).transpose(1, 2)


class Tied(nn.Module):
    """One matrix is the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


class Frozen(Attention):
    """The embedding and a part of the layer are not trained, and one part is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layer.linear1.requires_grad_(False)
        self.unused = nn.Linear(3, 3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Attention,
    "CNN": Convolution,
    "LSTM": lambda: Recurrent(nn.LSTM, 1, 7, words=CLASSES),
    "tied": Tied,
    "frozen": Frozen,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def make_model(name: str) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(1)
    return MODELS[name]().double()


@dataclass(frozen=True)
class Data:
    """Token sequences; the labels of what is padding are -100.

    Attributes:
        x: shape `(n, LENGTH)`.
        y: likewise.
    """

    x: Tensor
    y: Tensor

    @classmethod
    def make(cls, n: int, seed: int = 0) -> Data:
        """Of n samples, with lengths that differ."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(CLASSES, (n, LENGTH), generator=generator)
        y = torch.randint(CLASSES, (n, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (n, 1), generator=generator)
        return cls(x, y.masked_fill(torch.arange(LENGTH) >= lengths, -100))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Any) -> Data:
        return Data(self.x[rows], self.y[rows])

    @property
    def weight(self) -> int:
        """Labels that count."""
        return int((self.y != -100).sum())


def loss_sum(model: nn.Module, data: Data) -> Tensor:
    """Cross-entropy, summed over all labels."""
    return F.cross_entropy(model(data.x).flatten(0, 1), data.y.flatten(), reduction="sum")


def large_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    max_norm: float | None = None,
) -> Tensor | None:
    """The step of the one large batch, as everybody writes it: the oracle; the gradient's norm."""
    optimizer.zero_grad()
    logits = model(data.x).flatten(0, 1)
    F.cross_entropy(logits, data.y.flatten()).backward()  # the mean over all labels that count
    clip = nn.utils.clip_grad_norm_
    norm = None if max_norm is None else clip(model.parameters(), max_norm)
    optimizer.step()
    return norm


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest relative difference of a parameter, in its norm; of sharded ones the whole's."""
    wholes = [a.full_tensor() if hasattr(a, "full_tensor") else a for a in one.parameters()]
    pairs = zip(wholes, other.parameters(), strict=True)
    return max(float((a - b).detach().norm() / (b.detach().norm() + 1e-30)) for a, b in pairs)


def parts_of(data: Data, size: int) -> list[Data]:
    """Parts of so many samples each; the last may have fewer."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["SGD"](model.parameters())


def accumulating(name: str = "CNN", **options: Any) -> tuple[GradAccumulator, nn.Module]:
    """A model's accumulator, and the model."""
    model = make_model(name)
    return GradAccumulator(sgd(model), model, **options), model


def accumulate(accumulator: GradAccumulator, model: nn.Module, pieces: list[Data]) -> None:
    """Accumulate each piece as a micro-batch of its own."""
    for piece in pieces:
        with accumulator.micro_batch(weight=piece.weight, samples=len(piece)):
            accumulator.backward(loss_sum(model, piece))
