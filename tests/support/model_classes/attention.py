"""Transformers that differ in what they add to, or keep of, the scores of their attention."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.model_classes.case import (
    Case,
    FeedForward,
    case,
    counted_loss,
    lengths,
    mask_of,
    masked_loss,
    masked_tokens,
)
from tests.support.training_cases import VOCABULARY, Batch, next_token_loss, tokens

WIDTH, HEADS = 64, 4


class Scored(nn.Module):
    """Attention that keeps its scores and adds what it is given to them."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5

    def forward(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self.norm(x)
        memory = y if memory is None else memory
        scores = self.scores(self.split(self.query(y)), self.split(self.key(memory)))
        if added is not None:
            scores = scores + added
        y = self.dropout(scores.softmax(-1)) @ self.split(self.value(memory))
        return x + self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.mix = attention, FeedForward(WIDTH)

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self.mix(self.attention(x, *args))


# ---------------------------------------------------------------------- masks of padding


class MaskedEncoder(nn.Module):
    """The mask of the lengths, as floats for each pair of positions, is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(Scored()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n, length = x.shape
        pairs = mask[:, None, None, :].expand(n, 1, length, length).float()
        added = (1 - pairs) * torch.finfo(torch.float32).min
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, added)
        return self.head(x)


class Fused(Scored):
    """Attention by the fused kernel, with a boolean mask of the keys, shape `(n, L)`."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = self.norm(x)
        query, key, value = (self.split(part(y)) for part in (self.query, self.key, self.value))
        seen = mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + self.out(y.transpose(1, 2).flatten(2))


class FusedEncoder(MaskedEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(Fused()) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def masked_encoder(make: Any = MaskedEncoder, reduce: Any = masked_loss) -> Case:
    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        mask = mask_of(batch)
        return reduce(model(batch["x"], mask), batch["x"], mask)

    return case(make(), loss_of, masked_tokens, 512)


# ---------------------------------------------------------------------- rotary and causal


class Rotary(Scored):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        def rotated(y: torch.Tensor) -> torch.Tensor:
            one, two = y.chunk(2, -1)
            return y * cos + torch.cat([-two, one], -1) * sin

        y = self.norm(x)
        query, key = rotated(self.split(self.query(y))), rotated(self.split(self.key(y)))
        scores = self.scores(query, key).masked_fill(hidden, float("-inf"))
        y = self.dropout(scores.softmax(-1)) @ self.split(self.value(y))
        return x + self.out(y.transpose(1, 2).flatten(2))


class RotaryDecoder(nn.Module):
    """Each step makes a causal mask `(L, L)` and tables of angles `(L, d)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(Rotary()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, each = x.shape[1], WIDTH // HEADS
        frequencies = 10_000 ** (-torch.arange(0, each, 2) / each)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
        hidden = torch.ones(length, length).triu(1).bool()
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, hidden, cos, sin)
        return self.head(x)


def rotary_decoder() -> Case:
    return case(RotaryDecoder(), next_token_loss, tokens, 512)


# ---------------------------------------------------------------------- relative bias


class RelativeBias(nn.Module):
    """A bias for each head and pair of positions, shape `(1, h, L, L)`, by buckets of distance."""

    def __init__(self, *, both_ways: bool, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.both_ways, self.buckets, self.farthest = both_ways, buckets, farthest
        self.embed = nn.Embedding(buckets, HEADS)

    def bucket(self, distance: torch.Tensor) -> torch.Tensor:
        buckets, start = self.buckets, torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            start = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = -torch.min(distance, start)
        exact = buckets // 2
        share = (distance.float() / exact).log() / math.log(self.farthest / exact)
        far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
        return start + torch.where(distance < exact, distance, far)

    def forward(self, length: int) -> torch.Tensor:
        positions = torch.arange(length)
        bias = self.embed(self.bucket(positions[None, :] - positions[:, None]))
        return bias.permute(2, 0, 1).unsqueeze(0)


class BiasedEncoder(nn.Module):
    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed, self.bias = embed, RelativeBias(both_ways=True)
        self.layers = nn.ModuleList(Block(Scored()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x.shape[1])
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, bias)
        return x


class BiasedTranslator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.bias = BiasedEncoder(self.embed), RelativeBias(both_ways=False)
        self.own = nn.ModuleList(Scored() for _ in range(2))
        self.cross = nn.ModuleList(Block(Scored()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, length = self.encoder(source), target.shape[1]
        hidden = torch.ones(length, length).triu(1) * torch.finfo(torch.float32).min
        added = self.bias(length) + hidden
        x = self.embed(target)
        for own, cross in zip(self.own, self.cross, strict=True):
            x = cross(own(x, added), None, memory)
        return self.head(x)


def biased_translator() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {key: tokens(n, size[axis])["x"] for axis, key in enumerate("st")}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["s"], batch["t"]).flatten(0, 1), batch["t"].flatten())

    return case(BiasedTranslator(), loss_of, make_batch, (512, 256))


class PooledClassifier(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(1))


def biased_encoder() -> Case:
    def make_batch(n: int, length: int) -> Batch:
        return tokens(n, length) | {"y": torch.randint(0, 10, (n,))}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    model = PooledClassifier(BiasedEncoder(nn.Embedding(VOCABULARY, WIDTH)))
    return case(model, loss_of, make_batch, 2048)


# ---------------------------------------------------------------------- disentangled


class Disentangled(Scored):
    """Scores of content by content, content by position and position by content."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, positions: torch.Tensor, added: torch.Tensor
    ) -> torch.Tensor:
        y = self.norm(x)
        query, key, value = (self.split(part(y)) for part in (self.query, self.key, self.value))
        pos_query = self.split(self.query(positions)[None])
        pos_key = self.split(self.key(positions)[None])
        length, scale = x.shape[1], (3 * query.shape[-1]) ** 0.5
        steps = torch.arange(length)
        distance = steps[:, None] - steps[None, :]
        shape = (*query.shape[:2], length, length)
        at = (distance + self.reach).clamp(0, 2 * self.reach - 1)
        back = (-distance + self.reach).clamp(0, 2 * self.reach - 1)
        scores = query @ (key / scale).transpose(-1, -2)
        c2p = (query @ pos_key.transpose(-1, -2)).gather(-1, at.expand(shape))
        p2c = (key @ pos_query.transpose(-1, -2)).gather(-1, back.expand(shape))
        scores = scores + c2p / scale + p2c.transpose(-1, -2) / scale
        y = self.dropout((scores + added).softmax(-1)) @ value
        return x + self.out(y.transpose(1, 2).flatten(2))


class DisentangledEncoder(nn.Module):
    def __init__(self, reach: int = 64) -> None:
        super().__init__()
        self.embed, self.positions = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(2 * reach, WIDTH),
        )
        self.layers = nn.ModuleList(Block(Disentangled(reach)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        both = mask[:, None, None, :] & mask[:, None, :, None]
        added = torch.zeros(both.shape).masked_fill(~both, torch.finfo(torch.float32).min)
        positions = self.norm(self.positions.weight)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, positions, added)
        return self.head(x)


# ---------------------------------------------------------------------- masked frames


class CrossMasked(nn.Module):
    """A decoder over words that attends to masked frames of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.embed = nn.Linear(40, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = Block(Scored())
        self.own, self.cross = Scored(), Block(Scored())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, frames: torch.Tensor, ends: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(frames.shape[1]) < ends[:, None]
        lowest = torch.finfo(torch.float32).min
        added = torch.zeros(seen.shape).masked_fill(~seen, lowest)[:, None, None, :]
        memory = self.encoder(self.frames(frames), added)
        causal = torch.full((x.shape[1], x.shape[1]), lowest).triu(1)
        return self.head(self.cross(self.own(self.embed(x), causal), added, memory))


def captioner() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        frames = torch.randn(n, size[0], 40)
        return tokens(n, size[1]) | {"frames": frames, "ends": lengths(n, size[0])}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["frames"], batch["ends"], batch["x"])
        return F.cross_entropy(logits.flatten(0, 1), batch["x"].flatten())

    return case(CrossMasked(), loss_of, make_batch, (1000, 64))


ATTENTION = {
    "encoder, padding masked": masked_encoder,
    "encoder, padding counted": partial(masked_encoder, reduce=counted_loss),
    "encoder, fused and masked": partial(masked_encoder, FusedEncoder),
    "decoder, rotary": rotary_decoder,
    "translator, relative bias": biased_translator,
    "encoder, relative bias": biased_encoder,
    "encoder, disentangled": partial(masked_encoder, DisentangledEncoder),
    "captioner": captioner,
}
