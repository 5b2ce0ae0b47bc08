"""Control groups of every layout, written down as the kernel's files."""

from pathlib import Path

import pytest

from torchbudget.errors import MachineError
from torchbudget.machine.host import ControlGroups, GroupEvents, cgroup_memory

NO_LIMIT_V1 = 9223372036854771712
V1_MOUNT = "35 31 0:32 {root} {point} rw,relatime shared:9 master:2 - cgroup cgroup rw,memory"
V2_MOUNT = "41 31 0:38 {root} {point} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
SYSTEMD_MOUNT = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd"


def tree(root: Path, cgroup: str, mounts: list[str], files: dict[str, object]) -> Path:
    """A file tree that looks as the kernel's would."""
    contents = {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "\n".join(["22 27 0:21 / /proc rw - proc proc rw", *mounts]),
        **files,
    }
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def v1(folder: str, limit: object, used: int, stat: str = "") -> dict[str, object]:
    names = ("limit_in_bytes", "usage_in_bytes", "stat")
    values = (limit, used, stat)
    return {f"{folder}/memory.{name}": v for name, v in zip(names, values, strict=True)}


def v2(folder: str, limit: object, used: int, high: object = "max", stat: str = "") -> dict:
    names, values = ("max", "high", "current", "stat"), (limit, high, used, stat)
    return {f"{folder}/memory.{name}": v for name, v in zip(names, values, strict=True)}


def found(root: Path) -> list[tuple[str, int, int]]:
    return [
        (str(Path(pool.name).relative_to(root)), pool.limit_bytes, pool.used_bytes)
        for pool in cgroup_memory(root=root)
    ]


