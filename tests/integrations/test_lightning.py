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
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

os.environ |= {"TORCHELASTIC_RUN_ID": "one", "GROUP_RANK": "0"}  # as torchrun does
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from tests.integrations.cells import EPOCHS, LENGTHS, STOP, each_cell, loader_of, name_of
from torchbudget.errors import DiscardedStateWarning, OptionError, StateError
from torchbudget.integrations.lightning import BudgetDataMixin

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("ignore")


class Data(BudgetDataMixin, LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def budget_loader(self):
        return self.make()


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.epochs, self.lr = {}, 0.0

    def training_step(self, batch):
        self.epochs.setdefault(self.current_epoch, []).append(batch["ids"].tolist())
        return self.linear(batch["ids"].float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Save(Callback):
    \"\"\"At the end of the first epoch, and within the second one, where the run may stop.\"\"\"

    def __init__(self, path, stops):
        self.path, self.stops = path, stops

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.path} epoch")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, STOP - 1):
            trainer.save_checkpoint(f"{self.path} batch")
            trainer.should_stop = self.stops


def trainer_of(*callbacks, strategy="ddp" if ranks > 1 else "auto", **options):
    return Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, logger=False, max_epochs=EPOCHS,
        callbacks=[*callbacks], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **options,
    )


def fit(data, *callbacks, ckpt_path=None, kind=None, **options):
    model = Model() if kind is None else kind()
    trainer_of(*callbacks, **options).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return [batches for _, batches in sorted(model.epochs.items())]


def run(source, workers, kind, made):
    def data():
        if made == "before fit":
            loader = loader_of(source, workers, kind)
            return Data(lambda: loader)
        return Data(lambda: loader_of(source, workers, kind))

    path = f"{folder}/{name_of(source, workers, kind.__name__, made)}"
    whole = fit(data(), Save(path, stops=False))
    stopped = fit(data(), Save(path, stops=True))
    resumed = fit(data(), ckpt_path=f"{path} batch")
    assert fit(data(), ckpt_path=f"{path} epoch") == whole[1:]
    if made == "in fit":
        first, second, _ = map(len, whole)
        for stop in (first, first + second):  # at an epoch's last batch
            assert resumed_twice(source, workers, kind, path, stop) == sum(whole, [])
    return {"whole": whole, "stopped": sum(stopped, []), "resumed": sum(resumed, [])}


class WithoutPosition(Data):
    def state_dict(self):
        return {}


def check_that_a_position_is_missed():
    path = f"{folder}/without"
    data = WithoutPosition(lambda: loader_of("sampler", 0))
    whole = fit(data, Save(path, stops=False))
    try:
        fit(data, ckpt_path=f"{path} batch")
    except StateError as error:
        assert "no position of a WithoutPosition" in str(error)
    else:
        raise AssertionError("it went on from an epoch's beginning")
    later = fit(data, ckpt_path=f"{path} epoch")  # no position within an epoch is needed
    assert later[1:] == whole[2:]


BY_ITSELF = {"use_distributed_sampler": False}


class Plain(Data):
    train_dataloader = Data.budget_loader


class Hooked(Model):
    make = None

    def train_dataloader(self):
        return self.make()


def fit_by_itself(way, make, *callbacks, ckpt_path=None, **options):
    \"\"\"Without the mixin, by one of the ways to hand over a loader.\"\"\"
    model = Model()
    given = {}
    if way == "fit":
        given["train_dataloaders"] = make()
    elif way == "module":
        model = Hooked()
        model.make = make
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


def resumed_without_the_mixin(kind):
    \"\"\"Lightning would begin with other batches than those that are left.\"\"\"
    path, by_itself = f"{folder}/plain {kind.__name__}", BY_ITSELF

    def error(source, workers, saved="batch", way="data module", model=None):
        def make():
            return loader_of(source, workers, kind)

        try:
            if model is None:
                fit_by_itself(way, make, ckpt_path=f"{path} {saved}", **by_itself)
            else:
                fit(Plain(make), ckpt_path=f"{path} {saved}", kind=model, **by_itself)
        except StateError as error:
            return type(error).__name__, str(error)

    sized = loader_of("sampler", 0, kind, shuffle=False)
    fit(Plain(lambda: sized), Save(path, stops=True), **by_itself)
    errors = each_cell(error)
    assert [*each_cell(error, "epoch").values()] == [*errors.values()]
    for way in ("fit", "module"):
        assert error("sampler", 0, way=way) == errors["sampler, 0"]
    assert error("sampler", 0, model=Estimating) == errors["sampler, 0"]
    return errors


def refused(data, **options):
    try:
        fit(data, **options)
    except OptionError as error:
        return str(error)


def check_what_is_refused():
    assert "overfit_batches" in refused(Data(lambda: loader_of("sampler", 0)), overfit_batches=2)
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


def check_that_a_limit_ends_epochs(source):
    path = f"{folder}/limit {source}"
    limited = {"limit_train_batches": 3}
    whole = fit(Data(lambda: loader_of(source, 0)), Save(path, stops=False), **limited)
    assert [len(epoch) for epoch in whole] == [3] * EPOCHS
    rest = fit(Data(lambda: loader_of(source, 0)), ckpt_path=f"{path} epoch", **limited)
    assert rest == whole[1:]


