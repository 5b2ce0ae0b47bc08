"""Losses over pairs of samples or chunks of rows, and layers of experts."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.support.model_classes.attention import WIDTH, Block, Scored
from tests.support.model_classes.case import Case, case
from tests.support.training_cases import VOCABULARY, Batch, next_token_loss, tokens

# ---------------------------------------------------------------------- pairs of samples


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), Block(Scored())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layer(self.embed(x)).mean(1), dim=-1)


class TwoTowers(nn.Module):
    """Queries of 16 words and passages: every query is compared with every passage."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.passage = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, queries: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.query(queries) @ self.passage(x).T * self.scale.exp()


def contrastive() -> Case:
    def make_batch(n: int, length: int) -> Batch:
        return tokens(n, length) | {"queries": tokens(n, 16)["x"]}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["queries"], batch["x"])
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return case(TwoTowers(), loss_of, make_batch, 256)


def supervised_contrastive() -> Case:
    """Two views of each sample; the samples are small, the matrices of all pairs are not."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))

    def make_batch(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, length, 8), "y": torch.randint(0, 10, (n,))}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        pooled = batch["x"].mean(1)
        views = torch.cat([pooled, pooled + 0.1 * torch.randn_like(pooled)])
        features, labels = F.normalize(model(views), dim=-1), batch["y"].repeat(2)
        similar = features @ features.T / 0.1
        others = 1 - torch.eye(len(labels))
        same = (labels[:, None] == labels[None, :]).float() * others
        logits = similar - similar.max(1, keepdim=True).values.detach()
        each = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        return -((same * each).sum(1) / same.sum(1)).mean()

    return case(model, loss_of, make_batch, 200)


# ---------------------------------------------------------------------- chunks of rows


class ChunkedLoss(nn.Module):
    """The loss over a large vocabulary, of 1,024 rows at a time and again in the backward."""

    def __init__(self, words: int = 4000) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(words, WIDTH), Block(Scored())
        self.head = nn.Linear(WIDTH, words)

    def rows_loss(self, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(rows), target, reduction="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.layer(self.embed(x)).flatten(0, 1)
        total = rows.new_zeros(())
        for part, target in zip(rows.split(1024), x.flatten().split(1024), strict=True):
            total = total + checkpoint(self.rows_loss, part, target, use_reentrant=False)
        return total / x.numel()


def chunked_loss() -> Case:
    return case(ChunkedLoss(), lambda model, batch: model(batch["x"]), tokens, 256)


# ---------------------------------------------------------------------- experts


class CapacityRouted(nn.Module):
    """Each expert takes so many tokens; one-hot `(tokens, experts, capacity)` tensors route."""

    def __init__(self, experts: int = 4, factor: float = 1.25) -> None:
        super().__init__()
        self.factor, self.gate = factor, nn.Linear(WIDTH, experts)
        self.inner = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 8)
        self.outer = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, experts = x.flatten(0, 1), len(self.inner)
        capacity = math.ceil(self.factor * len(rows) / experts)
        share, chosen = self.gate(rows).softmax(-1).max(-1)
        routed = chosen[:, None] == torch.arange(experts)
        place = routed.long().cumsum(0) * routed - 1
        slots = place[..., None] == torch.arange(capacity)
        combine = share[:, None, None] * slots.float()
        gathered = torch.einsum("tec,td->ecd", slots.float(), rows)
        done = F.relu(gathered @ self.inner) @ self.outer
        return x + torch.einsum("tec,ecd->td", combine, done).view_as(x)


class ValueRouted(nn.Module):
    """Each expert takes the tokens that chose it, however many."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        share, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, rank = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]) * share[row, rank, None])
        return x + out.view_as(x)


class Experts(nn.Module):
    def __init__(self, routed: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Scored()
        self.routed, self.head = routed(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.routed(self.attention(self.embed(x))))


def experts(routed: type[nn.Module]) -> Case:
    return case(Experts(routed), next_token_loss, tokens, 256)


LOSSES = {
    "two towers, contrastive": contrastive,
    "all pairs, contrastive": supervised_contrastive,
    "loss in chunks": chunked_loss,
    "experts, capacity": partial(experts, CapacityRouted),
    "experts, by value": partial(experts, ValueRouted),
}
