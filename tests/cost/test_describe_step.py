"""`describe_step`: what a cost depends on, and what is noticed where a saved one is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.costs import measured
from tests.support.training_cases import CASES
from torchbudget import load_cost
from torchbudget.cost.measure import describe_step
from torchbudget.errors import MeasureWarning

NAMES = {
    "model",
    "checkpointing",
    "attention",
    "optimizer",
    "dtype",
    "device",
    "threads",
    "allocator",
    "torch",
}


def test_a_step_is_described_by_what_its_cost_depends_on() -> None:
    """Another optimizer or another model differs by name; the same step made again does not."""
    described = describe_step(CASES["images"]().step)
    assert described == describe_step(CASES["images"]().step)
    assert described["optimizer"] == "AdamW"
    assert (described["checkpointing"], described["attention"]) == ("none seen", "not stated")
    assert set(described) == NAMES
    assert described["model"] != describe_step(CASES["waves"]().step)["model"]


def _of(model: nn.Module) -> dict[str, str]:
    return describe_step(lambda batch: model(**batch))


def _llama(attention: str) -> Any:
    hf = pytest.importorskip("transformers", reason="in the test group")
    config = hf.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
    )
    return hf.LlamaForCausalLM(config)


def _checkpointing(model: Any, what: str) -> None:
    """Of the two names that transformers has for it, the one that is not deprecated."""
    old = getattr(model, f"gradient_checkpointing_{what}")
    getattr(model, f"activation_checkpointing_{what}", old)()


def test_a_device_that_cannot_be_measured_is_not_called_the_cpu() -> None:
    """Parameters of torch's meta device stand for those of mps, xpu and others."""
    model = nn.Linear(2, 2, device="meta")
    assert describe_step(lambda batch: model(batch).sum())["device"] == "meta"


def test_checkpointing_and_attention_of_transformers_models(tmp_path: Path) -> None:
    """Without the one, or with the other, a step needs far more; its parameters do not show it."""
    checkpointed = _llama("sdpa")
    _checkpointing(checkpointed, "enable")
    saved = _of(checkpointed)
    assert saved["checkpointing"].startswith("of ")
    assert saved["attention"] == "sdpa"
    measured(measured_on=saved).save(tmp_path / "cost.json")
    load_cost(tmp_path / "cost.json", saved)
    with pytest.warns(MeasureWarning, match="checkpointing: 'of .* then, 'none seen' now$"):
        load_cost(tmp_path / "cost.json", _of(_llama("sdpa")))
    _checkpointing(checkpointed, "disable")
    assert _of(checkpointed) == _of(_llama("sdpa"))
    eager = _llama("eager")
    _checkpointing(eager, "enable")
    with pytest.warns(
        MeasureWarning, match="on something else: attention: 'sdpa' then, 'eager' now$"
    ):
        load_cost(tmp_path / "cost.json", _of(eager))


def test_modules_that_torch_wraps_are_seen() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert _of(inner)["checkpointing"] == "none seen"
    assert _of(nn.Sequential(*map(checkpoint_wrapper, inner)))["checkpointing"] == "of 2 modules"
