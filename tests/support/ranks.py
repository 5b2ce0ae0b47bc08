"""Real ranks over gloo, each a process with one thread that runs a script.

A rank must not end as Python processes usually do. A thread of gloo frees the tensors of the last
collective, and needs the interpreter for that. If Python has begun to end by then, torch 2.13
aborts ("terminate called without an active exception"). And if the group is destroyed before
`DistributedDataParallel`, whose reducer keeps it alive, the reducer waits for that thread while it
keeps the interpreter: neither goes on. So scripts do not destroy their group, and end in `leave`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.support.commands import printed_by

# The last line of every script, while its models and its group are alive.
END = "\nfrom tests.support.ranks import leave\n\nleave()\n"


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, for what cannot be wrapped without one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a reducer must not outlive its group
        dist.destroy_process_group()


def leave() -> NoReturn:
    """End this rank, after its results are written, once all ranks have come here.

    They wait at the store of the process that started them, which needs no other rank.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"rank {rank} has ended", "")
    store.wait([f"rank {one} has ended" for one in range(ranks)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(
    script: str,
    folder: Path,
    ranks: int,
    *arguments: Any,
    killed: Sequence[int] = (),
    within_s: float = 240,
) -> list[Any]:
    """Run a script on that many ranks; what each wrote as JSON to `sys.argv[1]/<rank>.json`.

    Ranks find each other as under torchrun, by environment variables, but are forked from a
    process that has imported torch already.

    Args:
        script: calls `init_process_group("gloo")`, and does not destroy the group.
        folder: of the script and the results; `sys.argv[1]`.
        ranks: their number.
        arguments: follow as text.
        killed: ranks that the script kills; the result of each is `None`. The others must end by
            `os._exit`, since `leave` waits for all. If all are killed, the first one's end is
            that of the others.
        within_s: until they say where they are, and end; below pytest's own limit.

    Raises:
        AssertionError: a rank failed, or did not end in time, or one that was to be killed was not.
    """
    path = folder / "script.py"
    path.write_text(script + END)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    argv = [str(path), str(folder), *map(str, arguments)]
    processes = [
        context.Process(target=_run_rank, args=(argv, rank, ranks, store.port, within_s))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    awaited = [one for rank, one in enumerate(processes) if rank not in killed] or processes
    try:
        while not any(one.exitcode for one in awaited):  # once one has failed, nobody waits
            running = [one.sentinel for one in awaited if one.exitcode is None]
            if not running:
                break
            wait(running)
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [*sorted(folder.glob("*.error")), *sorted(folder.glob("*.where"))]
    errors = [f"{file.name}: {file.read_text()}" for file in files]
    codes = [process.exitcode for process in processes]
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(ranks)]
    assert codes == expected, f"exit codes {codes}\n" + "\n".join(errors)
    return _results(folder, ranks, killed)


def torchrun(script: str, folder: Path, ranks: int, *arguments: Any) -> list[Any]:
    """As `run_ranks`, under torchrun itself, which takes seconds."""
    path = folder / "script.py"
    path.write_text(script + END)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    printed_by([*command, path, folder, *arguments])
    return _results(folder, ranks)


def _results(folder: Path, ranks: int, killed: Sequence[int] = ()) -> list[Any]:
    alive = [None if rank in killed else folder / f"{rank}.json" for rank in range(ranks)]
    return [file and json.loads(file.read_text()) for file in alive]


def _run_rank(argv: list[str], rank: int, ranks: int, port: int, within_s: float) -> None:
    """Run the script with the environment that torchrun gives."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of the process that started the ranks
    }
    sys.argv = argv
    told = Path(argv[1], f"{rank}.where").open("w")  # noqa: SIM115  (until the process ends)
    faulthandler.dump_traceback_later(within_s, file=told, exit=True)
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # workers of loaders start as anywhere else
    gc.freeze()  # what is imported takes 0.2 s of each collection
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except Exception:  # noqa: BLE001  (passed on as text)
        Path(argv[1], f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
