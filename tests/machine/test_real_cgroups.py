"""Control groups that are really made, and processes that really run in them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_groups import HOLD, SHM, memory_group, skip_on_tmpfs
from torchbudget import MemoryBudget
from torchbudget.machine.host import host_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.units import GiB, MiB

SIZE = MiB(100)
RUN = f"import sys; from {__name__} import {{0}}; {{0}}(*sys.argv[1:])"


def near(num_bytes: int) -> Any:
    """Within what interpreters, page tables and the kernel's per-processor batches add."""
    return pytest.approx(num_bytes, abs=MiB(16))


def write(path: str) -> None:
    """Write a file of 100 MiB to its disk."""
    with open(path, "wb", buffering=0) as file:  # noqa: PTH123  (unbuffered)
        for _ in range(SIZE // MiB(1)):
            file.write(bytes(MiB(1)))
        os.fsync(file.fileno())


def take_steps(disk_file: str, shm_file: str) -> None:
    """Print what the group's pool says after each of a job's steps."""
    readings = {}

    def read(name: str) -> None:
        pool = host_memory()[1]
        readings[name] = pool.name, pool.used_bytes, pool.own_bytes, pool.usable_bytes

    read("start")
    write(disk_file)
    read("a file was written")
    write(shm_file)
    read("a file lies in /dev/shm")
    Path(shm_file).unlink()
    taken = bytearray(b"\1") * SIZE
    read("memory was taken")
    del taken
    print(json.dumps(readings))  # noqa: T201


def test_what_a_job_does_to_its_group(tmp_path: Path) -> None:
    """The group is the one that we made, and nearly all of its use is the job's own."""
    shm_file = SHM / f"torchbudget-test-{os.getpid()}"
    skip_on_tmpfs(tmp_path)
    with memory_group(GiB(1)) as group:
        try:
            output = group.output(RUN.format("take_steps"), tmp_path / "file", shm_file)
        finally:
            shm_file.unlink(missing_ok=True)
    readings = json.loads(output)
    name, used, own, usable = readings.pop("start")
    assert name == str(group.folder)
    assert (own, usable) == (near(used), near(GiB(1)))
    changes = {step: [a - b for a, b in zip(one[1:], (used, own, usable), strict=True)]
               for step, one in readings.items()}  # fmt: skip
    assert changes == {
        "a file was written": [near(0)] * 3,  # charged to the group, but can be reclaimed
        "a file lies in /dev/shm": [near(SIZE), near(0), near(-SIZE)],
        "memory was taken": [near(SIZE), near(SIZE), near(0)],  # its own to use still
    }


def print_pools() -> None:
    pools = [[pool.name, pool.limit_bytes, pool.usable_bytes] for pool in host_memory()]
    print(json.dumps([*pools[1:3], MemoryBudget.detect("cpu", fraction=0.5).host]))  # noqa: T201


def test_a_real_ancestor_bounds_more_tightly() -> None:
    """A sibling group's process uses up the ancestor; the own group does not see it."""
    with (
        memory_group(MiB(700)) as outer,
        memory_group(MiB(900), outer) as inner,
        memory_group(MiB(400), outer) as other,
        other.python(HOLD, MiB(128)) as holder,
    ):
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        own, above, host_bytes = json.loads(inner.output(RUN.format("print_pools")))
    assert own == [str(inner.folder), MiB(900), near(MiB(900))]
    assert above == [str(outer.folder), MiB(700), near(MiB(700 - 128))]
    assert host_bytes == near(MiB(700 - 128) // 2)


def fill(share: str, path: str) -> None:
    """Take this share of what is found to be usable, beside a file's cache."""
    write(path)
    usable = MemoryBudget.detect(None, fraction=1).host or 0
    taken = []
    while process_memory().unreclaimable_bytes < float(share) * usable:
        taken.append(bytearray(b"\1") * MiB(4))
    print("lives")  # noqa: T201


@pytest.mark.parametrize(("share", "code"), [(0.95, 0), (1.05, -signal.SIGKILL)])
@pytest.mark.slow
def test_the_budget_is_where_the_kernel_kills(tmp_path: Path, share: float, code: int) -> None:
    """A process that takes 95 % of what was found lives, and one that takes 105 % is killed."""
    with (
        memory_group(MiB(768)) as group,
        group.python(RUN.format("fill"), share, tmp_path / "f") as process,
    ):
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (code, "" if code else "lives\n"), errors
