"""A rank that trains under Lightning, with the data module's mixin and without it."""

import logging
import os
import sys
import warnings
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

os.environ |= {"TORCHELASTIC_RUN_ID": "one", "GROUP_RANK": "0"}  # as torchrun does
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

from tests.integrations.cells import (  # noqa: E402
    BUDGET,
    EPOCHS,
    ONCE,
    ids_of,
    loader_of,
    story,
    write_cells,
)
from torchbudget import MemoryBudgetBatchSampler, PaddedCost  # noqa: E402
from torchbudget.errors import (  # noqa: E402
    DiscardedStateWarning,
    OptionError,
    StateError,
    StateMismatchError,
)
from torchbudget.integrations.lightning import BudgetDataMixin  # noqa: E402

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("ignore")
warnings.simplefilter("error", DiscardedStateWarning)
numbers = count()
# Resumed twice at ends of epochs, Lightning itself counts an epoch too few, of any loader.
STOPS: list[list[int | None]] = [[5, None], [None, 2]]
MODES = ("min_size", "max_size", "max_size_cycle")
BY_ITSELF = {"use_distributed_sampler": False}


class Data(BudgetDataMixin, LightningDataModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def budget_loader(self) -> Any:
        return self.make()


class Plain(Data):
    train_dataloader = Data.budget_loader


def ids(batch: Any) -> Any:
    """The ids of a batch; of those of several loaders, in their order."""
    if batch is None or (isinstance(batch, dict) and set(batch) == {"a", "b"}):
        return batch if batch is None else [*map(ids, batch.values())]
    return [*map(ids, batch)] if isinstance(batch, (list, tuple)) else batch["ids"].tolist()


class Model(LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.linear, self.fails_at = torch.nn.Linear(1, 1), fails_at
        self.epochs: dict[int, list[Any]] = {}
        self.lr = 0.0

    def training_step(self, batch: Any) -> Any:
        if self.global_step == self.fails_at:
            raise ZeroDivisionError  # it has its batch
        self.epochs.setdefault(self.current_epoch, []).append(ids(batch))
        return self.linear(torch.ones(1, 1)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def configure_model(self) -> None:
        pass


class Iterating(Model):
    def training_step(self, dataloader_iter: Any) -> Any:
        raise AssertionError("it would read ahead")


class Save(Callback):
    """After a number of batches of this process, where the run stops, and in a step that fails."""

    def __init__(self, path: str, batches: int | None) -> None:
        self.path, self.left = path, batches or 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.should_stop = True
            trainer.save_checkpoint(self.path)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if isinstance(exception, ZeroDivisionError):
            trainer.save_checkpoint(self.path)


def trainer_of(*callbacks: Any, strategy: Any = "ddp" if ranks > 1 else "auto", **more: Any) -> Any:
    return Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, logger=False, callbacks=[*callbacks],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"max_epochs": EPOCHS} | more,
    )  # fmt: skip


def fit(
    data: Any, *callbacks: Any, model: Any = None, ckpt_path: Any = None, saves: Any = None,
    **options: Any,
) -> list[Any]:  # fmt: skip
    model, trainer = model or Model(), trainer_of(*callbacks, **options)
    with suppress(ZeroDivisionError):
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    if saves is not None:
        trainer.save_checkpoint(saves)
    return [batches for _, batches in sorted(model.epochs.items())]


def parts_of(make: Any, by: str = "batch", **options: Any) -> Any:
    """Runs that stop and are saved: after a batch, in a step that fails, or after `fit`."""

    def part(state: Any, stop: int | None) -> Any:
        path, done = state or (None, 0)
        to, limits = f"{folder}/{next(numbers)}", {}
        callbacks = [Save(to, stop)] if by == "batch" or stop is None else []
        if by == "max_steps":  # Lightning counts the epoch that it ends
            limits = {"max_epochs": -1, "max_steps": total if stop is None else done + stop}
            limits["saves"] = to
        elif by == "error" and stop is not None:
            callbacks, limits = [Save(to, None)], {"model": Model(done + stop)}
        epochs = fit(Data(make), *callbacks, ckpt_path=path, **options | limits)
        return epochs, (to, done + sum(map(len, epochs)))

    total = sum(map(len, fit(Data(make)))) if by == "max_steps" else 0
    return part


def run(
    source: str, workers: int, by: str = "batch", kind: Any = DataLoader, stops: Any = ONCE,
    **options: Any,
) -> Any:  # fmt: skip
    return story(parts_of(lambda: loader_of(source, workers, kind), by, **options), stops)


def several_fits(source: str, workers: int, **of_loader: Any) -> Any:
    """Parts are fits of one trainer and one data module, whose loaders are made anew."""

    def make() -> Any:
        return loader_of(source, workers, **of_loader)

    def part(state: Any, stop: int | None) -> Any:
        if state is None and stop is None:
            return fit(Data(make)), None
        trainer, data, done = state or (trainer_of(max_epochs=-1), Data(make), 0)
        trainer.fit_loop.epoch_loop.max_steps = total if stop is None else done + stop
        model = Model()
        trainer.fit(model, datamodule=data)
        epochs = [batches for _, batches in sorted(model.epochs.items())]
        return epochs, (trainer, data, done + sum(map(len, epochs)))

    total = sum(map(len, fit(Data(make))))
    return story(part, [[5, None, 2]])


def check_endless_loaders(source: str) -> None:
    """Loaders that are made anew go on in the pass over the data."""
    endless = {"batches_per_epoch": 4}
    one = loader_of(source, 0, **endless)
    told = several_fits(source, 0, **endless)
    anew = fit(Data(lambda: loader_of(source, 0, **endless)), reload_dataloaders_every_n_epochs=1)
    assert anew == told["whole"] == fit(Data(lambda: one))
    assert told["in_parts"] == [[*chain(*anew)]]
    assert len({*chain(*chain(*anew))}) == len([*chain(*chain(*anew))])


def check_other_data() -> None:
    """Loaders that are made anew for another epoch may read other data, and be more."""

    def make() -> Any:
        sampler = MemoryBudgetBatchSampler([5] * next(sizes), PaddedCost(unit_bytes=1), 50)
        data = [(number, 5) for number in range(sampler.plan.order.dataset_length)]
        return DataLoader(data, batch_sampler=sampler, collate_fn=ids_of)

    sizes, numbers = count(40), count(1)
    more = fit(Data(lambda: [make()] * next(numbers)), reload_dataloaders_every_n_epochs=1)
    assert [len(epoch[0]) for epoch in more] == [1, 2, 3]
    sizes = count(40)
    epochs = fit(Data(make), reload_dataloaders_every_n_epochs=1)
    assert [sorted(chain(*epoch)) for epoch in epochs] == [[*range(n)] for n in (40, 41, 42)]
    trainer, data = trainer_of(max_epochs=-1, max_steps=2), Data(make)
    trainer.fit(Model(), datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = 4
    with pytest.raises(StateMismatchError, match="the samples' sizes"):
        trainer.fit(Model(), datamodule=data)


def check_a_limit(source: str) -> None:
    """It ends epochs, which do not go on."""

    def make() -> Any:
        return loader_of(source, 0)

    told = story(parts_of(make, limit_train_batches=6), [[6], [4]])
    assert told["in_parts"] == [[*chain(*told["whole"])]] * 2
    assert told["whole"] == [epoch[:6] for epoch in fit(Data(make))]


def check_several_loaders(source: str) -> None:
    """Each keeps its own position; the shorter ones start over as Lightning has them."""

    def pair() -> dict[str, Any]:
        long = loader_of(source, 0, shuffle=False)
        return {"a": long, "b": loader_of(source, 0, seed=7, budget=4 * BUDGET)}

    for make in (pair, *(lambda mode=mode: CombinedLoader(pair(), mode) for mode in MODES)):
        told = story(parts_of(make), [[7, None, 4] if make is pair else [16]])
        assert told["in_parts"] == [[*chain(*told["whole"])]]
    path = f"{folder}/several"
    fit(Data(pair), Save(path, 3))
    data = Data(lambda: loader_of(source, 0))
    check_refused(StateError, "budget_loader returned 1: return as many", data, ckpt_path=path)
    trainer, data = trainer_of(max_epochs=-1, max_steps=16), Data(pair)
    trainer.fit(Model(), datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = 20
    with pytest.raises(StateError, match="pass it as ckpt_path"):  # the shorter one has ended
        trainer.fit(Model(), datamodule=data)


def by_itself(source: str, workers: int, **options: Any) -> Any:
    try:
        return {"whole": fit(Plain(lambda: loader_of(source, workers)), **options)}
    except (OptionError, TypeError) as error:
        return type(error).__name__, str(error)


def resumed_without_the_mixin(source: str, workers: int) -> Any:
    """Lightning would begin with other batches than those that are left."""
    path, sized = f"{folder}/plain", loader_of("sampler", 0, shuffle=False)
    fit(Plain(lambda: sized), Save(path, 5), **BY_ITSELF)
    with pytest.raises(StateError) as raised:
        fit(Plain(lambda: loader_of(source, workers)), ckpt_path=path, **BY_ITSELF)
    return raised.typename, str(raised.value)


def of_fabric(source: str, workers: int) -> Any:
    """A tracked loop names Fabric's wrapper; the `DataLoader` inside is iterated in its place."""
    fabric = Fabric(accelerator="cpu", devices=ranks)
    fabric.launch()
    loader = loader_of(source, workers)
    dealt: Any = loader.dataset if source == "stream" else loader.batch_sampler
    wrapper = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    with pytest.raises(OptionError, match="such as Fabric's, pass the DataLoader"):
        dealt.tracked(wrapper)
    return {
        "whole": [
            [ids(fabric.to_device(batch)) for batch in dealt.tracked(loader)] for _ in range(EPOCHS)
        ]
    }


def check_refused(error: type[Exception], text: str, data: Any, **options: Any) -> None:
    with pytest.raises(error, match=text):
        fit(data, **options)


def check_refusals() -> None:
    data = Data(lambda: loader_of("sampler", 0))
    check_refused(OptionError, "take batch", data, model=Iterating())
    others = Data(lambda: loader_of("stream", 0, num_replicas=ranks + 1, rank=0))
    check_refused(OptionError, f"pass num_replicas={ranks}, rank={rank}", others)
    path, plain = f"{folder}/without", Plain(lambda: loader_of("sampler", 0, shuffle=False))
    plain.state_dict = dict
    fit(plain, Save(path, 5), **BY_ITSELF)
    check_refused(StateError, "no position of a Data", data, ckpt_path=path)
    if ranks > 1:  # processes of one model
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
        check_refused(OptionError, "pass num_replicas=1, rank=0", data, strategy=strategy)


def check_the_search_of_a_learning_rate() -> None:
    """It trains on a few batches; the training begins with the first epoch all the same."""
    loader = loader_of("sampler", 0)
    trainer, model = trainer_of(), Model()
    options = {"num_training": 5, "early_stop_threshold": None}
    data = Data(lambda: loader)
    Tuner(trainer).lr_find(model, datamodule=data, **options)
    assert len(model.epochs.pop(0)) >= 5
    trainer.fit(model, datamodule=data)
    assert [*model.epochs.values()] == fit(Data(lambda: loader_of("sampler", 0)))


check_refusals()
if ranks == 1:
    check_the_search_of_a_learning_rate()
    check_other_data()
    for source in ("sampler", "stream"):
        check_endless_loaders(source)
        check_a_limit(source)
        check_several_loaders(source)
settings = {
    "DataLoader": lambda *cell: run(*cell, stops=STOPS),
    "StatefulDataLoader": lambda *cell: run(*cell, kind=StatefulDataLoader),
    "max_steps": lambda *cell: run(*cell, "max_steps"),
    "reload_dataloaders_every_n_epochs": lambda *cell: run(
        *cell, stops=STOPS, reload_dataloaders_every_n_epochs=1
    ),
    "several fits": several_fits,
    "a step fails": lambda *cell: run(*cell, "error"),
    "by itself": lambda *cell: by_itself(*cell, **BY_ITSELF),
    "by itself, use_distributed_sampler": by_itself,
    "without": resumed_without_the_mixin,
    "Fabric": of_fabric,
}
write_cells(settings)
