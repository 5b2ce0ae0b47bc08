"""Control groups of every layout, written down as the kernel's files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.errors import MachineError
from torchbudget.machine.cgroups import ControlGroups, GroupEvents, cgroup_memory

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
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": stat,
    }


def v2(folder: str, limit: object, used: int, high: object = "max", stat: str = "") -> dict:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": stat,
    }


def found(root: Path) -> list[tuple[str, int, int]]:
    return [
        (str(Path(pool.name).relative_to(root)), pool.limit_bytes, pool.used_bytes)
        for pool in cgroup_memory(root=root)
    ]


def test_version_2_with_ancestors(tmp_path):
    """Own group first, then each ancestor with a limit; the real root has no files."""
    job = "sys/fs/cgroup/user.slice/job.scope"
    root = tree(
        tmp_path,
        "0::/user.slice/job.scope\n",
        [V2_MOUNT.format(root="/", point="/sys/fs/cgroup")],
        {**v2(job, 4000, 900), **v2("sys/fs/cgroup/user.slice", 3000, 2900)},
    )
    assert found(root) == [(job, 4000, 900), ("sys/fs/cgroup/user.slice", 3000, 2900)]


def test_version_2_memory_high_is_a_limit(tmp_path):
    """The lower of the two limits counts, whichever it is."""
    root = tree(
        tmp_path,
        "0::/a/b\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        {**v2("cg/a/b", 500, 10, high=400), **v2("cg/a", 500, 20, high=600)},
    )
    assert found(root) == [("cg/a/b", 400, 10), ("cg/a", 500, 20)]


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


def test_a_group_below_the_containers_own(tmp_path):
    """A path below the mounted folder is found, and the walk ends at the mount point."""
    root = tree(
        tmp_path,
        "7:memory:/docker/abc/step\n",
        [V1_MOUNT.format(root="/docker/abc", point="/cg/memory")],
        {
            **v1("cg/memory/step", 100, 10),
            **v1("cg/memory", 200, 20),
            **v1("cg", 1, 1),  # beyond the mount point, and no group
        },
    )
    assert found(root) == [("cg/memory/step", 100, 10), ("cg/memory", 200, 20)]


def test_version_1_without_a_limit(tmp_path):
    root = tree(
        tmp_path,
        "7:memory:/job\n",
        [V1_MOUNT.format(root="/", point="/cg")],
        {**v1("cg/job", NO_LIMIT_V1, 10), **v1("cg", NO_LIMIT_V1, 20)},
    )
    assert found(root) == []


def test_version_1_tells_of_limits_above_what_is_visible(tmp_path):
    """`hierarchical_memory_limit` stands for the ancestors that a container does not see."""
    root = tree(
        tmp_path,
        "7:memory:/docker/abc\n",
        [V1_MOUNT.format(root="/docker/abc", point="/cg")],
        v1("cg", NO_LIMIT_V1, 600, stat="hierarchical_memory_limit 5000\ntotal_inactive_file 100"),
    )
    assert found(root) == [("cg", 5000, 500)]


def test_version_1_groups_that_do_not_charge_their_parent(tmp_path):
    """Before Linux 5.11 a group without `use_hierarchy` did not bound its children."""
    root = tree(
        tmp_path,
        "7:memory:/a/b/c\n",
        [V1_MOUNT.format(root="/", point="/cg")],
        {
            **v1("cg/a/b/c", 300, 1),
            **v1("cg/a/b", 200, 1),
            **v1("cg/a", 100, 1),
            "cg/a/b/memory.use_hierarchy": 1,
            "cg/a/memory.use_hierarchy": 0,
        },
    )
    assert found(root) == [("cg/a/b/c", 300, 1), ("cg/a/b", 200, 1)]


def test_hybrid_with_memory_in_version_1(tmp_path):
    """The memory controller belongs to version 1 here; version 2's files are not looked at."""
    root = tree(
        tmp_path,
        "9:name=systemd:/job\n4:memory:/job\n0::/job\n",
        [
            SYSTEMD_MOUNT,
            V2_MOUNT.format(root="/", point="/sys/fs/cgroup/unified"),
            V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
        ],
        {**v1("sys/fs/cgroup/memory/job", 1000, 5), **v2("sys/fs/cgroup/unified/job", 1, 1)},
    )
    assert found(root) == [("sys/fs/cgroup/memory/job", 1000, 5)]


def test_hybrid_with_memory_in_version_2(tmp_path):
    """The version 1 hierarchy of systemd has no memory; version 2 has."""
    root = tree(
        tmp_path,
        "1:name=systemd:/job\n0::/job\n",
        [SYSTEMD_MOUNT, V2_MOUNT.format(root="/", point="/sys/fs/cgroup/unified")],
        {**v1("sys/fs/cgroup/systemd/job", 1, 1), **v2("sys/fs/cgroup/unified/job", 1000, 5)},
    )
    assert found(root) == [("sys/fs/cgroup/unified/job", 1000, 5)]


