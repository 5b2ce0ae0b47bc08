"""Runs of `peers.py`: each in a process of its own, whose data may grow by so many bytes."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIB = 2**20
# Of the limit, for a way that needs no setting: budgets are of resident memory, and the kernel's
# limit also counts pages that are not, up to 8 % in the process that has measured.
MOST = 0.9
PRELOADED = [
    "torch", "torchbudget", "torch._dynamo", "transformers.data.data_collator",
    "transformers.models.bert.modeling_bert", "transformers.trainer_pt_utils",
    "torch_geometric.nn", "torch_geometric.loader", "networkx", "sympy.combinatorics",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make batches.

    Attributes:
        name: of the library and what it is used for.
        make: the loader, from `Work` and a setting such as the batch size.
        documented: the setting in the library's documentation; `None`: it needs none.
        tuned: makes the loader once somebody has tuned it; default: `make`, with a better setting.
        find: finds the setting by itself.
        before: done to `Work` before memory is limited.
        needs: the module that must be installed.
        blank: why it cannot be used as documented; then it is tuned only.
        in_tokens: its setting is a number of tokens, rather than of samples.
        why: it may be faster than this library.
        resumed: what becomes of a run that was killed on 2 ranks and goes on on 3.
    """

    name: str
    make: Callable[[Any, Any], Iterable[Any]]
    documented: int | None = None
    tuned: Callable[[Any, Any], Iterable[Any]] | None = None
    find: Callable[[Any, bool], int] | None = None
    before: Callable[[Any], None] | None = None
    needs: str = "torch"
    resumed: str = "not offered"
    blank: str = ""
    in_tokens: bool = False
    why: str = (
        "its batches are less padded, and one core gains nothing from batches that fill the memory"
    )

    @property
    def is_installed(self) -> bool:
        with contextlib.suppress(ModuleNotFoundError):
            return find_spec(self.needs) is not None
        return False

    def lines_changed(self, other: Way) -> int:
        """Lines that are new or different beside another way's, docstrings and signature apart."""
        mine, theirs = (inspect.getsource(way.make).splitlines() for way in (self, other))
        changes = difflib.ndiff(theirs[1:], mine[1:])
        return sum(line[:2] == "+ " and '"""' not in line for line in changes)


@dataclass(slots=True, kw_only=True)
class Work:
    """The data and the training step of a workload, in the process of one run.

    Attributes:
        samples: mappings, whose `index` says which one each is.
        sizes: of the samples, for counting.
        step: trains on a batch.
        padded: counts the elements of a batch, padding included.
        room: bytes that training may take beyond what the process has.
        folder: for files that runs share.
        extra: what else the ways of this workload need.
        indices: of the samples of a batch.
        base: bytes that the process has in memory before it trains.
        budget: bytes that the process may have in memory.
    """

    samples: Any
    sizes: Any
    step: Callable[[Any], object]
    padded: Callable[[Any], int]
    room: int
    folder: Path
    extra: dict[str, Any] = field(default_factory=dict)
    indices: Callable[[Any], Iterable[int]] = lambda batch: map(int, batch["index"])
    base: int = 0
    budget: int = 0

    @property
    def cost_file(self) -> Path:
        return self.folder / "cost.json"

    def measured_or(self, step: Any) -> Any:
        """The cost that an earlier run has measured: runs that are repeated skip that."""
        from torchbudget import load_cost

        return load_cost(self.cost_file) if self.cost_file.exists() else step


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def limit_data(room: int | None) -> None:
    """Let the data of this process grow by so many bytes; `None`: by any."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = hard if room is None else status_bytes("VmData") + room
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or any(
        part in text
        for part in (
            "can't allocate memory",
            "could not create",
            "annot allocate",
            "can't start new",
        )
    )


def run(module: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch in this process, or the first batches of it that take the most.

    Args:
        module: of the workload.
        job: `way` by name, `setting`, `tuned`, `share` of the room that is used, `probe`; and the
            options of the workload.
    """
    import torch

    from torchbudget import configure_allocators
    from torchbudget.errors import OversizeError

    configure_allocators()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    workload = import_module(module)
    work: Work = workload.work(job)
    way = next(one for one in workload.WAYS if one.name == job["way"])
    import_module(way.needs)  # before the limit: a library is no data
    if way.before is not None:
        way.before(work)
    base = status_bytes("VmRSS")
    work.base = base
    work.budget = base + int(work.room * job.get("share", 1))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    limit_data(work.room)
    came: list[int] = []
    elements = batches = 0
    began_s = time.perf_counter()
    found: dict[str, Any] = {"oom": False}
    try:
        if job.get("find"):
            assert way.find is not None
            setting = way.find(work, job["tuned"])
            return {"oom": False, "setting": setting, "setup_s": time.perf_counter() - began_s}
        make = way.tuned if job["tuned"] and way.tuned else way.make
        loader = make(work, job["setting"])
        found["setup_s"] = time.perf_counter() - began_s
        if job.get("probe"):
            loader = costliest(loader, work)
        began_s = time.perf_counter()
        computed_s = time.process_time()
        for batch in loader:
            came += work.indices(batch)
            elements += work.padded(batch)
            batches += 1
            work.step(batch)
        found["seconds"] = time.process_time() - computed_s
    except Exception as error:
        limit_data(None)
        if not is_out_of_memory(error) and not isinstance(error, OversizeError):
            raise
        found["oom"] = True
    real = int(sum(work.sizes[index] for index in came))
    return found | {
        "setting": job["setting"],
        "peak": (status_bytes("VmHWM") - base) / work.room,
        "tokens": real,
        "samples": len(came),
        "padding": 1 - real / max(elements, 1),
        "lost": len(work.sizes) - len(set(came)),
        "repeated": len(came) - len(set(came)),
        "batches": batches,
    }


