"""Control groups that are really made, and processes that really run in them."""

import json
import os
import signal
import subprocess

import pytest

from tests.support.memory_groups import HOLD, SHM, memory_group
from torchbudget.units import GiB, MiB

STEPS = """
import json, os, subprocess, sys
from torchbudget.machine.host import host_memory

charged, disk_file, shm_file, hold = sys.argv[1:]
size = 100 * 2**20
readings = {}

def read(name):
    pool = host_memory()[1]
    readings[name] = {
        "name": pool.name, "limit": pool.limit_bytes, "used": pool.used_bytes,
        "own": pool.own_bytes, "usable": pool.usable_bytes, "charged": int(open(charged).read()),
    }

def write(path):
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // 2**20):
            file.write(bytes(2**20))
        os.fsync(file.fileno())

read("start")
write(disk_file)
read("cache written")
with open(disk_file, "rb", buffering=0) as file:
    while file.read(2**20):
        pass
read("cache read")
write(shm_file)
read("tmpfs")
os.unlink(shm_file)
read("tmpfs removed")
taken = bytearray(b"\\1") * size
read("taken")
child = subprocess.Popen([sys.executable, "-c", hold, str(size)], stdin=-1, stdout=-1)
child.stdout.readline()
read("taken by a child")
child.communicate(b"\\n")
read("child ended")
print(json.dumps(readings))
"""


@pytest.fixture(scope="module")
def readings(tmp_path_factory):
    """Readings of a process in a group of 1 GiB, after each of its steps."""
    disk_file = tmp_path_factory.mktemp("cache") / "file"
    shm_file = SHM / f"torchbudget-test-{os.getpid()}"
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", disk_file.parent], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind == "tmpfs":
        pytest.skip(f"{disk_file.parent} is a tmpfs, which has no page cache")
    with memory_group(GiB(1)) as group:
        use = "memory.usage_in_bytes" if group.version == 1 else "memory.current"
        try:
            output = group.output(STEPS, group.folder / use, disk_file, shm_file, HOLD)
        finally:
            shm_file.unlink(missing_ok=True)
            disk_file.unlink(missing_ok=True)
        yield group, json.loads(output)


def near(num_bytes: int) -> object:
    """Within what interpreters, page tables and the kernel's per-processor batches add."""
    return pytest.approx(num_bytes, abs=MiB(16))


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        # A file that is written and read is charged to the group, but can be reclaimed.
        ("start", "cache written", {"used": 0, "usable": 0}),
        ("start", "cache read", {"used": 0, "usable": 0}),
        # A file in /dev/shm cannot be reclaimed, until it is removed.
        ("cache read", "tmpfs", {"used": MiB(100), "usable": -MiB(100)}),
        ("cache read", "tmpfs removed", {"usable": 0}),
        # Its own memory, and its workers', is used, but still its own to use.
        ("tmpfs removed", "taken", {"used": MiB(100), "own": MiB(100), "usable": 0}),
        ("taken", "taken by a child", {"own": MiB(100), "usable": 0}),
        ("taken", "child ended", {"own": 0}),
    ],
)
def test_what_a_job_does_to_its_group(readings, before, after, changes):
    """The reading is of the group that we made, and nearly all of its use is the job's own."""
    group, steps = readings
    start = steps["start"]
    assert (start["name"], start["limit"]) == (str(group.folder), GiB(1))
    assert start["own"] == near(start["used"])
    assert start["usable"] == near(GiB(1))
    assert {key: steps[after][key] - steps[before][key] for key in changes} == {
        key: near(change) for key, change in changes.items()
    }
    if "cache" in after:
        assert steps[after]["charged"] - steps[before]["charged"] >= MiB(90)


NESTED = """
import json
from torchbudget.budget import MemoryBudget
from torchbudget.machine.host import host_memory
pools = [[pool.name, pool.limit_bytes, pool.usable_bytes] for pool in host_memory()]
print(json.dumps([pools, MemoryBudget.detect("cpu", fraction=0.5).host]))
"""


def test_a_real_ancestor_bounds_more_tightly():
    """A sibling group's process uses up the ancestor; the own group does not see it."""
    with (
        memory_group(MiB(700)) as outer,
        memory_group(MiB(900), outer) as inner,
        memory_group(MiB(400), outer) as other,
        other.python(HOLD, MiB(128)) as holder,
    ):
        assert holder.stdout.readline() == "ready\n"
        pools, host_bytes = json.loads(inner.output(NESTED))
    assert [(name, limit) for name, limit, _ in pools[1:3]] == [
        (str(inner.folder), MiB(900)),
        (str(outer.folder), MiB(700)),
    ]
    assert pools[1][2] == near(MiB(900))
    assert pools[2][2] == near(MiB(700 - 128))
    assert host_bytes == near(MiB(700 - 128) // 2)


FILL = """
import os, sys
from torchbudget.budget import MemoryBudget
from torchbudget.machine.process_tree import process_memory

with open(sys.argv[2], "wb", buffering=0) as file:
    for _ in range(100):
        file.write(bytes(2**20))
    os.fsync(file.fileno())
usable = MemoryBudget.detect(None, fraction=1).host
taken = []
while process_memory().unreclaimable_bytes < float(sys.argv[1]) * usable:
    taken.append(bytearray(b"\\1") * 2**22)
print("lives")
"""


@pytest.mark.parametrize(("fraction", "code"), [(0.95, 0), (1.05, -signal.SIGKILL)])
@pytest.mark.slow
def test_the_budget_is_where_the_kernel_kills(tmp_path, fraction, code):
    """A process that takes 95 % of what was found lives, and one that takes 105 % is killed."""
    with memory_group(MiB(768)) as group, group.python(FILL, fraction, tmp_path / "f") as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert output == ("lives\n" if code == 0 else "")
