"""`inspect`: every limit of the machine, and the budget that is detected."""

from __future__ import annotations

import json
import re
import resource
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import COMMAND, ENVIRONMENT, run_command
from torchbudget import MemoryBudget, parse_bytes
from torchbudget.commands.command_line import main
from torchbudget.machine.host import host_memory, usable_processors


def test_the_json_has_every_pool_and_the_budget(tmp_path: Path) -> None:
    done = run_command("inspect", "--device", "cpu", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    pools = {pool["name"]: pool for pool in found["pools"]}
    for pool in host_memory():
        assert pools[pool.name]["limit_bytes"] == pool.limit_bytes
    hosts = [pool for pool in found["pools"] if pool["bounds"] == "host"]
    least = min(hosts, key=lambda pool: pool["usable_bytes"])
    assert found["host_limited_by"] == least["name"]
    # What is usable differs a little between two readings.
    assert found["budget"]["host"] == pytest.approx(0.9 * least["usable_bytes"], rel=0.05)
    assert found["processors"] == usable_processors()
    assert 0 < found["free_descriptors"] <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu", "--fraction", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["bounds", "limit", "in", "use", "usable"]
    assert any(line.startswith("host ") and line.endswith(" machine") for line in lines)
    assert any(line.startswith("the host is limited by: ") for line in lines)
    shown = re.fullmatch(r"budget: device (.+?), host (.+?)(, shared .+)?", lines[-1])
    assert shown
    budget = MemoryBudget.detect("cpu", fraction=0.5)
    assert parse_bytes(shown[2]) == pytest.approx(budget.host, rel=0.2)  # others run, too


def test_a_limit_on_the_process_is_shown() -> None:
    """A real RLIMIT_AS, set in the process before it runs the command."""
    limit = 2**42
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if most != resource.RLIM_INFINITY and most < limit:
        pytest.skip("the address space of this session is limited already")
    shell = f'ulimit -v {limit // 1024} && exec "$@"'
    command = ["sh", "-c", shell, "sh", *COMMAND, "inspect", "--device", "cpu"]
    output = subprocess.check_output(command, env=ENVIRONMENT, text=True)
    assert re.search(r"^process +4 TiB .* RLIMIT_AS$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fraction", "2"], "fraction must be above 0 and at most 1"),
        (["--device", "abacus"], "abacus"),
        (["--ranks-per-machine", "0"], "ranks_per_machine"),
    ],
)
def test_wrong_use(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert expected in err
