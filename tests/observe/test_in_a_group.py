"""A monitor in a control group of the test's own: its limit, and what the kernel does at it."""

from __future__ import annotations

import json

from tests.support.memory_groups import memory_group
from torchbudget.units import MiB

JOB = """
import json
import subprocess
import sys
import warnings

from torchbudget import MemoryMonitor
from torchbudget.machine.cgroups import cgroup_memory

warnings.simplefilter("ignore")
MIB = 2**20
take = "import sys; taken = bytearray(b'1') * int(sys.argv[1]); print('ready', flush=True); input()"

def child(mib):
    return subprocess.Popen([sys.executable, "-c", take, str(mib * MIB)], stdin=-1, stdout=-1)

near = []
with MemoryMonitor(interval_s=0.02, on_limit=lambda limit: near.append(limit.name)) as monitor:
    [pool] = cgroup_memory()
    large = child((pool.free_bytes // MIB) - 20)
    assert large.stdout.readline() == b"ready\\n"
    sample = monitor.snapshot("nearly full")
    small = child(60)
    status = large.wait()  # the kernel kills the largest
    small.kill()
    small.wait()
report = monitor.report()
[limit] = [one for one in report.limits if one.name == "cgroup"]
print(json.dumps([
    status, near, limit.share, limit.limit_bytes, sample.cgroup_bytes, sample.unreclaimable_bytes,
    report.events.refusals, report.events.kills, str(report),
]))
"""


def test_a_full_group_is_seen_coming_and_its_kills_are_counted() -> None:
    """The warning comes first; then a child is killed, and the monitor tells of it and goes on."""
    with memory_group(MiB(600)) as group:
        output = group.output(JOB)
    status, near, share, limit, used, job, refusals, kills, text = json.loads(output)
    assert status == -9
    assert "cgroup" in near
    assert limit == MiB(600)
    assert 0.95 < share <= 1
    assert abs(used - job) < MiB(40)  # the kernel's own pages
    assert refusals >= 0  # some kernels leave memory.failcnt at 0
    assert kills >= 1
    assert "the kernel killed" in text
