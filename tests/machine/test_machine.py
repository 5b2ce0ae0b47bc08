"""The package as a whole: importing it reads nothing of the machine."""

import os
import subprocess
import sys

from tests.support.memory_groups import REPOSITORY


def test_importing_reads_nothing():
    """Import opens none of the kernel's files, reads no environment, and starts no CUDA."""
    code = """
import os, sys
import numpy, psutil, torch

opened, asked, whole = [], [], type(os.environ).__getitem__
def watch(event, arguments):
    if event == "open":
        opened.append(str(arguments[0]))
sys.addaudithook(watch)
def ask(self, key):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in {"os", "collections.abc", "_collections_abc"}:
        frame = frame.f_back
    asked.append(frame.f_globals["__name__"])
    return whole(self, key)
type(os.environ).__getitem__ = ask

import torchbudget.budget
from torchbudget.machine import allocators, device, host, peaks

assert not [name for name in opened if name.startswith(("/proc", "/sys", "/dev"))], opened
assert not [name for name in asked if name.startswith("torchbudget")], asked
assert not torch.cuda.is_initialized()
os.environ.get("HOME"), os.getenv("HOME"), open("/proc/self/stat").close()
assert asked[-2:] == ["__main__", "__main__"], "the environment is not watched"
assert opened[-1] == "/proc/self/stat", "files are not watched"
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )
