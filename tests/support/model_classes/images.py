"""Images of free sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.model_classes.case import Case, FeedForward, case
from tests.support.training_cases import Batch, pooled_loss


def convolutions(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1),
        nn.BatchNorm2d(outer),
        nn.ReLU(),
        nn.Conv2d(outer, outer, 3, padding=1),
        nn.BatchNorm2d(outer),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions; what came down is concatenated.

    Odd sizes lose a row on their way down; it is padded on the way up.
    """

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32), classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(convolutions, (3, *widths), widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths
        )
        self.join = nn.ModuleList(convolutions(2 * width, width) for width in widths)
        self.bottom = convolutions(widths[-1], 2 * widths[-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x, skip = up(x), skips.pop()
            below, right = skip.shape[-2] - x.shape[-2], skip.shape[-1] - x.shape[-1]
            x = join(torch.cat([skip, F.pad(x, (0, right, 0, below))], 1))
        return self.head(x)


def unet() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {"x": torch.randn(n, 3, *size), "y": torch.randint(0, 4, (n, *size))}

    return case(UNet(), pooled_loss, make_batch, (160, 160), min_size=16, multiple=8)


class Reduced(nn.Module):
    """Attention whose keys and values are a strided convolution of the image."""

    def __init__(self, width: int, heads: int, stride: int) -> None:
        super().__init__()
        self.heads, self.norm, self.query = heads, nn.LayerNorm(width), nn.Linear(width, width)
        self.reduce = nn.Conv2d(width, width, stride, stride=stride)
        self.reduced_norm, self.both = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.out, self.mix = nn.Linear(width, width), FeedForward(width)

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = self.norm(x)
        reduced = self.reduce(y.transpose(1, 2).unflatten(2, size)).flatten(2).transpose(1, 2)
        key, value = map(split, self.both(self.reduced_norm(reduced)).chunk(2, -1))
        query = split(self.query(y))
        scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        return self.mix(x + self.out((scores @ value).transpose(1, 2).flatten(2)))


class Pyramid(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64), classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.ModuleList(
            [nn.Conv2d(3, widths[0], 4, stride=4), nn.Conv2d(*widths, 2, stride=2)]
        )
        self.layers = nn.ModuleList([Reduced(widths[0], 2, 4), Reduced(widths[1], 4, 2)])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for patch, layer in zip(self.patches, self.layers, strict=True):
            x = patch(x)
            size = (x.shape[-2], x.shape[-1])
            x = layer(x.flatten(2).transpose(1, 2), size).transpose(1, 2).unflatten(2, size)
        return self.head(x.mean((2, 3)))


def pyramid() -> Case:
    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        return {"x": torch.randn(n, 3, *size), "y": torch.randint(0, 10, (n,))}

    return case(Pyramid(), pooled_loss, make_batch, (256, 256), min_size=16, multiple=16)


IMAGES = {"U-Net": unet, "pyramid": pyramid}
