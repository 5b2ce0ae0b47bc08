"""Speech by conformers, windows, volumes, documents of sentences, clouds of points."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.model_classes.attention import WIDTH, Block, Scored
from tests.support.model_classes.case import Case, FeedForward, case
from tests.support.training_cases import VOCABULARY, Batch, pooled_loss

# ---------------------------------------------------------------------- conformer


class Shifted(Scored):
    """Relative positions as in Transformer-XL: scores `(n, h, L, 2L − 1)`, shifted row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y, length = self.norm(x), x.shape[1]
        query, key, value = (self.split(part(y)) for part in (self.query, self.key, self.value))
        far = self.scores(query, self.split(self.position(table)[None]))
        padded = F.pad(far, (1, 0)).reshape(*far.shape[:2], 2 * length, length)
        far = padded[:, :, 1:].reshape(far.shape)[..., :length]
        y = self.dropout((self.scores(query, key) + far).softmax(-1)) @ value
        return x + self.out(y.transpose(1, 2).flatten(2))


class Conformer(nn.Module):
    """A quarter of the frames; feed-forward, attention, gated convolution, feed-forward."""

    def __init__(self, bands: int = 40, classes: int = 50) -> None:
        super().__init__()
        self.fewer = nn.Sequential(
            nn.Conv1d(bands, WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1),
        )
        self.first, self.attention, self.last = FeedForward(WIDTH), Shifted(), FeedForward(WIDTH)
        self.gate = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 15, padding=7, groups=WIDTH)
        self.normal, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fewer(x.transpose(1, 2)).transpose(1, 2)
        distance = torch.arange(x.shape[1] - 1, -x.shape[1], -1.0)
        angles = torch.outer(distance, 10_000 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        x = self.attention(self.first(x), torch.cat([angles.sin(), angles.cos()], -1))
        y = self.depthwise(F.glu(self.gate(x.transpose(1, 2)), 1))
        return self.head(self.last(x + F.silu(self.normal(y)).transpose(1, 2)))


def conformer() -> Case:
    def make_batch(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, length, 40), "y": torch.randint(0, 50, (n, -(-length // 4)))}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return case(Conformer(), loss_of, make_batch, 1600, min_size=32, multiple=4)


# ---------------------------------------------------------------------- windows


class Windows(nn.Module):
    """Attention within windows of 8 × 8 patches, to a multiple of which the image is padded."""

    def __init__(self, window: int = 8) -> None:
        super().__init__()
        self.window, self.patch = window, nn.Conv2d(3, WIDTH, 4, stride=4)
        self.layers = nn.ModuleList(Block(Scored()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, window = self.patch(x).movedim(1, -1), self.window
        for number, layer in enumerate(self.layers):
            _, height, width, _ = x.shape
            x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
            shift = number * window // 2
            x = x.roll((-shift, -shift), (1, 2))
            parts = x.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
            y = layer(parts.reshape(-1, window * window, WIDTH))
            x = y.view(parts.shape).transpose(2, 3).reshape(x.shape).roll((shift, shift), (1, 2))
            x = x[:, :height, :width]
        return self.head(x.mean((1, 2)))


def windows() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {"x": torch.randn(n, 3, *size), "y": torch.randint(0, 10, (n,))}

    return case(Windows(), pooled_loss, make_batch, (256, 256), min_size=8, multiple=32)


# ---------------------------------------------------------------------- three axes


def volumes() -> Case:
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.InstanceNorm3d(8),
        nn.ReLU(),
        nn.Conv3d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )

    def make_batch(n: int, size: tuple[int, int, int]) -> Batch:
        return {"x": torch.randn(n, 1, *size), "y": torch.randint(0, 10, (n,))}

    return case(model, pooled_loss, make_batch, (48, 48, 48), min_size=4, multiple=2)


# ---------------------------------------------------------------------- documents, points


class Documents(nn.Module):
    """Attention between the words of a sentence, then between the sentences of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 10)
        self.words, self.sentences = Block(Scored()), Block(Scored())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sentences = self.words(self.embed(x.flatten(0, 1))).mean(1).unflatten(0, x.shape[:2])
        return self.head(self.sentences(sentences).mean(1))


def documents() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        x = torch.randint(0, VOCABULARY, (n, *size))
        return {"x": x, "y": torch.randint(0, 10, (n,))}

    return case(Documents(), pooled_loss, make_batch, (64, 64))


class Points(nn.Module):
    """Each point and its eight nearest, of the distances of all pairs."""

    def __init__(self, near: int = 8) -> None:
        super().__init__()
        self.near, self.head = near, nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(2 * WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            n, points, width = x.shape
            nearest = torch.cdist(x, x).topk(self.near, largest=False).indices
            at = nearest.flatten(1)[..., None].expand(-1, -1, width)
            around = x.gather(1, at).view(n, points, self.near, width)
            pairs = torch.cat([around - x[:, :, None], x[:, :, None].expand_as(around)], -1)
            x = F.relu(layer(pairs)).amax(2)
        return self.head(x.amax(1))


def point_cloud() -> Case:
    def make_batch(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, length, 3), "y": torch.randint(0, 10, (n,))}

    return case(Points(), pooled_loss, make_batch, 1024, min_size=8)


OTHERS = {
    "conformer": conformer,
    "windows": windows,
    "volumes": volumes,
    "documents": documents,
    "point cloud": point_cloud,
}
