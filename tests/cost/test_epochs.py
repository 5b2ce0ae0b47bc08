"""Epochs under a measured cost, against the machine's own counters and limits."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ENVIRONMENT, ROOT, printed_by, python
from tests.support.costs import measured
from tests.support.memory_groups import memory_group

BUDGET = 600 * 2**20


MODULE = "tests.support.script_epoch"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's high-water mark")
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


def saved(mode: str, path: Path) -> dict[str, Any]:
    """Peak / budget and warnings of a BERT in a process of its own."""
    script = ROOT / "tests" / "support" / "script_saved_cost.py"
    return dict(json.loads(printed_by([script, mode, path])))


@pytest.mark.slow
def test_a_cost_that_was_measured_in_another_process_is_not_exceeded(tmp_path: Path) -> None:
    """A process that loads a cost, and calls nothing else, trains as the cost was measured."""
    pytest.importorskip("transformers", reason="in the test group")
    saved("measure", tmp_path / "cost.json")
    loaded = saved("load", tmp_path / "cost.json")
    assert 0.8 <= loaded["peak"] <= 1
    assert not loaded["warned"]


@pytest.mark.slow
def test_a_traced_cost_with_a_budget_is_not_exceeded(tmp_path: Path) -> None:
    """No step has run, which could have set malloc; only the kernels' own bytes are beyond it."""
    pytest.importorskip("transformers", reason="in the test group")
    assert 0.7 <= saved("trace", tmp_path / "cost.json")["peak"] <= 1.05


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
