"""transformers' Trainer: its step is a step of the plan, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice, repeat
from math import inf
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from torchbudget.data.collate.collates import TransformersBatch
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.distributed import failing_together
from torchbudget.errors import BatchNormWarning, OptionError, StateError, TorchBudgetWarning
from torchbudget.integrations.checks import check_kept_apart, check_weights, halves
from torchbudget.integrations.hosted import (
    HostedLoader,
    check_dealt,
    find_source,
    of_each_rank,
    of_this_rank,
)
from torchbudget.train.batches import num_samples
from torchbudget.warn import warn

_Trainer: Any = object  # the Trainer comes after the mixin
_KEY: Final = "torchbudget"  # in trainer_state.json
_IGNORED: Final = -100  # a label that does not count


class BudgetTrainerMixin(_Trainer):  # type: ignore[misc]
    """A base class to put before `Trainer`: override `budget_loader`, not `get_train_dataloader`.

    Each item of the loader that the Trainer sees is a list of micro-batches. With a sampler it is
    one step of the plan, so that `samples_per_step` is needed, and `gradient_accumulation_steps`
    stays 1. With a stream it is one micro-batch, of which `gradient_accumulation_steps` make a
    step; a stream without `batches_per_epoch` needs `max_steps`, and is read epoch after epoch.

    The loss of each micro-batch is a mean: it is multiplied by the micro-batch's share of the
    step's weight on all ranks. `micro_batch_weight` returns the weight; `num_items_in_batch` is
    passed to a `compute_loss_func` only, as the micro-batch's own weight. Before the first step
    `check_weights` is called, unless `checks_weights` is false, and with rows of packed samples
    `check_kept_apart`, unless `checks_rows` is false. The loader's position is in
    `trainer_state.json`. Rates in samples are right with a sampler; with a stream, whose samples
    are not known in advance, they count micro-batches.

    >>> class BudgetTrainer(BudgetTrainerMixin):  # and Trainer
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    checks_rows = True
    checks_weights = True
    compute_loss_func: Any  # the Trainer's, as the next one
    loss_is_scaled_for_ga: bool | None
    _items: _Items | None = None
    _shifts_labels = False
    _step_weight = 0.0  # of all micro-batches of the step, on all ranks

    def budget_loader(self) -> DataLoader[Any]:
        """Return a loader over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`."""
        raise NotImplementedError(f"{type(self).__name__} must override budget_loader")

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of lists of micro-batches.

        Raises:
            OptionError: an argument of the Trainer, or an option of the loader, would lose samples
                or weigh them wrongly.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        loader = self.budget_loader()
        # The Trainer overlooks that GPT-2, say, shifts labels. FSDP2 derives a class of its own.
        causal = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
        kinds = {kind.__name__ for kind in type(self.accelerator.unwrap_model(self.model)).__mro__}
        self._shifts_labels = bool(causal & kinds) or self._loss_shifts_labels
        self._items = _Items(self, HostedLoader(loader))
        shared_by = self.get_tp_size()
        check_dealt(
            loader,
            num_replicas=self.args.world_size // shared_by,
            rank=self.args.process_index // shared_by,
        )
        return _ItemLoader(self._items, batch_size=None, collate_fn=list)

    def micro_batch_weight(self, batch: Any) -> float:
        """Return the number that the mean loss of a micro-batch is the mean over.

        Override it where the loss is another mean. By default it is the number of labels but -100,
        as the Trainer counts them, or of samples where there are no labels.

        Args:
            batch: a micro-batch, or a part of one, on the host.

        Raises:
            OptionError: the labels or samples cannot be counted.
        """
        labels = batch.get("shift_labels", batch.get("labels"))
        try:
            if labels is None:
                return num_samples(batch)
            if self._shifts_labels and "shift_labels" not in batch:
                labels = labels[..., 1:]
            return int(labels.ne(_IGNORED).sum())
        except (AttributeError, TypeError, OptionError) as error:
            raise OptionError(
                f"{type(self).__name__} cannot count the labels or samples of a micro-batch: "
                "override micro_batch_weight(self, batch) to return the number that its loss is "
                f"the mean over ({error})"
            ) from error

    def num_examples(self, dataloader: Any) -> int:
        """Return the samples of an epoch, from which rates are computed."""
        if isinstance(dataloader, _ItemLoader):
            return dataloader.dataset.num_samples
        return int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of a step, on all ranks."""
        if self._items is None or self._items.sampler is None:
            return int(super().get_total_train_batch_size(args))
        return self._items.sampler.plan.window

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the items of one step, and no number: losses are weighted here."""
        items = list(islice(epoch_iterator, num_batches))
        own = sum(self._weight(batch) for item in items for batch in item)
        self._step_weight = sum(of_each_rank(own))
        return items, None

    def training_step(self, model: nn.Module, inputs: list[Any], *_: Any) -> Tensor:
        """Run forward and backward of each micro-batch of an item; return the summed loss."""
        self._check_item(model, inputs)
        losses = []
        ranks = self.accelerator.num_processes  # over which gradients are averaged
        # Chosen under FSDP, where gradients that wait to be reduced are kept whole.
        syncs_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for number, batch in enumerate(inputs, 1):
            weight = self._weight(batch)
            # The Trainer divides the loss by this number.
            self.current_gradient_accumulation_steps = (
                self._step_weight / (weight * ranks) if weight else inf
            )
            syncs = syncs_each or number == len(inputs)
            with (
                self._mean_of(weight),
                nullcontext() if syncs else self.accelerator.no_sync(model=model),
            ):
                losses.append(super().training_step(model, batch if weight else _counted(batch)))
        return torch.stack(losses).sum()

    def _weight(self, batch: Any) -> float:
        weight = self.micro_batch_weight(batch)
        if not 0 <= weight < inf:
            raise OptionError(
                f"micro_batch_weight must return a number of at least 0, got {weight}"
            )
        return weight

    @contextmanager
    def _mean_of(self, weight: float) -> Iterator[None]:
        """Losses inside are means over a weight, whoever computes them."""
        given, scaled = self.compute_loss_func, self.loss_is_scaled_for_ga
        self.loss_is_scaled_for_ga = False
        if given is not None:
            number = torch.tensor(weight or 1, device=self.args.device)
            self.compute_loss_func = lambda outputs, labels, **_: given(
                outputs, labels, num_items_in_batch=number
            )
        try:
            yield
        finally:
            self.compute_loss_func, self.loss_is_scaled_for_ga = given, scaled

    def _check_item(self, model: nn.Module, batches: list[Any]) -> None:
        """Run the checks that are on, on all ranks together, until they could tell."""
        if not (self.checks_rows or self.checks_weights):
            return
        rows = [one for one in batches if self.checks_rows and isinstance(one, TransformersBatch)]
        compared = batches if self.checks_weights else rows
        if not any(of_each_rank(any(map(halves, compared)))):
            return

        def loss(batch: Any) -> Tensor:
            with self._mean_of(self._weight(batch)):
                inputs = self._prepare_inputs(batch)
                found: Tensor = self.compute_loss(model, {**inputs, **self._no_router_loss})
                return found

        is_exact = self.accelerator.mixed_precision == "no" and not self.args.tf32
        could_tell = True
        with failing_together(of_each_rank), self.compute_loss_context_manager():
            if rows:
                check_kept_apart(model, self._prepare_inputs(max(rows, key=num_samples)))
            if self.checks_weights and is_exact:
                could_tell = check_weights(model, batches, loss=loss, weight=self._weight)
        self.checks_rows = False
        self.checks_weights = self.checks_weights and not any(of_each_rank(could_tell))

    @property
    def _no_router_loss(self) -> dict[str, bool]:
        """Return the argument that turns the loss of the experts' balance off, where it is on."""
        configs = [getattr(part, "config", None) for part in self.model.modules()]
        is_on = any(getattr(config, "output_router_logits", False) for config in configs)
        return {"output_router_logits": False} if is_on else {}

    def evaluation_loop(self, dataloader: DataLoader[Any], *more: Any, **options: Any) -> Any:
        """Evaluate like the Trainer.

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
        """Count the operations of all micro-batches of an item."""
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


class _Items(IterableDataset[list[Any]]):
    """Lists of micro-batches, in the process that trains.

    Args:
        trainer: the Trainer, whose arguments and state are read.
        loader: a loader of micro-batches.

    Attributes:
        sampler: the sampler whose steps the items are; `None`: each item is one micro-batch.

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
        """The samples of an epoch on all ranks; micro-batches where that is not planned."""
        return len(self) if self.sampler is None else len(self.sampler.plan.order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch; a stream of unknown length is one epoch."""
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
        """Return the number of items of the coming epoch; `None`: unknown."""
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
        """Choose the next epoch."""
        self.dataset.set_epoch(epoch)


def _counted(batch: Any) -> Any:
    """Return a micro-batch, no label of which counts, with labels that do.

    The mean of nothing is NaN, and so may be its gradients, which are divided by infinity.
    """
    labels = batch.get("labels")
    return {**batch, "labels": torch.zeros_like(labels)} if isinstance(labels, Tensor) else batch


def _check(trainer: Any, sampler: MemoryBudgetBatchSampler | None) -> None:
    """Raise an `OptionError` that names settings that do not go together, or warn."""
    args = trainer.args
    refused = {
        "a Trainer that does not read loss_is_scaled_for_ga, and would divide the loss again: "
        "update transformers": not hasattr(trainer, "loss_is_scaled_for_ga"),
        "a sampler without samples_per_step or batches_per_epoch: the Trainer needs as many steps "
        "in each epoch": sampler is not None and not sampler.plan.ranks.even_sums,
        "gradient_accumulation_steps with a sampler, whose plan has the steps: leave it at 1": (
            sampler is not None and args.gradient_accumulation_steps != 1
        ),
        "context or sequence parallelism: the mean of a shard has no share of the step": (
            trainer.get_cp_size() * trainer.get_sp_size() > 1
        ),
        "auto_find_batch_size=True: the sampler's budget decides": args.auto_find_batch_size,
        "DataParallel: start one process for each GPU": args.n_gpu > 1,
        "DeepSpeed: it counts the micro-batches of a step itself": trainer.is_deepspeed_enabled,
    }
    for what, is_so in refused.items():
        if is_so:
            raise OptionError(f"BudgetTrainerMixin refuses {what}")
    if trainer._no_router_loss:
        warn(
            "config.output_router_logits adds a loss of the experts' balance, which is no sum over "
            "micro-batches: the mean of theirs, by weight, counts once in each step",
            TorchBudgetWarning,
        )
    if any(isinstance(part, _BatchNorm) for part in trainer.model.modules()):
        warn(
            "batch normalisation takes its statistics from each micro-batch, so that the step is "
            "not the large batch's; use group or layer normalisation",
            BatchNormWarning,
        )
