"""A process whose memory ends for real, in forward or backward, beside one that is undisturbed."""

import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.support.large_steps import difference
from torchbudget import GradAccumulator
from torchbudget.errors import BatchNormWarning, SampleTooLargeError
from torchbudget.machine.allocators import trim_malloc
from torchbudget.train import retry

trim_malloc()  # or else the heap has blocks of before
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


class Planned:
    """Steps of given numbers of micro-batches."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def accumulates(self) -> bool:
        return True


def make(steps: Any = 3, width: int = WIDE) -> tuple[Wide, GradAccumulator]:
    model = Wide(width)
    return model, GradAccumulator(torch.optim.AdamW(model.parameters()), model, steps=steps)


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


def run(*, dropout: bool) -> dict[str, Any]:
    """Memory ends at each place once; with dropout the other run is cut so from the start."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(36, 4)))
    x[:, 0] = torch.arange(36)
    failing = dict(zip(rng.choice(9, len(PLACES), replace=False).tolist(), PLACES, strict=True))
    halved = failing if dropout else {}
    model, accumulator = make()
    calm, undisturbed = make(
        Planned([sum(1 + (number in halved) for number in range(at, at + 3)) for at in (0, 3, 6)])
    )
    for one in () if dropout else (model, calm):
        one.eval()
    counted: list[Any] = []
    step, calm_step = step_of(model, accumulator, counted), step_of(calm, undisturbed, [])
    torch.manual_seed(7)
    for number, batch in enumerate(x.split(4)):
        model.fails += [failing[number]] if number in failing else []
        accumulator.run_or_split(step, batch)
    torch.manual_seed(7)
    for number, batch in enumerate(x.split(4)):
        for part in batch.split(2) if number in halved else [batch]:  # the same cut, by hand
            calm_step(part)
    pairs = zip(model.state_dict().values(), calm.state_dict().values(), strict=True)
    return {
        "same": all(a.equal(b) for a, b in pairs),
        "difference": difference(model, calm),
        "failures": [len(PLACES) - len(model.fails), accumulator.out_of_memory],
        "counted": sorted(counted) == list(range(36)),
        "last": [accumulator.last.number, accumulator.last.weight],
    }


def hopeless() -> dict[str, Any]:
    """4, 2 and 1 samples fail."""
    model, accumulator = make(width=300_000)
    model.eval()
    step = step_of(model, accumulator, [])
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    text = ""
    try:
        accumulator.run_or_split(lambda x: (starve(), step(x)), torch.zeros(4, 4).double())
    except SampleTooLargeError as error:
        feed()
        text = str(error)
    return {
        "text": text,
        "tries": accumulator.out_of_memory,
        "same": all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True)),
        "clean": all(p.grad is None for p in model.parameters()),
        "random": random.equal(torch.get_rng_state()),
    }


told = [run(dropout=True), run(dropout=False), hopeless()]
Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(told))
