"""Lightning's `Trainer.fit`, with the data module's mixin and without it, on real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.cells import (
    EPOCHS_ONLY,
    RecordProperty,
    Refused,
    Row,
    assert_epochs_grow,
    check_rows,
)
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
    ),
]

SCRIPT = """
import json, logging, os, sys, warnings
from itertools import chain, count
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

os.environ |= {"TORCHELASTIC_RUN_ID": "one", "GROUP_RANK": "0"}  # as torchrun does
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from tests.integrations.cells import BUDGET, CELLS, EPOCHS, LENGTHS, each_cell, loader_of, name_of
from tests.integrations.cells import story
from torchbudget.errors import DiscardedStateWarning, OptionError, StateError
from torchbudget.integrations.lightning import BudgetDataMixin

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("ignore")
warnings.simplefilter("error", DiscardedStateWarning)
numbers = count()
# Resumed twice at ends of epochs, Lightning itself counts an epoch too few, of any loader.
ONCE = [[5], [None, 2]]


class Data(BudgetDataMixin, LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def budget_loader(self):
        return self.make()


def ids(batch):
    if isinstance(batch, torch.Tensor) or batch is None:
        return batch if batch is None else batch.tolist()
    if isinstance(batch, dict) and "ids" in batch:
        return ids(batch["ids"])
    return [ids(one) for one in (batch.values() if isinstance(batch, dict) else batch)]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.epochs, self.lr = {}, 0.0

    def training_step(self, batch):
        self.epochs.setdefault(self.current_epoch, []).append(ids(batch))
        return self.linear(torch.ones(1, 1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Iterating(Model):
    def training_step(self, dataloader_iter):
        raise AssertionError("it would read ahead")


class Failing(Model):
    \"\"\"Raises in a step that has its batch.\"\"\"

    def training_step(self, batch):
        if self.global_step == self.last:
            raise ZeroDivisionError
        return super().training_step(batch)


class Save(Callback):
    \"\"\"After a number of batches of this process, where the run stops.\"\"\"

    def __init__(self, path, batches):
        self.path, self.left = path, batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.left -= 1
        if not self.left:
            trainer.should_stop = True
            if self.path is not None:
                trainer.save_checkpoint(self.path)

    def on_exception(self, trainer, module, exception):
        if isinstance(exception, ZeroDivisionError):
            trainer.save_checkpoint(self.path)


def trainer_of(*callbacks, strategy="ddp" if ranks > 1 else "auto", **options):
    return Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, logger=False, callbacks=[*callbacks],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"max_epochs": EPOCHS} | options,
    )


def fit(data, *callbacks, ckpt_path=None, kind=None, saves=None, last=None, **options):
    model = Model() if kind is None else kind()
    model.last, trainer = last, trainer_of(*callbacks, **options)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    except ZeroDivisionError:
        pass
    if saves is not None:
        trainer.save_checkpoint(saves)
    return [batches for _, batches in sorted(model.epochs.items())]


def parts_of(make, by="batch", total=None, **options):
    \"\"\"Runs that stop and are saved: after a batch, in a step that fails, or after `fit`.\"\"\"
    def part(state, stop):
        path, done = state or (None, 0)
        to, limits = f"{folder}/{next(numbers)}", {}
        callbacks = [Save(to if by in ("batch", "error") else None, by != "error" and stop)]
        if by in ("max_steps", "callback"):
            ends = total if stop is None or by == "callback" else done + stop
            limits = {"max_epochs": -1, "max_steps": ends, "saves": to}
        elif by == "error":
            limits = {"kind": Failing, "last": None if stop is None else done + stop}
        if stop is None or by == "max_steps":
            callbacks = []
        epochs = fit(Data(make), *callbacks, ckpt_path=path, **options | limits)
        return epochs, (to, done + sum(map(len, epochs)))

    return part


def run(source, workers, kind=DataLoader):
    return story(parts_of(lambda: loader_of(source, workers, kind)), ONCE)


def ended(source, workers, by="max_steps"):
    \"\"\"Lightning counts an epoch that `max_steps` or a callback ends; it goes on.\"\"\"
    def make():
        return loader_of(source, workers)

    total = sum(map(len, fit(Data(make))))
    return story(parts_of(make, by, total), ONCE)


def check_other_stories(source, workers):
    \"\"\"Loaders that are made before `fit`; a callback ends a run, or a step that fails.\"\"\"
    def part(state, stop):
        loader = loader_of(source, workers)
        return parts_of(lambda: loader)(state, stop)

    check_story(part, *ONCE)
    for by in ("callback", "error"):
        told = ended(source, workers, by)
        assert told["in_parts"] == [[*chain(*told["whole"])]] * len(ONCE)


def check_story(part, *stops):
    told = story(part, [*stops])
    for batches in told["in_parts"]:
        assert batches == [*chain(*told["whole"])]
    return told["whole"]


def check_a_limit(source, kind=DataLoader):
    \"\"\"It ends epochs, which do not go on, whatever ended the run there.\"\"\"
    def make():
        return loader_of(source, 0, kind)

    limited = {"limit_train_batches": 6}
    whole = check_story(parts_of(make, **limited), [6], [4])
    first = fit(Data(make))
    assert whole == [first[0][:6], first[1][:6], first[2][:6]]
    for by in ("max_steps", "callback"):  # Lightning counts on as it does with any loader
        part = parts_of(make, by, 6 * EPOCHS, **limited)
        for stop, following in ((6, whole[1][0]), (4, whole[0][4])):
            assert part(part(None, stop)[1], 1)[0][0][0] == following


def check_several_loaders(source, workers):
    \"\"\"Each keeps its own position; the shorter ones start over as Lightning has them.\"\"\"
    def pair(swapped):
        long = loader_of(source, workers, shuffle=False)
        short = loader_of(source, workers, seed=7, **{"budget": 4 * BUDGET})
        return {"b": short, "a": long} if swapped else {"a": long, "b": short}

    combined = [lambda mode=mode: CombinedLoader(pair(True), mode)
                for mode in ("min_size", "max_size", "max_size_cycle")]
    made = [lambda: pair(False), lambda: [*pair(False).values()], *combined]
    for make in made:
        check_story(parts_of(make), [7, None, 4], [16])
    part = parts_of(made[0], "max_steps", sum(map(len, fit(Data(made[0])))))
    assert part(None, 5)[0] == [fit(Data(made[0]))[0][:5]]
    state = part(None, 3)[1]
    assert "return those that it was saved with" in refused(
        Data(lambda: loader_of(source, 0)), ckpt_path=state[0])


def check_that_a_position_is_missed():
    class WithoutPosition(Data):
        def state_dict(self):
            return {}

    data, path = WithoutPosition(lambda: loader_of("sampler", 0)), f"{folder}/without"
    fit(data, Save(f"{path} batch", 5))
    assert "no position of a WithoutPosition" in refused(data, ckpt_path=f"{path} batch")
    fit(data, max_epochs=1, saves=f"{path} epoch")  # needs none
    assert fit(data, ckpt_path=f"{path} epoch") == fit(data)[1:]


BY_ITSELF = {"use_distributed_sampler": False}


class Plain(Data):
    train_dataloader = Data.budget_loader


def fit_by_itself(way, make, *callbacks, ckpt_path=None, **options):
    \"\"\"Without the mixin, by one of the ways to hand over a loader.\"\"\"
    model = Model()
    given = {}
    if way == "fit":
        given["train_dataloaders"] = make()
    else:
        given["datamodule"] = Plain(make)
    trainer_of(*callbacks, **options).fit(model, ckpt_path=ckpt_path, **given)
    return [batches for _, batches in sorted(model.epochs.items())]


def by_itself(source, workers, way, **options):
    try:
        return {"whole": fit_by_itself(way, lambda: loader_of(source, workers), **options)}
    except (OptionError, TypeError) as error:
        return type(error).__name__, str(error)


class Estimating(Model):
    \"\"\"Has Lightning make the loader before it restores the checkpoint.\"\"\"

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def resumed_without_the_mixin():
    \"\"\"Lightning would begin with other batches than those that are left.\"\"\"
    path = f"{folder}/plain"

    def error(source, workers, kind=DataLoader, way="data module"):
        def make():
            return loader_of(source, workers, kind)

        try:
            fit_by_itself(way, make, ckpt_path=path, **BY_ITSELF)
        except StateError as error:
            return type(error).__name__, str(error)

    sized = loader_of("sampler", 0, shuffle=False)
    fit(Plain(lambda: sized), Save(path, 5), **BY_ITSELF)
    errors = each_cell(error)
    assert error("sampler", 0, StatefulDataLoader, "fit") == errors["sampler, 0"]
    return errors


def refused(data, **options):
    try:
        fit(data, **options)
    except (OptionError, StateError) as error:
        return str(error)


def check_what_is_refused():
    assert "overfit_batches" in refused(Data(lambda: loader_of("sampler", 0)), overfit_batches=2)
    assert "take batch" in refused(Data(lambda: loader_of("sampler", 0)), kind=Iterating)
    given = {"num_replicas": ranks + 1, "rank": 0}
    for source in ("sampler", "stream"):
        message = refused(Data(lambda: loader_of(source, 0, **given)))
        assert f"pass num_replicas={ranks}, rank={rank}" in message


class Parallel(Model):
    def configure_model(self):
        pass


def check_that_processes_of_one_model_take_the_same_batches():
    def strategy():
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)

    data = Data(lambda: loader_of("sampler", 0))
    assert "pass num_replicas=1, rank=0" in refused(data, strategy=strategy(), kind=Parallel)
    data = Data(lambda: loader_of("sampler", 0, num_replicas=1, rank=0))
    first, *_ = fit(data, strategy=strategy(), kind=Parallel)
    assert sorted(sum(first, [])) == [*range(len(LENGTHS))]


