"""A process whose memory ends for real, in forward or backward, beside one that is undisturbed."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from torchbudget import GradAccumulator
from torchbudget.errors import BatchNormWarning
from torchbudget.machine.allocators import trim_malloc
from torchbudget.train import retry

trim_malloc(2**17, 2**17)  # or else the heap has blocks of before
# The first square root of a process (AdamW's) is not always the same where two threads take it at
# once: of the same gradients and averages, one process in a hundred made other parameters.
torch.set_num_threads(1)
WIDE = 30_000  # an activation of a sample is 240 kB, which malloc maps and unmaps
PLACES = ("inner", "norm", "outer", "backward of outer", "backward of inner")
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def starve() -> None:
    """From here on no large block can be allocated."""
    used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used, resource.RLIM_INFINITY))


def feed() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, UNLIMITED)


class Wide(nn.Module):
    """Dropout and batch statistics, and a place in forward or backward where memory ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, width).double()
        self.norm = nn.BatchNorm1d(width).double()
        self.outer = nn.Linear(width, 1).double()
        self.fails: list[str] = []  # what is left to happen

    def here(self, place: str) -> None:
        if self.fails and self.fails[0] == place:
            self.fails.pop(0)
            starve()

    def forward(self, x: Tensor) -> Tensor:
        self.here("inner")
        hidden = self.inner(x)
        hidden.register_hook(lambda _: self.here("backward of inner"))
        self.here("norm")
        hidden = F.dropout(self.norm(hidden), 0.1, self.training)
        self.here("outer")
        out = self.outer(hidden)
        out.register_hook(lambda _: self.here("backward of outer"))
        return out


def make() -> tuple[Wide, GradAccumulator]:
    model = Wide(WIDE)
    return model, GradAccumulator(torch.optim.AdamW(model.parameters()), model)


def step_of(model: Wide, accumulator: GradAccumulator, counted: list[Any]) -> Callable[..., None]:
    def step(x: Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).square().sum())
        counted.extend(x[:, 0].tolist())
        feed()

    return step


# Memory comes back when the failure is undone, as it does where somebody else ends.
undo = retry.Attempt.undo


def undo_and_feed(attempt: retry.Attempt) -> None:
    feed()
    undo(attempt)


retry.Attempt.undo = undo_and_feed
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=BatchNormWarning)


def undone() -> dict[str, Any]:
    """Memory ends at each place once; the other run is cut so from the start."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(36, 4)))
    x[:, 0] = torch.arange(36)
    failing = dict(zip(rng.choice(9, len(PLACES), replace=False).tolist(), PLACES, strict=True))
    counted: list[Any] = []
    (model, accumulator), (calm, undisturbed) = make(), make()
    step, calm_step = step_of(model, accumulator, counted), step_of(calm, undisturbed, [])
    for disturbs in (True, False):
        torch.manual_seed(7)
        for number, batch in enumerate(x.split(4)):
            if disturbs:
                model.fails += [failing[number]] if number in failing else []
                accumulator.run_or_split(step, batch)
            else:
                for part in batch.split(2) if number in failing else [batch]:
                    calm_step(part)
            if number % 3 == 2:
                (accumulator if disturbs else undisturbed).step()
    pairs = zip(model.state_dict().values(), calm.state_dict().values(), strict=True)
    return {
        "same": all(a.equal(b) for a, b in pairs),
        "failures": [len(PLACES) - len(model.fails), accumulator.out_of_memory],
        "counted": sorted(counted) == list(range(36)),
        "last": [accumulator.last.number, accumulator.last.weight],
    }