def check_a_checkpoint_at_a_limit(source, kind):
    \"\"\"After the last batch that the limit lets through, and then within the next epoch.\"\"\"
    def data():
        return Data(lambda: loader_of(source, 0, kind))

    path, limited = f"{folder}/at limit {source} {kind.__name__}", {"limit_train_batches": 6}
    whole = fit(data(), **limited)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiscardedStateWarning)
        fit(data(), SaveAfter(f"{path} once", 6), **limited)
        once = fit(data(), SaveAfter(f"{path} twice", 2), ckpt_path=f"{path} once", **limited)
        twice = fit(data(), ckpt_path=f"{path} twice", **limited)
    assert once == [whole[1][:2]]
    # Resumed twice, Lightning lets six through, not the four that are left, of any loader.
    assert [twice[0][:4], twice[1]] == [whole[1][2:], whole[2]]


def check_a_checkpoint_after_the_last_batch():
    path = f"{folder}/last"
    whole = fit(Data(lambda: loader_of("sampler", 0)))

    class SaveLast(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (0, len(whole[0]) - 1):
                trainer.save_checkpoint(path)

    fit(Data(lambda: loader_of("sampler", 0)), SaveLast())
    assert fit(Data(lambda: loader_of("sampler", 0)), ckpt_path=path) == whole[1:]


class SaveAfter(Callback):
    \"\"\"After a number of batches of this process, where the run stops.\"\"\"

    def __init__(self, path, batches):
        self.path, self.left = path, batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def resumed_twice(source, workers, kind, path, stop):
    \"\"\"A run that is stopped, goes on for two batches, and goes on again.\"\"\"
    def data():
        return Data(lambda: loader_of(source, workers, kind))

    parts = [fit(data(), SaveAfter(f"{path} once", stop))]
    parts += [fit(data(), SaveAfter(f"{path} twice", 2), ckpt_path=f"{path} once")]
    parts += [fit(data(), ckpt_path=f"{path} twice")]
    return sum(sum(parts, []), [])


check_what_is_refused()
if ranks == 1:
    check_that_an_evaluation_is_not_cut_short()
    check_the_search_of_a_learning_rate()
else:
    check_that_processes_of_one_model_take_the_same_batches()
check_that_a_limit_ends_epochs("sampler")
check_that_a_limit_ends_epochs("stream")
for kind in (DataLoader, StatefulDataLoader):
    check_a_checkpoint_at_a_limit("sampler", kind)
    check_a_checkpoint_at_a_limit("stream", kind)
check_a_checkpoint_after_the_last_batch()
check_that_a_position_is_missed()
results = {}
for kind, made in ((DataLoader, "before fit"), (DataLoader, "in fit"),
                   (StatefulDataLoader, "in fit")):
    for name, result in each_cell(lambda *cell: run(*cell, kind, made)).items():
        results[name_of(name, kind.__name__, made)] = result
for kind in (DataLoader, StatefulDataLoader):
    for name, error in resumed_without_the_mixin(kind).items():
        results[name_of(name, kind.__name__, "without")] = error
for way in ("fit", "module", "data module"):
    for name, result in each_cell(lambda *cell: by_itself(*cell, way, **BY_ITSELF)).items():
        results[name_of(name, "by itself", way)] = result
for name, result in each_cell(lambda *cell: by_itself(*cell, "data module")).items():
    results[name_of(name, "by itself", "use_distributed_sampler")] = result
(folder / f"{rank}.json").write_text(json.dumps(results))
"""


MIXIN = "BudgetDataMixin"
GROWS = Refused("OptionError", ["lightning has read len once", MIXIN, "batches_per_epoch"])
NOT_RESUMED = Refused("StateError", ["ckpt_path", MIXIN])
REBUILT = Refused("TypeError", ["use_distributed_sampler=False"])  # Lightning's own
PLAIN = "Lightning, without the mixin: "
RESUMED = "Lightning, without the mixin, resumed: "
ROWS = {
    "DataLoader, before fit": Row("Lightning, data module with the mixin: made before `fit`"),
    "DataLoader, in fit": Row("Lightning, data module with the mixin: made in `fit`"),
    "StatefulDataLoader, in fit": Row(
        "Lightning, data module with the mixin: `StatefulDataLoader`"
    ),
    "by itself, fit": Row(f"{PLAIN}`fit(model, loader)`", GROWS, EPOCHS_ONLY),
    "by itself, module": Row(f"{PLAIN}hook of the module", GROWS, EPOCHS_ONLY),
    "by itself, data module": Row(f"{PLAIN}hook of a data module", GROWS, EPOCHS_ONLY),
    "DataLoader, without": Row(f"{RESUMED}`DataLoader`", NOT_RESUMED),
    "StatefulDataLoader, without": Row(f"{RESUMED}`StatefulDataLoader`", NOT_RESUMED),
}


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_in_fit(
    ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Loaders made before and in `fit`, epochs of any length, checkpoints within an epoch."""
    found = run_ranks(SCRIPT, tmp_path, ranks, within_s=540)
    for made in ("before fit", "in fit"):
        assert_epochs_grow(found, f"DataLoader, {made}")
    own = REBUILT if ranks > 1 else GROWS
    sharding = Row(f"{PLAIN}`use_distributed_sampler=True`", own, EPOCHS_ONLY)
    check_rows(found, ROWS | {"by itself, use_distributed_sampler": sharding}, record_property)
