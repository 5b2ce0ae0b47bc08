"""A rank that trains by transformers' Trainer, with the mixin and without it."""

import os
import sys
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations.cells import EPOCHS, LENGTHS, loader_of, write_cells
from torchbudget import PadCollate
from torchbudget.errors import OptionError, RankError, ShardedTwiceError, StateError
from torchbudget.integrations.transformers import BudgetTrainerMixin

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("ignore")
PLANNED: dict[str, Any] = {"samples_per_step": 24, "window": None}
SIZED = {"batches_per_epoch": 7}
PAIRS = {"gradient_accumulation_steps": 2}


class Model(torch.nn.Module):
    """The gradient of its weight is the mean over samples of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.batches: list[Any] = []

    def forward(self, ids: Tensor, labels: Tensor | None = None, **more: Any) -> Any:
        if torch.is_grad_enabled():
            self.batches.append(ids.tolist())
        losses = self.weight * ids.double()
        if labels is None:
            return {"losses": losses}
        counts = labels.ne(-100)
        return {"loss": (losses * counts).sum() / more.get("num_items_in_batch", counts.sum())}


class Steps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.gradients, self.ends = stop, [], []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **more: Any) -> None:
        self.gradients.append(model.weight.grad.item())
        self.ends.append(len(model.batches))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.stop is not None and state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def labelled(samples: Any) -> Any:
    """Samples that are longer than 40 have no labels; nothing can be popped from the mapping."""
    labels = [-100 if length > 40 else number for number, length in samples]
    pairs = zip(samples, labels, strict=True)
    return PadCollate()(
        [{"ids": torch.tensor(one[0]), "labels": torch.tensor(y)} for one, y in pairs]
    )


def trainer_of(loader: Any, steps: Any, *bases: type, **options: Any) -> Any:
    class Budget(*bases, BudgetTrainerMixin, Trainer):  # type: ignore[misc]
        def budget_loader(self) -> Any:
            return loader

    class Plain(*bases, Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader) if prepared else loader

    prepared = options.pop("prepared", False)
    function = {"compute_loss_func": options.pop("compute_loss_func", None)}
    kind = Plain if options.pop("plain", False) else Budget
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        **{"num_train_epochs": EPOCHS, "max_grad_norm": 0.0, "learning_rate": 0.0} | options,
    )  # fmt: skip
    return kind(Model(), arguments, callbacks=[steps], **function)


def train(
    loader: Any, *bases: type, stop: int | None = None, resume: Any = None, **options: Any
) -> Any:
    """Return the batches, and the callback that has seen the steps."""
    steps = Steps(stop)
    trainer = trainer_of(loader, steps, *bases, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.batches, steps


def loader(source: str, workers: int = 0, kind: Any = DataLoader, **options: Any) -> Any:
    return loader_of(source, workers, kind, collate_fn=labelled, **options)


def epochs_of(*cell: Any, **options: Any) -> list[Any]:
    """The batches of each epoch, as a loop without the Trainer takes them."""
    made = loader_of(*cell, **options)
    source: Any = made.batch_sampler or made.dataset
    return [[batch["ids"].tolist() for batch in source.tracked(made)] for _ in range(EPOCHS)]


def check_gradients(batches: Any, steps: Any) -> None:
    """Each step's gradient is the mean over all labels that count, on all ranks."""
    for begin, end, gradient in zip([0, *steps.ends], steps.ends, steps.gradients, strict=False):
        own = [one for batch in batches[begin:end] for one in batch if LENGTHS[one] <= 40]
        sums = torch.tensor([sum(own), len(own)], dtype=torch.float64)
        dist.all_reduce(sums)
        assert gradient == pytest.approx((sums[0] / sums[1].clamp(min=1)).item(), rel=1e-12)


def check_resumed(stops: Any, *cell: Any, loaders: dict[str, Any], **options: Any) -> Any:
    """The rest of a run that was stopped is the rest of one that was not."""
    batches, steps = train(loader(*cell, **loaders), **options)
    check_gradients(batches, steps)
    for stop in stops:
        stopped, begun = train(loader(*cell, **loaders), stop=stop, **options)
        last = f"{folder}/checkpoint-{stop}"
        resumed, ended = train(loader(*cell, **loaders), resume=last, **options)
        assert stopped + resumed == batches
        assert begun.gradients + ended.gradients == steps.gradients
    return batches, steps


def run(source: str, workers: int, kind: Any = DataLoader) -> Any:
    if source == "stream":
        return refused(loader_of(source, workers, kind))
    whole = epochs_of(source, workers, **PLANNED)
    cell = source, workers, kind
    batches, _ = check_resumed([12], *cell, loaders=PLANNED)
    return {"whole": whole, "in_parts": [batches]}


