"""Reads the memory of a process tree until its input ends, and prints the peaks as JSON.

An oracle that knows nothing of the library: it imports nothing but the standard library, and is a
process of its own. Run it as `python tree_reader.py PID`.

Libraries count whole, once, as if no process outside the tree mapped them: the pages that the root
had when reading began of files that it maps as code. Pages of other files are data that is mapped,
which the kernel takes back when memory is short. Shared memory counts whole, mapped or not: what a
worker has handed over, and the loop has not touched yet, is in no process.
"""

import json
import os
import sys
import threading
from pathlib import Path

INTERVAL_S = 0.02
MOUNT = "/dev/shm"


def fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # it has ended
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in pairs}


def library_bytes(root: int) -> int:
    """Resident pages of the files of which a part is mapped as code."""
    resident: dict[str, int] = {}
    code = set()
    path = ""
    for line in Path(f"/proc/{root}/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            path = words[5] if len(words) == 6 else ""
            if "x" in words[1]:
                code.add(path)
        elif words[0] == "Rss:" and path.startswith("/"):
            resident[path] = resident.get(path, 0) + int(words[1]) * 1024
    return sum(size for path, size in resident.items() if path in code)


def tree(root: int) -> list[int]:
    """The process and its descendants, without this one."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return [pid for pid in found if pid != os.getpid()]


def used_shared() -> int:
    system = os.statvfs(f"/proc/{ROOT}/root{MOUNT}")
    return (system.f_blocks - system.f_bfree) * system.f_frsize


ROOT = int(sys.argv[1])
libraries = library_bytes(ROOT)
before = used_shared()
peaks = {"total": 0, "pss": 0, "shared": 0, "processes": 0}
ended = threading.Event()


def read_all() -> None:
    while not ended.wait(INTERVAL_S):
        shared = used_shared() - before
        processes = [fields(Path(f"/proc/{pid}/smaps_rollup")) for pid in tree(ROOT)]
        anonymous = sum(one.get("Pss_Anon", 0) for one in processes)
        mapped = sum(one.get("Pss_Shmem", 0) for one in processes)
        files = min(libraries, sum(one.get("Pss_File", 0) for one in processes))
        peaks["total"] = max(peaks["total"], anonymous + libraries + shared)
        peaks["pss"] = max(peaks["pss"], anonymous + mapped + files)
        peaks["shared"] = max(peaks["shared"], shared)
        peaks["processes"] = max(peaks["processes"], len(processes))


thread = threading.Thread(target=read_all)
thread.start()
sys.stdout.write("ready\n")
sys.stdout.flush()
sys.stdin.readline()
ended.set()
thread.join()
sys.stdout.write(json.dumps(peaks) + "\n")