# By what it shows: /proc/self/cgroup, mounts, files, and the groups that are found.
LAYOUTS = {
    "version 2: the own group first, then each ancestor with a limit": (
        "0::/a/b\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        {**v2("cg/a/b", 4000, 900), **v2("cg/a", 3000, 2900)},
        [("cg/a/b", 4000, 900), ("cg/a", 3000, 2900)],
    ),
    "version 2: the lower of the two limits counts": (
        "0::/a/b\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        {**v2("cg/a/b", 500, 10, high=400), **v2("cg/a", 500, 20, high=600)},
        [("cg/a/b", 400, 10), ("cg/a", 500, 20)],
    ),
    "a group below the container's own; the walk ends at the mount point": (
        "7:memory:/docker/abc/step\n",
        [V1_MOUNT.format(root="/docker/abc", point="/cg/memory")],
        {**v1("cg/memory/step", 100, 10), **v1("cg/memory", 200, 20), **v1("cg", 1, 1)},
        [("cg/memory/step", 100, 10), ("cg/memory", 200, 20)],
    ),
    "version 1: no limit": (
        "7:memory:/job\n",
        [V1_MOUNT.format(root="/", point="/cg")],
        {**v1("cg/job", NO_LIMIT_V1, 10), **v1("cg", NO_LIMIT_V1, 20)},
        [],
    ),
    "version 1: a limit above what is visible": (
        "7:memory:/docker/abc\n",
        [V1_MOUNT.format(root="/docker/abc", point="/cg")],
        v1("cg", NO_LIMIT_V1, 600, stat="hierarchical_memory_limit 5000\ntotal_inactive_file 100"),
        [("cg", 5000, 500)],
    ),
    "version 1, before Linux 5.11: a group that does not charge its parent": (
        "7:memory:/a/b/c\n",
        [V1_MOUNT.format(root="/", point="/cg")],
        {
            **v1("cg/a/b/c", 300, 1),
            **v1("cg/a/b", 200, 1),
            **v1("cg/a", 100, 1),
            "cg/a/b/memory.use_hierarchy": 1,
            "cg/a/memory.use_hierarchy": 0,
        },
        [("cg/a/b/c", 300, 1), ("cg/a/b", 200, 1)],
    ),
    "hybrid, memory in version 1": (
        "9:name=systemd:/job\n4:memory:/job\n0::/job\n",
        [
            SYSTEMD_MOUNT,
            V2_MOUNT.format(root="/", point="/cg/unified"),
            V1_MOUNT.format(root="/", point="/cg/memory"),
        ],
        {**v1("cg/memory/job", 1000, 5), **v2("cg/unified/job", 1, 1)},
        [("cg/memory/job", 1000, 5)],
    ),
    "hybrid, memory in version 2": (
        "1:name=systemd:/job\n0::/job\n",
        [SYSTEMD_MOUNT, V2_MOUNT.format(root="/", point="/cg/unified")],
        {**v1("cg/systemd/job", 1, 1), **v2("cg/unified/job", 1000, 5)},
        [("cg/unified/job", 1000, 5)],
    ),
    "the mount with the most ancestors is read": (
        "0::/a/b\n",
        [V2_MOUNT.format(root="/a", point="/part"), V2_MOUNT.format(root="/", point="/whole")],
        {**v2("part/b", 9, 1), **v2("whole/a/b", 9, 1), **v2("whole/a", 8, 1)},
        [("whole/a/b", 9, 1), ("whole/a", 8, 1)],
    ),
    "a mount point with a blank": (
        "0::/a b\n",
        [V2_MOUNT.format(root="/", point="/my\\040groups")],
        v2("my groups/a b", 9, 1),
        [("my groups/a b", 9, 1)],
    ),
    "statistics that lag behind the use": (
        "0::/\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        v2("cg", 1000, 80, stat="inactive_file 100"),
        [("cg", 1000, 0)],
    ),
    "not mounted": ("0::/\n", [], {}, []),
    "only systemd": ("4:memory:/\n", [SYSTEMD_MOUNT], {}, []),
    "real root": ("0::/\n", [V2_MOUNT.format(root="/", point="/cg")], {"cg/cgroup.procs": ""}, []),
    "a tmpfs so called": (
        "4:memory:/\n",
        ["60 1 0:9 / /cg rw - tmpfs memory rw,memory"],
        {"cg/memory.limit_in_bytes": "7"},
        [],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_that_limit_memory_are_found(tmp_path, layout):
    cgroup, mounts, files, expected = LAYOUTS[layout]
    assert found(tree(tmp_path, cgroup, mounts, files)) == expected
    assert cgroup_memory(root=tmp_path / "no proc") == ()


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
def test_a_container_finds_its_group_at_the_mount(tmp_path, version, path, mount_root):
    """Whatever path the container sees, the limit at the mount's root binds it."""
    cgroup = f"4:cpu,memory:{path}\n0::/\n" if version == 1 else f"0::{path}\n"
    mount = (V1_MOUNT if version == 1 else V2_MOUNT).format(root=mount_root, point="/sys/fs/cgroup")
    group = v1 if version == 1 else v2
    # A folder that ".." would lead to, were it followed.
    decoy = group("sys/fs/sibling", 1, 1)
    root = tree(tmp_path, cgroup, [mount], {**group("sys/fs/cgroup", 1000, 600), **decoy})
    assert found(root) == [("sys/fs/cgroup", 1000, 600)]


V1_STAT = """cache 10
inactive_file 1
active_file 2
inactive_anon 4
total_inactive_file 100
total_active_file 200
total_inactive_anon 1000
total_shmem 2000
total_unevictable 4000
slab_reclaimable 8000"""
V2_STAT = """anon 1000
file 2300
shmem 2000
inactive_anon 3000
unevictable 4000
inactive_file 100
active_file 200
slab_reclaimable 50
slab_unreclaimable 8000"""


@pytest.mark.parametrize(("version", "reclaimable"), [(1, 300), (2, 350)])
def test_only_reclaimable_cache_is_no_use(tmp_path, version, reclaimable):
    """Lists of file pages (and slabs in version 2) are taken off; tmpfs and locked pages not."""
    root = tree(
        tmp_path,
        "4:memory:/job\n" if version == 1 else "0::/job\n",
        [(V1_MOUNT if version == 1 else V2_MOUNT).format(root="/", point="/cg")],
        v1("cg/job", 90_000, 20_000, stat=V1_STAT)
        if version == 1
        else v2("cg/job", 90_000, 20_000, stat=V2_STAT),
    )
    (pool,) = cgroup_memory(own_bytes=12, root=root)
    assert pool.used_bytes == 20_000 - reclaimable
    assert pool.own_bytes == 12


def test_a_limit_that_cannot_be_compared_is_an_error(tmp_path):
    """A limit is never silently dropped."""
    mounts = [V2_MOUNT.format(root="/", point="/cg")]
    root = tree(tmp_path, "0::/\n", mounts, {"cg/memory.max": 100})
    with pytest.raises(MachineError, match=r"limits memory, but .*memory\.current does not exist"):
        cgroup_memory(root=root)
    (root / "cg/memory.high").mkdir(parents=True)
    with pytest.raises(MachineError, match=r"cannot read .*memory\.high: Is a directory"):
        cgroup_memory(root=root)


def test_what_has_happened_in_groups_of_version_2(tmp_path):
    """Its own waiting; refusals and kills of the topmost group, which counts those below it."""
    job = "sys/fs/cgroup/job"
    pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0 total=7\n"
    root = tree(
        tmp_path,
        "0::/job\n",
        [V2_MOUNT.format(root="/", point="/sys/fs/cgroup")],
        {
            f"{job}/memory.pressure": pressure,
            f"{job}/memory.events": "low 0\nhigh 1\nmax 3\noom 1\noom_kill 1\n",
            "sys/fs/cgroup/memory.events": "low 0\nhigh 1\nmax 5\noom 2\noom_kill 2\n",
        },
    )
    events = ControlGroups.of(root=root).events()
    assert events == GroupEvents(stalled_s=2.5, refusals=5, kills=2)
    (root / job / "memory.pressure").unlink()
    assert ControlGroups.of(root=root).events().stalled_s is None


def test_what_has_happened_in_groups_of_version_1(tmp_path):
    """Each group counts what hit its own limit; no file says how long processes waited."""
    root = tree(
        tmp_path,
        "7:memory:/job\n",
        [V1_MOUNT.format(root="/", point="/cg")],
        {
            "cg/job/memory.failcnt": "3",
            "cg/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "cg/memory.failcnt": "2",
            "cg/memory.memsw.failcnt": "4",
            "cg/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        },
    )
    events = ControlGroups.of(root=root).events()
    assert events == GroupEvents(stalled_s=None, refusals=9, kills=1)


def test_where_there_are_no_groups_nothing_has_happened(tmp_path):
    events = ControlGroups.of(root=tmp_path).events()
    assert events == GroupEvents(stalled_s=None, refusals=0, kills=0)


def test_the_groups_of_another_process(tmp_path):
    """Its own groups are read, not those of the process that asks."""
    root = tree(
        tmp_path,
        "0::/mine\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        {"proc/77/cgroup": "0::/its\n", **v2("cg/mine", 100, 10), **v2("cg/its", 200, 20)},
    )
    [pool] = ControlGroups.of(77, root=root).pools()
    assert (pool.limit_bytes, pool.used_bytes) == (200, 20)
