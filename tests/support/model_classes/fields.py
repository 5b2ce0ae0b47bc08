"""Steps on images, volumes, point sets and graphs, and steps of several networks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.training_cases import Batch, Training, graphs, pooled_loss, training

# ---------------------------------------------------------------------- images and volumes


def picture(n: int, size: tuple[int, int]) -> Batch:
    return {"x": torch.randn(n, 3, *size), "y": torch.randint(10, (n,))}


class Residual(nn.Module):
    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False)
        self.two = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(width, wider, 1, stride=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.one(x)).relu_()
        return (self.norms[1](self.two(y)) + self.skip(x)).relu_()


def residual() -> Training:
    """Strided residual blocks after pooling that rounds up; SGD with momentum."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Residual(16, 32),
        Residual(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)

    return training(model, pooled_loss, picture, (160, 160), optimizer, min_size=20, max_n=64)


class Segmenter(nn.Module):
    """A U-Net that pads to multiples of 8, and cuts what it padded."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(
            nn.Conv2d(a + b, b, 3, padding=1) for a, b in ((4 * width, 2 * width), (16, width))
        )
        self.last = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % 8, 0, -height % 8), mode="reflect")
        kept = []
        for k, down in enumerate(self.down):
            x = F.relu(down(F.max_pool2d(x, 2) if k else x))
            kept.append(x)
        for up, beside in zip(self.up, kept[-2::-1], strict=True):
            x = F.interpolate(x, size=beside.shape[-2:], mode="bilinear", align_corners=False)
            x = F.relu(up(torch.cat([x, beside], 1)))
        return self.last(x)[..., :height, :width]


def u_net() -> Training:
    def make(n: int, size: tuple[int, int]) -> Batch:
        return {"x": torch.randn(n, 3, *size), "y": torch.randint(4, (n, *size))}

    return training(Segmenter(), pooled_loss, make, (128, 128), min_size=16, max_n=64)


class Denoiser(nn.Module):
    """Noise of a random time is predicted; attention over the coarse pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Linear(1, 2 * width)
        self.down = nn.Conv2d(3, 2 * width, 4, stride=4)
        self.norm, self.qkv = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, 6 * width, 1)
        self.up = nn.ConvTranspose2d(2 * width, 3, 4, stride=4)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.down(x))) + self.time(time[:, None])[..., None, None]
        q, k, v = self.qkv(y).flatten(2).mT.chunk(3, -1)
        y = y + F.scaled_dot_product_attention(q, k, v).mT.reshape(y.shape)
        return self.up(y, output_size=x.shape[-2:])


def diffusion() -> Training:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        x, time = batch["x"], torch.rand(len(batch["x"]))
        noise = torch.randn_like(x)
        return F.mse_loss(model(torch.lerp(x, noise, time.view(-1, 1, 1, 1)), time), noise)

    return training(Denoiser(), loss, picture, (96, 96), min_size=8, max_n=64, multiple=4)


def volumes() -> Training:
    """Three ragged axes; convolutions, average pooling and a trilinear map of labels."""
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.InstanceNorm3d(8, affine=True),
        nn.LeakyReLU(),
        nn.AvgPool3d(2, ceil_mode=True),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.LeakyReLU(),
        nn.Conv3d(8, 2, 1),
    )

    def make(n: int, size: tuple[int, int, int]) -> Batch:
        return {"x": torch.randn(n, 1, *size), "y": torch.randint(2, (n, *size))}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        shape = batch["y"].shape[1:]
        logits = F.interpolate(model(batch["x"]), shape, mode="trilinear", align_corners=False)
        return F.cross_entropy(logits, batch["y"])

    return training(model, loss, make, (32, 48, 48), min_size=6, max_n=16)


# ---------------------------------------------------------------------- sets and graphs


