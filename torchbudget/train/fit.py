"""A whole training, which goes on where it was stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchbudget.errors import OptionError
from torchbudget.protocols import HasEpochs, ResumableSource
from torchbudget.train import checkpoint
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.batches import num_samples
from torchbudget.train.loop import Criterion, Weight, evaluate, train_epoch
from torchbudget.train.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one epoch did, over all ranks.

    Attributes:
        number: of the epoch, from 0.
        loss: Σ loss / Σ weight of its steps.
        validation: the same of the validation data after it; `None` without.
        steps: optimizer steps.
        skipped: those of them that changed nothing.
        seconds: that it took, evaluation included.
    """

    number: int
    loss: float
    validation: float | None
    steps: int
    skipped: int
    seconds: float


Callback: TypeAlias = Callable[[Step | Epoch], object]


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
    """Train for a number of epochs; with a folder that has an unfinished run, go on with that one.

    The first rank writes into the folder: `last.pt`, the state of everything; `best.pt`, the
    model's of the best validation loss; and `statistics.jsonl`, a line for every step and every
    epoch. A run that was stopped takes the same steps as one that was not, on as many ranks, and
    bit for bit where the kernels are deterministic. Only the random numbers of the loader's workers
    are not repeated in the epoch that was stopped.

    Args:
        model: as it is called; put into training mode.
        loader: one whose batch sampler or data set is a `MemoryBudgetBatchSampler`, a
            `BudgetedIterableDataset` or another `torchbudget.protocols.ResumableSource`, or a
            `StatefulDataLoader`; others only without `checkpoint_steps`.
        criterion: `criterion(model, batch)` calls the model and returns the loss; a mean where the
            accumulator has `mean=True`.
        accumulator: that steps; its optimizers, schedulers and scaler are saved.
        epochs: in all, those of earlier calls in the same folder included.
        weight: of a batch in the loss of a step. Default: its samples.
        validation: a loader to evaluate on after each epoch.
        patience: stop after so many epochs in a row without a better validation loss.
        folder: for files; made where it does not exist.
        checkpoint_steps: save after every so many steps, too.
        callbacks: called with every `Step` and `Epoch`; the training ends after one that returns
            true, which must then be so on every rank.
        device: that batches are moved to; `None`: they are not moved.
        progress: show a bar, where tqdm is installed and there is a terminal.

    Returns:
        The epochs, those of earlier calls in the same folder included.

    Raises:
        OptionError: patience without validation; checkpoints of a loader whose position cannot be
            saved; or a folder, and a model that is sharded.
        StateError: the folder has a `last.pt` that is no checkpoint of such a run.
    """
    if patience is not None and validation is None:
        raise OptionError("patience needs validation data")
    run = _Run(
        model=model,
        loader=loader,
        accumulator=accumulator,
        folder=None if folder is None else Path(folder),
        checkpoint_steps=checkpoint_steps,
        callbacks=callbacks,
        patience=patience,
    )
    while run.goes_on(epochs):
        model.train()
        if run.begin_epoch():
            train_epoch(
                model,
                loader if folder is None else checkpoint.TrackedLoader(loader),
                criterion,
                accumulator,
                weight=weight,
                device=device,
                when_begun=run.restore_generators,
                when_stepped=run.step_taken,
                progress=progress and run.is_first_rank,
            )
        if run.stopped:
            break
        loss = None
        if validation is not None:
            loss = evaluate(
                model,
                validation,
                criterion,
                weight=weight,
                mean=accumulator.mean,
                device=device,
                group=accumulator.ranks.group,
            )
        run.end_epoch(loss)
    return run.history


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