def check_the_search_of_a_learning_rate():
    \"\"\"It trains on a few batches; the training begins with the first epoch all the same.\"\"\"
    loader = loader_of("sampler", 0)
    trainer, model = trainer_of(), Model()
    options = {"num_training": 5, "early_stop_threshold": None}
    Tuner(trainer).lr_find(model, datamodule=Data(lambda: loader), **options)
    assert len(model.epochs.pop(0)) >= 5
    trainer.fit(model, datamodule=Data(lambda: loader))
    assert [*model.epochs.values()] == fit(Data(lambda: loader_of("sampler", 0)))


class Validated(Model):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass


def check_that_an_evaluation_is_not_cut_short():
    \"\"\"Lightning would take as many batches of each validation as of the first.\"\"\"
    def data(*loaders):
        module = Data(lambda: loader_of("sampler", 0))
        module.val_dataloader = lambda: [*loaders]
        return module

    fixed, shuffled = loader_of("sampler", 0, shuffle=False), loader_of("sampler", 0)
    fit(data(fixed), kind=Validated)
    for loaders in ((shuffled,), (fixed, loader_of("sampler", 0))):
        message = refused(data(*loaders), kind=Validated)
        assert "but lightning has read len once" in message and "shuffle=False" in message


check_what_is_refused()
if ranks == 1:
    check_that_an_evaluation_is_not_cut_short()
    check_the_search_of_a_learning_rate()
    check_story(parts_of(lambda: loader_of("sampler", 0), kind=Estimating, max_steps=60), [30])
