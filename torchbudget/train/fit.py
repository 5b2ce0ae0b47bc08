"""A whole training, which goes on where it was stopped."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchbudget.budget import MemoryBudget
from torchbudget.checks import natural, optional
from torchbudget.errors import OptionError, StateError, StateMismatchError
from torchbudget.files import make_folder
from torchbudget.protocols import BatchMonitor, IndexSource, Stateful
from torchbudget.train import checkpoint
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.agreement import on_any_rank, on_each_rank, on_host
from torchbudget.train.batches import num_samples
from torchbudget.train.callback_states import load_states, states_of
from torchbudget.train.device_limit import TrainingLimit
from torchbudget.train.epoch import Epoch, Tally
from torchbudget.train.epoch_loader import EpochLoader, generators_of, read_as_plain
from torchbudget.train.loop import Criterion, Weight, summed_loss, train_epoch
from torchbudget.train.run_folder import RunFolder
from torchbudget.train.step import Step
from torchbudget.train.unsaved import Unsaved, check_trained
from torchbudget.units import Amount

_OTHER: Final = 2**32  # between the seeds of training's and of validation's workers


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
    device_limit: MemoryBudget | Amount | None = None,
    monitor: BatchMonitor | None = None,
    progress: bool = True,
) -> list[Epoch]:
    """Train for a number of epochs; with a folder that has an unfinished run, go on with that one.

    The first rank writes into the folder: `last.pt`, the state of everything; `best.pt`, the
    model's of the best validation loss; and `statistics.jsonl`, a line for every step and every
    epoch. Each file is there as a whole or not at all. A run that was stopped, killed or lost its
    power takes the same steps as one that was not, on as many ranks, and bit for bit where the
    kernels are deterministic. Only the random numbers of the loader's workers are not repeated:
    workers that are started again are seeded as before, and begin again with their first numbers.

    Optimizers with `train` and `eval`, as schedule-free ones have, set the model to the weights
    that they return, for validation, for `best.pt` and at the end, and back for training.

    Args:
        model: as it is called; put into training mode.
        loader: one whose batch sampler or data set is a `MemoryBudgetBatchSampler`, a
            `BudgetedIterableDataset` or another `torchbudget.protocols.ResumableSource`, which
            keeps the position, of a `StatefulDataLoader` too; a `StatefulDataLoader` of other data;
            others only without `checkpoint_steps`.
        criterion: `criterion(model, batch)` calls the model and returns the loss; a mean where the
            accumulator has `mean=True`.
        accumulator: that steps; its optimizers, schedulers and scaler are saved.
        epochs: in all, those of earlier calls in the same folder included.
        weight: of a batch in the loss of a step. Default: its samples.
        validation: a loader to evaluate on after each epoch, or a list of batches.
        patience: stop after so many epochs in a row without a better validation loss.
        folder: for files; made where it does not exist; the same for all ranks.
        checkpoint_steps: save after every so many steps, too; needs a folder.
        callbacks: called with every `Step` and `Epoch`, before its checkpoint. The training ends,
            on every rank, after one that returns true on any; that is saved too. To break off and
            go on later, raise instead. One that has `state_dict` and `load_state_dict` (or
            whose object has, of a method), on every rank, is saved: as the first rank has it, and
            where ranks differ, as each has it.
        device: that batches are moved to; `None`: they are not moved.
        device_limit: a budget that torch's allocator is limited to, on the model's device, by
            `limit_device_memory`: before the first batch, and again after the first step and the
            first evaluation, when kernels are loaded. `None`: it is not.
        monitor: a `MemoryMonitor` that is running, on every rank: it measures every batch of the
            training, and with `replan=`, of batches that know their `padded_size`, corrects the
            sampler.
        progress: show a bar, where tqdm is installed and there is a terminal.

    Returns:
        The epochs, those of earlier calls in the same folder included.

    Raises:
        OptionError: patience without validation, or checkpoints without a folder; numbers out of
            range; a monitor on some ranks only; checkpoints of a loader whose position cannot be
            saved; a folder, and a model that is sharded, or lacks parameters that are trained; a
            sampler has not as many sizes as the data set has samples, or batches of its loader come
            out of order; or an epoch, or its validation, has no batch.
        BudgetError: `device_limit` cannot be read, or leaves torch's allocator nothing.
        StateError: `last.pt` is damaged or no checkpoint of such a run; or the first checkpoint
            cannot be loaded again, because of what callbacks or optimizers have in their state.
        StateMismatchError: the ranks do not see the same `last.pt`; or they are more or fewer than
            those that saved it, which were at different places of the epoch.
        SampleError: a loader of a sampler or stream ended before the epoch did.
        RankError: a callback or a checkpoint failed on another rank.
        OSError: a file cannot be written; the checkpoint before it is whole.
    """
    epochs = natural("epochs", epochs)
    if optional("patience", patience) is not None and validation is None:
        raise OptionError("patience needs validation data")
    if optional("checkpoint_steps", checkpoint_steps) is not None and folder is None:
        raise OptionError(f"checkpoint_steps={checkpoint_steps} needs a folder to save into")
    for one in (loader, validation):
        sampler = getattr(one, "batch_sampler", None)
        if isinstance(one, DataLoader) and isinstance(sampler, IndexSource):
            sampler.check_dataset(one.dataset)
    limit = TrainingLimit(budget=device_limit, model=model)
    limit.after("setting up")
    run = _Run(
        model=model,
        loader=read_as_plain(loader),
        criterion=criterion,
        validation=() if validation is None else validation,
        accumulator=accumulator,
        folder=None if folder is None else Path(folder),
        checkpoint_steps=checkpoint_steps,
        callbacks=callbacks,
        patience=patience,
        monitor=monitor,
        limit=limit,
    )
    while run.goes_on(epochs):
        model.train()
        accumulator.optimizers.train()
        train_epoch(
            model,
            run.begin_epoch(),
            criterion,
            accumulator,
            weight=weight,
            device=device,
            when_begun=run.restore_generators,
            when_stepped=run.step_taken,
            monitor=monitor,
            progress=progress and run.is_first_rank,
        )
        if run.stopped:
            break
        accumulator.optimizers.eval()
        run.check_batches("loader", run.tally.steps)
        loss = None
        if validation is not None:
            total, weights = summed_loss(
                model,
                run.validation_data(),
                criterion,
                weight=weight,
                mean=accumulator.mean,
                device=device,
                group=accumulator.ranks.group,
            )
            limit.after("an evaluation")
            run.check_batches("validation", weights)
            loss = total / weights
        run.end_epoch(loss)
    accumulator.optimizers.eval()
    return run.history


@dataclass(kw_only=True)
class _Run:
    """The progress of a training, and its files."""

    model: nn.Module
    loader: DataLoader[Any]
    criterion: Criterion
    validation: Iterable[Any]
    accumulator: GradAccumulator
    folder: Path | None
    checkpoint_steps: int | None
    callbacks: Sequence[Callback]
    patience: int | None
    monitor: BatchMonitor | None
    limit: TrainingLimit
    history: list[Epoch] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    clock_s: float = 0.0  # up to which the tally's seconds count
    stopped: bool = False
    loaded: dict[str, Any] | None = None  # until its random generators are restored
    files: RunFolder | None = None

    def __post_init__(self) -> None:
        self.is_first_rank = self.accumulator.ranks.rank == 0
        self.host = on_host(self.accumulator.ranks)
        self.seed = int(torch.empty((), dtype=torch.int64).random_())  # of this rank's workers
        self.generators = generators_of(self.loader) + generators_of(self.validation)
        owners = [getattr(callback, "__self__", callback) for callback in self.callbacks]
        stateful = {id(owner): owner for owner in owners if isinstance(owner, Stateful)}
        self.stateful: list[Any] = list(stateful.values())
        counts = len(self.callbacks), len(self.stateful), self.monitor is not None
        numbers = on_each_rank(self.host, lambda: counts)
        self.agrees = self.folder is not None or any(number for number, _, _ in numbers)
        if len({has_monitor for _, _, has_monitor in numbers}) > 1:
            raise OptionError("a monitor must be given on every rank, since they replan together")
        if self.folder is not None:
            if len({with_state for _, with_state, _ in numbers}) > 1:
                raise OptionError(
                    "callbacks that have a state_dict must be on every rank, which load them; the "
                    f"ranks have {[n for _, n, _ in numbers]} of them"
                )
            self._open(self.folder)

    def _open(self, folder: Path) -> None:
        if self.checkpoint_steps is not None and not checkpoint.has_position(self.loader):
            raise OptionError(
                "checkpoint_steps needs a loader whose position can be saved: one with a "
                "MemoryBudgetBatchSampler or a BudgetedIterableDataset, or a StatefulDataLoader"
            )
        if self.accumulator.sharded:
            raise OptionError(
                "fit saves whole models; save sharded ones with torch.distributed.checkpoint"
            )
        check_trained(self.model, self.accumulator)
        self.unsaved = Unsaved(self.model, self.accumulator, self.criterion, self.callbacks)
        # The ranks meet here, since the first one may still write for an earlier call.
        on_each_rank(self.host, lambda: make_folder(folder))
        self.files = files = RunFolder(folder)
        found = on_each_rank(self.host, lambda: self._read(files))
        for rank, mine in enumerate(found):
            if mine != found[0]:
                raise StateMismatchError(
                    f"the ranks must share one folder, but in {folder} rank 0 has {found[0]}, rank "
                    f"{rank} {mine}: use a folder that all nodes see, or copy last.pt to each"
                )
        on_each_rank(self.host, lambda: self._go_on(files))

    def _read(self, files: RunFolder) -> str:
        """Read the last checkpoint; which one it is."""
        self.loaded = files.read()
        if self.loaded is None:
            return "no checkpoint"
        return f"the checkpoint {self.loaded.get('id')}"

    def _go_on(self, files: RunFolder) -> None:
        """Load the checkpoint, and drop the lines of what came after it, since it comes again."""
        steps = 0 if self.loaded is None else self._load(self.loaded)
        if self.is_first_rank:
            files.forget_after({"step": steps, "epoch": len(self.history) - 1})

    def _load(self, loaded: dict[str, Any]) -> int:
        """Go on from a checkpoint; after how many steps it was saved."""
        checkpoint.load_run_state(loaded["run"], self.model, self.accumulator, self.loader)
        if len(loaded["callbacks"]) != len(self.stateful):
            raise StateError(
                f"the checkpoint has the states of {len(loaded['callbacks'])} callbacks, but "
                f"{len(self.stateful)} have a state_dict: pass the callbacks that it was saved with"
            )
        load_states(self.stateful, loaded["callbacks"], self.host)
        self.unsaved.restore(loaded.get("learnable"))
        self.history = [Epoch(**epoch) for epoch in loaded["history"]]
        self.tally = Tally(**loaded["tally"])
        self.stopped = loaded["stopped"]
        self.seed = loaded["seeds"][self.host.rank % len(loaded["seeds"])]
        if not self.tally.steps:  # between epochs; within one, `train_epoch` calls it
            self.restore_generators()
        steps: int = loaded["run"]["training"]["accumulator"]["steps"]
        return steps

    def restore_generators(self) -> None:
        """Go on with the random numbers of the run that was loaded."""
        if self.loaded is not None:
            checkpoint.restore_generators(self.loaded["run"], self.accumulator, self.generators)
            self.loaded = None

    def begin_epoch(self) -> Iterable[Any]:
        """What this rank is to train on in the coming epoch.

        It is nothing where it was stopped after its last batch of that epoch. It takes the steps
        of the other ranks then, which may have batches left.
        """
        self.clock_s = time.perf_counter()
        number = len(self.history)
        loaded = self.loaded  # within this epoch, or it would not be there any more
        if loaded is not None and checkpoint.is_over(
            loaded["run"], self.accumulator, self.loader, epoch=number
        ):
            return ()
        return EpochLoader(loader=self.loader, epoch=number, seed=self.seed)

    def check_batches(self, name: str, number: float) -> None:
        """Raise an `OptionError` where nothing of a loader counted in the present epoch."""
        if not number:
            raise OptionError(
                f"{name} had no batch, or none that weighs anything, in epoch {len(self.history)}: "
                "an iterator, such as a generator, is used up after one epoch; pass what it "
                "iterates over, a DataLoader or a list of batches"
            )

    def validation_data(self) -> Iterable[Any]:
        """What this rank is to evaluate on after the present epoch."""
        seed = self.seed + _OTHER
        return EpochLoader(loader=self.validation, epoch=len(self.history), seed=seed)

    def step_taken(self, step: Step, is_over: bool) -> bool:
        """Count, write, call back and save; whether the training ends here."""
        self.limit.after("a step")
        self.tally.add(step)
        self._note(step)
        due = self.checkpoint_steps and self.tally.steps % self.checkpoint_steps == 0
        if due or self.stopped:  # what has ended needs no position to go on from
            self._save(is_over=is_over)
        return self.stopped

    def end_epoch(self, validation: float | None) -> None:
        """Add the epoch to the history, write, call back and save."""
        self._read_clock()
        best = min(self._losses(), default=math.inf)
        epoch = self.tally.epoch(len(self.history), validation)
        self.history.append(epoch)
        self.tally = Tally()
        self._note(epoch)
        self._save(is_over=True, is_best=self._losses()[-1] < best)

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

    def _note(self, record: Step | Epoch) -> None:
        """Write a record, and pass it to the callbacks; where one ends the training, all ranks do.

        They come before the checkpoint, which so has what they change.
        """

        def note_here() -> bool:
            if self.files is not None and self.is_first_rank:
                self.files.write_record(type(record).__name__.lower(), asdict(record))
            ends = [bool(callback(record)) for callback in self.callbacks]
            return any(ends)

        if self.agrees:
            self.stopped = on_any_rank(self.host, note_here)

    def _read_clock(self) -> None:
        now_s = time.perf_counter()
        self.tally.seconds += now_s - self.clock_s
        self.clock_s = now_s

    def _save(self, *, is_over: bool, is_best: bool = False) -> None:
        """Write the checkpoint, within the loop over the loader or after it."""
        files = self.files
        if files is None:
            return
        self.unsaved.check()
        if self.tally.steps:
            self._read_clock()
        state = {
            "id": secrets.token_hex(8),
            "run": checkpoint.run_state(
                self.model,
                self.accumulator,
                self.loader,
                is_over=is_over,
                generators=self.generators,
            ),
            "learnable": self.unsaved.learnable(),
            "callbacks": states_of(self.stateful, self.host),
            "seeds": self.host.gather_objects(self.seed),
            "history": [asdict(epoch) for epoch in self.history],
            "tally": self.tally.encode(),
            "stopped": self.stopped,
        }

        def write_here() -> None:
            if self.is_first_rank and is_best:
                files.save_best(self.model.state_dict())
            if self.is_first_rank:
                files.save(state)

        on_each_rank(self.host, write_here)
