"""The machine's memory, pools, limits, processors, and control groups, written down and real."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import printed_by
from tests.support.memory_groups import HOLD, SHM, memory_group, skip_on_tmpfs
from torchbudget import MemoryBudget
from torchbudget.errors import MachineError
from torchbudget.machine import host
from torchbudget.machine.host import (
    ControlGroups,
    MemoryPool,
    free_descriptors,
    host_memory,
    machine_memory,
    process_limits,
    shared_memory,
)
from torchbudget.machine.process_tree import process_memory, process_tree
from torchbudget.units import GiB, MiB

amounts = st.integers(0, 2**50)
pools = st.builds(
    MemoryPool, name=st.just("pool"), limit_bytes=amounts, used_bytes=amounts, own_bytes=amounts
)


@given(pool=pools, taken=amounts)
def test_what_the_job_takes_does_not_change_what_it_can_use(pool: MemoryPool, taken: int) -> None:
    """0 <= free <= usable <= limit; usable is the same before and after the job allocates."""
    assert 0 <= pool.free_bytes <= pool.usable_bytes <= pool.limit_bytes
    own = min(pool.own_bytes, pool.used_bytes) + taken
    after = replace(pool, used_bytes=pool.used_bytes + taken, own_bytes=own)
    assert after.usable_bytes == pool.usable_bytes


def test_the_host_is_the_machine_and_its_groups() -> None:
    """The machine comes first, as the kernel has it, and all pools know what the job uses."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    first, *groups = host_memory()
    assert first.name == machine_memory().name == "machine"
    assert first.limit_bytes == int(fields["MemTotal"].split()[0]) * 1024
    assert [pool.name for pool in groups] == [pool.name for pool in ControlGroups.of().pools()]
    job = sum(process.unreclaimable_bytes for process in process_tree())  # with a fork server
    assert first.own_bytes == pytest.approx(job, abs=MiB(64))


@pytest.mark.parametrize("size", ["64m", "0"])
def test_shared_memory_counts_what_is_written(tmp_path: Path, size: str) -> None:
    """A real tmpfs, to the byte; one of size 0 has no limit."""
    assert shared_memory(root=tmp_path) is None
    folder = tmp_path / "dev/shm"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "torchbudget-test", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        (folder / "batch").write_bytes(bytes(MiB(24)))
        pool = shared_memory(root=tmp_path)
    finally:
        subprocess.run(["umount", folder], check=True)
    if size == "0":
        assert pool is None
    else:
        assert pool == MemoryPool(name="/dev/shm", limit_bytes=MiB(64), used_bytes=MiB(24))


def print_limits() -> None:
    """Limit this process, and print the limits that are found."""
    for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
        resource.setrlimit(name, (limit, limit))
    found = process_limits()
    assert all(0 < pool.used_bytes == pool.own_bytes for pool in found)
    print([(pool.name, pool.limit_bytes, pool.usable_bytes) for pool in found])  # noqa: T201


def test_limits_that_are_set_are_found() -> None:
    """In a process of its own, whose limits are real."""
    for name in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        if resource.getrlimit(name)[1] != resource.RLIM_INFINITY:
            pytest.skip("this session is limited already")
    expected = [("RLIMIT_DATA", 2**41, 2**41), ("RLIMIT_AS", 2**42, 2**42)]
    printed = printed_by(["-c", f"from {__name__} import print_limits; print_limits()"])
    assert printed == f"{expected}\n"


def test_an_open_file_is_one_less() -> None:
    """Descriptors that are free are those that may be opened yet."""
    before = free_descriptors()
    with open(os.devnull), open(os.devnull):  # noqa: PTH123  (the built-in is what users call)
        assert free_descriptors() == before - 2
    assert free_descriptors() == before


# ---------------------------------------------------------------------- control groups


Files = dict[str, object]
NO_LIMIT_V1 = 9223372036854771712
MOUNTS = {
    1: "35 31 0:32 {} {} rw,relatime shared:9 master:2 - cgroup cgroup rw,memory,cpu",
    2: "41 31 0:38 {} {} rw,relatime - cgroup2 cgroup2 rw,nsdelegate",
}
SYSTEMD = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd"


def mount(version: int, point: str = "/cg", root: str = "/") -> str:
    return MOUNTS[version].format(root, point)


def tree(root: Path, cgroup: str, mounts: list[str], files: Files) -> Path:
    """A file tree that looks as the kernel's would."""
    proc: Files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join(mounts)}
    for name, content in (proc | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def v1(folder: str, limit: object, used: int, stat: str = "") -> Files:
    values = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"{folder}/memory.{name}": value for name, value in values.items()}


