"""transformers' Trainer: its step is a step of the plan, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice, repeat
from math import inf
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from torchbudget.data.collate.collates import TransformersBatch
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.errors import OptionError, StateError
from torchbudget.integrations.hosted import (
    HostedLoader,
    check_dealt,
    find_source,
    of_each_rank,
    of_this_rank,
)
from torchbudget.integrations.kept_apart import check_kept_apart
from torchbudget.train.batches import num_samples

_Trainer: Any = object  # the Trainer comes after the mixin
_KEY: Final = "torchbudget"  # in trainer_state.json
_IGNORED: Final = -100  # a label that does not count


class BudgetTrainerMixin(_Trainer):  # type: ignore[misc]
    """Goes before `Trainer`: override `budget_loader`, not `get_train_dataloader`.

    Each item of the loader that the Trainer sees is a list of micro-batches. With a sampler it is
    one step of the plan, so that `samples_per_step` is needed, and `gradient_accumulation_steps`
    stays 1. With a stream it is one micro-batch, of which `gradient_accumulation_steps` make a
    step; a stream without `batches_per_epoch` needs `max_steps`, and is read epoch after epoch.

    A step's losses are divided by the labels that count in the whole step, on all ranks: by the
    model that takes `num_items_in_batch`, else here (without labels, by the samples). A
    `compute_loss` of your own says by `loss_is_scaled_for_ga` which of the two it is. Where the
    loader stands is in `trainer_state.json`. Before the first step with rows of packed samples
    `check_kept_apart` is called, unless `checks_rows` is false. Rates in samples are right with a
    sampler; with a stream, whose samples are not known in advance, they count micro-batches.

    >>> class BudgetTrainer(BudgetTrainerMixin):  # and Trainer
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    checks_rows = True
    loss_is_scaled_for_ga: bool | None  # the Trainer's
    _items: _Items | None = None
    _step_weight = 0.0  # of all micro-batches of the step, on all ranks

    def budget_loader(self) -> DataLoader[Any]:
        """A loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`."""
        raise NotImplementedError(f"{type(self).__name__} must override budget_loader")

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of lists of micro-batches.

        Raises:
            OptionError: an argument of the Trainer, or an option of the loader, would lose samples
                or weigh them wrongly.
        """
        if not hasattr(super(), "loss_is_scaled_for_ga"):
            raise OptionError(
                "BudgetTrainerMixin refuses a Trainer that does not read loss_is_scaled_for_ga "
                "and would divide the loss again: update transformers"
            )
        self._check_loss()
        loader = self.budget_loader()
        shared_by = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        check_dealt(
            loader,
            num_replicas=self.args.world_size // shared_by,
            rank=self.args.process_index // shared_by,
        )
        self._items = _Items(self, HostedLoader(loader))
        return _ItemLoader(self._items, batch_size=None, collate_fn=_same)

    def _check_loss(self) -> None:
        """Raise an `OptionError` where it cannot be known what losses were divided by."""
        from transformers import Trainer

        may_be_either = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        is_own = type(self).compute_loss is not Trainer.compute_loss
        if is_own and may_be_either and self.loss_is_scaled_for_ga is None:
            raise OptionError(
                f"{type(self).__name__} has a compute_loss of its own: set its "
                "loss_is_scaled_for_ga to True where that divides by num_items_in_batch, as the "
                "Trainer's does, or to False where it returns the mean of the micro-batch"
            )

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Samples of an epoch, from which rates are computed."""
        items = getattr(dataloader, "dataset", None)
        return items.num_samples if isinstance(items, _Items) else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step, on all ranks."""
        if self._items is None or self._items.sampler is None:
            return int(super().get_total_train_batch_size(args))
        return self._items.sampler.plan.window

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The items of one step, and the number of labels in it, on all ranks."""
        items = list(islice(epoch_iterator, num_batches))
        batches = [batch for item in items for batch in item]
        number = self._get_num_items_in_batch(batches, device)
        if batches and not self._is_of_step(number):
            weight = torch.tensor(sum(map(self._weight, batches)), device=device)
            self._step_weight = float(self.accelerator.gather(weight).sum())
        return items, number

    def training_step(
        self, model: nn.Module, inputs: list[Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of each micro-batch of an item; the sum of their losses."""
        if self.checks_rows and inputs and isinstance(inputs[0], TransformersBatch):
            self._check_rows(model, inputs)
        losses = []
        ranks = self.accelerator.num_processes  # over which gradients are averaged
        # Chosen under FSDP, where gradients that wait to be reduced are kept whole.
        syncs_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        said, of_step = self.loss_is_scaled_for_ga, self._is_of_step(num_items_in_batch)
        self.loss_is_scaled_for_ga = of_step
        try:
            for number, batch in enumerate(inputs, 1):
                if not of_step:  # the Trainer divides by it, whoever has computed the loss
                    share = self._weight(batch) * ranks / max(self._step_weight, 1)
                    self.current_gradient_accumulation_steps = 1 / share if share else inf
                    batch = batch if share else _counted(batch)
                syncs = syncs_each or number == len(inputs)
                with nullcontext() if syncs else self.accelerator.no_sync(model=model):
                    losses.append(super().training_step(model, batch, num_items_in_batch))
        finally:
            self.loss_is_scaled_for_ga = said
        return torch.stack(losses).sum()

    def _check_rows(self, model: nn.Module, batches: list[Any]) -> None:
        """Check the longest row of an item, at each item until one had several samples."""
        batch = max(batches, key=num_samples)
        if self.get_cp_size() * self.get_sp_size() == 1:  # or else no process has a whole row
            with self.compute_loss_context_manager():
                check_kept_apart(model, self._prepare_inputs(batch))
        several = torch.tensor([int(num_samples(batch) > 1)], device=self.accelerator.device)
        self.checks_rows = not self.accelerator.gather(several).any()

    def _is_of_step(self, num_items_in_batch: Any) -> bool:
        """Whether losses are divided by the labels of the whole step, not by the micro-batch's."""
        said = self.loss_is_scaled_for_ga
        return num_items_in_batch is not None if said is None else bool(said)

    def evaluation_loop(self, dataloader: DataLoader[Any], *more: Any, **options: Any) -> Any:
        """As the Trainer's.

        Raises:
            OptionError: the Trainer would gather batches of unequal sizes, which never ends.
        """
        if self.args.world_size > 1 and find_source(dataloader) is not None:
            raise OptionError(
                "the Trainer evaluates batches of as many samples on each process, and a sampler "
                "or stream deals unequal ones: leave get_eval_dataloader and get_test_dataloader "
                "as they are, or evaluate with torchbudget.predict"
            )
        return super().evaluation_loop(dataloader, *more, **options)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Of all micro-batches of an item."""
        each = super().floating_point_ops
        return sum(map(each, inputs)) if isinstance(inputs, list) else each(inputs)

    def _track_num_input_tokens(self, inputs: list[Any]) -> None:
        for batch in inputs:
            super()._track_num_input_tokens(batch)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        if self._items is not None:
            positions = of_each_rank(self._items.loader.position())
            self.state.stateful_callbacks[_KEY] = {"ranks": positions}
        super()._save_checkpoint(*arguments, **options)

    def _weight(self, batch: Any) -> int:
        """What the mean loss of a micro-batch is the mean over."""
        if "labels" not in batch:
            return num_samples(batch)
        labels = batch["labels"]
        if getattr(self, "_loss_shifts_labels", False):  # as the Trainer itself counts
            labels = labels[..., 1:]
        return int(labels.ne(_IGNORED).sum())


class _Items(IterableDataset[list[Any]]):
    """Lists of micro-batches, in the process that trains.

    Args:
        trainer: whose arguments and state are read.
        loader: of micro-batches.

    Attributes:
        sampler: whose steps the items are; `None`: each item is one micro-batch.

    Raises:
        OptionError: they do not go together.
    """

    def __init__(self, trainer: Any, loader: HostedLoader) -> None:
        source = loader.source
        is_sampler = isinstance(source, MemoryBudgetBatchSampler)
        is_planned = is_sampler and source.plan.batches_per_epoch is None
        self.loader, self._trainer = loader, trainer
        self.sampler: MemoryBudgetBatchSampler | None = source if is_planned else None
        _check(trainer, self.sampler)
        self._length = self._left()
        self._has_begun = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length of a stream is known with batches_per_epoch only")
        return self._length

    @property
    def num_samples(self) -> int:
        """Samples of an epoch on all ranks; micro-batches where that is not planned."""
        return len(self) if self.sampler is None else len(self.sampler.plan.order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next; to a stream of unknown length, all is one epoch."""
        if self._length is not None:
            self.loader.choose(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield what is left of the epoch; of a stream of unknown length, of all epochs.

        The Trainer passes over as many items as were done before its checkpoint: they are empty.
        """
        done = self._go_on()
        yield from repeat([], done)
        if self._length is not None:
            yield from self._epoch(self._length - done)
            return
        came = True
        while came:
            came = False
            for batch in self.loader:
                came = True
                yield [batch]

    def _epoch(self, left: int) -> Iterator[list[Any]]:
        """Yield the items that the Trainer still takes in the epoch."""
        if self.sampler is not None and self._left() != left:
            raise OptionError(
                f"epoch {self.sampler.epoch} has {self._left()} steps left, and the Trainer counts "
                f"on {left}, by the first epoch's"
            )
        item: list[Any] = []
        batches = iter(self.loader)
        for batch in batches:
            item.append(batch)
            if self.sampler is None or self.loader.run.ends_step:
                left -= 1
                if not left:
                    list(batches)  # ends the loop: the Trainer asks for no item after the last
                yield item
                item = []

    def _left(self) -> int | None:
        """Items of the coming epoch; `None`: unknown."""
        if self.sampler is not None:
            return self.sampler.steps_left
        try:
            return len(self.loader.loader)
        except TypeError:
            return None

    def _go_on(self) -> int:
        """Go to the position of the Trainer's checkpoint, if it has loaded one.

        Returns:
            How many items the Trainer passes over.

        Raises:
            StateError: the checkpoint has no position.
        """
        has_begun, self._has_begun = self._has_begun, True
        args, state = self._trainer.args, self._trainer.state
        if has_begun or not state.global_step or args.ignore_data_skip:
            return 0
        saved = state.stateful_callbacks.get(_KEY)
        if saved is None:
            raise StateError(
                "trainer_state.json has no position to go on from: resume from a checkpoint that "
                "was saved with BudgetTrainerMixin, or pass ignore_data_skip=True"
            )
        self.loader.go_to(of_this_rank(saved["ranks"]))
        each = args.gradient_accumulation_steps
        steps = args.max_steps if self._length is None else -(-self._length // each)
        return int(state.global_step % steps * each)


class _ItemLoader(DataLoader[list[Any]]):
    """A loader that passes on the epoch that the Trainer chooses."""

    dataset: _Items

    def set_epoch(self, epoch: int) -> None:
        """See `_Items.set_epoch`."""
        self.dataset.set_epoch(epoch)


def _same(item: Any) -> Any:
    return item


def _counted(batch: Any) -> dict[str, Any]:
    """A micro-batch no label of which counts, with labels that do.

    The mean of nothing is NaN, and so may be its gradients, which are divided by infinity.
    """
    labels = batch["labels"]
    return {**batch, "labels": labels.masked_fill(labels == _IGNORED, 0)}


def _check(trainer: Any, sampler: MemoryBudgetBatchSampler | None) -> None:
    """Raise an `OptionError` that names what does not go together."""
    args = trainer.args
    refused = {
        "a sampler without samples_per_step or batches_per_epoch: the Trainer needs as many steps "
        "in each epoch": sampler is not None and not sampler.plan.ranks.even_sums,
        "gradient_accumulation_steps with a sampler, whose plan has the steps: leave it at 1": (
            sampler is not None and args.gradient_accumulation_steps != 1
        ),
        "average_tokens_across_devices=False: each rank would weigh its own tokens alike": (
            args.world_size > 1 and not args.average_tokens_across_devices
        ),
        "auto_find_batch_size=True: the sampler's budget decides": args.auto_find_batch_size,
        "DataParallel: start one process for each GPU": args.n_gpu > 1,
        "DeepSpeed: it counts the micro-batches of a step itself": trainer.is_deepspeed_enabled,
    }
    for what, is_so in refused.items():
        if is_so:
            raise OptionError(f"BudgetTrainerMixin refuses {what}")