def check_epochs_of_a_given_length(source: str, workers: int) -> None:
    """Epochs of 7 micro-batches, two in a step, which go on where the one before ended."""
    stops = 4, 6  # at the first epoch's end, and within the second one
    batches, steps = check_resumed(stops, source, workers, loaders=SIZED, **PAIRS)
    assert batches == [*chain(*epochs_of(source, workers, **SIZED))]
    assert steps.ends == [2, 4, 6, 7, 9, 11, 13, 14, 16, 18, 20, 21]


def refused(made: Any, *bases: type, **options: Any) -> Any:
    with pytest.raises((OptionError, RankError, StateError, ShardedTwiceError)) as raised:
        train(made, *bases, **options)
    return raised.typename, str(raised.value)


class OwnLoss:
    """The mean of a micro-batch, as most losses that users write."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        assert num_items_in_batch is None
        return model(**inputs)["loss"]


class SquaredWeights:
    def micro_batch_weight(self, batch: Any) -> float:
        return super().micro_batch_weight(batch) ** 2  # type: ignore[misc,no-any-return]


class TensorParallel:
    """All processes have one model, and take the same batches."""

    def get_tp_size(self) -> int:
        return ranks


class ContextParallel:
    def get_cp_size(self) -> int:
        return 2


class NoLocalSums:
    """Gradients that wait to be reduced would be kept whole."""

    def get_train_dataloader(self) -> Any:
        self.accelerator.no_sync = None  # would raise
        return super().get_train_dataloader()  # type: ignore[misc]


def loss_of_number(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    total: Tensor = (outputs["losses"] * labels.ne(-100)).sum()
    return total / num_items_in_batch


def check_that_losses_are_weighted_alike() -> None:
    """The model's, one's own, a function's, and where each micro-batch is reduced."""
    each = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    function = {"compute_loss_func": loss_of_number}
    for made, options in ((PLANNED, {}), (SIZED, PAIRS)):
        check_gradients(*train(loader("sampler", **made), OwnLoss, **options))
        check_gradients(*train(loader("sampler", **made), **function, **options))
    check_gradients(*train(loader("sampler", **PLANNED), NoLocalSums, **each))


def check_refusals() -> None:
    def message(*bases: type, made: Any = PLANNED, **options: Any) -> str:
        return str(refused(loader("sampler", **made), *bases, **options)[1])

    assert "batches_per_epoch, or samples_per_step" in message(made={})
    assert "gradient_accumulation_steps with a sampler" in message(**PAIRS)
    assert "Override micro_batch_weight" in message(SquaredWeights)
    assert "sequence parallelism" in message(ContextParallel)
    others = PLANNED | {"num_replicas": ranks + 1, "rank": 0}
    assert f"pass num_replicas={ranks}, rank={rank}" in message(made=others)
    alone = PLANNED | {"num_replicas": 1, "rank": 0}
    trainer = trainer_of(loader("sampler", **alone), Steps(), TensorParallel)
    assert len(trainer.get_train_dataloader()) == 9  # 203 samples, 24 a step


def by_itself(source: str, workers: int, **options: Any) -> Any:
    """Without the mixin, from the first batch on."""
    whole = epochs_of(source, workers) if source == "stream" else []
    steps = {"max_steps": sum(map(len, whole))} if whole else {}
    try:
        batches, _ = train(loader(source, workers), plain=True, **steps, **options)
    except (OptionError, ShardedTwiceError) as error:
        return type(error).__name__, str(error)
    assert batches == [*chain(*whole)]
    return {"whole": whole}


def resumed_without_the_mixin(source: str, workers: int) -> Any:
    """The Trainer would count back to other batches."""
    train(loader("sampler", shuffle=False), plain=True, stop=5, num_train_epochs=1)
    last = f"{folder}/checkpoint-5"
    return refused(loader(source, workers), plain=True, resume=last, max_steps=60)


dist.init_process_group("gloo")
for source in ("sampler", "stream"):
    check_epochs_of_a_given_length(source, 2)
check_that_losses_are_weighted_alike()
check_refusals()
settings = {
    "with the mixin": run,
    "StatefulDataLoader": lambda *cell: run(*cell, StatefulDataLoader),
    "by itself": by_itself,
    "by itself, prepared": lambda *cell: by_itself(*cell, prepared=True),
    "resumed": resumed_without_the_mixin,
}
write_cells(settings)
