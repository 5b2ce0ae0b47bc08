"""Models with a training step each, of the kinds whose bytes grow in different ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

Batch: TypeAlias = dict[str, torch.Tensor]
MakeBatch: TypeAlias = Callable[[int, Any], Batch]
MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

VOCABULARY, WIDTH = 500, 64
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3)
FOREACH: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=True)


@dataclass(frozen=True)
class Training:
    """A model in training: `step` runs on what `make_batch` makes.

    Attributes:
        max_size: the largest size on each axis.
        min_size: the smallest size on every axis.
        max_n: the most samples to compare; fewer where the step loops over them.
        multiple: what all patches, strides and windows of the layers divide; 1: there are none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Batch], Any]
    make_batch: MakeBatch
    max_size: int | tuple[int, ...]
    _: KW_ONLY
    min_size: int = 1
    max_n: int = 256
    multiple: int = 1


def training(
    model: nn.Module,
    loss_of: Callable[[Any, Batch], torch.Tensor],
    make_batch: MakeBatch,
    max_size: int | tuple[int, ...],
    optimizer: MakeOptimizer = ADAMW,
    *,
    autocast: bool = False,
    **limits: int,
) -> Training:
    trained = optimizer(model.parameters())

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch)
        loss.backward()
        trained.step()
        trained.zero_grad()
        return loss.detach()

    return Training(model, trained, step, make_batch, max_size, **limits)


def lengths(n: int, longest: int) -> torch.Tensor:
    """Random lengths of n samples, at least one of which is the longest, shape `(n,)`."""
    drawn = torch.randint(1, longest + 1, (n,))
    drawn[0] = longest
    return drawn


def tokens(n: int, length: int) -> Batch:
    return {"x": torch.randint(0, VOCABULARY, (n, length))}


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch["x"]
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


# ---------------------------------------------------------------------- transformers


class Attention(nn.Module):
    """Attention with scores that are kept (`materialised`), or by the fused kernel."""

    def __init__(self, *, materialised: bool, causal: bool) -> None:
        super().__init__()
        self.materialised, self.causal = materialised, causal
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (4, -1)).transpose(1, 2)

        query = split(self.query(x))
        key, value = map(split, self.both(memory).chunk(2, -1))
        if self.materialised:
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            y = self.dropout(scores.softmax(-1)) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(
        self, *, materialised: bool = False, causal: bool = False, cross: bool = False
    ) -> None:
        super().__init__()
        make = partial(Attention, materialised=materialised, causal=causal)
        self.attention, self.cross = make(), make() if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mix(self.norms[2](x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2, *, checkpointed: bool = False, **how: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(**how) for _ in range(layers))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = Layer(materialised=True)
        self.decoder = Layer(materialised=True, cross=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.embed(source))
        return self.head(self.decoder(self.embed(target), memory))


def transformer(optimizer: MakeOptimizer = ADAMW, *, autocast: bool = False, **kw: Any) -> Training:
    return training(Transformer(**kw), next_token_loss, tokens, 512, optimizer, autocast=autocast)


def translator() -> Training:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {k: tokens(n, length)["x"] for k, length in zip(("s", "t"), size, strict=True)}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["s"], batch["t"]).flatten(0, 1), batch["t"].flatten())

    return training(Translator(), loss_of, make_batch, (256, 256))


# ---------------------------------------------------------------------- recurrent and convolutional


