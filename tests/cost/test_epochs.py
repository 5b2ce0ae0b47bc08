"""Epochs under a measured cost, against the machine's own counters and limits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ENVIRONMENT, ROOT, python
from tests.support.costs import measured
from tests.support.memory_groups import memory_group

pytestmark = pytest.mark.slow

EPOCH = """
import gc
import resource
import sys

import numpy as np
import torch

import torchbudget as tb
from torchbudget.machine.allocators import trim_malloc
from tests.support.training_cases import CASES
from torchbudget.machine.high_water import RESIDENT
from torchbudget.machine.process_tree import process_memory

gc.freeze()  # what is imported takes 0.2 s of each collection
name, budget, how, limited = sys.argv[1], int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4
training = CASES[name]()
before = process_memory().resident_bytes
rng = np.random.default_rng(0)
ends = np.atleast_1d(training.max_size)
number = 1200 if name == "graphs" else 400  # several batches of each
sizes = np.clip(ends * rng.lognormal(-2, 0.8, (number, len(ends))), 2, ends).astype(int)
probes = ()
if how.isdecimal():  # that many samples in each batch
    trim_malloc()
    batches = np.split(rng.permutation(len(sizes)), range(int(how), len(sizes), int(how)))
else:
    cost = tb.measure_cost(
        training.step, training.make_batch, max_size=training.max_size, budget=budget, method=how
    )
    probes = [probe for probe in cost.probes if probe.how == "run"]
    batches = list(tb.MemoryBudgetBatchSampler(sizes, cost, budget))
if limited:  # what is there now, and what the budget leaves
    memory = process_memory()
    status = open("/proc/self/status").read()
    data = int(status.partition("VmData:")[2].split()[0]) * 1024
    limit = data + budget - memory.resident_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
RESIDENT.reset()
print("begun", flush=True)
for batch in batches:
    size = sizes[batch].max(0)
    size = tuple(map(int, size)) if len(ends) > 1 else int(size[0])
    training.step(training.make_batch(len(batch), size))
share = (process_memory().peak_resident_bytes - before) / (budget - before)
print(share, len(probes), -(-len(sizes) // len(batches)))
"""


BUDGET = 600 * 2**20


def epoch(name: str, how: str, *limited: str) -> subprocess.CompletedProcess[str]:
    """In batches of a measured cost, or of a number of samples; under a limit of allocations."""
    return subprocess.run(
        [sys.executable, "-c", EPOCH, name, str(BUDGET), how, *limited],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's high-water mark")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("images", "auto"),
        ("encoder and decoder", "auto"),
        ("decoder, scores kept", "run"),
        ("graphs", "run"),
    ],
)
def test_an_epoch_stays_within_the_budget(name: str, method: str) -> None:
    """The process's own high-water mark over an epoch is below the budget and near it."""
    done = epoch(name, method)
    assert not done.returncode, done.stderr
    check(done.stdout, method)


def check(printed: str, method: str = "auto") -> str:
    """The share of what the process did not have before; the mean number of samples in a batch.

    Without a trace less of the budget is filled, after more runs.
    """
    least, most_probes = (0.8, 8) if method == "auto" else (0.6, 90)
    _, share, probes, mean = printed.split()
    assert least <= float(share) <= 1
    assert int(probes) <= most_probes
    return mean


@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
def test_an_epoch_ends_under_a_limit_of_allocations() -> None:
    """`RLIMIT_DATA` at the budget: ours ends; fixed batches of the same mean number do not."""
    name = "decoder, scores kept"
    ours = epoch(name, "auto", "limited")
    assert not ours.returncode, ours.stderr
    fixed = epoch(name, check(ours.stdout), "limited")
    assert fixed.stdout.split() == ["begun"]
    assert "can't allocate memory" in fixed.stderr


def test_an_epoch_ends_in_a_control_group_of_the_budgets_size() -> None:
    """The kernel kills who needs more: not ours; fixed batches of the same mean number."""
    with memory_group(BUDGET) as group:
        ours = group.output(EPOCH, "decoder, scores kept", BUDGET, "auto")
        with group.python(EPOCH, "decoder, scores kept", BUDGET, check(ours)) as fixed:
            printed, errors = fixed.communicate(timeout=120)
    assert printed.split() == ["begun"], errors
    assert fixed.returncode == -signal.SIGKILL


def saved(mode: str, path: Path, **environment: str) -> dict[str, Any]:
    """Peak / budget, steps, warnings and standard error of a BERT in a process of its own."""
    script = ROOT / "tests" / "support" / "script_saved_cost.py"
    done = python(script, mode, path, env=ENVIRONMENT | environment)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout) | {"printed": done.stderr}


def test_a_cost_that_was_measured_in_another_process_is_not_exceeded(tmp_path: Path) -> None:
    """A process that loads a cost, and calls nothing else, trains as the cost was measured."""
    pytest.importorskip("transformers", reason="in the test group")
    saved("measure", tmp_path / "cost.json")
    loaded = saved("load", tmp_path / "cost.json")
    assert 0.8 <= loaded["peak"] <= 1
    assert not loaded["warned"]


def test_a_traced_cost_with_a_budget_is_not_exceeded(tmp_path: Path) -> None:
    """No step has run, which could have set malloc; only the kernels' own bytes are beyond it."""
    pytest.importorskip("transformers", reason="in the test group")
    assert 0.7 <= saved("trace", tmp_path / "cost.json")["peak"] <= 1.05


def test_a_cached_cost_is_used_by_the_next_process(tmp_path: Path) -> None:
    """The one step that checks it has the memory of a measured one."""
    pytest.importorskip("transformers", reason="in the test group")
    first, second = (saved("cache", tmp_path / "costs.json") for _ in range(2))
    assert "measuring the step" in first["printed"]
    assert "measuring the step" not in second["printed"]
    assert second["steps"] < first["steps"]


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
