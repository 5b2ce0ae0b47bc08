"""transformers' Trainer, with the mixin and without it, on real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.cells import (
    CELLS,
    EPOCHS_ONLY,
    RIGHT,
    RecordProperty,
    Refused,
    Row,
    assert_epochs_grow,
    check_rows,
    name_of,
)
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("accelerate") is None,
        reason="transformers or accelerate is not installed",
    ),
]

SCRIPT = """
import json, logging, os, sys, warnings
from pathlib import Path
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.integrations.cells import CELLS, EPOCHS, LENGTHS, each_cell, loader_of, name_of
from torchbudget.errors import OptionError, ShardedTwiceError, StateError
from torchbudget.integrations.transformers import BudgetTrainerMixin

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("ignore")
STEP = 24


class Model(torch.nn.Module):
    \"\"\"The gradient of its weight is the mean over samples of their number.\"\"\"

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.batches, self.evaluated = [], []

    def forward(self, ids, labels=None, **more):
        (self.batches if self.training else self.evaluated).append(ids.tolist())
        losses = self.weight * ids.double()
        if labels is None:
            return {"losses": losses}
        counts = labels.ne(-100)
        return {"loss": (losses * counts).sum() / more.get("num_items_in_batch", counts.sum())}


class Steps(TrainerCallback):
    def __init__(self, stop=None):
        self.stop, self.gradients, self.ends = stop, [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.gradients.append(model.weight.grad.item())
        self.ends.append(len(model.batches))

    def on_step_end(self, args, state, control, **more):
        if self.stop is not None and state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def labelled(samples):
    numbers = torch.tensor([number for number, _ in samples])
    return {"ids": numbers, "labels": numbers}


def trainer_of(path, source, workers, steps, *bases, max_steps=-1, compute_loss_func=None,
               gradient_accumulation_steps=1, accelerator_config=None, kind=DataLoader, **options):
    loader = loader_of(source, workers, kind, collate_fn=labelled, **options)

    class BudgetTrainer(*bases, BudgetTrainerMixin, Trainer):
        def budget_loader(self):
            return loader

    arguments = TrainingArguments(
        output_dir=path, num_train_epochs=EPOCHS, max_steps=max_steps, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="epoch", disable_tqdm=True,
        gradient_accumulation_steps=gradient_accumulation_steps, max_grad_norm=0.0,
        learning_rate=0.0, accelerator_config=accelerator_config,
    )
    return BudgetTrainer(
        Model(), arguments, callbacks=[steps], compute_loss_func=compute_loss_func)


def train(path, source, workers, *bases, stop=None, resume=None, **options):
    steps = Steps(stop)
    trainer = trainer_of(path, source, workers, steps, *bases, **options)
    done = trainer.train(resume_from_checkpoint=resume)
    return trainer.model.batches, steps, trainer, done


def batches_of(source, workers, **options):
    \"\"\"Of each epoch, as a loop without the Trainer takes them.\"\"\"
    loader = loader_of(source, workers, **options or OPTIONS[source])
    source = loader.batch_sampler or loader.dataset
    return [[b["ids"].tolist() for b in source.tracked(loader)] for _ in range(EPOCHS)]


OPTIONS = {"sampler": {"samples_per_step": STEP, "window": None}, "stream": {}}


def run(source, workers, accumulated=1, kind=DataLoader):
    path = folder / name_of(source, workers, accumulated, kind.__name__)
    options = OPTIONS[source] | {"kind": kind}
    whole = batches_of(source, workers)
    total = sum(map(len, whole))
    if source == "stream":  # whose last step goes on into a fourth epoch, where it has to
        options = options | {"max_steps": -(-total // accumulated)}
        options |= {"gradient_accumulation_steps": accumulated}
    batches, steps, trainer, done = train(path, source, workers, **options)
    assert batches[:total] == sum(whole, [])
    assert len(batches) - total < accumulated
    stop = 12 if source == "sampler" else len(whole[0]) // accumulated + 5
    stopped, begun, *_ = train(path, source, workers, stop=stop, **options)
    last = f"{path}/checkpoint-{stop}"
    resumed, ended, trainer, _ = train(
        path, source, workers, resume=last, **options)
    assert stopped + resumed == batches
    if source == "sampler":
        assert done.metrics["epoch"] == trainer.state.epoch == EPOCHS
        assert begun.gradients + ended.gradients == steps.gradients
        assert trainer.num_examples(trainer.get_train_dataloader()) == len(LENGTHS)
        assert trainer.get_total_train_batch_size(trainer.args) == STEP
    return {"whole": whole, "in_parts": [(stopped + resumed)[:total]],
            "batches": batches, "gradients": steps.gradients, "ends": steps.ends}


def accumulated(source, workers):
    \"\"\"Two micro-batches of a stream are a step; those of a sampler's step are in its plan.\"\"\"
    if source == "stream":
        return run(source, workers, accumulated=2)
    options = {"gradient_accumulation_steps": 2, **planned}
    return "OptionError", refused(source, workers=workers, **options)


def check_epochs_of_a_given_length(source, workers):
    \"\"\"Epochs of 7 micro-batches, two in a step, which go on where the one before ended.\"\"\"
    options = {"batches_per_epoch": 7}
    path, cell = folder / name_of("sized", source, workers), (source, workers)
    whole = batches_of(source, workers, **options)
    options |= {"gradient_accumulation_steps": 2}
    batches, steps, trainer, done = train(path, *cell, **options)
    assert batches == sum(whole, [])
    assert steps.ends == [2, 4, 6, 7, 9, 11, 13, 14, 16, 18, 20, 21]
    for stop in (4, 6):  # at the first epoch's end, and within the second one
        stopped, *_ = train(path, *cell, stop=stop, **options)
        resumed, *_ = train(path, *cell, resume=f"{path}/checkpoint-{stop}", **options)
        assert stopped + resumed == batches


class OwnLoss:
    \"\"\"The mean of a micro-batch, as most losses that users write.\"\"\"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Unchanged:
    pass


class SquaredWeights:
    def micro_batch_weight(self, batch):
        return super().micro_batch_weight(batch) ** 2


def loss_of_number(outputs, labels, num_items_in_batch):
    return (outputs["losses"] * labels.ne(-100)).sum() / num_items_in_batch


def check_losses_of_their_own():
    \"\"\"They are weighted like the model's; a function gets the micro-batch's own number.\"\"\"
    sized = {"batches_per_epoch": 7, "gradient_accumulation_steps": 2}
    for source, options in (("sampler", planned), ("stream", sized)):
        cell = folder / "own", source, 0
        _, known, *_ = train(*cell, **options)
        for base, own in ((OwnLoss, {}), (Unchanged, {"compute_loss_func": loss_of_number})):
            _, found, *_ = train(*cell, base, **own, **options)
            torch.testing.assert_close(found.gradients, known.gradients, rtol=1e-12, atol=0)
    assert "Override micro_batch_weight" in refused("sampler", SquaredWeights, **planned)


def check_micro_batches_without_labels():
    \"\"\"They add nothing to the gradient of the step, although their mean is NaN.\"\"\"
    counted = []

    def without_long_ones(samples):
        batch, lengths = labelled(samples), torch.tensor([length for _, length in samples])
        labels = batch["labels"].masked_fill(lengths > 40, -100)
        counted.append(labels)
        return batch | {"labels": labels}

    steps = Steps()
    trainer = trainer_of(folder / "long", "sampler", 0, steps, **planned)
    trainer.budget_loader().collate_fn = without_long_ones
    trainer.train()
    assert not all(bool(labels.ne(-100).any()) for labels in counted)
    for begin, end, gradient in zip([0, *steps.ends], steps.ends, steps.gradients):
        labels = torch.cat(counted[begin:end])
        own = torch.stack([labels.clamp(min=0).sum(), labels.ne(-100).sum()])
        total, number = trainer.accelerator.gather(own[None]).sum(0).tolist()
        assert abs(gradient - total / number) < 1e-12 * gradient


def refused(source, *bases, workers=0, **options):
    try:
        train(folder / "refused", source, workers, *bases, **options)
    except (OptionError, StateError) as error:
        return str(error)


class UnderDeepSpeed:
    \"\"\"As `accelerate launch` sets it up, whatever the arguments say.\"\"\"

    def get_train_dataloader(self):
        self.is_deepspeed_enabled = True
        return super().get_train_dataloader()


class TensorParallel:
    \"\"\"All processes have one model, and take the same batches.\"\"\"

    def get_tp_size(self):
        return ranks


class ContextParallel:
    def get_cp_size(self):
        return 2


def check_that_batches_are_dealt_to_data_parallel_ranks():
    assert "DeepSpeed" in refused("sampler", UnderDeepSpeed, **planned)
    assert f"rank {rank} of {ranks}" in refused(
        "sampler", num_replicas=ranks + 1, rank=0, **planned)
    assert "sequence parallelism" in refused("sampler", ContextParallel, **planned)
    if ranks > 1:
        assert "pass num_replicas=1, rank=0" in refused("sampler", TensorParallel, **planned)
    given = {"num_replicas": 1, "rank": 0} | planned
    trainer = trainer_of(folder, "sampler", 0, Steps(), TensorParallel, **given)
    assert len(trainer.get_train_dataloader()) == 9  # 203 samples, 24 a step


def check_that_each_batch_is_reduced_where_that_is_asked_for():
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    steps, known = Steps(), Steps()
    cell = folder / "synchronised", "sampler", 0
    trainer_of(*cell, known, **planned).train()
    trainer = trainer_of(*cell, steps, accelerator_config=config, **planned)
    trainer.accelerator.no_sync = None  # would raise
    trainer.train()
    torch.testing.assert_close(steps.gradients, known.gradients, rtol=1e-12, atol=0)


class Evaluated:
    def get_eval_dataloader(self, eval_dataset=None):
        return loader_of("sampler", 0, collate_fn=labelled, shuffle=False)


def check_an_evaluation_of_unequal_batches():
    \"\"\"The Trainer would gather them, and its processes wait for each other for ever.\"\"\"
    trainer = trainer_of(folder, "sampler", 0, Steps(), Evaluated, **planned)
    if ranks > 1:
        try:
            trainer.evaluate()
        except OptionError as error:
            assert "leave get_eval_dataloader" in str(error)
        else:
            raise AssertionError("batches of unequal sizes were gathered")
        return
    trainer.evaluate()
    assert sorted(sum(trainer.model.evaluated, [])) == [*range(len(LENGTHS))]


def check_that_an_older_trainer_is_refused():
    \"\"\"One that would divide the loss again; no release of those times is installed.\"\"\"
    attribute = Trainer.loss_is_scaled_for_ga
    del Trainer.loss_is_scaled_for_ga
    try:
        assert "does not read loss_is_scaled_for_ga" in refused("stream", batches_per_epoch=7)
    finally:
        Trainer.loss_is_scaled_for_ga = attribute


def plain_trainer(loader, prepare=None, stop=None, **options):
    \"\"\"Without the mixin.\"\"\"
    class Plain(Trainer):
        def get_train_dataloader(self):
            return loader if prepare is None else prepare(self.accelerator, loader)

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        **{"num_train_epochs": EPOCHS, "learning_rate": 0.0} | options,
    )
    return Plain(Model(), arguments, callbacks=[Steps(stop)])


def by_itself(source, workers, prepare=None):
    \"\"\"Without the mixin, from the first batch on.\"\"\"
    loader, steps = loader_of(source, workers, collate_fn=labelled), {}
    if source == "stream":
        whole = batches_of(source, workers)
        steps["max_steps"] = sum(map(len, whole))
    trainer = plain_trainer(loader, prepare, **steps)
    try:
        trainer.train()
    except (OptionError, ShardedTwiceError) as error:
        return type(error).__name__, str(error)
    assert trainer.model.batches == sum(whole, [])
    return {"whole": whole}


def resumed_without_the_mixin():
    \"\"\"The Trainer would count back to other batches; by our own state it goes on.\"\"\"
    loader = loader_of("sampler", 0, collate_fn=labelled)
    begun = plain_trainer(loader, stop=5, num_train_epochs=1)
    begun.train()
    state, last = loader.batch_sampler.state_dict(), f"{folder}/checkpoint-5"

    def error(source, workers):
        trainer = plain_trainer(loader_of(source, workers, collate_fn=labelled), max_steps=60)
        try:
            trainer.train(resume_from_checkpoint=last)
        except StateError as error:
            return type(error).__name__, str(error)

    rest = loader_of("sampler", 0, collate_fn=labelled)
    rest.batch_sampler.load_state_dict(state)
    ended = plain_trainer(rest, num_train_epochs=1, ignore_data_skip=True)
    ended.train(resume_from_checkpoint=last)
    batches = sum(begun.model.batches + ended.model.batches, [])
    whole = [batch["ids"].tolist() for batch in loader_of("sampler", 0, collate_fn=labelled)]
    assert batches == sum(whole, [])
    return each_cell(error)


dist.init_process_group("gloo")
check_that_an_older_trainer_is_refused()
for source, workers in CELLS:
    check_epochs_of_a_given_length(source, workers)
assert "a sampler without samples_per_step" in refused("sampler")
planned = OPTIONS["sampler"]
check_losses_of_their_own()
check_micro_batches_without_labels()
check_that_batches_are_dealt_to_data_parallel_ranks()
check_an_evaluation_of_unequal_batches()
check_that_each_batch_is_reduced_where_that_is_asked_for()
results = {}
for setting, cell in {
    "with the mixin": run,
    "accumulated": accumulated,
    "StatefulDataLoader": lambda *cell: run(*cell, kind=StatefulDataLoader),
    "by itself": by_itself,
    "by itself, prepared": lambda *cell: by_itself(*cell, Accelerator.prepare),
}.items():
    for name, result in each_cell(cell).items():
        results[name_of(name, setting)] = result
for name, error in resumed_without_the_mixin().items():
    results[name_of(name, "resumed")] = error
(folder / f"{rank}.json").write_text(json.dumps(results))
"""


MIXIN = "torchbudget.integrations.transformers.BudgetTrainerMixin"
GROWS = Refused("OptionError", ["transformers has read len once", MIXIN, "batches_per_epoch"])
SHARDED = Refused("ShardedTwiceError", ["BatchSamplerShard, by prepare()", MIXIN])
DISPATCHED = Refused("ShardedTwiceError", ["DataLoaderDispatcher, by prepare()", MIXIN])
NOT_RESUMED = Refused("StateError", ["resume_from_checkpoint", MIXIN, "ignore_data_skip"])
ROWS = {
    "with the mixin": Row("Trainer, with the mixin"),
    "accumulated": Row(
        "Trainer: `gradient_accumulation_steps=2`",
        Refused("OptionError", ["gradient_accumulation_steps", "BudgetTrainerMixin"]),
        RIGHT,
    ),
    "StatefulDataLoader": Row("Trainer: `StatefulDataLoader`"),
    "by itself": Row("Trainer, without the mixin", GROWS, EPOCHS_ONLY),
    "resumed": Row("Trainer, without the mixin, resumed", NOT_RESUMED),
}


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_in_train(
    ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Steps of the plan, checkpoints within an epoch, and losses divided by the step's labels."""
    found = run_ranks(SCRIPT, tmp_path, ranks, within_s=540)
    assert_epochs_grow(found, "with the mixin")
    for cell in CELLS:
        check_gradients([one[name_of(*cell, "with the mixin")] for one in found])
    for workers in (0, 2):
        check_gradients([one[name_of("stream", workers, "accumulated")] for one in found])
    dealt = (SHARDED, DISPATCHED) if ranks > 1 else (GROWS, EPOCHS_ONLY)
    prepared = Row("Trainer, without the mixin: `accelerator.prepare`", *dealt)
    again = {"by itself, prepared": prepared}
    check_rows(found, ROWS | again, record_property)


def check_gradients(of_ranks: list[dict[str, Any]]) -> None:
    """Each step's gradient is the mean over all of its samples, on all ranks."""
    batches = [one["batches"] for one in of_ranks]
    ends = of_ranks[0]["ends"]
    assert all(one["ends"] == ends for one in of_ranks)
    for begin, end, *gradients in zip(
        [0, *ends], ends, *(one["gradients"] for one in of_ranks), strict=False
    ):
        samples = [sample for one in batches for batch in one[begin:end] for sample in batch]
        assert gradients == pytest.approx([sum(samples) / len(samples)] * len(of_ranks), rel=1e-12)
