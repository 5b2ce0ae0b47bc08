"""Saved costs: what they depend on, and the steps that they still hold for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.costs import measured
from tests.support.steps import Step, ones, step_of
from tests.support.training_cases import CASES
from torchbudget import MeasuredCost, load_cost, measure_cost
from torchbudget.cost.measure import describe_step, why_not
from torchbudget.errors import MeasureWarning
from torchbudget.machine.process_tree import process_memory

NAMES = "model checkpointing attention optimizer dtype device threads allocator torch"


def test_a_step_is_described_by_what_its_cost_depends_on() -> None:
    """Another optimizer or another model differs by name; the same step made again does not."""
    described = describe_step(CASES["images"]().step)
    assert described == describe_step(CASES["images"]().step)
    assert described["optimizer"] == "AdamW"
    assert (described["checkpointing"], described["attention"]) == ("none seen", "not stated")
    assert set(described) == {*NAMES.split()}
    assert described["model"] != describe_step(CASES["waves"]().step)["model"]
    # Parameters of torch's meta device stand for those of mps, xpu and others.
    assert _of(nn.Linear(2, 2, device="meta"))["device"] == "meta"


def _of(model: nn.Module) -> dict[str, str]:
    return describe_step(lambda batch: model(**batch))


def _llama(attention: str) -> Any:
    hf = pytest.importorskip("transformers", reason="in the test group")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlamaConfig(**sizes, **heads, attn_implementation=attention)
    return hf.LlamaForCausalLM(config)


def _checkpointing(model: Any, what: str) -> None:
    """Of the two names that transformers has for it, the one that is not deprecated."""
    old = getattr(model, f"gradient_checkpointing_{what}")
    getattr(model, f"activation_checkpointing_{what}", old)()


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


# ---------------------------------------------------------------------- the same step


def made(
    *, frozen: bool = False, heavier: bool = False, looks: bool = False, evaluates: bool = False
) -> Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32))
    model.train(not evaluates)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        if looks:
            torch.nonzero(batch[:, 0, 0])
        first = model[:2](batch)
        if frozen:
            first = first.detach()
        if heavier and batch.shape[1] < 20:
            first = first + torch.cat([first] * 8, dim=1)[:, : batch.shape[1]]
        return model[2](first).square().mean()

    return step_of(loss_of, model)


def saved(step: Step, budget: int) -> MeasuredCost:
    return measure_cost(step, ones, sizes=range(8, 65), budget=budget)


@pytest.fixture(scope="module")
def room() -> int:
    saved(made(), process_memory().resident_bytes + 200 * 2**20)  # all is loaded then
    return process_memory().resident_bytes + 200 * 2**20


def reason(cost: MeasuredCost, step: Step, room: int) -> str:
    return why_not(cost, step, ones, range(8, 65), room)


@pytest.mark.slow
def test_the_same_step(room: int) -> None:
    """It holds, also for a model that was loaded in evaluation mode, and without a trace."""
    assert not reason(saved(made(), room), made(), room)
    with pytest.warns(match="evaluation mode"):
        cost = saved(made(evaluates=True), room)
    with pytest.warns(match="evaluation mode"):
        assert not reason(cost, made(evaluates=True), room)
    assert not reason(saved(made(looks=True), room), made(looks=True), room)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["frozen", "heavier"])
def test_another_step_of_the_same_model(change: Any, room: int) -> None:
    """Layers that are frozen inside the step, or more work for short samples, are noticed."""
    cost = saved(made(), room)
    assert reason(cost, made(**{change: True}), room).startswith("a trace of")


@pytest.mark.slow
def test_a_step_without_a_trace_that_became_heavier(room: int) -> None:
    """Real steps of small and middle samples exceed what they needed."""
    cost = saved(made(looks=True), room)
    assert "needed" in reason(cost, made(looks=True, heavier=True), room)