class Recurrent(nn.Module):
    def __init__(
        self, kind: Any, layers: int = 2, width: int = 64, words: int = VOCABULARY, **options: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.rnn = kind(width, width, layers, batch_first=True, **options)
        directions = 2 if self.rnn.bidirectional else 1
        self.head = nn.Linear(directions * width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def recurrent(kind: type[nn.RNNBase]) -> Training:
    return training(Recurrent(kind), next_token_loss, tokens, 128)


def pooled_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def normalised(layer: Any) -> list[nn.Module]:
    norm = nn.BatchNorm1d if isinstance(layer, nn.Conv1d) else nn.BatchNorm2d
    return [layer, norm(layer.out_channels), nn.ReLU()]


def waves() -> Training:
    """Convolutions along one axis, with strides, batch norm and a pooled output."""
    model = nn.Sequential(
        *normalised(nn.Conv1d(1, 32, 9, stride=4, padding=4)),
        *normalised(nn.Conv1d(32, 64, 9, stride=2, padding=4)),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )

    def make_batch(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, 1, length), "y": torch.randint(0, 10, (n,))}

    return training(model, pooled_loss, make_batch, 16_000)


def images() -> Training:
    model = nn.Sequential(
        *normalised(nn.Conv2d(3, 16, 3, padding=1)),
        nn.MaxPool2d(2),
        *normalised(nn.Conv2d(16, 32, 3, padding=1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )

    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {"x": torch.randn(n, 3, *size), "y": torch.randint(0, 10, (n,))}

    return training(model, pooled_loss, make_batch, (256, 256))


# ---------------------------------------------------------------------- others


def heavy() -> Training:
    """Eight million parameters and next to no activations."""
    body = nn.Sequential(nn.Linear(16, 2000), nn.ReLU(), nn.Linear(2000, 4000), nn.ReLU())
    model = nn.Sequential(*body, nn.Linear(4000, 10))

    def make_batch(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, length, 16), "y": torch.randint(0, 10, (n,))}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"].mean(1)), batch["y"])

    return training(model, loss_of, make_batch, 1000)


class Messages(nn.Module):
    """Nodes hear from their neighbours, three times; the mean of each graph counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(9, 32), nn.Linear(32, 1)
        self.message = nn.ModuleList(nn.Linear(64 + 4, 32) for _ in range(3))

    def forward(self, batch: Batch) -> torch.Tensor:
        (source, target), x = batch["edges"], self.embed(batch["nodes"])
        for message in self.message:
            heard = message(torch.cat([x[source], x[target], batch["kinds"]], -1)).relu()
            x = x + torch.zeros_like(x).index_add_(0, target, heard)
        total = x.new_zeros(len(batch["y"]), 32).index_add_(0, batch["of"], x)
        count = torch.bincount(batch["of"], minlength=len(batch["y"])).clamp(min=1)
        return self.head(total / count[:, None])[:, 0]


def graphs(most_nodes: int = 120, most_edges: int = 260) -> Training:
    """Sizes are nodes and edges; all graphs of a batch are one."""

    def make(n: int, size: tuple[int, int]) -> Batch:
        nodes, edges = size
        return {
            "nodes": torch.randn(n * nodes, 9),
            "kinds": torch.randn(n * edges, 4),
            "edges": torch.randint(n * nodes, (2, n * edges)),
            "of": torch.arange(n).repeat_interleave(nodes),
            "y": torch.randn(n),
        }

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.l1_loss(model(batch), batch["y"])

    return training(Messages(), loss, make, (most_nodes, most_edges), min_size=2)


CASES: dict[str, Callable[[], Training]] = {
    "encoder, fused attention": transformer,
    "encoder, foreach": partial(transformer, FOREACH),
    "encoder, bfloat16": partial(transformer, autocast=True),
    "encoder, checkpointed": partial(transformer, checkpointed=True),
    "decoder, scores kept": partial(transformer, materialised=True),
    "encoder and decoder": translator,
    "LSTM": partial(recurrent, nn.LSTM),
    "GRU": partial(recurrent, nn.GRU),
    "waves": waves,
    "images": images,
    "heavy": heavy,
    "graphs": partial(graphs, 200, 800),
}

# On an H200 (torch 2.11, CUDA 13.0): n, the size, and the most MiB that a step allocated, of which
# workspaces of cuBLAS take 65.
ON_A_CARD: dict[str, list[tuple[int, Any, float]]] = {
    "decoder, scores kept": [(107, 512, 3041.4), (1403, 102, 3063.9)],
    "encoder, bfloat16": [(548, 512, 2794.3), (2753, 102, 2796.5)],
    "encoder, checkpointed": [(906, 512, 3065.5), (4547, 102, 3065.0)],
    "encoder, foreach": [(419, 512, 3063.7), (2104, 102, 3066.5)],
    "encoder and decoder": [(278, (256, 256), 3059.3), (2811, (51, 51), 3066.6)],
    "waves": [(1003, 16_000, 3073.6), (5015, 3200, 3073.6)],
    "images": [(151, (256, 256), 3048.3)],
    "heavy": [(12_000, 1000, 1531.7), (12_000, 200, 945.8)],
    "graphs": [(2541, (200, 800), 3073.4), (12_000, (40, 160), 2907.0)],
}
