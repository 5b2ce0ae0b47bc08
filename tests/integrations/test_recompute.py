"""The Trainer's `recompute = "where needed"`: checkpointing where a batch does not fit plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.costs import measured, two_ways
from torchbudget import MemoryBudgetBatchSampler, PadCollate, PaddedCost
from torchbudget.cost.batch_recipe import ShapeReader
from torchbudget.cost.measured import WaysCost
from torchbudget.errors import OptionError

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torchbudget.integrations.transformers import BudgetTrainerMixin  # noqa: E402

pytestmark = pytest.mark.peer

BUDGET = 9_000


def train(path: Path, recompute: str | None, cost: Any = None, **arguments: Any) -> Any:
    """The trained model, and for each micro-batch whether it fits plain and was recomputed."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=99, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = hf.BertForMaskedLM(config)
    lengths = [80, 3, 40, 9, 60, 5, 70, 12]
    data: Any = [
        {"input_ids": torch.arange(n) % 30, "labels": torch.arange(n) % 7} for n in lengths
    ]
    seen: list[tuple[bool, bool]] = []

    def made(shape: tuple[int, ...]) -> Any:
        sample = {"input_ids": torch.zeros(shape[1]), "labels": torch.zeros(shape[1])}
        return PadCollate()([sample] * shape[0])

    if cost is None:
        reader = ShapeReader.of(made, [(3, 9), (5, 20), (5, 9)])
        cost = WaysCost.of(two_ways().ways, reader)
    sampler = MemoryBudgetBatchSampler(lengths, cost, BUDGET, samples_per_step=8)

    class Trainer(BudgetTrainerMixin, hf.Trainer):  # type: ignore[misc,name-defined]
        def budget_loader(self) -> DataLoader[Any]:
            return DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())

        def compute_loss(self, model: nn.Module, inputs: Any, *more: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                fits = 1000 + 100 * inputs["input_ids"].numel() <= BUDGET
                seen.append((fits, bool(model.is_activation_checkpointing)))
            return super().compute_loss(model, inputs, *more, **options)

    Trainer.recompute = recompute
    given = {"report_to": [], "use_cpu": True, "num_train_epochs": 2, "save_strategy": "no"}
    Trainer(model, hf.TrainingArguments(path, disable_tqdm=True, **given | arguments)).train()
    return model, seen


def test_a_micro_batch_is_recomputed_where_it_does_not_fit_plain(tmp_path: Path) -> None:
    """And the model is that of a training without it."""
    model, seen = train(tmp_path, "where needed")
    assert {recomputed for _, recomputed in seen} == {False, True}
    assert all(fits != recomputed for fits, recomputed in seen)
    plain, others = train(tmp_path, None)
    assert not any(recomputed for _, recomputed in others)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("recompute", "cost", "arguments", "message"),
    [
        ("always", None, {}, "recompute='always'"),
        ("where needed", measured(PaddedCost(unit_bytes=1)), {}, "without a cost of alternatives"),
        ("where needed", None, {"activation_checkpointing": True}, "that recomputes all"),
    ],
)
def test_what_does_not_go_together_is_refused(
    recompute: str, cost: Any, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        train(tmp_path, recompute, cost, **arguments)