else:
    check_that_processes_of_one_model_take_the_same_batches()
check_that_a_position_is_missed()
for source, workers in (CELLS[0], CELLS[-1]):
    check_several_loaders(source, workers)
    check_a_limit(source, (DataLoader, StatefulDataLoader)[workers // 2])
    check_other_stories(source, workers)
results = {}
for setting, cell in {
    "DataLoader": run,
    "StatefulDataLoader": lambda *cell: run(*cell, StatefulDataLoader),
    "max_steps": ended,
    "by itself": lambda *cell: by_itself(*cell, "fit", **BY_ITSELF),
    "by itself, use_distributed_sampler": lambda *cell: by_itself(*cell, "data module"),
}.items():
    for name, result in each_cell(cell).items():
        results[name_of(name, setting)] = result
for name, error in resumed_without_the_mixin().items():
    results[name_of(name, "without")] = error
(folder / f"{rank}.json").write_text(json.dumps(results))
"""


MIXIN = "BudgetDataMixin"
GROWS = Refused("OptionError", ["lightning has read len once", MIXIN, "batches_per_epoch"])
NOT_RESUMED = Refused("StateError", ["ckpt_path", MIXIN])
REBUILT = Refused("TypeError", ["use_distributed_sampler=False"])  # Lightning's own
ROWS = {
    "DataLoader": Row("Lightning, data module with the mixin"),
    "StatefulDataLoader": Row("Lightning, data module with the mixin: `StatefulDataLoader`"),
    "max_steps": Row("Lightning, data module with the mixin: `max_steps` ends within an epoch"),
    "by itself": Row("Lightning, without the mixin", GROWS, EPOCHS_ONLY),
    "without": Row("Lightning, without the mixin, resumed", NOT_RESUMED),
}


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_in_fit(
    ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Loaders made before and in `fit`, epochs of any length, checkpoints within an epoch."""
    found = run_ranks(SCRIPT, tmp_path, ranks, within_s=540)
    assert_epochs_grow(found, "DataLoader")
    own = REBUILT if ranks > 1 else GROWS
    sharding = Row("Lightning, without the mixin: `use_distributed_sampler=True`", own, EPOCHS_ONLY)
    check_rows(found, ROWS | {"by itself, use_distributed_sampler": sharding}, record_property)
