"""A whole training, which goes on where it was stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchbudget.errors import OptionError
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.checkpoint import (
    has_state,
    load_generators,
    load_run_state,
    run_state,
    save,
)
from torchbudget.train.loop import Criterion, Weight, evaluate, train_epoch
from torchbudget.train.retry import num_samples
from torchbudget.train.stepping import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one epoch did, over all ranks.

    Attributes:
        number: of the epoch, from 0.
        loss: Σ loss / Σ weight of its steps.
        validation: the same of the validation data behind it; `None` without.
        steps: optimizer steps.
        skipped: those of them that changed nothing.
        seconds: on the wall.
    """

    number: int
    loss: float
    validation: float | None
    steps: int
    skipped: int
    seconds: float


Callback: TypeAlias = Callable[[Step | Epoch], object]


@dataclass(slots=True)
class _Tally:
    """An epoch as far as it is done."""

    loss: float = 0.0
    weight: float = 0.0
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        self.loss += step.loss * step.weight if step.weight else 0.0
        self.weight += step.weight
        self.steps += 1
        self.skipped += step.skipped


def fit(
    model: nn.Module,
    loader: DataLoader[Any],
    criterion: Criterion,
    accumulator: GradAccumulator,
    *,
    epochs: int,
    weight: Weight = num_samples,
    validation: Iterable[Any] | None = None,
    patience: int | None = None,
    folder: str | Path | None = None,
    checkpoint_steps: int | None = None,
    callbacks: Sequence[Callback] = (),
    device: torch.device | str | None = None,
    progress: bool = True,
) -> list[Epoch]:
    """Train for a number of epochs; a folder that holds an unfinished run goes on with that one.

    Into the folder go `last.pt`, the state of everything; `best.pt`, the model's of the best
    validation loss; and `statistics.jsonl`, a line for every step and every epoch. The first rank
    writes them. A run that was stopped takes the same steps as one that was not, bit for bit where
    the kernels repeat themselves, on as many ranks. What workers of the loader draw at random in
    the epoch that was stopped is not repeated.

    Args:
        model: as it is called; put into training mode.
        loader: whose batch sampler or data set has a state, as `MemoryBudgetBatchSampler` and
            `BudgetedIterableDataset` have, or a `StatefulDataLoader`.
        criterion: `criterion(model, batch)` calls the model and gives the loss; a mean where the
            accumulator says so.
        accumulator: that steps; its optimizers, schedulers and scaler are saved.
        epochs: in all, those of earlier calls in the same folder included.
        weight: of a batch in the loss of a step. Default: its samples.
        validation: a loader to evaluate on behind each epoch.
        patience: stop behind so many epochs in a row without a better validation loss.
        folder: for files; made where it does not exist.
        checkpoint_steps: save behind every so many steps, too.
        callbacks: called with every `Step` and `Epoch`; the training ends behind one that returns
            true, on every rank alike.
        device: where batches are taken; `None`: where they are.
        progress: show a bar, where tqdm is installed and there is a terminal.

    Returns:
        The epochs, those of earlier calls in the same folder included.

    Raises:
        OptionError: patience without validation; or a folder, and a model that is sharded.
        StateError: the folder holds something else.
    """
    if patience is not None and validation is None:
        raise OptionError("patience needs validation data")
    if folder is not None and checkpoint_steps is not None and not has_state(loader):
        raise OptionError(
            "checkpoint_steps needs a loader whose position can be saved: one with a "
            "MemoryBudgetBatchSampler or a BudgetedIterableDataset, or a StatefulDataLoader"
        )
    if folder is not None and accumulator.sharded:
        raise OptionError(
            "fit saves whole models; save sharded ones with torch.distributed.checkpoint"
        )
    run = _Run(model, loader, accumulator, None if folder is None else Path(folder))
    while not run.is_stopped() and len(run.history) < epochs and run.patient(patience):
        number = len(run.history)

        def stepped(step: Step, done: int | None) -> bool:
            run.tally.add(step)
            run.write(step)
            if checkpoint_steps and run.tally.steps % checkpoint_steps == 0:
                run.save(done)
            return run.tell(callbacks, step)

        model.train()
        began_s = time.perf_counter()
        if run.epoch_is_drawn(number):
            run.begun()
        else:
            _set_epoch(loader, number)
            train_epoch(
                model,
                loader,
                criterion,
                accumulator,
                weight=weight,
                device=device,
                when_begun=run.begun,
                when_stepped=stepped,
                progress=progress and run.first_rank,
            )
        if run.is_stopped():
            break
        validated = None
        if validation is not None:
            validated = evaluate(
                model,
                validation,
                criterion,
                weight=weight,
                mean=accumulator.mean,
                device=device,
                group=accumulator.ranks.group,
            )
        tally = run.tally
        epoch = Epoch(
            number=number,
            loss=tally.loss / tally.weight if tally.weight else math.nan,
            validation=validated,
            steps=tally.steps,
            skipped=tally.skipped,
            seconds=tally.seconds + time.perf_counter() - began_s,
        )
        run.end(epoch)
        run.tell(callbacks, epoch)
    return run.history