class Points(nn.Module):
    """Each point looks at its eight nearest ones, found by all distances."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(x, x).topk(8, dim=-1, largest=False).indices
        place = near.flatten(1)[..., None].expand(-1, -1, 3)
        other = x.gather(1, place).unflatten(1, (-1, 8))
        edges = torch.cat([other - x[:, :, None], x[:, :, None].expand_as(other)], -1)
        return self.head(self.edge(edges).amax(2).amax(1))


def points() -> Training:
    def make(n: int, count: int) -> Batch:
        return {"x": torch.randn(n, count, 3), "y": torch.randint(10, (n,))}

    return training(Points(), pooled_loss, make, 1024, min_size=8)


# ---------------------------------------------------------------------- several networks


def contrastive() -> Training:
    """Text and images meet in a matrix of all pairs, with a learned temperature."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = nn.EmbeddingBag(300, 32), nn.Conv2d(3, 32, 8, stride=8)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, batch: Batch) -> torch.Tensor:
            a = F.normalize(self.text(batch["ids"]), dim=-1)
            b = F.normalize(self.image(batch["x"]).mean((2, 3)), dim=-1)
            return self.scale.exp() * a @ b.T

    def make(n: int, length: int) -> Batch:
        return {"ids": torch.randint(300, (n, length)), "x": torch.randn(n, 3, 32, 32)}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch)
        right = torch.arange(len(logits))
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2

    return training(Pairs(), loss, make, 256)


def adversarial() -> Training:
    """A generator of lines and its critic with a gradient penalty, an optimizer each."""
    make_line = nn.Sequential(nn.Conv1d(4, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 1, 5, 1, 2))
    critic = nn.Sequential(nn.Conv1d(1, 32, 5, 2, 2), nn.SiLU(), nn.Conv1d(32, 1, 5, 2, 2))
    nets = nn.ModuleDict({"line": make_line, "critic": critic})
    first = torch.optim.Adam(make_line.parameters(), betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), betas=(0.5, 0.9))

    def step(batch: Batch) -> None:
        real = batch["x"]
        fake = make_line(torch.randn(len(real), 4, real.shape[-1]))
        mixed = torch.lerp(real, fake.detach(), torch.rand(len(real), 1, 1)).requires_grad_()
        [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        second.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty).backward()
        second.step()
        first.zero_grad()
        (-critic(fake).mean()).backward()
        first.step()
        nets.zero_grad()

    def make(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, 1, length)}

    return Training(nets, first, step, make, 4096, min_size=32, max_n=64)


class Preconditioned(torch.optim.Optimizer):
    """Gram matrices of each gradient's rows; their roots are computed in every tenth step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, rows = self.state[p], p.grad.reshape(len(p), -1)
                if not state:
                    state |= {"count": 0, "gram": torch.zeros(len(p), len(p))}
                state["gram"] += rows @ rows.T
                if state["count"] % 10 == 0:
                    values, vectors = torch.linalg.eigh(state["gram"] + 1e-4 * torch.eye(len(p)))
                    state["root"] = (vectors * values.pow(-0.25)) @ vectors.T
                state["count"] += 1
                p.add_((state["root"] @ rows).view_as(p), alpha=-1e-3)


def preconditioned() -> Training:
    """A flat network over the mean of its points; a teacher follows it as a moving average."""
    model = nn.Sequential(nn.Linear(24, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 10))
    teacher = torch.optim.swa_utils.AveragedModel(model)
    optimizer = Preconditioned(model.parameters())

    def make(n: int, length: int) -> Batch:
        return {"x": torch.randn(n, length, 24)}

    def step(batch: Batch) -> None:
        with torch.no_grad():
            wanted = teacher(batch["x"])
        F.mse_loss(model(batch["x"] + 0.1 * torch.randn_like(batch["x"])), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.update_parameters(model)

    return Training(model, optimizer, step, make, 512)


FIELDS: dict[str, Callable[[], Training]] = {
    "residual blocks": residual,
    "U-Net": u_net,
    "diffusion": diffusion,
    "volumes": volumes,
    "points": points,
    "graphs": graphs,
    "contrastive": contrastive,
    "adversarial": adversarial,
    "preconditioned": preconditioned,
}
