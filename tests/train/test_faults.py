"""Processes that are killed, and full disks; of losses of power see `test_power.py`.

Nothing is lost that a checkpoint was complete of; where a training cannot go on it says so, and it
does not hang.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.ranks import ROOT, run_ranks
from tests.train.test_fit import Tagger, Training, assert_equal, samples
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, PadCollate, PaddedCost
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step

EPOCHS = 2


class Small(Training):
    """A few steps, of which many can be taken."""

    def __init__(self, workers: int = 0) -> None:
        data = samples(24, 0)
        lengths = [len(one["x"]) for one in data]
        self.sampler = MemoryBudgetBatchSampler(
            lengths, PaddedCost(unit_bytes=1), 60, samples_per_step=8, seed=1
        )
        self.loader = DataLoader(
            data, batch_sampler=self.sampler, collate_fn=PadCollate(), num_workers=workers
        )
        torch.manual_seed(11)
        self.model = Tagger()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.accumulator = GradAccumulator(self.optimizer, self.model, steps=self.sampler)
        self.validation = DataLoader(samples(4, 9), batch_size=4, collate_fn=PadCollate())

    def fit(self, **options: Any) -> list[Epoch]:
        return super().fit(**{"epochs": EPOCHS, "checkpoint_steps": 1} | options)


def statistics(folder: Path) -> list[dict[str, Any]]:
    """Its lines, without times."""
    lines = map(json.loads, (folder / "statistics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


class Uninterrupted:
    """A training without any fault, which others are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.training = Small()
        self.training.fit(folder=folder)

    def check(self, training: Training, folder: Path) -> None:
        """A training that went on after faults is the same, with all its files."""
        assert_equal(training.model, self.training.model)
        assert statistics(folder) == statistics(self.folder)
        best, expected = Tagger(), Tagger()
        best.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
        expected.load_state_dict(torch.load(self.folder / "best.pt", weights_only=True))
        assert_equal(best, expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


def at_step(number: int, fault: Callable[[], object]) -> Callable[[Step | Epoch], None]:
    """A callback that makes a fault."""

    def callback(record: Step | Epoch) -> None:
        if isinstance(record, Step) and record.number == number:
            fault()

    return callback


@contextmanager
def within_a_minute() -> Iterator[None]:
    """A training that cannot go on must end by then, with its error; nobody waits for a hang."""
    start = time.monotonic()
    try:
        yield
    finally:
        assert time.monotonic() - start < 60


# ---------------------------------------------------------------------- processes


def train_to_the_end(folder: Path) -> None:
    # Workers start as anywhere else: those of a forkserver would watch that one, not this process.
    multiprocessing.set_start_method(None, force=True)
    training = Small(workers=1)
    training.fit(folder=folder, callbacks=[lambda _: time.sleep(0.02)])
    torch.save(training.model.state_dict(), folder / "model.pt")


@pytest.mark.slow
def test_a_main_process_that_is_killed(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """Wherever the signal comes, again and again; its workers end with it."""
    path = tmp_path / "statistics.jsonl"
    context = multiprocessing.get_context("forkserver")
    workers: list[psutil.Process] = []
    for lines in (1, 5):
        process = context.Process(target=train_to_the_end, args=(tmp_path,))
        process.start()
        while process.is_alive() and not (path.exists() and len(statistics(tmp_path)) >= lines):
            time.sleep(0.005)
        workers += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.join()
    process = context.Process(target=train_to_the_end, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    ended = Small()
    ended.model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    uninterrupted.check(ended, tmp_path)


def test_a_worker_that_is_killed(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """Torch's error names it; then the training goes on from the last checkpoint."""

    def kill_worker() -> None:
        workers = [one for one in multiprocessing.active_children() if one.pid is not None]
        os.kill(workers[-1].pid or 0, signal.SIGKILL)
        time.sleep(60)  # torch raises in the handler of a signal

    match = r"DataLoader worker .*(killed|exited)"
    with within_a_minute(), pytest.raises(RuntimeError, match=match):
        Small(workers=1).fit(folder=tmp_path, callbacks=[at_step(2, kill_worker)])
    gc.collect()  # torch raises again for this worker until its loop is gone
    training = Small(workers=1)
    training.fit(folder=tmp_path)
    uninterrupted.check(training, tmp_path)


RANK = """
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from tests.train.test_faults import Small, at_step
from torchbudget.errors import RankError

folder, files, fault, victim = sys.argv[1:]
dist.init_process_group("gloo")
rank, processes = dist.get_rank(), [None] * dist.get_world_size()
dist.all_gather_object(processes, os.getpid())
limits, save = resource.getrlimit(resource.RLIMIT_FSIZE), torch.save


def kill():
    os.kill(processes[int(victim)], signal.SIGKILL)
    while psutil.pid_exists(processes[int(victim)]):
        time.sleep(0.01)


def may_not_write():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))


def save_and_kill(state, file, **options):
    if isinstance(file, io.BytesIO):  # of a tensor that is pickled
        return save(state, file, **options)
    whole = io.BytesIO()
    save(state, whole)
    file.write(whole.getvalue()[:4096])
    file.flush()
    kill()
    file.write(whole.getvalue()[4096:])


def kill_in_the_next_write():
    torch.save = save_and_kill


def kill_in_evaluation(model, arguments):
    if not model.training:
        kill()


training, callbacks = Small(), []
if rank == int(victim) and fault == "full":
    callbacks = [at_step(4, may_not_write)]
elif rank == int(victim) and fault == "step":
    callbacks = [at_step(4, kill)]
elif rank == int(victim) and fault == "evaluation":
    training.model.register_forward_pre_hook(kill_in_evaluation)
elif rank == 0 and fault == "write":  # the one that writes
    callbacks = [at_step(4, kill_in_the_next_write)]
found, start = [], time.monotonic()
try:
    training.fit(folder=files, callbacks=callbacks)
except (RankError, RuntimeError, OSError) as error:
    found = [type(error).__name__, str(error)]
seconds = time.monotonic() - start
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
result = [training.model.head.weight.tolist(), found, seconds]
Path(folder, f"{rank}.json").write_text(json.dumps(result))
if fault not in ("none", "full"):
    os._exit(0)
"""


class UninterruptedRanks:
    """A training on two ranks without any fault, which others are compared with."""

    def __init__(self, folder: Path) -> None:
        self.files = folder / "whole"
        self.weights = run_ranks(RANK, folder, 2, self.files, "none", 0)[0][0]

    def check_what_goes_on(self, folder: Path) -> None:
        """Both ranks go on with the files as if nothing had been."""
        for weights, error, _ in run_ranks(RANK, folder, 2, folder / "files", "none", 0):
            assert error == []
            assert weights == self.weights
        assert statistics(folder / "files") == statistics(self.files)


@pytest.fixture(scope="module")
def uninterrupted_ranks(tmp_path_factory: pytest.TempPathFactory) -> UninterruptedRanks:
    return UninterruptedRanks(tmp_path_factory.mktemp("uninterrupted ranks"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "victim", "complete"),
    [("step", 1, 3), ("evaluation", 1, 3), ("write", 1, 4), ("write", 0, 3)],
)
def test_a_rank_that_is_killed(
    fault: str,
    victim: int,
    complete: int,
    uninterrupted_ranks: UninterruptedRanks,
    tmp_path: Path,
) -> None:
    """In a step, in the validation, or while a checkpoint is written, by the other one or by it.

    The other one ends within a minute, with an error, and no step is lost that a checkpoint was
    complete of.
    """
    found = run_ranks(RANK, tmp_path, 2, tmp_path / "files", fault, victim, killed=[victim])
    _, error, seconds = found[1 - victim]
    assert error[0] in ("RuntimeError", "DistBackendError", "RankError")
    assert seconds < 60
    saved = torch.load(tmp_path / "files" / "last.pt", weights_only=True)
    assert saved["run"]["training"]["accumulator"]["steps"] == complete
    uninterrupted_ranks.check_what_goes_on(tmp_path)


@pytest.mark.distributed
def test_a_rank_that_cannot_write(uninterrupted_ranks: UninterruptedRanks, tmp_path: Path) -> None:
    """Each rank ends within a minute, with what stopped the first one."""
    first, second = run_ranks(RANK, tmp_path, 2, tmp_path / "files", "full", 0)
    assert first[1][0] == "OSError"
    assert "the checkpoint before is whole: make room" in first[1][1]
    assert second[1][0] == "RankError"
    assert "rank 0 failed, see its traceback: OSError" in second[1][1]
    assert max(first[2], second[2]) < 60
    uninterrupted_ranks.check_what_goes_on(tmp_path)


# ---------------------------------------------------------------------- full disks


def test_a_file_that_may_not_grow(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """As on a full disk: the error names the file, and what was saved before is whole."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1])))
    try:
        match = r"File too large.*before is whole.*last\.pt"
        with within_a_minute(), pytest.raises(OSError, match=match):
            Small().fit(folder=tmp_path, callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    training = Small()
    training.fit(folder=tmp_path)
    uninterrupted.check(training, tmp_path)


FULL = """
import sys
from pathlib import Path

from tests.train.test_faults import Small, Uninterrupted, within_a_minute

folder, mounted, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
files = mounted if workers == 0 else folder / "files"


def fill():
    with (mounted / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(512)):
            pass


def fill_between_epochs(record):
    # Within one, the batches that were used make room for others.
    if hasattr(record, "validation") and record.number == 0:
        try:
            fill()
        except OSError:
            pass


if __name__ == "__main__":
    uninterrupted = Uninterrupted(folder / "whole")
    try:
        with within_a_minute():
            Small(workers).fit(folder=files, callbacks=[fill_between_epochs])
    except (OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}")
    (mounted / "ballast").unlink()
    training = Small(workers)
    training.fit(folder=files)
    uninterrupted.check(training, files)
    print("went on")
"""


def run_beside_a_small_disk(folder: Path, mounted: Path, workers: int) -> str:
    """Run the script with a file system of 256 KiB of its own; what it printed."""
    script = folder / "script.py"
    script.write_text(FULL)
    if shutil.which("unshare") is None:
        pytest.skip("no file system can be mounted here: there is no unshare")
    mount = f"mount -t tmpfs -o size=256k tmpfs {mounted}"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    possible = subprocess.run([*own, mount], capture_output=True, text=True, check=False)
    if possible.returncode:
        pytest.skip(f"no file system can be mounted here: {possible.stderr.strip()}")
    run = [*own, f'{mount} && exec "$@"', "sh", sys.executable, str(script), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, str(mounted), str(workers)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # of three trainings and the imports; the script has the bar of the faulty one
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """The error names the file, and the training goes on once there is room."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    error, ended = run_beside_a_small_disk(tmp_path, mounted, 0).splitlines()
    assert error.startswith("OSError: [Errno 28] cannot be written (No space left on device)")
    assert "make room" in error
    assert ended == "went on"


@pytest.mark.slow
def test_full_shared_memory(tmp_path: Path) -> None:
    """A worker that cannot write its batch ends the loop with an error; then it goes on."""
    *error, ended = run_beside_a_small_disk(tmp_path, Path("/dev/shm"), 1).splitlines()
    assert any(word in "".join(error) for word in ("Bus error", "shared memory", "No space left"))
    assert ended == "went on"
