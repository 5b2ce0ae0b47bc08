"""What a report says was used of each limit at the most."""

from __future__ import annotations

from pathlib import Path

from torchbudget import MemoryBudget
from torchbudget.machine.cgroups import ControlGroups
from torchbudget.machine.pools import MemoryPool
from torchbudget.observe.limits import limits_of
from torchbudget.observe.outputs import Outputs
from torchbudget.observe.recorder import Recorder
from torchbudget.observe.sample import MemoryReader, MemorySample


def group(folder: Path, *, limit_bytes: int, used_bytes: int) -> Path:
    """The files of a control group, version 2."""
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{limit_bytes}\n")
    (folder / "memory.current").write_text(f"{used_bytes}\n")
    return folder


def test_use_is_compared_with_the_limit_of_its_own_group(tmp_path: Path) -> None:
    """Of nested groups now one has the least left, now another: no share mixes the two."""
    outer = group(tmp_path / "outer", limit_bytes=200, used_bytes=150)
    inner = group(outer / "inner", limit_bytes=64, used_bytes=10)
    reader = MemoryReader(None, "cpu")
    reader._groups = ControlGroups(version=2, folders=(inner, outer))
    recorder = Recorder(
        reader,
        Outputs(None, None, None),
        budget=None,
        interval_s=1,
        history_bytes=2**20,
        warn_at=1,
    )
    recorder.read(whole=False)
    group(outer, limit_bytes=200, used_bytes=140)
    recorder.read(whole=False)
    [limit] = [one for one in recorder.report(()).limits if one.name == "cgroup"]
    assert (limit.used_bytes, limit.limit_bytes) == (150, 200)


def test_a_budget_above_what_the_machine_has_hides_no_limit() -> None:
    """A `/dev/shm` of 64 MiB is full at 64 MiB, whatever was budgeted."""
    sample = MemorySample(time_s=0.0, shared_bytes=60)
    pools = {"shared": MemoryPool(name="/dev/shm", limit_bytes=64, used_bytes=60)}
    for amount, limit_bytes in ((1000, 64), (50, 50), (None, 64)):
        budget = MemoryBudget(host=10, shared=amount)
        found = {one.name: one for one in limits_of(sample, budget, pools, on_cpu=True)}
        assert found["shared"].limit_bytes == limit_bytes
