"""A whole training, which goes on where it was stopped."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchbudget.budget import MemoryBudget, limit_device_memory
from torchbudget.checks import natural, optional
from torchbudget.errors import OptionError, StateError, StateMismatchError
from torchbudget.files import make_folder, write_whole
from torchbudget.protocols import BatchMonitor, IndexSource, ResumableSource, Stateful
from torchbudget.random_state import RandomState
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.batches import num_samples
from torchbudget.train.loop import (
    USED_UP,
    Criterion,
    Weight,
    batches_left,
    evaluate,
    loop_over,
    read_as_plain,
    sources_of,
    train_epoch,
)
from torchbudget.train.step import Step
from torchbudget.units import Amount

_CHECKPOINT_VERSION: Final = 4
_OTHER: Final = 2**32  # between the seeds of training's and of validation's workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Figures of one epoch, over all ranks.

    Attributes:
        number: number of the epoch, from 0.
        loss: Σ loss / Σ weight over its steps that were not skipped.
        validation: the same over the validation data after it; `None` without validation.
        steps: number of optimizer steps.
        skipped: number of skipped steps, which changed nothing.
        seconds: duration, evaluation included.
    """

    number: int
    loss: float
    validation: float | None
    steps: int
    skipped: int
    seconds: float


@dataclass(slots=True, eq=False)
class Tally:
    """An epoch as far as it is done: see `Epoch`.

    Attributes:
        loss: Σ loss, in float64; of steps whose loss nobody has read, it is on their device.
    """

    loss: Tensor | float = 0.0
    weight: float = 0.0
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Count a step; nothing is read, and the loss of a skipped one is left out."""
        self.steps += 1
        self.skipped += step.skipped
        if not step.skipped:
            self.loss = self.loss + step.loss_sum()
            self.weight += step.weight

    def epoch(self, number: int, validation: float | None) -> Epoch:
        """The epoch that is done now; waits for the device."""
        return Epoch(
            number=number,
            loss=float(self.loss) / self.weight if self.weight else math.nan,
            validation=validation,
            steps=self.steps,
            skipped=self.skipped,
            seconds=self.seconds,
        )


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
    """Train for a number of epochs; continue the unfinished run of a folder, if there is one.

    The first rank writes three files into the folder: `last.pt`, the state of everything;
    `best.pt`, the state of the model with the best validation loss; and `statistics.jsonl`, one
    line for every step and every epoch. Each file is complete or missing. A run that was stopped,
    was killed or lost its power takes the same steps as an uninterrupted one on the same number of
    ranks, bit for bit if the kernels are deterministic. The only difference is in random numbers of
    the loader's workers, which start over with their first numbers.

    If an optimizer has `train` and `eval`, as schedule-free optimizers do, `fit` calls `eval`
    before validation, before `best.pt` is written and at the end, and `train` before training.

    Args:
        model: the model, with its wrappers; `fit` puts it into training mode.
        loader: a `DataLoader` or `StatefulDataLoader` over a `MemoryBudgetBatchSampler`, a
            `BudgetedIterableDataset` or another `torchbudget.protocols.ResumableSource`, which
            knows its position; any other loader only without `checkpoint_steps`.
        criterion: `criterion(model, batch)` calls the model and returns the loss: a sum, or a mean
            if the accumulator has `mean=True`.
        accumulator: takes the steps; its optimizers, schedulers and scaler are saved.
        epochs: total number of epochs, those of earlier calls with the same folder included.
        weight: a function that returns the weight of a batch in the loss of a step. Default: its
            number of samples.
        validation: a loader, or a list of batches, to evaluate on after each epoch.
        patience: stop after this many epochs in a row without a better validation loss.
        folder: folder of the files, the same for all ranks; created if it does not exist.
        checkpoint_steps: also save after this many steps, again and again; needs a folder.
        callbacks: called with every `Step` and `Epoch`, before its checkpoint. If one returns true
            on any rank, the training ends on every rank, for later calls too. To stop and continue
            later, raise an exception instead. If a callback, or the object of a bound method, has
            `state_dict` and `load_state_dict`, the first rank's state is saved; it must be equal on
            all ranks.
        device: device to which batches are moved; `None`: they are not moved.
        device_limit: a budget to which `limit_device_memory` limits torch's allocator on the
            model's device: before the first batch, and in each epoch after its first step and its
            evaluation. `None`: no limit.
        monitor: a running `MemoryMonitor`, on every rank. It measures every training batch. With
            `replan=` it corrects the sampler; batches must then know their `padded_size`.
        progress: show a bar, if tqdm is installed and there is a terminal.

    Returns:
        The epochs, those of earlier calls with the same folder included.

    Raises:
        OptionError: `patience` without `validation`, or `checkpoint_steps` without a folder; a
            number is out of range; only some ranks have a monitor; `checkpoint_steps` with a loader
            whose position is unknown; a folder with a sharded model, or with trained parameters
            that the model does not have; a sampler has more or fewer sizes than the data set has
            samples, or its loader yields batches out of order; or an epoch, or its validation, has
            no batch.
        BudgetError: `device_limit` cannot be read, or leaves torch's allocator nothing.
        StateError: `last.pt` is damaged or not a checkpoint of such a run; or the first checkpoint
            cannot be loaded again, because of objects in the state of a callback or an optimizer.
        StateMismatchError: the ranks do not see the same `last.pt`; or another number of ranks
            saved it, and these were at different positions in the epoch.
        SampleError: a loader of a sampler or stream ended before the epoch did.
        RankError: a callback or a checkpoint failed on another rank.
        OSError: a file cannot be written; the previous checkpoint is complete.
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
    run = _Run(
        model=model,
        loader=read_as_plain(loader),
        validation=() if validation is None else validation,
        accumulator=accumulator,
        folder=None if folder is None else Path(folder),
        checkpoint_steps=checkpoint_steps,
        callbacks=callbacks,
        patience=patience,
        monitor=monitor,
        device_limit=device_limit,
    )
    while run.goes_on(epochs):
        model.train()
        accumulator.optimizers.set_mode("train")
        train_epoch(
            model,
            run.begin_epoch(),
            criterion,
            accumulator,
            weight=weight,
            device=device,
            when_stepped=run.step_taken,
            monitor=monitor,
            progress=progress and not run.ranks.rank,
        )
        if run.stopped:
            break
        accumulator.optimizers.set_mode("eval")
        if not run.tally.steps:
            raise OptionError(f"the loader had no batch in epoch {len(run.history)}: {USED_UP}")
        loss = None
        if validation is not None:
            seed, number = run.seed + _OTHER, len(run.history)
            loss = evaluate(
                model,
                _EpochLoader(loader=validation, epoch=number, seed=seed),
                criterion,
                weight=weight,
                mean=accumulator.mean,
                device=device,
                group=accumulator.ranks.group,
            )
            run.limit_device()
        run.end_epoch(loss)
    accumulator.optimizers.set_mode("eval")
    return run.history