def v2(folder: str, limit: object, used: int, high: object = "max", stat: str = "") -> Files:
    values = {"max": limit, "high": high, "current": used, "stat": stat}
    return {f"{folder}/memory.{name}": value for name, value in values.items()}


def found(root: Path) -> list[tuple[str, int, int]]:
    return [
        (str(Path(pool.name).relative_to(root)), pool.limit_bytes, pool.used_bytes)
        for pool in ControlGroups.of(root=root).pools()
    ]


# By what it shows: /proc/self/cgroup, mounts, files, and the groups that are found.
LAYOUTS: dict[str, tuple[str, list[str], Files, list[tuple[str, int, int]]]] = {
    "the own group first, then each ancestor with a limit; the lower of its two limits": (
        "0::/a/b\n",
        [mount(2)],
        v2("cg/a/b", 500, 10, high=400) | v2("cg/a", 300, 290, high=600),
        [("cg/a/b", 400, 10), ("cg/a", 300, 290)],
    ),
    "a group below the container's own; the mount point is the topmost": (
        "7:memory:/docker/abc/step\n",
        [mount(1, "/cg/memory", "/docker/abc")],
        v1("cg/memory/step", 100, 10) | v1("cg/memory", 200, 20) | v1("cg", 1, 1),
        [("cg/memory/step", 100, 10), ("cg/memory", 200, 20)],
    ),
    "version 1: no limit": (
        "7:memory:/job\n",
        [mount(1)],
        v1("cg/job", NO_LIMIT_V1, 10) | v1("cg", NO_LIMIT_V1, 20),
        [],
    ),
    "version 1: a limit above what is visible": (
        "7:memory:/docker/abc\n",
        [mount(1, root="/docker/abc")],
        v1("cg", NO_LIMIT_V1, 600, stat="hierarchical_memory_limit 5000\ntotal_inactive_file 100"),
        [("cg", 5000, 500)],
    ),
    "hybrid, memory in version 1": (
        "9:name=systemd:/job\n4:memory:/job\n0::/job\n",
        [SYSTEMD, mount(2, "/cg/unified"), mount(1, "/cg/memory")],
        v1("cg/memory/job", 1000, 5) | v2("cg/unified/job", 1, 1),
        [("cg/memory/job", 1000, 5)],
    ),
    "the mount with the most ancestors, at a point with a blank": (
        "0::/a/b\n",
        [mount(2, "/part", "/a"), mount(2, "/the\\040whole")],
        v2("part/b", 9, 1) | v2("the whole/a/b", 9, 1) | v2("the whole/a", 8, 1),
        [("the whole/a/b", 9, 1), ("the whole/a", 8, 1)],
    ),
    "not mounted": ("0::/\n", [], {}, []),
    "real root": ("0::/\n", [mount(2)], {"cg/cgroup.procs": ""}, []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_that_limit_memory_are_found(tmp_path: Path, layout: str) -> None:
    cgroup, mounts, files, expected = LAYOUTS[layout]
    assert found(tree(tmp_path, cgroup, mounts, files)) == expected
    assert ControlGroups.of(root=tmp_path / "no proc").pools() == ()


@pytest.mark.parametrize(
    ("path", "mount_root"),
    [
        ("/", "/"),  # a cgroup namespace of its own
        ("/kubepods/pod1/abc", "/kubepods/pod1/abc"),  # the host's namespace, its own group mounted
        ("/docker/abc", "/"),  # the host's path, which is not visible here
        ("/docker/abc", "/../.."),  # a mount that was made outside the namespace
        ("/../sibling", "/"),  # moved out of the namespace
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_finds_its_group_at_the_mount(
    tmp_path: Path, version: int, path: str, mount_root: str
) -> None:
    """Whatever path the container sees, the limit at the mount's root binds it."""
    cgroup = f"4:cpu,memory:{path}\n0::/\n" if version == 1 else f"0::{path}\n"
    group = v1 if version == 1 else v2
    # The second folder is where ".." would lead to, were it followed.
    files = group("sys/fs/cgroup", 1000, 600) | group("sys/fs/sibling", 1, 1)
    root = tree(tmp_path, cgroup, [mount(version, "/sys/fs/cgroup", mount_root)], files)
    assert found(root) == [("sys/fs/cgroup", 1000, 600)]


V1_STAT = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 200\ntotal_shmem 2000"
V2_STAT = "shmem 2000\ninactive_file 100\nactive_file 200\nslab_reclaimable 50"


@pytest.mark.parametrize(
    ("cgroup", "version", "files", "used"),
    [
        ("4:memory:/job\n", 1, v1("cg/job", 90_000, 20_000, stat=V1_STAT), 19_700),
        ("0::/job\n", 2, v2("cg/job", 90_000, 20_000, stat=V2_STAT), 19_650),
        ("0::/job\n", 2, v2("cg/job", 90_000, 80, stat=V2_STAT), 0),  # the use lags behind
    ],
)
def test_only_reclaimable_cache_is_no_use(
    tmp_path: Path, cgroup: str, version: int, files: Files, used: int
) -> None:
    """Lists of file pages (and slabs in version 2) are taken off; tmpfs is not."""
    groups = ControlGroups.of(root=tree(tmp_path, cgroup, [mount(version)], files))
    (pool,) = groups.pools(own_bytes=12)
    assert (pool.used_bytes, pool.own_bytes) == (used, 12)


def test_a_limit_that_cannot_be_compared_is_an_error(tmp_path: Path) -> None:
    """A limit is never silently dropped."""
    root = tree(tmp_path, "0::/\n", [mount(2)], {"cg/memory.max": 100})
    with pytest.raises(MachineError, match=r"limits memory, but .*memory\.current does not exist"):
        ControlGroups.of(root=root).pools()


EVENTS: dict[str, tuple[str, list[str], Files, dict[str, float]]] = {
    "version 2: the topmost group counts those below it": (
        "0::/job\n",
        [mount(2)],
        {
            "cg/job/memory.pressure": "some avg10=0.00 total=2500000\nfull avg10=0 total=7\n",
            "cg/job/memory.events": "low 0\nhigh 1\nmax 3\noom 1\noom_kill 1\n",
            "cg/memory.events": "low 0\nhigh 1\nmax 5\noom 2\noom_kill 2\n",
        },
        {"stalled_s": 2.5, "refusals": 5, "kills": 2},
    ),
    "version 1: each group counts what hit its own limit; no file says how long processes waited": (
        "7:memory:/job\n",
        [mount(1)],
        {
            "cg/job/memory.failcnt": "3",
            "cg/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "cg/memory.failcnt": "2",
            "cg/memory.memsw.failcnt": "4",
        },
        {"refusals": 9, "kills": 1},
    ),
    "no groups": ("", [], {}, {"refusals": 0, "kills": 0}),
}


@pytest.mark.parametrize("layout", EVENTS)
def test_what_has_happened_in_groups(tmp_path: Path, layout: str) -> None:
    cgroup, mounts, files, expected = EVENTS[layout]
    assert ControlGroups.of(root=tree(tmp_path, cgroup, mounts, files)).events() == expected


def test_the_groups_of_another_process(tmp_path: Path) -> None:
    """Its own groups are read, not those of the process that asks."""
    files = {"proc/77/cgroup": "0::/its\n"} | v2("cg/mine", 100, 10) | v2("cg/its", 200, 20)
    [pool] = ControlGroups.of(77, root=tree(tmp_path, "0::/mine\n", [mount(2)], files)).pools()
    assert (pool.limit_bytes, pool.used_bytes) == (200, 20)


V1, V2 = "4:memory:/\n1:cpu:/job/step\n0::/", "0::/job/step"


@pytest.mark.parametrize(
    ("cgroup", "version", "quotas", "expected"),
    [
        (V2, 2, {"job/step/cpu.max": "max 100000\n"}, None),
        (V2, 2, {"job/step/cpu.max": "900000 100000\n", "cpu.max": "50000 100000\n"}, 1),
        (V1, 1, {"job/step/cpu.cfs_quota_us": "-1\n"}, None),
        (V1, 1, {"job/cpu.cfs_quota_us": "90000\n", "job/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_limits_the_processors(
    tmp_path: Path, cgroup: str, version: int, quotas: Files, expected: int | None
) -> None:
    """Of either version, the least of all groups; else those that it may be scheduled on."""
    files = {f"cg/{name}": quota for name, quota in quotas.items()} | {"cg/job/step/cpu.stat": ""}
    affinity = len(os.sched_getaffinity(0))
    root = tree(tmp_path, cgroup, [mount(version)], files)
    assert host.usable_processors(root=root) == min(affinity, expected or affinity)


# ---------------------------------------------------------------------- real groups


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