def costliest(loader: Any, work: Work) -> Any:
    """The batches that take the most, where they are known: a way to try a setting in less time."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or loader.dataset is not work.samples:
        return loader
    planned = [list(indices) for indices in sampler]

    def longest(indices: list[int]) -> int:
        return max(work.sizes[index] for index in indices)

    by_area = max(planned, key=lambda one: len(one) * longest(one))
    by_square = max(planned, key=lambda one: len(one) * longest(one) ** 2)
    collate = loader.collate_fn
    return (collate([work.samples[i] for i in indices]) for indices in (by_square, by_area))


def in_own_process(module: str, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run in a fresh process; one that is killed, or does not end, ran out of memory or hangs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        future = pool.submit(run, module, dict(job))
        try:
            return future.result(timeout_s)
        except BrokenProcessPool:
            return {"oom": True, "setting": job["setting"]}
        except TimeoutError:
            for process in pool._processes.values():
                process.kill()
            return {"oom": True, "setting": job["setting"], "hangs": True}


# ---------------------------------------------------------------------- what a user does by hand


@dataclass(slots=True)
class Trials:
    """The attempts of somebody who makes one way run.

    Attributes:
        module: of the workload.
        way: that is tried.
        job: the options of the workload.
        tuned: as somebody tunes it, rather than as its documentation has it.
        most: the setting at which everything is one batch.
        attempts: how often the script was started.
        oom: the first attempt ran out of memory.
        setup_s: of the longest set-up: measuring, or a finder's own trials.
        share: of the room that is used, by a way that needs no setting.
        peaks: the highest / the room, of whole epochs, by setting and share.
        runs: epochs of the table.
    """

    module: str
    way: Way
    job: dict[str, Any]
    tuned: bool
    most: int
    attempts: int = 0
    oom: bool = False
    setup_s: float = 0.0
    setting: int | None = None
    share: float = MOST
    peaks: dict[Any, float] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_possible(self) -> bool:
        return self.tuned or not self.way.blank

    @property
    def label(self) -> str:
        return "tuned" if self.tuned else "documented"

    @property
    def shown(self) -> str:
        if not self.is_possible:
            return self.way.blank
        if self.setting is not None:
            return f"{self.setting:,}"
        return f"{self.share:g} of the limit"

    def start(self, setting: int | None, **options: Any) -> dict[str, Any]:
        """Start the script once with a setting."""
        job = {**self.job, "way": self.way.name, "tuned": self.tuned, "setting": setting}
        found = in_own_process(self.module, {**job, "share": self.share, **options}, 900)
        self.setup_s = max(self.setup_s, found.get("setup_s", 0.0))
        if not found["oom"] and "peak" in found and not options:
            key = (setting, self.share)
            self.peaks[key] = max(self.peaks.get(key, 0.0), found["peak"])
        return found

    def attempt(self, setting: int | None, **options: Any) -> bool:
        """Return whether it runs with this setting."""
        found = self.start(setting, **options)
        self.attempts += 1
        self.oom |= self.attempts == 1 and found["oom"]
        return not found["oom"]

    def settle(self) -> None:
        """Find the setting; the first is the documented one, or the one that the way finds."""
        setting = self.way.documented
        if self.way.find is not None:
            found = self.start(None, find=True)
            setting = found["setting"]
        if setting is None:
            self.attempt(None)
        else:
            while not self.attempt(setting, probe=True) and setting > 1:
                setting //= 2
            if self.tuned and self.way.find is None:
                setting = self.largest(setting)
        self.setting = setting
        if self.tuned:
            self.fastest()

    def largest(self, setting: int) -> int:
        """The largest setting that runs, within a quarter."""
        low, high = setting, self.way.documented or setting
        if low == high:
            high *= 2
            while high < self.most and self.attempt(high, probe=True):
                low, high = high, 2 * high
        while high - low > max(low // 4, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if self.attempt(middle, probe=True) else (low, middle)
        return low

    def fastest(self) -> None:
        """Take the fastest of the largest setting, its half and its quarter."""
        speeds = {}
        for part in (1.0, 0.5, 0.25):
            self.share = min(part, MOST)
            setting = None if self.setting is None else max(int(self.setting * part), 1)
            found = self.start(setting)
            self.attempts += 1
            if not found["oom"]:
                speeds[found["tokens"] / found["seconds"]] = (setting, self.share)
        if speeds:
            self.setting, self.share = speeds[max(speeds)]

    def repeat(self) -> None:
        """Train an epoch; where that runs out of memory after all, with half of the setting."""
        found = self.start(self.setting)
        while found["oom"] and self.setting is not None and self.setting > 1:
            self.attempts += 1
            self.setting //= 2
            found = self.start(self.setting)
        self.runs.append(found)
