"""transformers' Trainer: its step is a step of the plan, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice, repeat
from math import inf, isinf, nan
from operator import length_hint
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from torchbudget.data.collate.collates import IDS, TransformersBatch
from torchbudget.distributed import Ranks
from torchbudget.errors import BatchNormWarning, OptionError, StateError, TorchBudgetWarning
from torchbudget.integrations.hosted import HostedLoader, of_this_rank
from torchbudget.random_state import RandomState
from torchbudget.train.batches import halves, num_samples
from torchbudget.train.loop import evaluation_mode, source_of
from torchbudget.warn import warn

_Trainer: Any = object  # the Trainer comes after the mixin
_KEY: Final = "torchbudget"  # in trainer_state.json
_COMPARED: Final = 16  # positions: a row of logits may be as large as the model
# Losses of 23 heads in float32, with weights three times as large as their first ones, were off by
# 1.6 times the precision, and once by 30 times.
_ROUNDING: Final = 64


class BudgetTrainerMixin(_Trainer):  # type: ignore[misc]
    """A base class to list before `Trainer`; override `budget_loader`.

    Each item of the loader that the Trainer sees is a list of micro-batches. With
    `samples_per_step` it has all micro-batches of a step, and `gradient_accumulation_steps` must be
    1. With `batches_per_epoch` it has one micro-batch, and a step takes
    `gradient_accumulation_steps` items.

    The loss of a micro-batch must be a mean. It is multiplied by the micro-batch's share of the
    step's weight on all ranks; `micro_batch_weight` returns the weight. Only a `compute_loss_func`
    gets `num_items_in_batch`: the weight of the micro-batch. Before the first step the mixin calls
    `check_weights`, unless `checks_weights` is false, and for packed samples `check_kept_apart`,
    unless `checks_rows` is false. The loader's position is saved in `trainer_state.json`.

    >>> class BudgetTrainer(BudgetTrainerMixin):  # and Trainer
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    checks_rows = True
    checks_weights = True
    compute_loss_func: Any  # the Trainer's
    _items: _Items
    _shifts_labels = False
    _rank_weight = 0.0  # of all micro-batches of the step, on the average rank

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

        # The Trainer overlooks that GPT-2, say, shifts labels. FSDP2 derives a class of its own.
        causal = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
        kinds = {kind.__name__ for kind in type(self.accelerator.unwrap_model(self.model)).__mro__}
        self._shifts_labels = bool(causal & kinds) or self._loss_shifts_labels
        self._items = items = _Items(self, self.budget_loader())
        if getattr(getattr(self.model, "config", None), "output_router_logits", False):
            self.checks_weights = False
            warn(
                "config.output_router_logits adds a load-balancing loss, which is not a sum over "
                "samples: its mean over micro-batches is used, and weights are not checked",
                TorchBudgetWarning,
            )
        if any(isinstance(part, _BatchNorm) for part in self.model.modules()):
            warn("batch normalisation sees micro-batches, not the whole step", BatchNormWarning)
        self.loss_is_scaled_for_ga = False  # the Trainer divides losses that are means,
        self.args.average_tokens_across_devices = False  # and multiplies them by no number of ranks
        loader: Any = DataLoader(items, batch_size=None, collate_fn=list)
        loader.set_epoch = items.choose  # the Trainer calls it
        return loader  # type: ignore[no-any-return]

    def micro_batch_weight(self, batch: Any) -> float:
        """Return the number of terms in the mean loss of a micro-batch.

        Override it if the loss is another mean. The default is the number of labels that are not
        -100, as the Trainer counts them; without labels, the number of samples.

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
            return int(labels.ne(-100).sum())
        except (AttributeError, TypeError, OptionError) as error:
            raise OptionError(
                f"{type(self).__name__} cannot count the labels or samples of a micro-batch: "
                "override micro_batch_weight(self, batch) to return the number that its loss is "
                f"the mean over ({error})"
            ) from error

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the items of one step, and no number: losses are weighted here."""
        items = list(islice(epoch_iterator, num_batches))
        weights = [self.micro_batch_weight(batch) for item in items for batch in item]
        if not all(0 <= weight < inf for weight in weights):
            raise OptionError(f"micro_batch_weight must return 0 or more, got {weights}")
        of_ranks = Ranks().gather_objects(sum(weights))
        self._rank_weight = sum(of_ranks) / len(of_ranks)
        return items, None

    def training_step(self, model: nn.Module, inputs: list[Any], *_: Any) -> Tensor:
        """Run forward and backward of each micro-batch of an item; return the summed loss."""
        self._check_item(model, inputs)
        losses = []
        # Chosen under FSDP, where gradients that wait to be reduced are kept whole.
        syncs_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for number, batch in enumerate(inputs, 1):
            weight = self.micro_batch_weight(batch)
            # The Trainer divides the loss by this number, and averages gradients over the ranks.
            self.current_gradient_accumulation_steps = self._rank_weight / weight if weight else inf
            syncs = syncs_each or number == len(inputs)
            with nullcontext() if syncs else self.accelerator.no_sync(model=model):
                if not weight and isinstance(batch.get("labels"), Tensor):
                    # The mean of nothing is NaN, and so may be its gradients, if divided by inf.
                    batch = {**batch, "labels": torch.zeros_like(batch["labels"])}
                losses.append(super().training_step(model, batch, self._number(weight)))
        return torch.stack(losses).sum()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the batch on the device; a mapping as a dict, since the Trainer pops labels."""
        return super()._prepare_inputs(dict(inputs) if isinstance(inputs, Mapping) else inputs)

    def _number(self, weight: float) -> Tensor | None:
        """Return the number of items that a `compute_loss_func` divides by."""
        number = torch.tensor(weight or 1, device=self.args.device)
        return None if self.compute_loss_func is None else number

    def _check_item(self, model: nn.Module, batches: list[Any]) -> None:
        """Run the checks that are on, on all ranks together, until they could tell."""
        if not (self.checks_rows or self.checks_weights):
            return

        def loss(batch: Any) -> Any:
            number = self._number(self.micro_batch_weight(batch))
            return self.compute_loss(model, self._prepare_inputs(batch), num_items_in_batch=number)

        is_exact = self.accelerator.mixed_precision == "no" and not self.args.tf32
        with Ranks().together(), self.compute_loss_context_manager():
            batch = max(batches, key=num_samples)
            could_tell = num_samples(batch) > 1
            if self.checks_rows and isinstance(batch, TransformersBatch):
                check_kept_apart(model, self._prepare_inputs(batch))
            if self.checks_weights and is_exact:
                could_tell = check_weights(model, batch, loss=loss, weight=self.micro_batch_weight)
        if any(Ranks().gather_objects(could_tell)):
            self.checks_rows = self.checks_weights = False

    def evaluation_loop(self, dataloader: DataLoader[Any], *more: Any, **options: Any) -> Any:
        """Evaluate like the Trainer.

        Raises:
            OptionError: the Trainer would gather batches of unequal sizes, which never ends.
        """
        if self.args.world_size > 1 and source_of(dataloader) is not None:
            raise OptionError("several processes evaluate equal batches only: use predict")
        return super().evaluation_loop(dataloader, *more, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        positions = Ranks().gather_objects(self._items.position())
        self.state.stateful_callbacks[_KEY] = {"ranks": positions}
        super()._save_checkpoint(*arguments, **options)


class _Items(HostedLoader, IterableDataset[list[Any]]):
    """Lists of micro-batches, in the process that trains.

    Args:
        trainer: the Trainer, whose arguments and state are read.
        loader: a loader of micro-batches.

    Raises:
        OptionError: they do not go together.
    """

    def __init__(self, trainer: Any, loader: DataLoader[Any]) -> None:
        shared_by = trainer.get_tp_size()
        super().__init__(
            loader,
            num_replicas=trainer.args.world_size // shared_by,
            rank=trainer.args.process_index // shared_by,
        )
        self._trainer, self._has_begun = trainer, False
        plan = getattr(self.source, "plan", None)
        self._is_planned = plan is not None and plan.ranks.even_sums
        self._length = self._left()
        is_even = self._is_planned or (self._length and getattr(plan, "batches_per_epoch", True))
        args = trainer.args
        refused = {
            "a Trainer that does not read loss_is_scaled_for_ga, and would divide the loss again: "
            "update transformers": not hasattr(trainer, "loss_is_scaled_for_ga"),
            "a loader of unequal epochs, since the Trainer needs equally many steps in each: pass "
            "batches_per_epoch, or samples_per_step to a sampler": not is_even,
            "gradient_accumulation_steps with a sampler, whose plan has the steps: leave it at 1": (
                self._is_planned and args.gradient_accumulation_steps != 1
            ),
            "context or sequence parallelism: a shard's mean loss has no weight in the step": (
                trainer.get_cp_size() * trainer.get_sp_size() > 1
            ),
            "auto_find_batch_size=True: the sampler's budget decides": args.auto_find_batch_size,
            "DataParallel: start one process for each GPU": args.n_gpu > 1,
            "DeepSpeed: it counts the micro-batches itself": trainer.is_deepspeed_enabled,
        }
        for what, is_so in refused.items():
            if is_so:
                raise OptionError(f"BudgetTrainerMixin refuses {what}")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield what is left of the epoch.

        The Trainer passes over as many items as were done before its checkpoint: they are empty.

        Raises:
            OptionError: it has other steps than the Trainer counts on.
            StateError: the Trainer's checkpoint has no position.
        """
        has_begun, self._has_begun = self._has_begun, True
        args, state, done = self._trainer.args, self._trainer.state, 0
        if state.global_step and not (has_begun or args.ignore_data_skip):
            saved = state.stateful_callbacks.get(_KEY)
            if saved is None:
                raise StateError(
                    "trainer_state.json has no position to continue from: resume from a checkpoint "
                    "that was saved with BudgetTrainerMixin, or pass ignore_data_skip=True"
                )
            self.go_to(of_this_rank(saved["ranks"]))
            each = args.gradient_accumulation_steps
            done = state.global_step % -(-self._length // each) * each
        yield from repeat([], done)
        left = self._length - done
        if self._is_planned and self._left() != left:
            raise OptionError(
                f"epoch {self.source.epoch} has {self._left()} steps left, but the Trainer expects "
                f"{left}, as in the first epoch: pass batches_per_epoch"
            )
        item: list[Any] = []
        batches = super().__iter__()
        for batch in batches:
            item.append(batch)
            if not self._is_planned or self.run.last.ends_step:
                left -= 1
                if not left:
                    list(batches)  # ends the loop: the Trainer asks for no item after the last
                yield item
                item = []

    def _left(self) -> int:
        """Return the number of items of the coming epoch; 0: unknown."""
        return self.source.steps_left if self._is_planned else length_hint(self.loader)


def check_kept_apart(model: nn.Module, batch: TransformersBatch) -> None:
    """Raise an error if samples of one packed row attend to each other.

    It depends on the class and the attention of the model whether they do; the loss falls either
    way. The function runs the batch twice, in evaluation mode and without gradients and labels, the
    second time with other tokens in the first sample, and compares the outputs of the other
    samples. If the model is sharded, every rank must call the function. A row of one sample passes,
    and so does a model without an output for each position.

    Args:
        model: the model, on the batch's device.
        batch: a batch of `PackCollate(layout="transformers")`.

    Raises:
        OptionError: outputs of other samples, of shape `(1, total, …)`, have changed.

    >>> class OfEach(torch.nn.Module):
    ...     def forward(self, input_ids, **_):
    ...         return input_ids[..., None].float()
    >>> class OfAll(torch.nn.Module):
    ...     def forward(self, input_ids, **_):
    ...         return input_ids.float().mean().expand(*input_ids.shape, 1)
    >>> batch = PackCollate(layout="transformers")([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> check_kept_apart(OfEach(), batch)
    >>> check_kept_apart(OfAll(), batch)
    Traceback (most recent call last):
    torchbudget.errors.OptionError: OfAll lets the samples of a row see each other: ...
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    ids, end = batch[IDS], int(batch["cu_seq_lens_q"][1])
    changed = ids.clone()
    changed[0, :end] = ids.min() if ids[0, 0] == ids.max() else ids.max()
    found = []
    with _evaluated(model):
        for row in (ids, changed):
            output = tree_leaves(model(**{**inputs, IDS: row}))[0]
            of_each = output.is_floating_point() and output.shape[:2] == ids.shape
            found.append(output[0, end : end + _COMPARED].clone() if of_each else ids[:0])
    one, other = found
    if not one.numel():
        return
    # Models that keep samples apart change by 0 in float32 and bfloat16, on the CPU. Experts of
    # other sizes may round otherwise; a BERT with its first weights changes by 6e-4.
    allowed = max(1e-5, torch.finfo(one.dtype).eps / 4) * one.abs().max()
    if (one - other).abs().max() > allowed:
        raise OptionError(
            f"{type(model).__name__} lets the samples of a row see each other: its outputs for one "
            "sample changed with the tokens of another. Use flash attention, or PadCollate. If "
            "positions shall mix, set checks_rows = False in the class of the Trainer"
        )


def check_weights(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor],
    weight: Callable[[Any], float],
) -> bool:
    """Raise an error if the loss of a micro-batch is not the mean over its weight.

    The micro-batch runs as a whole and in two halves, in evaluation mode and without gradients. The
    three losses imply the weight of each half. If the model is sharded, every rank must call the
    function.

    Args:
        model: the model.
        batch: a batch of a torchbudget collate, or a structure of tensors whose first axis is the
            sample.
        loss: `loss(batch)` calls the model and returns the mean loss.
        weight: `weight(batch)` returns the number of terms in the mean.

    Returns:
        True if the losses could be compared. False if there is only one sample, if the losses of
        the halves differ by little more than rounding, or in half precision.

    Raises:
        OptionError: the loss is another mean, or none; or the micro-batch cannot be cut.

    >>> model = torch.nn.Linear(1, 1)
    >>> batch = {"x": torch.tensor([[1.0], [2.0], [4.0]])}
    >>> check_weights(model, batch, loss=lambda part: model(part["x"]).mean(),
    ...     weight=lambda part: len(part["x"]))
    True
    >>> check_weights(model, batch, loss=lambda part: model(part["x"]).sum(),
    ...     weight=lambda part: len(part["x"]))
    Traceback (most recent call last):
    torchbudget.errors.OptionError: the loss of Linear must be a mean over ...
    """
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return True
    is_cut = num_samples(batch) > 1
    parts = [batch, *(halves(batch) if is_cut else [batch, batch])]
    with _evaluated(model):
        losses = [loss(part) for part in parts]
    precision = max(torch.finfo(dtype).eps for dtype in {losses[0].dtype, *dtypes})
    if losses[0].is_cuda and any(isinstance(part, _ConvNd) for part in model.modules()):
        precision = max(precision, 2**-11)  # TF32, torch's default for convolutions
    whole, first, second = found = [float(part) for part in losses]
    total, *weights = map(weight, parts)
    if not (is_cut and total) or any(map(isinf, found)):
        return False
    rounding = _ROUNDING * precision * max(map(abs, found))
    # The mean of nothing is NaN, and weighs nothing.
    summed = sum(own * part for own, part in zip(weights, found[1:], strict=True) if own)
    if not abs(summed - total * whole) <= total * rounding:
        share = (whole - second) / ((first - second) or nan)
        raise OptionError(
            f"the loss of {type(model).__name__} must be a mean over micro_batch_weight, but a "
            f"micro-batch with the loss {whole:g} has halves with {first:g} and {second:g}: the "
            f"first has a share of {weights[0] / total:.6g} by weight, of {share:.6g} by loss. "
            "Override micro_batch_weight(self, batch) to return the number that the loss is the "
            "mean over. No weight is right for a sum, for several denominators, or if samples see "
            "each other or the padding. checks_weights = False leaves this check out"
        )
    return abs(first - second) > rounding


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """A model is in evaluation mode inside, eager and without gradients; random states stay."""
    with RandomState.take(), torch.no_grad(), evaluation_mode([model]), set_stance("force_eager"):
        yield
