"""The benchmarks run, and write what they print; what they measure is judged by people."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import ROOT, printed_by

BENCHMARKS = ROOT / "examples" / "benchmarks"

TINY = {
    "planning": "--samples 2000 --repetitions 1",
    "first_batch": "--samples 20000",
    "plan_large": "--least-samples 20000 --most-samples 20000 --most-ranks 8",
    "few_samples": "--samples 1000 --repetitions 1",
    "padding": "--samples 5000 --peer-samples 300",
    "ranks": "--samples 4096 --few 4096 --most-ranks 2",
    "rank_speed": "--samples 60 --max-length 200 --mib 64 --step 16 --repetitions 1",
    "fairness": "--samples 4096 --epochs 1",
    "scatter": "--samples 4096",
    "plan_step": "--samples 512 --seeds 1",
    "alternatives": "--samples 48 --steps 1 --models images",
    "least_time": "--samples 64 --turns 1 --models encoder",
    "packing": "--samples 2000 --peer-samples 300 --repetitions 1",
    "several_axes": "--samples 600 --window 512",
    "several_limits": "--samples 2000",
    "few_shapes": "--samples 2000",
    "columns": "--integers 50000 --lists 5000",
    "streams": "--samples 3000 --lhotse-samples 300 --texts 400 --repetitions 1",
    "stop_together": "--batches 20 --repetitions 1",
    "compared": "--most-ranks 4",
    "tracked": "--batches 40 --samples 400 --repetitions 1",
    "loader": "--samples 400 --repetitions 1",
    "collate": "--repetitions 1",
    "any_model": "--budgets 1 --models contrastive",
    "any_model_cpu": "--steps 1 --budgets 1 --models contrastive",
    "kept_budget": "--samples 40 --models 1 --budgets 1",
    "malloc_settings": "--samples 200 --budgets 1 --models encoder --settings 128",
    "host_budget": "--samples 600 --budgets 1 --starts 1 --kinds 1 --search-ms 10",
    "accumulate": "--repetitions 2",
    "gradient_error": "",
    "predict": "--samples 30 --max-length 400 --mib 160 --repetitions 1 --most-ranks 1",
    "monitor_overhead": "--seconds 1 --gib 1",
}
EXACT = {
    "gradient_error": "error",
    "padding": "over the budget",
    "scatter": "excess",
    "several_axes": "over the budget",
    "several_limits": "over the budget",
    "few_shapes": "over the budget",
    "columns": "memory",
    "streams": "over the budget",
    "plan_step": "over the budget",
    "predict": "error",
    "any_model": "error where called exact",
    "any_model_cpu": "errors",
    "host_budget": "highest pss",
    "malloc_settings": "highest peak",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs_with_tiny_arguments(name: str, tmp_path: Path) -> None:
    """It prints a table and writes its rows and bars; what needs no clock holds at any size."""
    written = tmp_path / "numbers.json"
    printed = printed_by([BENCHMARKS / f"{name}.py", "--json", written, *TINY[name].split()])
    numbers = json.loads(written.read_text())
    assert len(printed.splitlines()) == 1 + len(numbers["rows"]) + len(numbers["bars"])
    exact = [bar for bar in numbers["bars"] if EXACT.get(name, "no bar") in bar["bar"]]
    assert all(bar["holds"] for bar in exact)
    assert bool(exact) == (name in EXACT)


@pytest.mark.nightly
def test_recording_replaces_the_table(tmp_path: Path) -> None:
    """The new table stands where the old one stood, and nothing else changes."""
    for path in BENCHMARKS.glob("*.py"):
        shutil.copy(path, tmp_path)
    script = tmp_path / "padding.py"
    before = script.read_text()
    arguments = ["padding", "--samples", "1000", "--peer-samples", "100"]
    printed = printed_by([tmp_path / "record.py", *arguments])
    after = script.read_text()
    assert all(f"    {line}\n" in after for line in printed.splitlines()[1:] if line)
    assert after.partition("Figures are")[2] == before.partition("Figures are")[2]
    assert after.partition("Hardware")[0] == before.partition("Hardware")[0]
    assert after.count("window 4,096 ≤") == 1


@pytest.mark.nightly
@pytest.mark.peer
@pytest.mark.timeout(900)
def test_peers_are_compared_on_a_page(tmp_path: Path) -> None:
    """The page has a table of each workload and figures; our batches lose and repeat nothing."""
    pytest.importorskip("transformers")
    page, written = tmp_path / "page.md", tmp_path / "numbers.json"
    page.write_text("before\n<!-- peers.py writes from here -->\n<!-- to here -->\nafter\n")
    few = ["--only", "text", "step", "--ways", "torchbudget", "fixed", "--samples", "24"]
    printed_by([BENCHMARKS / "peers.py", "--quick", *few, "--page", page, "--json", written])
    assert all(bar["holds"] for bar in json.loads(written.read_text())["bars"])
    found = page.read_text()
    assert found.startswith("before\n")
    assert found.endswith("-->\nafter\n")
    assert {"|torchbudget.plan_step|documented|", "|fixed batches|tuned|"} <= {*cells(found)}
    assert all((tmp_path / "images" / f"peers_{name}.png").exists() for name in ("speed", "peak"))


def cells(page: str) -> list[str]:
    """The first two cells of each row of its tables."""
    return ["|".join(line.split("|")[:3]) + "|" for line in page.splitlines() if line[:1] == "|"]


def test_every_benchmark_is_run_here() -> None:
    """A new script does not go untested, and its docstring holds what was measured."""
    scripts = {path.stem for path in BENCHMARKS.glob("[!_]*.py")} - {"record"}
    # These run above, in test_examples.py, and on a GPU alone.
    assert scripts == {*TINY, "peers", "train_text_compared", "on_gpu"}
    for name in scripts:
        assert "Hardware:" in (BENCHMARKS / f"{name}.py").read_text()