@dataclass(kw_only=True)
class _Run:
    """The progress of a training, and its files."""

    model: nn.Module
    loader: DataLoader[Any]
    validation: Iterable[Any]
    accumulator: GradAccumulator
    folder: Path | None
    checkpoint_steps: int | None
    callbacks: Sequence[Callback]
    patience: int | None
    monitor: BatchMonitor | None
    device_limit: MemoryBudget | Amount | None
    history: list[Epoch] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    clock_s: float = 0.0  # time up to which the tally has counted seconds
    stopped: bool = False
    is_read: bool = False  # the loaded position is within an epoch, after this rank's last batch
    files: RunFolder | None = None

    def __post_init__(self) -> None:
        self.limit_device()
        self.ranks = self.accumulator.ranks
        self.seed = int(torch.empty((), dtype=torch.int64).random_())  # of this rank's workers
        self.sources = {  # sources with a position, by the name of the loader's attribute
            name: source
            for name, source in sources_of(self.loader).items()
            if isinstance(source, ResumableSource)
        }
        self.generators = _generators_of(self.loader) + _generators_of(self.validation)
        self.learnable = [one.requires_grad for one in self.model.parameters()]
        owners = [getattr(callback, "__self__", callback) for callback in self.callbacks]
        stateful = {id(owner): owner for owner in owners if isinstance(owner, Stateful)}
        self.stateful: list[Any] = list(stateful.values())
        counts = len(self.stateful), int(self.monitor is not None)
        of_ranks = self.ranks.each(lambda: counts)
        if len(set(of_ranks)) > 1:
            raise OptionError(
                "callbacks that have a state_dict, and a monitor, must be on every rank; the ranks "
                f"have {of_ranks} of them"
            )
        if self.folder is not None:
            self._open(self.folder)

    def _open(self, folder: Path) -> None:
        if self.checkpoint_steps is not None and not self.sources:
            raise OptionError(
                "checkpoint_steps needs a loader whose position can be saved: one with a "
                "MemoryBudgetBatchSampler or a BudgetedIterableDataset"
            )
        if self.accumulator.sharded:
            raise OptionError(
                "fit saves whole models; save sharded ones with torch.distributed.checkpoint"
            )
        _check_trained(self.model, self.accumulator)
        # The ranks meet here, since the first one may still write for an earlier call.
        self.ranks.each(lambda: make_folder(folder))
        self.files = files = RunFolder(folder)
        states: list[dict[str, Any] | None] = []

        def read() -> str:
            states.append(files.read())
            return "no checkpoint" if states[0] is None else f"the checkpoint {states[0]['id']}"

        found = self.ranks.each(read)
        for rank, its in enumerate(found):
            if its != found[0]:
                raise StateMismatchError(
                    f"the ranks must share one folder, but in {folder} rank 0 has {found[0]}, rank "
                    f"{rank} {its}: use a folder that all nodes see, or copy last.pt to each"
                )
        self.ranks.each(lambda: self._go_on(files, states[0]))

    def _go_on(self, files: RunFolder, state: dict[str, Any] | None) -> None:
        """Load the checkpoint, and drop later lines of the statistics: their steps are repeated."""
        steps = 0
        if state is not None:
            self._load(state)
            steps = state["training"]["accumulator"]["steps"]
        if not self.ranks.rank:
            files.forget_after({"step": steps, "epoch": len(self.history) - 1})

    def _load(self, state: dict[str, Any]) -> None:
        saved, ranks = state["ranks"], self.ranks
        places = [(one["is_over"], one["data"]) for one in saved]
        if len(saved) != len(ranks) and any(place != places[0] for place in places):
            raise StateMismatchError(
                f"the {len(saved)} ranks of the checkpoint were at different positions of the "
                f"epoch, as happens with samples= or weight=, so {len(ranks)} ranks would lose and "
                f"repeat samples: continue with {len(saved)} ranks"
            )
        mine = saved[ranks.rank % len(saved)]  # ranks that are new share one
        here = [*self.sources, len(self.generators), len(self.stateful)]
        there = [*mine["data"], len(mine["generators"]), len(state["callbacks"])]
        if here != there:
            raise StateError(
                "the checkpoint has positions, and numbers of generators and of callbacks with a "
                f"state_dict {there}, but this fit has {here}: pass the same kinds of loaders, "
                "with the same generator=, and the same callbacks"
            )
        self.model.load_state_dict(state["model"])
        self.accumulator.load_training_state(state["training"])
        for name, source in self.sources.items():
            source.load_state_dict(mine["data"][name])
        for callback, its_state in zip(self.stateful, state["callbacks"], strict=True):
            callback.load_state_dict(its_state)
        # None: no callback froze parameters, and changes between two calls of fit are kept.
        for one, learns in zip(self.model.parameters(), state["learnable"] or (), strict=False):
            one.requires_grad_(learns)
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.tally = Tally(**state["tally"])
        self.stopped = state["stopped"]
        self.seed = mine["seed"]
        ahead = any(one.epoch > len(self.history) for one in self.sources.values())
        self.is_read = self.tally.steps > 0 and (mine["is_over"] or ahead)
        for generator, its_state in zip(self.generators, mine["generators"], strict=True):
            generator.set_state(its_state)
        RandomState(**mine["random"]).restore()

    def begin_epoch(self) -> Iterable[Any]:
        """Return the data of the coming epoch on this rank.

        It is nothing where it was stopped after its last batch of that epoch. It takes the steps
        of the other ranks then, which may have batches left.
        """
        self.clock_s = time.perf_counter()
        is_read, self.is_read = self.is_read, False
        number = len(self.history)
        return () if is_read else _EpochLoader(loader=self.loader, epoch=number, seed=self.seed)

    def limit_device(self) -> None:
        """Limit the allocator to the budget, less the bytes outside it.

        Kernels, and buffers of collectives, are there only after the first step and evaluation.
        """
        if self.device_limit is not None:
            limit_device_memory(self.device_limit, next(self.model.parameters()).device)

    def step_taken(self, step: Step, is_over: bool) -> bool:
        """Count, write, call back and save; whether the training ends here."""
        self.tally.add(step)
        if self.tally.steps == 1:
            self.limit_device()
        self._note(step)
        due = self.checkpoint_steps and self.tally.steps % self.checkpoint_steps == 0
        if due or self.stopped:  # a training that has ended needs no position
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
        """Whether another epoch follows: the best validation loss is not too many epochs ago."""
        if self.stopped or len(self.history) >= epochs:
            return False
        losses = self._losses()
        best = losses.index(min(losses)) if losses else 0
        return self.patience is None or len(losses) - 1 - best < self.patience

    def _losses(self) -> list[float]:
        """Validation losses; infinity for none, and for NaN."""
        losses = (epoch.validation for epoch in self.history)
        return [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]

    def _note(self, record: Step | Epoch) -> None:
        """Write a record, and pass it to the callbacks; if one ends the training, all ranks end it.

        They come before the checkpoint, which so has what they change.
        """

        def note_here() -> bool:
            if self.files is not None and not self.ranks.rank:
                self.files.write_record(type(record).__name__.lower(), asdict(record))
            ends = [bool(callback(record)) for callback in self.callbacks]
            return any(ends)

        self.stopped = self.ranks.any(note_here)

    def _read_clock(self) -> None:
        now_s = time.perf_counter()
        self.tally.seconds += now_s - self.clock_s
        self.clock_s = now_s

    def _save(self, *, is_over: bool, is_best: bool = False) -> None:
        """Write the checkpoint, within the loop over the loader or after it."""
        files = self.files
        if files is None:
            return
        if self.tally.steps:
            self._read_clock()
        mine = {
            "data": {name: source.state_dict() for name, source in self.sources.items()},
            "is_over": is_over,
            "seed": self.seed,
            "random": asdict(RandomState.take()),
            "generators": [generator.get_state() for generator in self.generators],
        }
        learnable = [one.requires_grad for one in self.model.parameters()]
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "training": self.accumulator.training_state(),
            "ranks": self.ranks.gather_objects(mine),
            "learnable": None if learnable == self.learnable else learnable,
            "history": [asdict(epoch) for epoch in self.history],
            "tally": asdict(replace(self.tally, loss=float(self.tally.loss))),
            "stopped": self.stopped,
        }

        def write_here() -> None:
            state["callbacks"] = [callback.state_dict() for callback in self.stateful]
            if not self.ranks.rank and is_best:
                files.save_best(state["model"])
            if not self.ranks.rank:
                files.save(state)

        self.ranks.each(write_here)


