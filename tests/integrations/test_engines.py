"""Trainings of `examples/` whose ranks are killed, and go on with other numbers of ranks."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.commands import ENVIRONMENT, ROOT, printed_by
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

ELASTIC = ROOT / "examples" / "elastic.py"


def saved_in(folder: Path) -> tuple[int, int, torch.Tensor]:
    """The checkpoint's steps, its ranks, and how often it counts each sample in each epoch."""
    if not (folder / "last.pt").exists():
        return 0, 0, torch.zeros(0)
    state = torch.load(folder / "last.pt", weights_only=True)
    steps = state["training"]["accumulator"]["steps"]
    return steps, len(state["ranks"]), state["callbacks"][0]["total"]


def last_step(folder: Path) -> int:
    """The last step that was taken, whether or not a checkpoint has it."""
    try:
        text = (folder / "statistics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    records = [json.loads(line) for line in text.split("\n")[:-1]]
    return max((one["number"] for one in records if one["kind"] == "step"), default=0)


def check_counts(folder: Path) -> None:
    """Over the whole run, each sample came once in each epoch."""
    _, _, counts = saved_in(folder)
    assert counts.shape[0] == 2
    assert counts.eq(1).all(), counts.unique(return_counts=True)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    """One of up to three ranks is killed at any moment, and other numbers of ranks go on.

    Steps after a checkpoint are repeated; the counts are saved with it.
    """
    chance, files, name = random.Random(0), tmp_path / "files", script("engines.lose")
    training = [ELASTIC, files, "--samples", 2000, "--workers", 0, "--step-s", 0]
    repeated = 0
    for _ in range(20):
        ranks = chance.choice([1, 2, 3])
        victim = chance.randrange(ranks)
        moment = [chance.randint(1, 12), chance.uniform(0, 0.02)]
        found = run_ranks(name, tmp_path, ranks, victim, *moment, *training, killed=[victim])
        assert all(one is None or one.startswith("RuntimeError") for one in found), found
        repeated += last_step(files) - saved_in(files)[0]
    assert run_ranks(name, tmp_path, 2, -1, 0, 0, *training) == ["", ""]
    assert repeated > 0
    check_counts(files)


# ---------------------------------------------------------------------- torchrun


class Agents:
    """Agents of torchrun, each a machine with one rank. This process has their rendezvous store.

    Args:
        folder: for their output.
        arguments: of the script.
    """

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder, self._arguments = folder, [*map(str, arguments)]
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start one more agent."""
        # An agent is lost after 6 s without a sign of life; a round waits 1 s for more agents.
        settings = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._store.port}"]
        command += [f"--rdzv-conf={settings}", "--local-addr=127.0.0.1", *self._arguments]
        environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.agents.append(agent)
        return agent

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            kill(agent)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent with all its processes, as a machine that fails."""
    if agent.poll() is None:
        processes = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        for process in processes:
            process.kill()
    agent.wait()


def wait_for_steps(folder: Path, ranks: int) -> None:
    """Wait until so many ranks have saved, and have then taken steps that they have not saved."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        saved, saved_by, _ = saved_in(folder)
        if saved_by == ranks and last_step(folder) >= saved + 2:
            return
        time.sleep(0.05)
    pytest.fail(f"no steps of {ranks} ranks after step {last_step(folder)}")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_kills_under_torchrun(tmp_path: Path) -> None:
    """An agent is killed with its rank; the other goes on alone, and then with a new agent.

    The old one and the new ones in turn, so that the rank that saves is killed, too.
    """
    files, repeated = tmp_path / "files", 0
    arguments = [ELASTIC, files, "--samples", 2000, "--step-s", 0.3]
    with Agents(tmp_path, *arguments) as started:
        running = [started.start(), started.start()]
        for _ in range(3):
            wait_for_steps(files, ranks=2)
            taken = last_step(files)
            kill(running.pop(0))
            repeated += taken - saved_in(files)[0]
            wait_for_steps(files, ranks=1)
            running.append(started.start())
        assert [agent.wait() for agent in running] == [0, 0]
    assert repeated > 0
    check_counts(files)


# ---------------------------------------------------------------------- Ray Train


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_trainers_of_ray_that_lose_workers() -> None:
    """A worker is killed; a trainer of another number of workers goes on from Ray's checkpoint."""
    pytest.importorskip("ray.train")
    printed = printed_by([ROOT / "examples" / "elastic_ray.py", "--epochs", 2])
    assert re.findall(r"^(\d) workers: one was lost", printed, re.MULTILINE) == ["2", "1"]
    counts = re.findall(r"^epoch \d: each sample (\d) to (\d) times", printed, re.MULTILINE)
    assert counts == [("1", "1")] * 2


# ---------------------------------------------------------------------- torchft


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_replica_of_torchft_that_is_lost(tmp_path: Path) -> None:
    """It is killed within a step; the other one goes on alone, and then with a new one.

    Each sample is in one committed step of an epoch.
    """
    pytest.importorskip("torchft")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", address]
    command += ["--min_replicas", "1", "--join_timeout_ms", "3000"]

    def replica(number: int, *more: Any) -> subprocess.Popen[bytes]:
        script = [sys.executable, ROOT / "examples" / "elastic_torchft.py", tmp_path / "files"]
        script += ["--lighthouse", f"http://{address}", "--samples", 4000, "--replica", number]
        return subprocess.Popen([*map(str, script), *map(str, more)], env=ENVIRONMENT)

    started = [subprocess.Popen([*map(str, command)])]
    try:
        started += [replica(0), replica(1, "--lost-at", 10)]
        assert started[2].wait() == -signal.SIGKILL
        started.append(replica(1))
        assert [one.wait() for one in (started[1], started[3])] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    counts, together = [Counter[int](), Counter[int]()], set()
    for path in (tmp_path / "files").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            counts[line["epoch"]].update(line["samples"])
            together.add((int(path.suffixes[0][1:]), line["replicas"]))
    assert counts == [Counter(range(4000))] * 2
    first, lost, late = (one.pid for one in started[1:])
    assert together == {(first, 1), (first, 2), (lost, 2), (late, 2)}
