"""Saved costs: what they depend on, the steps that they still hold for, and epochs under them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.commands import ENVIRONMENT, ROOT, printed_by, python
from tests.support.costs import measured
from tests.support.memory_groups import memory_group
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


# ---------------------------------------------------------------------- epochs
# Against the machine's own counters and limits.


BUDGET = 600 * 2**20


MODULE = "tests.support.script_epoch"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("images", ["auto"]),
        ("encoder and decoder", ["auto"]),
        ("encoder, fused attention", ["auto", "forward"]),
        ("decoder, scores kept", ["run"]),
        ("graphs", ["run"]),
    ],
)
def test_an_epoch_stays_within_the_budget(name: str, how: list[str]) -> None:
    """The process's own high-water mark over an epoch is below the budget and near it.

    Of an evaluation, too; without a trace less of the budget is filled, after more runs.
    """
    check(printed_by(["-m", MODULE, name, BUDGET, *how]), how[0])


def check(printed: str, method: str = "auto") -> str:
    """The share of what the process did not have before; the mean number of samples in a batch."""
    least, most_probes = (0.8, 8) if method == "auto" else (0.6, 90)
    _, share, probes, mean = printed.split()
    assert least <= float(share) <= 1
    assert int(probes) <= most_probes
    return mean


@pytest.mark.slow
def test_an_epoch_ends_in_a_control_group_of_the_budgets_size() -> None:
    """The kernel kills who needs more: not ours; fixed batches of the same mean number."""
    code = f"from runpy import run_module; run_module({MODULE!r}, run_name='__main__')"
    with memory_group(BUDGET) as group:
        ours = group.output(code, "decoder, scores kept", BUDGET, "auto")
        with group.python(code, "decoder, scores kept", BUDGET, check(ours)) as fixed:
            printed, errors = fixed.communicate(timeout=120)
    assert printed.split() == ["begun"], errors
    assert fixed.returncode == -signal.SIGKILL


def bert(mode: str, path: Path) -> dict[str, Any]:
    """Peak / budget and warnings of a BERT in a process of its own."""
    script = ROOT / "tests" / "support" / "script_saved_cost.py"
    return dict(json.loads(printed_by([script, mode, path])))


@pytest.mark.slow
def test_a_cost_that_was_measured_in_another_process_is_not_exceeded(tmp_path: Path) -> None:
    """A process that loads a cost, and calls nothing else, trains as the cost was measured."""
    pytest.importorskip("transformers", reason="in the test group")
    bert("measure", tmp_path / "cost.json")
    loaded = bert("load", tmp_path / "cost.json")
    assert 0.8 <= loaded["peak"] <= 1
    assert not loaded["warned"]


@pytest.mark.slow
def test_a_traced_cost_with_a_budget_is_not_exceeded(tmp_path: Path) -> None:
    """No step has run, which could have set malloc; only the kernels' own bytes are beyond it."""
    pytest.importorskip("transformers", reason="in the test group")
    assert 0.7 <= bert("trace", tmp_path / "cost.json")["peak"] <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_another_allocator_is_warned_of_where_a_cost_is_loaded(name: str, tmp_path: Path) -> None:
    """Its setting cannot be the one that a cost was measured under."""
    found = [*Path("/usr/lib").glob(f"*/{name}"), *Path("/usr/lib64").glob(name)]
    if not found:
        pytest.skip(f"{name} is not installed")
    measured(measured_on={"device": "cpu", "allocator": "?"}).save(tmp_path / "cost.json")
    code = f"import torchbudget; torchbudget.load_cost({str(tmp_path / 'cost.json')!r})"
    environment = ENVIRONMENT | {"LD_PRELOAD": str(found[0])}
    errors = python("-W", "always", "-c", code, env=environment).stderr
    assert "MeasureWarning: tensors on the CPU are not made by glibc's malloc" in errors
    assert "allocator: '?' then, \"not glibc's malloc\" now" in errors