def _set_epoch(loader: DataLoader[Any], number: int) -> None:
    for one in (loader.batch_sampler, loader.sampler, loader.dataset):
        set_epoch = getattr(one, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(number)


class _Run:
    """The state of a training, and its files."""

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        accumulator: GradAccumulator,
        folder: Path | None,
    ) -> None:
        self.history: list[Epoch] = []
        self.tally = _Tally()
        self._stopped = False
        self.first_rank = accumulator.ranks.rank == 0
        self._model, self._loader, self._accumulator = model, loader, accumulator
        self._folder = folder
        self._saved: dict[str, Any] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        accumulator.ranks.told(None)  # the first rank has written what an earlier call here saved
        if (folder / "last.pt").exists():
            self._saved = saved = torch.load(folder / "last.pt", "cpu", weights_only=True)
            load_run_state(saved["run"], model, accumulator, loader)
            self.history = [Epoch(**epoch) for epoch in saved["history"]]
            self.tally = _Tally(**saved["tally"])
            if not self.tally.steps:
                self.begun()
            if self.first_rank:
                self._forget_lines(saved["run"]["training"]["accumulator"]["steps"])

    def _forget_lines(self, steps: int) -> None:
        """Of what came behind the checkpoint, which comes again."""
        if self._folder is None or not (self._folder / "statistics.jsonl").exists():
            return
        path = self._folder / "statistics.jsonl"
        limits = {"step": steps, "epoch": len(self.history) - 1}
        lines = path.read_text("utf-8").splitlines(keepends=True)
        told = map(json.loads, lines)
        kept = [
            line
            for line, one in zip(lines, told, strict=True)
            if one["number"] <= limits[one["kind"]]
        ]
        path.write_text("".join(kept), "utf-8")

    def begun(self) -> None:
        """Go on with the random numbers: within an epoch, behind the one that its loop takes."""
        if self._saved is not None:
            load_generators(self._saved["run"], self._accumulator)
            self._saved = None

    def end(self, epoch: Epoch) -> None:
        """An epoch is over."""
        best = self._best()
        self.history.append(epoch)
        self.tally = _Tally()
        self.write(epoch)
        if self._folder is None:
            return
        self.save(None)
        if self.first_rank and self._losses()[-1] < best:
            save(self._model.state_dict(), self._folder / "best.pt")

    def patient(self, patience: int | None) -> bool:
        """Whether the best validation loss is fewer epochs ago than that."""
        if patience is None or not self.history:
            return True
        losses = self._losses()
        return len(losses) - 1 - losses.index(min(losses)) < patience

    def _best(self) -> float:
        return min(self._losses(), default=math.inf)

    def _losses(self) -> list[float]:
        """Of validation; infinite where there is none, or none that is a number."""
        losses = (epoch.validation for epoch in self.history)
        return [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]

    def epoch_is_drawn(self, number: int) -> bool:
        """Whether it was stopped behind the last step of that epoch."""
        sampler = self._loader.batch_sampler
        if self._saved is None:
            return False
        return bool(self._saved["drawn"] or getattr(sampler, "epoch", number) > number)

    def tell(self, callbacks: Sequence[Callback], record: Step | Epoch) -> bool:
        """Call all of them; whether one returned true, with which the training ends."""
        for callback in callbacks:
            self._stopped |= bool(callback(record))
        return self._stopped

    def is_stopped(self) -> bool:
        """Whether a callback has ended the training."""
        return self._stopped

    def write(self, record: Step | Epoch) -> None:
        """Add a line to the statistics."""
        if self._folder is not None and self.first_rank:
            line = {"kind": type(record).__name__.lower(), **asdict(record)}
            with (self._folder / "statistics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def save(self, batches_done: int | None) -> None:
        """Write `last.pt`, within an epoch behind so many batches of its loop."""
        if self._folder is None:
            return
        state = {
            "run": run_state(
                self._model,
                self._accumulator,
                self._loader,
                batches_done,
                epoch=len(self.history),
            ),
            "history": [asdict(epoch) for epoch in self.history],
            "tally": asdict(self.tally),
            "drawn": batches_done is None and bool(self.tally.steps),
        }
        if self.first_rank:
            save(state, self._folder / "last.pt")
