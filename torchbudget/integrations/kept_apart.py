"""Whether a model of transformers keeps the samples of one row apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from torchbudget.data.collate.collates import IDS, TransformersBatch
from torchbudget.data.collate.layouts import LABELS
from torchbudget.errors import OptionError
from torchbudget.train.loop import evaluation_mode

_COMPARED: Final = 16  # positions: a row of logits may be as large as the model


def check_kept_apart(model: nn.Module, batch: TransformersBatch) -> None:
    """Raise where what a model makes of one sample depends on another sample of its row.

    That is up to the model's class and its attention, and nothing else says it: the loss falls
    either way. The batch is run twice, in evaluation mode and without gradients and labels, the
    second time with other tokens in its first sample. Every rank must call it, if the model is
    sharded. A row of one sample, and a model that returns nothing for each position, pass.

    Args:
        model: as it is called, on the batch's device.
        batch: of `PackCollate(layout="transformers")`.

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
    with (
        torch.no_grad(),
        evaluation_mode([model]),
        torch.compiler.set_stance("force_eager"),
    ):
        one, other = (
            _after(model(**{**inputs, IDS: row}), end, ids) for row in (ids, _changed(ids, end))
        )
    if one is None or other is None:
        return
    # Models that keep samples apart change by 0 in float32 and bfloat16, on the CPU. Experts of
    # other sizes may round otherwise; a BERT with its first weights changes by 6e-4.
    allowed = max(1e-5, torch.finfo(one.dtype).eps / 4) * one.abs().max()
    if (one - other).abs().max() > allowed:
        name = type(getattr(model, "module", model)).__name__  # without DistributedDataParallel
        raise OptionError(
            f"{name} lets the samples of a row see each other: what it makes of "
            "one sample has changed with the tokens of another. Use flash attention, a block "
            "mask in flex attention, a model whose decoder makes its mask from "
            "position_ids, or PadCollate. Where positions are to mix, BudgetTrainerMixin takes "
            "checks_rows = False"
        )


def _changed(ids: Tensor, end: int) -> Tensor:
    """The row with another token, one that is in it, all over its first segment."""
    others = ids[ids != ids[0, 0]]
    changed = ids.clone()
    if len(others):
        changed[0, :end] = others[0]
    return changed


def _after(output: Any, end: int, ids: Tensor) -> Tensor | None:
    """Some of a model's first output after the first segment, if it has as many positions."""
    first = output
    if not isinstance(output, Tensor):
        first = next(iter(output.values() if isinstance(output, Mapping) else output))
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    if first.shape[:2] != ids.shape or end == ids.shape[1]:
        return None
    return first[0, end : end + _COMPARED].clone()