def test_the_mount_with_the_most_ancestors_is_read(tmp_path):
    """A bind mount of a part hides ancestors that another mount shows."""
    root = tree(
        tmp_path,
        "0::/a/b\n",
        [V2_MOUNT.format(root="/a", point="/part"), V2_MOUNT.format(root="/", point="/whole")],
        {**v2("part/b", 9, 1), **v2("whole/a/b", 9, 1), **v2("whole/a", 8, 1)},
    )
    assert found(root) == [("whole/a/b", 9, 1), ("whole/a", 8, 1)]


def test_a_mount_point_with_a_blank(tmp_path):
    root = tree(
        tmp_path,
        "0::/a b\n",
        [V2_MOUNT.format(root="/", point="/my\\040groups")],
        v2("my groups/a b", 9, 1),
    )
    assert found(root) == [("my groups/a b", 9, 1)]


@pytest.mark.parametrize(
    ("cgroup", "mounts"),
    [
        ("", []),
        ("0::/\n", []),
        ("4:memory:/\n", [SYSTEMD_MOUNT]),
        ("1:name=systemd:/\n", [V2_MOUNT.format(root="/", point="/cg")]),
        ("0::/\n", [V2_MOUNT.format(root="/", point="/cg")]),
        ("4:memory:/\n", ["60 1 0:9 / /cg rw - tmpfs memory rw,memory"]),
    ],
    ids=["none", "not mounted", "only systemd", "no version 2", "real root", "a tmpfs so called"],
)
def test_no_group_limits_memory(tmp_path, cgroup, mounts):
    root = tree(tmp_path, cgroup, mounts, {"cg/cgroup.procs": "", "cg/memory.limit_in_bytes": "7"})
    assert cgroup_memory(root=root) == ()


def test_no_proc_no_groups(tmp_path):
    assert cgroup_memory(root=tmp_path) == ()


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


def test_statistics_that_lag_behind_the_use_do_not_make_it_negative(tmp_path):
    root = tree(
        tmp_path,
        "0::/\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        v2("cg", 1000, 80, stat="inactive_file 100"),
    )
    assert found(root) == [("cg", 1000, 0)]


def test_a_limit_without_its_use_is_an_error(tmp_path):
    """A limit is never silently dropped."""
    root = tree(
        tmp_path,
        "0::/\n",
        [V2_MOUNT.format(root="/", point="/cg")],
        {"cg/memory.max": 100},
    )
    with pytest.raises(MachineError, match=r"limits memory, but .*memory\.current does not exist"):
        cgroup_memory(root=root)


def test_a_limit_that_cannot_be_read_is_an_error(tmp_path):
    root = tree(tmp_path, "0::/\n", [V2_MOUNT.format(root="/", point="/cg")], {})
    (root / "cg/memory.max").mkdir(parents=True)
    with pytest.raises(MachineError, match=r"cannot read .*memory\.max: Is a directory"):
        cgroup_memory(root=root)


groups = st.fixed_dictionaries(
    {
        "limit": st.one_of(st.none(), st.integers(1, 2**40)),
        "used": st.integers(0, 2**40),
        "cache": st.integers(0, 2**20),
    }
)


@pytest.mark.parametrize("version", [1, 2])
@given(chain=st.lists(groups, min_size=1, max_size=6), held=st.integers(0, 2**40))
def test_every_ancestor_bounds_what_can_be_used(tmp_path_factory, version, chain, held):
    """min(usable) over the pools is the least of limit - (use - cache - held) over the chain."""
    files: dict[str, object] = {}
    for depth, group in enumerate(chain):
        folder = "/".join(["cg", *(f"g{level}" for level in range(depth))])
        if version == 1:
            limit = NO_LIMIT_V1 if group["limit"] is None else group["limit"]
            files |= v1(folder, limit, group["used"], f"total_inactive_file {group['cache']}")
        else:
            limit = "max" if group["limit"] is None else group["limit"]
            files |= v2(folder, limit, group["used"], stat=f"inactive_file {group['cache']}")
    path = "/" + "/".join(f"g{level}" for level in range(len(chain) - 1))
    root = tree(
        tmp_path_factory.mktemp("chain"),
        f"4:memory:{path}\n" if version == 1 else f"0::{path}\n",
        [(V1_MOUNT if version == 1 else V2_MOUNT).format(root="/", point="/cg")],
        files,
    )
    limited = [group for group in chain if group["limit"] is not None]
    found = cgroup_memory(own_bytes=held, root=root)
    assert [pool.limit_bytes for pool in found] == [group["limit"] for group in reversed(limited)]
    assert [pool.usable_bytes for pool in found] == [
        max(0, group["limit"] - max(0, max(0, group["used"] - group["cache"]) - held))
        for group in reversed(limited)
    ]


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