@dataclass(kw_only=True)
class _Run:
    """The progress of a training, and its files."""

    model: nn.Module
    loader: DataLoader[Any]
    accumulator: GradAccumulator
    folder: Path | None
    checkpoint_steps: int | None
    callbacks: Sequence[Callback]
    patience: int | None
    history: list[Epoch] = field(default_factory=list)
    tally: _Tally = field(default_factory=_Tally)
    clock_s: float = 0.0  # up to which the tally's seconds count
    stopped: bool = False
    loaded: dict[str, Any] | None = None  # until its random generators are restored

    def __post_init__(self) -> None:
        self.is_first_rank = self.accumulator.ranks.rank == 0
        if self.folder is not None:
            if self.checkpoint_steps is not None and not checkpoint.has_position(self.loader):
                raise OptionError(
                    "checkpoint_steps needs a loader whose position can be saved: one with a "
                    "MemoryBudgetBatchSampler or a BudgetedIterableDataset, or a StatefulDataLoader"
                )
            if self.accumulator.sharded:
                raise OptionError(
                    "fit saves whole models; save sharded ones with torch.distributed.checkpoint"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            # The first rank may still write for an earlier call.
            self.accumulator.ranks.gather_objects(None)
            if (self.folder / "last.pt").exists():
                self._load(self.folder)

    def _load(self, folder: Path) -> None:
        self.loaded = loaded = torch.load(folder / "last.pt", "cpu", weights_only=True)
        checkpoint.load_run_state(loaded["run"], self.model, self.accumulator, self.loader)
        self.history = [Epoch(**epoch) for epoch in loaded["history"]]
        self.tally = _Tally(**loaded["tally"])
        if not self.tally.steps:  # between epochs; within one, `train_epoch` calls it
            self.restore_generators()
        if self.is_first_rank:
            self._truncate_statistics(folder, loaded["run"]["training"]["accumulator"]["steps"])

    def _truncate_statistics(self, folder: Path, steps: int) -> None:
        """Delete the lines of what came after the checkpoint, since it will come again."""
        path = folder / "statistics.jsonl"
        if not path.exists():
            return
        last = {"step": steps, "epoch": len(self.history) - 1}
        lines = path.read_text("utf-8").splitlines(keepends=True)
        records = map(json.loads, lines)
        kept = (record["number"] <= last[record["kind"]] for record in records)
        path.write_text("".join(compress(lines, kept)), "utf-8")

    def restore_generators(self) -> None:
        """Go on with the random numbers of the run that was loaded."""
        if self.loaded is not None:
            checkpoint.restore_generators(self.loaded["run"], self.accumulator)
            self.loaded = None

    def begin_epoch(self) -> bool:
        """Whether the coming epoch is to be trained on.

        It is not where the run was stopped after that epoch's last step, before its end.
        """
        self.clock_s = time.perf_counter()
        number = len(self.history)
        sampler: Any = self.loader.batch_sampler
        if self.loaded is not None and (
            self.loaded["epoch_is_over"]
            or (isinstance(sampler, ResumableSource) and sampler.epoch > number)
        ):
            self.restore_generators()
            return False
        for source in (sampler, self.loader.sampler, self.loader.dataset):
            if isinstance(source, HasEpochs):
                source.set_epoch(number)
        return True

    def step_taken(self, step: Step, batches_done: int | None) -> bool:
        """Count, write and save; whether the training ends here."""
        self.tally.add(step)
        self._write(step)
        if self.checkpoint_steps and self.tally.steps % self.checkpoint_steps == 0:
            self._save(is_over=batches_done is None)
        return self._call_back(step)

    def end_epoch(self, validation: float | None) -> None:
        """Add the epoch to the history, write and save."""
        self._read_clock()
        tally, best = self.tally, min(self._losses(), default=math.inf)
        epoch = Epoch(
            number=len(self.history),
            loss=tally.loss / tally.weight if tally.weight else math.nan,
            validation=validation,
            steps=tally.steps,
            skipped=tally.skipped,
            seconds=tally.seconds,
        )
        self.history.append(epoch)
        self.tally = _Tally()
        self._write(epoch)
        self._save(is_over=True)
        if self.folder is not None and self.is_first_rank and self._losses()[-1] < best:
            checkpoint.save(self.model.state_dict(), self.folder / "best.pt")
        self._call_back(epoch)

    def goes_on(self, epochs: int) -> bool:
        """Whether another epoch comes: the best validation loss is not too many epochs ago."""
        if self.stopped or len(self.history) >= epochs:
            return False
        losses = self._losses()
        best = losses.index(min(losses)) if losses else 0
        return self.patience is None or len(losses) - 1 - best < self.patience

    def _losses(self) -> list[float]:
        """Of validation; infinite where there is none, or where it is NaN."""
        losses = (epoch.validation for epoch in self.history)
        return [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]

    def _call_back(self, record: Step | Epoch) -> bool:
        for callback in self.callbacks:
            self.stopped |= bool(callback(record))
        return self.stopped

    def _read_clock(self) -> None:
        now_s = time.perf_counter()
        self.tally.seconds += now_s - self.clock_s
        self.clock_s = now_s

    def _write(self, record: Step | Epoch) -> None:
        if self.folder is not None and self.is_first_rank:
            line = {"kind": type(record).__name__.lower(), **asdict(record)}
            with (self.folder / "statistics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _save(self, *, is_over: bool) -> None:
        """Write `last.pt`, within an epoch or after its last batch."""
        if self.folder is None:
            return
        if self.tally.steps:
            self._read_clock()
        state = {
            "run": checkpoint.run_state(
                self.model,
                self.accumulator,
                self.loader,
                epoch=len(self.history),
                is_over=is_over,
            ),
            "history": [asdict(epoch) for epoch in self.history],
            "tally": asdict(self.tally),
            "epoch_is_over": is_over and bool(self.tally.steps),
        }
        if self.is_first_rank:
            checkpoint.save(state, self.folder / "last.pt")
