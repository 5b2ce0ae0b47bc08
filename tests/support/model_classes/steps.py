"""Steps that are more than one forward, backward and optimizer step in full precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.support.model_classes.attention import WIDTH, Block, Scored
from tests.support.model_classes.case import Case, case
from tests.support.training_cases import (
    ADAMW,
    MOMENTUM,
    VOCABULARY,
    Batch,
    Transformer,
    heavy,
    next_token_loss,
    tokens,
)

# ---------------------------------------------------------------------- several optimizers


def two_optimizers() -> Case:
    """AdamW for the embedding, SGD with momentum for the rest."""
    model = Transformer(materialised=True)
    embedding = {id(p) for p in model.embed.parameters()}
    first = ADAMW([p for p in model.parameters() if id(p) in embedding])
    second = MOMENTUM([p for p in model.parameters() if id(p) not in embedding])

    def step(batch: Batch) -> torch.Tensor:
        loss = next_token_loss(model, batch)
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Case(model, first, step, tokens, 256)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose1d(16, 32, 4, stride=4), nn.ReLU(), nn.Conv1d(32, 1, 9, padding=4)
        )

    def forward(self, noise: torch.Tensor, length: int) -> torch.Tensor:
        return self.layers(noise)[..., :length].tanh()


def alternating() -> Case:
    """A generator of waves and its critic, one after the other in a step."""
    model = nn.ModuleDict(
        {
            "generator": Generator(),
            "critic": nn.Sequential(
                nn.Conv1d(1, 32, 9, stride=2, padding=4),
                nn.LeakyReLU(0.2),
                nn.Conv1d(32, 32, 9, stride=2, padding=4),
                nn.LeakyReLU(0.2),
                nn.AdaptiveAvgPool1d(1),
                nn.Flatten(),
                nn.Linear(32, 1),
            ),
        }
    )
    generator, critic = model["generator"], model["critic"]
    of_generator, of_critic = ADAMW(generator.parameters()), ADAMW(critic.parameters())

    def make_batch(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, 1, length)}

    def judged(x: torch.Tensor, real: float) -> torch.Tensor:
        logits = critic(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def step(batch: Batch) -> torch.Tensor:
        x = batch["x"]
        made = generator(torch.randn(len(x), 16, -(-x.shape[-1] // 4)), x.shape[-1])
        of_critic.zero_grad()
        (judged(x, 1) + judged(made.detach(), 0)).backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = judged(made, 1)
        loss.backward()
        of_generator.step()
        of_critic.zero_grad()
        of_generator.zero_grad()
        return loss.detach()

    return Case(model, of_generator, step, make_batch, 8000, min_size=64, multiple=4)


# ---------------------------------------------------------------------- low rank


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


def trained_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ADAMW([p for p in parameters if p.requires_grad])


def low_rank() -> Case:
    """The queries and values of a frozen model are trained by matrices of rank 4."""
    model = Transformer(materialised=True).requires_grad_(requires_grad=False)
    for layer in model.layers:
        layer.attention.query = LowRank(layer.attention.query)
        layer.attention.both = LowRank(layer.attention.both)
    return case(model, next_token_loss, tokens, 512, trained_of)


# ---------------------------------------------------------------------- precision and checkpoints


def autocast() -> Case:
    model = Transformer(materialised=True)
    return case(model, next_token_loss, tokens, 512, autocast=True)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, layers: int = 4) -> None:
        super().__init__()
        self.reentrant, self.embed = reentrant, nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(Scored()) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointed(*, reentrant: bool) -> Case:
    return case(Checkpointed(reentrant=reentrant), next_token_loss, tokens, 512)


# ---------------------------------------------------------------------- others


def accumulated(parts: int = 4) -> Case:
    """The batch in four parts, the gradients of which are summed."""
    model = Transformer()
    made = case(model, next_token_loss, tokens, 512)

    def step(batch: Batch) -> torch.Tensor:
        loss = torch.zeros(())
        for x in batch["x"].chunk(parts):
            part = next_token_loss(model, {"x": x}) * len(x) / len(batch["x"])
            part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.optimizer.step()
        made.optimizer.zero_grad()
        return loss

    return replace(made, step=step)


def large_parameters() -> Case:
    """Eight million parameters and next to no activations."""
    made = heavy()
    return Case(made.model, made.optimizer, made.step, made.make_batch, made.max_size)


STEPS = {
    "two optimizers": two_optimizers,
    "two networks in turn": alternating,
    "low rank": low_rank,
    "autocast": autocast,
    "checkpoint, reentrant": partial(checkpointed, reentrant=True),
    "checkpoint, not reentrant": partial(checkpointed, reentrant=False),
    "accumulated": accumulated,
    "large parameters": large_parameters,
}
