"""Two checks of a model of transformers: samples of a row are kept apart, and weights are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isinf, nan
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from torchbudget.data.collate.collates import IDS, TransformersBatch
from torchbudget.data.collate.layouts import LABELS
from torchbudget.errors import OptionError
from torchbudget.protocols import SplittableBatch
from torchbudget.random_state import RandomState
from torchbudget.train.loop import evaluation_mode

_COMPARED: Final = 16  # positions: a row of logits may be as large as the model
# Losses of 23 heads in float32, with weights three times as large as their first ones, were off by
# 1.6 times the precision, and once by 30 times.
_ROUNDING: Final = 64


def check_kept_apart(model: nn.Module, batch: TransformersBatch) -> None:
    """Raise where a model's outputs for one sample depend on another sample of its row.

    The model's class and its attention decide that, and the loss falls either way. The batch is
    run twice, in evaluation mode and without gradients and labels, the second time with other
    tokens in its first sample. If the model is sharded, every rank must call the function. A row
    of one sample passes, and so does a model that returns nothing for each position.

    Args:
        model: the model as it is called, on the batch's device.
        batch: a batch of `PackCollate(layout="transformers")`.

    Raises:
        OptionError: outputs after the first sample, of shape `(1, total, …)`, have changed.

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
    inputs = {name: value for name, value in batch.items() if name != LABELS}
    ids, end = batch[IDS], int(batch["cu_seq_lens_q"][1])
    with _evaluated(model):
        one, other = (
            _after(model(**{**inputs, IDS: row}), end, ids) for row in (ids, _changed(ids, end))
        )
    if one is None or other is None:
        return
    # Models that keep samples apart change by 0 in float32 and bfloat16, on the CPU. Experts of
    # other sizes may round otherwise; a BERT with its first weights changes by 6e-4.
    allowed = max(1e-5, torch.finfo(one.dtype).eps / 4) * one.abs().max()
    if (one - other).abs().max() > allowed:
        raise OptionError(
            f"{_name(model)} lets the samples of a row see each other: its outputs for "
            "one sample have changed with the tokens of another. Use flash attention, a block "
            "mask in flex attention, a model whose decoder makes its mask from "
            "position_ids, or PadCollate. Where positions are to mix, BudgetTrainerMixin takes "
            "checks_rows = False"
        )


def check_weights(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Callable[[Any], Tensor],
    weight: Callable[[Any], float],
) -> bool:
    """Raise where the loss of a micro-batch is no mean over its weight.

    Each micro-batch is run as a whole and in halves, in evaluation mode and without gradients: the
    three losses imply the share of each half. If the model is sharded, every rank must call the
    function with as many micro-batches.

    Args:
        model: the model.
        batches: the micro-batches of a step: batches of a torchbudget collate, or mappings whose
            tensors and lists have one item for each sample.
        loss: `loss(batch)` calls the model and returns the mean loss.
        weight: `weight(batch)` returns the number that the loss is the mean over.

    Returns:
        True once the losses could tell; false if each micro-batch has one sample, or halves whose
        losses differ by little more than rounding. In half precision nothing is compared.

    Raises:
        OptionError: a loss is another mean, or none; or a micro-batch cannot be cut.

    >>> model = torch.nn.Linear(1, 1)
    >>> batch = {"x": torch.tensor([[1.0], [2.0], [4.0]])}
    >>> check_weights(model, [batch], loss=lambda part: model(part["x"]).mean(),
    ...     weight=lambda part: len(part["x"]))
    True
    >>> check_weights(model, [batch], loss=lambda part: model(part["x"]).sum(),
    ...     weight=lambda part: len(part["x"]))
    Traceback (most recent call last):
    torchbudget.errors.OptionError: the loss of Linear is no mean over micro_batch_weight: ...
    """
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return True
    parts = [[batch, *(halves(batch) or [batch, batch])] for batch in batches]
    with _evaluated(model):
        losses = [[loss(part) for part in of_batch] for of_batch in parts]
    precision = max(torch.finfo(dtype).eps for dtype in {losses[0][0].dtype, *dtypes})
    if losses[0][0].is_cuda and any(isinstance(part, _ConvNd) for part in model.modules()):
        precision = max(precision, 2**-11)  # TF32, torch's default for convolutions
    could_tell = False
    for (batch, one, other), of_parts in zip(parts, losses, strict=True):
        whole, first, second = found = [float(part) for part in of_parts]
        total, *weights = weight(batch), weight(one), weight(other)
        if one is batch or not total or any(map(isinf, found)):
            continue
        rounding = _ROUNDING * precision * max(map(abs, found))
        # The mean of nothing is NaN, and weighs nothing.
        summed = sum(own * part for own, part in zip(weights, found[1:], strict=True) if own)
        if not abs(summed - total * whole) <= total * rounding:
            share = (whole - second) / ((first - second) or nan)
            raise OptionError(
                f"the loss of {_name(model)} is no mean over micro_batch_weight: of a micro-batch "
                f"with the loss {whole:g}, its halves have {first:g} and {second:g}, and the first "
                f"half a share of {weights[0] / total:.6g} by weight, of {share:.6g} by loss. "
                "Override micro_batch_weight(self, batch) to return the number that the loss is "
                "the mean over: of samples, or of labels that the model does not ignore. Turn a "
                'sum into a mean (config.ctc_loss_reduction = "mean"). No weight is right for a '
                "loss with several denominators, or if samples see each other or the padding. "
                "checks_weights = False leaves this check out"
            )
        could_tell = could_tell or abs(first - second) > rounding
    return could_tell


def halves(batch: Any) -> list[Any]:
    """Return the two halves of a micro-batch, without its padding; none if it has one sample.

    Raises:
        OptionError: it is no batch of a torchbudget collate, and its tensors and lists are of
            several lengths.
    """
    if isinstance(batch, SplittableBatch):
        return [*batch.split(2)] if batch.num_samples > 1 else []
    sized = {name: value for name, value in batch.items() if _is_sized(value)}
    lengths = {len(value) for value in sized.values()}
    if len(lengths) != 1:
        raise OptionError(
            "the weight of a micro-batch is checked on its halves, and it cannot be cut: its "
            f"fields are {sorted(lengths)} long. Collate with PadCollate, or set checks_weights = "
            "False once micro_batch_weight returns the number that the loss is the mean over"
        )
    length = lengths.pop()
    rows = [slice(length // 2), slice(length // 2, None)] if length > 1 else []
    return [{**batch, **{name: value[part] for name, value in sized.items()}} for part in rows]


def _is_sized(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """A model is in evaluation mode inside, eager and without gradients; random states stay."""
    state = RandomState.take()
    try:
        with torch.no_grad(), evaluation_mode([model]), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        state.restore()


def _name(model: nn.Module) -> str:
    return type(getattr(model, "module", model)).__name__  # without DistributedDataParallel


def _changed(ids: Tensor, end: int) -> Tensor:
    """Return the row with another of its tokens all over its first segment."""
    others = ids[ids != ids[0, 0]]
    changed = ids.clone()
    if len(others):
        changed[0, :end] = others[0]
    return changed


def _after(output: Any, end: int, ids: Tensor) -> Tensor | None:
    """Return the first output's positions after the first segment, if it has as many."""
    first = output
    if not isinstance(output, Tensor):
        first = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    if first.shape[:2] != ids.shape or end == ids.shape[1]:
        return None
    return first[0, end : end + _COMPARED].clone()
