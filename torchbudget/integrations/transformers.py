"""transformers' Trainer: its step is a step of the plan, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice, repeat
from math import inf, isinf, nan
from operator import length_hint
from typing import Any, Final

import torch
from torch import Tensor, nn, no_grad
from torch.compiler import set_stance
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from torchbudget.cost.measured import WaysCost
from torchbudget.data.collate.collates import IDS, TransformersBatch
from torchbudget.distributed import Ranks
from torchbudget.errors import BatchNormWarning, OptionError, StateError, TorchBudgetWarning, warn
from torchbudget.integrations.hosted import HostedLoader, of_this_rank
from torchbudget.random_state import RandomState
from torchbudget.train.batches import cuts_units, halves, num_samples
from torchbudget.train.loop import evaluation_mode, source_of

_Trainer: Any = object  # the Trainer comes after the mixin
_KEY: Final = "torchbudget"  # in trainer_state.json
_KINDS: Final = ("image", "video", "audio")  # of placeholders, in the names of a config
_COMPARED: Final = 16  # positions: a row of logits may be as large as the model
# Losses of 23 heads in float32, with weights three times as large as their first ones, were off by
# 1.6 times the precision, and once by 30 times.
_ROUNDING: Final = 64
# A weight that is wrong by this share, of one half, must differ from a right one by more than that.
_NOTICED: Final = 0.01


class BudgetTrainerMixin(_Trainer):  # type: ignore[misc]
    """A base class to list before `Trainer`; override `budget_loader`.

    Each item of the loader that the Trainer sees is a list of micro-batches. With
    `samples_per_step` it has all micro-batches of a step, and `gradient_accumulation_steps` must be
    1. With `batches_per_epoch` it has one micro-batch, and a step takes
    `gradient_accumulation_steps` items.

    The loss of a micro-batch must be a mean. It is multiplied by the micro-batch's share of the
    step's weight on all ranks; `micro_batch_weight` returns the weight. Only a `compute_loss_func`
    gets `num_items_in_batch`: the weight of the micro-batch. Before the first item the mixin calls
    `check_weights`, unless `checks_weights` is false, and for packed samples `check_kept_apart`,
    unless `checks_rows` is false. If a check could not tell, it is repeated before the second item,
    the 4th, the 8th and so on. The loader's position is saved in `trainer_state.json`.

    With `recompute = "where needed"` the mixin switches the model's gradient checkpointing on for
    the micro-batches that fit in no other way. The loader's cost must then be that of
    `alternatives(plain, recomputed)`, in this order.

    >>> class BudgetTrainer(BudgetTrainerMixin):  # and Trainer
    ...     def budget_loader(self):
    ...         return DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate())
    """

    checks_rows = True
    checks_weights = True
    recompute: str | None = None
    compute_loss_func: Any  # the Trainer's
    _items: _Items
    _items_seen = 0
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
        from transformers.trainer_utils import unwrap_peft_model

        self._items = items = _Items(self, self.budget_loader())
        unwrap = partial(self.accelerator.unwrap_model, keep_torch_compile=False)
        items.model = model = unwrap(unwrap_peft_model(unwrap(self.model)))
        # The Trainer overlooks that GPT-2, say, shifts labels. FSDP2 derives a class of its own.
        causal = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
        shifts = self._loss_shifts_labels or any(k.__name__ in causal for k in type(model).__mro__)
        # The last virtual token predicts the first label, which otherwise nothing predicts.
        self._shifts_labels = shifts and not _virtual_tokens(self.model)
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
            self._switch(batch)
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

    def _switch(self, batch: Any) -> None:
        """Recompute the activations of a micro-batch if it does not fit otherwise."""
        if self.recompute is None:
            return
        model, again = self._items.model, self._items.source.cost.way_of(batch) > 0
        name = f"checkpointing_{'enable' if again else 'disable'}"
        # Before transformers 5.24 it was called so; now that name warns.
        switch = getattr(model, f"activation_{name}", None) or getattr(model, f"gradient_{name}")
        switch(*[{"use_reentrant": False}][:again])

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the batch on the device; a mapping as a dict, since the Trainer pops labels."""
        return super()._prepare_inputs(dict(inputs) if isinstance(inputs, Mapping) else inputs)

    def _number(self, weight: float) -> Tensor | None:
        """Return the number of items that a `compute_loss_func` divides by."""
        number = torch.tensor(weight or 1, device=self.args.device)
        return None if self.compute_loss_func is None else number

    def _check_item(self, model: nn.Module, batches: list[Any]) -> None:
        """Run the checks that are on, on all ranks together, until they could tell.

        They are tried at the first item, the second, the 4th, the 8th and so on.
        """
        self._items_seen += 1
        checks_rows = self.checks_rows and isinstance(batches[0], TransformersBatch)
        # `&` is 0 of powers of 2.
        if self._items_seen & (self._items_seen - 1) or not (checks_rows or self.checks_weights):
            return

        def loss(batch: Any) -> Any:
            number = self._number(self.micro_batch_weight(batch))
            return self.compute_loss(model, self._prepare_inputs(batch), num_items_in_batch=number)

        is_exact = self.accelerator.mixed_precision == "no" and not self.args.tf32
        with Ranks().together(), self.compute_loss_context_manager():
            with _checking(model, "checks_weights"):
                batch = max(batches, key=num_samples)
            could_tell = num_samples(batch) > 1
            if checks_rows:
                check_kept_apart(model, self._prepare_inputs(batch))
            if self.checks_weights and is_exact and not cuts_units(batch, self._items.source):
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

    Attributes:
        model: without wrappers; its gradient checkpointing is switched.

    Raises:
        OptionError: they do not go together.
    """

    model: Any

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
        is_even = self._is_planned or (self._length and getattr(plan, "per_epoch", True))
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
            f"recompute={trainer.recompute!r}: leave it None, or pass 'where needed'": (
                trainer.recompute not in (None, "where needed")
            ),
            "recompute without a cost of alternatives(plain, recomputed) in the loader": (
                trainer.recompute and not isinstance(getattr(self.source, "cost", None), WaysCost)
            ),
            "recompute='where needed' with an argument that recomputes all": trainer.recompute
            and (getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing),
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
                f"{left}, as in the first epoch: pass steps_per_epoch"
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
    second time with other tokens in the first sample, except in place of images, videos and sounds.
    It compares the outputs of the other samples. If the model is sharded, every rank must call the
    function. A row of one sample passes, and so does a model without an output for each position.

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
    ids, end, before = batch[IDS], int(batch["cu_seq_lens_q"][1]), _virtual_tokens(model)
    is_word = ~torch.isin(ids, torch.tensor(_placeholders(model), dtype=ids.dtype).to(ids.device))
    words, ours = ids[is_word], is_word & (torch.arange(ids.shape[1], device=ids.device) < end)
    if not ours.any():
        return
    changed = ids.masked_fill(ours, int(words.min() if words[0] == words.max() else words.max()))
    found = []
    with _checking(model, "checks_rows"):
        for row in (ids, changed):
            output = tree_leaves(model(**{**inputs, IDS: row}))[0]
            of_each = output.shape[:2] == (1, before + ids.shape[1]) and output.is_floating_point()
            found.append(output[0, before:][end : end + _COMPARED].clone() if of_each else ids[:0])
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
        True if a weight of a half that is wrong by 2 % would have raised an error. False if it may
        not have, since there is only one sample, since one half weighs nothing, or since the losses
        of the halves differ by too little for the rounding of float32; and in half precision or
        with quantized parameters, where nothing is run.

    Raises:
        OptionError: the loss is another mean, or none; weights of halves are not the weight of the
            whole; or the micro-batch cannot be cut, or does not run in halves.

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
    if {one.dtype for one in model.parameters()} - {torch.float32, torch.float64}:
        return False
    with _checking(model, "checks_weights"):
        is_cut = num_samples(batch) > 1
        parts = [batch, *(halves(batch) if is_cut else [batch, batch])]
        losses = [loss(part) for part in parts]
        whole, first, second = found = [float(part) for part in losses]
        total, *weights = [float(weight(part)) for part in parts]
        # A loss of float64 may have sums in float32 in it, as label smoothing has.
        precision = max(torch.finfo(losses[0].dtype).eps, torch.finfo(torch.float32).eps)
    if losses[0].is_cuda and any(isinstance(part, _ConvNd) for part in model.modules()):
        precision = max(precision, 2**-11)  # TF32, torch's default for convolutions
    if not (is_cut and total) or any(map(isinf, found)):
        return False
    rounding = _ROUNDING * precision * max(map(abs, found))
    # The mean of nothing is NaN, and weighs nothing.
    summed = sum(own * part for own, part in zip(weights, found[1:], strict=True) if own)
    is_sum = abs(sum(weights) - total) <= _ROUNDING * precision * total
    if not (is_sum and abs(summed - total * whole) <= total * rounding):
        share = (whole - second) / ((first - second) or nan)
        raise OptionError(
            f"the loss of {type(model).__name__} must be a mean over micro_batch_weight, but a "
            f"micro-batch with the loss {whole:g} has halves with {first:g} and {second:g}: the "
            f"first has a share of {weights[0] / total:.6g} by weight, of {share:.6g} by loss. "
            "Override micro_batch_weight(self, batch) to return the number that the loss is the "
            "mean over. No weight is right for a sum, for several denominators, or if samples see "
            "each other or the padding. checks_weights = False leaves this check out"
        )
    # A first half that weighs 1 + x times as much changes its share p by about x·p·(1 - p).
    return _NOTICED * weights[0] * weights[1] / total**2 * abs(first - second) > rounding


def _placeholders(model: nn.Module) -> list[int]:
    """Return the ids of tokens that stand for images, videos and sounds, by the model's config."""
    configs = [getattr(part, "config", None) for part in model.modules()]
    names = [f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index")]
    found = {getattr(config, name, None) for config in configs for name in names}
    return [one for one in found if isinstance(one, int)]


def _virtual_tokens(model: nn.Module) -> int:
    """Return the number of tokens that PEFT's prompt tuning puts before the ids of each row."""
    for part in model.modules():  # PEFT's may be inside another wrapper
        config: Any = getattr(part, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            # These two put keys and values into the cache instead.
            is_cached = config.peft_type in ("PREFIX_TUNING", "CARTRIDGE")
            return 0 if is_cached else int(config.num_virtual_tokens)
    return 0


@contextmanager
def _checking(model: nn.Module, flag: str) -> Iterator[None]:
    """A model is in evaluation mode inside, eager and without gradients; random states stay.

    Raises:
        OptionError: the code inside raised an error; it names the flag of the check.
    """
    try:
        with RandomState.take(), no_grad(), evaluation_mode([model]), set_stance("force_eager"):
            yield
    except Exception as error:
        raise OptionError(
            f"a check of {type(model).__name__} failed: {error!r}; {flag} = False leaves it out"
        ) from error
