"""Reads the memory of a process tree until its input ends, and prints the peaks as JSON.

An oracle that knows nothing of the library: it imports nothing of it, and is a process of its own.
Run it as `python tree_reader.py PID`.

Libraries count whole, once, as if no process outside the tree mapped them: the pages that the root
had when reading began of files that it maps as code. Pages of other files are data that is mapped,
which the kernel takes back when memory is short. Shared memory counts whole, mapped or not: what a
worker has handed over, and the loop has not touched yet, is in no process.
"""

import json
import os
import select
import sys
from pathlib import Path

import psutil

INTERVAL_S = 0.02
ROOT = psutil.Process(int(sys.argv[1]))


def fields(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in pairs}


def used_shared() -> int:
    system = os.statvfs(f"/proc/{ROOT.pid}/root/dev/shm")
    return (system.f_blocks - system.f_bfree) * system.f_frsize


maps = ROOT.memory_maps(grouped=False)
code = {one.path for one in maps if "x" in one.perms and one.path.startswith("/")}
libraries = sum(one.rss for one in maps if one.path in code)
before = used_shared()
peaks = {"total": 0, "pss": 0, "shared": 0, "processes": 0}
sys.stdout.write("ready\n")
sys.stdout.flush()
while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
    shared = used_shared() - before
    tree = [ROOT.pid, *(one.pid for one in ROOT.children(recursive=True))]
    processes = [fields(pid) for pid in tree if pid != os.getpid()]
    anonymous, mapped, files = (
        sum(one.get(f"Pss_{kind}", 0) for one in processes) for kind in ("Anon", "Shmem", "File")
    )
    now = {
        "total": anonymous + libraries + shared,
        "pss": anonymous + mapped + min(libraries, files),
        "shared": shared,
        "processes": len(processes),
    }
    peaks = {name: max(peak, now[name]) for name, peak in peaks.items()}
sys.stdout.write(json.dumps(peaks) + "\n")