def _check_trained(model: nn.Module, accumulator: GradAccumulator) -> None:
    """Raise an `OptionError` if parameters are trained that the model does not have."""
    saved = set(map(id, model.parameters()))
    others = [one for one in accumulator.optimizers.parameters() if id(one) not in saved]
    if others:
        raise OptionError(
            f"the optimizers train {len(others)} parameters that are not in the model, the first "
            f"of shape {tuple(others[0].shape)}: put them into one module, which is saved"
        )


class RunFolder:
    """`last.pt`, `best.pt` and `statistics.jsonl`, which the first rank writes.

    Each file is there as a whole or not at all, after a loss of power too.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._statistics = path / "statistics.jsonl"
        self._loads = False  # whether a checkpoint was loaded back

    def read(self) -> dict[str, Any] | None:
        """The last checkpoint; `None` if there is none.

        Raises:
            StateError: it is damaged, or no checkpoint of `fit`.
            OSError: it cannot be read.
        """
        path = self.path / "last.pt"
        return _read_checkpoint(path) if path.exists() else None

    def save(self, state: Mapping[str, Any]) -> None:
        """Write `last.pt`, after all statistics; the first time, check that it can be loaded.

        Raises:
            StateError: the state can be saved, but not be loaded.
        """
        if self._statistics.exists():  # a checkpoint must not reach the disk before their lines
            with self._statistics.open("rb") as file:
                os.fsync(file.fileno())
        whole = {"version": _CHECKPOINT_VERSION, "id": secrets.token_hex(8), **state}
        check = (lambda _: None) if self._loads else _read_checkpoint
        self._write("last.pt", lambda file: torch.save(whole, file), check=check)
        self._loads = True

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Write `best.pt`: a model's parameters and buffers."""
        self._write("best.pt", lambda file: torch.save(state, file))

    def _write(self, name: str, write: Callable[[IO[bytes]], object], **options: Any) -> None:
        path = self.path / name
        with _naming(path):
            write_whole(path, write, **options)

    def write_record(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append a line to the statistics; numbers that are not finite are no JSON, but null."""
        finite = {
            name: None if isinstance(one, float) and not math.isfinite(one) else one
            for name, one in record.items()
        }
        line = json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n"
        path = self._statistics
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    def forget_after(self, last: Mapping[str, int]) -> None:
        """Drop the lines of steps that will be repeated, and lines that a fault has cut off.

        Args:
            last: for each kind, the number of the last record that is kept.
        """
        if not self._statistics.exists():
            return
        text = self._statistics.read_text("utf-8", errors="replace")
        kept = "".join(f"{line}\n" for line in text.split("\n") if _is_kept(line, last))
        if kept != text:
            self._write(self._statistics.name, lambda file: file.write(kept.encode()))


def _is_kept(line: str, last: Mapping[str, int]) -> bool:
    try:
        record = json.loads(line)
        return bool(record["number"] <= last[record["kind"]])
    except ValueError:
        return False
    except (KeyError, TypeError):  # not the state of a training
        return True


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare the check sums
        if damaged is not None:
            raise zipfile.BadZipFile(f"the check sum of {damaged} is wrong")
        loaded: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
        if loaded["version"] != _CHECKPOINT_VERSION:
            raise ValueError(f"version {loaded['version']}, not {_CHECKPOINT_VERSION}")
    except (OSError, MemoryError):
        raise  # the file may be whole
    except Exception as error:  # a damaged pickle raises anything
        raise StateError(
            f"{path} cannot be loaded ({type(error).__name__}: {error}). If it is new, a callback "
            "or an optimizer has values other than tensors, numbers and strings in its state. If "
            "not, it is damaged or belongs to another fit: restore a copy of it, or remove it to "
            "train from the beginning"
        ) from error
    return loaded


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name and the next step to an error of the system."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises one of its own instead
        raise OSError(
            f"{path} cannot be written ({error.__context__ or error}); the previous checkpoint is "
            "intact: free disk space, and call fit again with this folder to continue from it"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpochLoader:
    """A loader in one epoch of a training.

    The workers' seeds are not drawn from a generator that others draw from, since workers that
    persist are seeded once, but once more if a training continues.

    Attributes:
        loader: as the user made it.
        epoch: of the training.
        seed: of the training, for the workers of all loops.
    """

    loader: Iterable[Any]
    epoch: int
    seed: int

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.loader
        for source in sources_of(loader).values():
            if hasattr(source, "set_epoch"):
                source.set_epoch(self.epoch)
        if not isinstance(loader, DataLoader):  # it has no workers, as far as is known
            return loop_over(loader)
        # Workers that persist are those of the first epoch.
        seed = self.seed + (0 if loader.persistent_workers else self.epoch)
        before, loader.generator = loader.generator, torch.Generator().manual_seed(seed)
        try:
            return loop_over(loader)
        finally:
            loader.generator = before

    def __length_hint__(self) -> int:
        return batches_left(self.loader) or 0


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Generators that a loader and its samplers draw from, each once."""
    sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [one for one in dict.fromkeys(found) if isinstance(one, torch.Generator)]
