"""Trainings with any loader, which are broken off and compared with uninterrupted ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import schedulefree
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, get_worker_info

from tests.support.costs import measured
from tests.support.large_steps import CLASSES
from tests.support.samplers import TOKENS
from torchbudget import (
    BudgetedIterableDataset,
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedCost,
    fit,
)
from torchbudget.errors import MeasureWarning
from torchbudget.machine.process_tree import process_memory
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step
from torchbudget.units import MiB

# With a position within an epoch, and without one.
POSITIONED = ("sampler", "stream", "stream of a number of batches")
KINDS = (*POSITIONED, "shuffled", "own generator", "list")


class Tagger(nn.Module):
    """Labels of positions, after dropout."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # or a resumed training would draw as a new one
            torch.manual_seed(4)
            self.embed = nn.Embedding(CLASSES, 16)
            self.head = nn.Linear(16, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.embed(x))))


def samples(n: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (n,), generator=generator).tolist()
    texts = [torch.randint(CLASSES, (length,), generator=generator) for length in lengths]
    return [{"x": text, "labels": (text + 1) % CLASSES} for text in texts]


class SeededByWorkers(list[Any]):
    """Samples with labels that a worker draws as augmentations are.

    With the index and the seed that workers share: after a restart another one may read a sample.
    """

    def __getitem__(self, index: Any) -> Any:
        info, sample = get_worker_info(), super().__getitem__(index)
        generator = torch.Generator().manual_seed(index + (info.seed - info.id if info else 0))
        noise = torch.rand(sample["labels"].shape, generator=generator) < 0.3
        return sample | {"labels": torch.where(noise, 0, sample["labels"])}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["x"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


tokens = attrgetter("num_tokens")


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers are the same, bit for bit."""
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def statistics(folder: Path) -> list[dict[str, Any]]:
    """Lines of the statistics, without times."""
    lines = map(json.loads, (folder / "statistics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


class BrokenOff(Exception):  # noqa: N818  (no failure)
    """A training ended here, as if its process had."""


def at_step(number: int, act: Callable[[], object]) -> Callable[[Step | Epoch], None]:
    """A callback that acts at one step."""

    def callback(record: Step | Epoch) -> None:
        if isinstance(record, Step) and record.number == number:
            act()

    return callback


class After:
    """A callback that breaks off after a number of records; never after 0."""

    def __init__(self, records: int) -> None:
        self.left = records

    def __call__(self, _: Step | Epoch) -> None:
        self.left -= 1
        if not self.left:
            raise BrokenOff


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Lowers the learning rate where the validation loss does not fall fast."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, factor=0.5, patience=1, threshold=0.9)

    def __call__(self, record: Step | Epoch) -> None:
        if isinstance(record, Epoch):
            self.step(record.validation or 0.0)


class Averaging(AveragedModel):
    """Averages the model after each step, and draws random numbers for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.trained = (model,)  # no part of this module

    def update(self, record: Step | Epoch) -> None:
        if isinstance(record, Step) and torch.rand(()) < 0.7:
            self.update_parameters(*self.trained)


class Training:
    """Everything that a small run consists of, made anew; a callback ends it, if at all."""

    def __init__(
        self,
        kind: str = "sampler",
        end: int | None = None,
        *,
        loader: Callable[..., Any] = DataLoader,
        free: bool = False,
        accumulating: Mapping[str, Any] = MappingProxyType({}),
        planning: Mapping[str, Any] = MappingProxyType({"samples_per_step": 8}),
        number: int = 24,
        cost: Any = TOKENS,
        budget: int = 60,
        **options: Any,
    ) -> None:
        torch.manual_seed(11)
        data: Any = samples(number, 0)
        lengths = [len(one["x"]) for one in data]
        self.sampler = MemoryBudgetBatchSampler(lengths, cost, budget, seed=1, **planning)
        options["collate_fn"] = PadCollate()
        held_out: Any = samples(6, 9)
        if options.get("num_workers"):
            data, held_out = SeededByWorkers(data), SeededByWorkers(held_out)
        self.validation = DataLoader(held_out, batch_size=2, shuffle=True, **options)
        if kind.startswith("stream"):
            stream = BudgetedIterableDataset(
                [samples(15, 0), samples(9, 1)], cost, budget, size="x", window=8,
                batches_per_epoch=8 if "number" in kind else None,
            )  # fmt: skip
            self.loader = loader(stream, batch_size=None, num_workers=options.get("num_workers", 0))
        elif kind == "sampler":
            self.loader = loader(data, batch_sampler=self.sampler, **options)
        else:
            if kind == "own generator":
                options["generator"] = torch.Generator().manual_seed(5)
            self.loader = DataLoader(data, batch_size=4, shuffle=kind != "list", **options)
            self.loader = list(self.loader) if kind == "list" else self.loader
        self.kind, self.end, self.model = kind, end, Tagger()
        optimizer = schedulefree.AdamWScheduleFree if free else torch.optim.AdamW
        self.optimizer = optimizer(self.model.parameters(), lr=0.03)
        accumulates: dict[str, Any] = {"steps": 3, **accumulating}
        if kind == "sampler":
            accumulates["steps"] = self.sampler
        if not free:
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
            accumulates.setdefault("scheduler", schedule)
        self.accumulator = GradAccumulator(self.optimizer, self.model, **accumulates)
        self.averaging, self.plateau = Averaging(self.model), Plateau(self.optimizer)
        self.callbacks: list[Any] = [self.averaging.update, self.plateau]

    def ends(self, record: Step | Epoch) -> bool:
        return isinstance(record, Step) and record.number == self.end

    def fit(self, *more: Any, **options: Any) -> list[Epoch]:
        """Train with all callbacks, and more of them."""
        arguments: dict[str, Any] = {"epochs": 2, "weight": tokens, "validation": self.validation}
        arguments["callbacks"] = [*self.callbacks, *more, self.ends]
        if options.get("folder") is not None and self.kind in POSITIONED:
            arguments["checkpoint_steps"] = 1
        arguments |= options
        return fit(self.model, self.loader, self.criterion, self.accumulator, **arguments)

    def criterion(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch)

    def fit_until(self, records: int, folder: Path, **options: Any) -> list[Epoch] | None:
        """Go on in a folder; the epochs, `None` where it was broken off."""
        begun = (folder / "last.pt").exists()
        torch.manual_seed(records if begun else 11)  # another process has other numbers
        try:
            return self.fit(After(records), folder=folder, **options)
        except BrokenOff:
            return None

    def check(self, whole: Training, folder: Path, its_folder: Path) -> None:
        """This training, after faults, is the whole one, with all its files."""
        assert_equal(self.model, whole.model)
        assert_equal(self.averaging, whole.averaging)
        assert self.plateau.state_dict() == whole.plateau.state_dict()
        assert statistics(folder) == statistics(its_folder)
        names, others = ({file.name for file in one.iterdir()} for one in (folder, its_folder))
        assert names == others, "the files of the runs"
        if "best.pt" in names:
            best = (torch.load(one / "best.pt", weights_only=True) for one in (folder, its_folder))
            torch.testing.assert_close(*best, rtol=0, atol=0)


class Creeping(Training):
    """A training whose criterion keeps 4 MiB of every batch.

    Predicted is what a process takes, by default this one now, and 64 MiB that no batch needs.
    """

    def __init__(self, *, leaks: bool = True, resident_bytes: int | None = None) -> None:
        fixed = (resident_bytes or process_memory(shares=False).resident_bytes) + MiB(64)
        cost = measured(PaddedCost(fixed_bytes=fixed, unit_bytes=MiB(1)), margin=0.01)
        budget = int(cost.batch_bytes(4, 30))
        super().__init__(number=200, cost=cost, budget=budget, planning={"window": 20})
        self.leaks, self.kept, self.numbers = leaks, [bytearray(0)], list[int]()

    def criterion(self, model: nn.Module, batch: Any) -> Tensor:
        self.numbers.append(batch.num_samples)
        if self.leaks:
            self.kept.append(bytearray(b"\1") * MiB(4))
        return super().criterion(model, batch)

    def fit(self, monitor: Any, **options: Any) -> list[Epoch]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MeasureWarning)
            return super().fit(monitor=monitor, validation=None, callbacks=[], **options)
