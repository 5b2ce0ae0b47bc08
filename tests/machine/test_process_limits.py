"""What `ulimit` allows one process, as it is set."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.support.commands import ENVIRONMENT

READ = """
import resource
from torchbudget.machine.process_limits import process_limits
for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
    resource.setrlimit(name, (limit, limit))
for pool in process_limits():
    assert 0 < pool.used_bytes == pool.own_bytes
    print(pool.name, pool.limit_bytes, pool.usable_bytes)
"""


def test_limits_that_are_set_are_found() -> None:
    """In a process of its own, whose limits are real."""
    for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY and hard < limit:
            pytest.skip("this session is limited already")
    done = subprocess.run(
        [sys.executable, "-c", READ], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        f"RLIMIT_DATA {2**41} {2**41}",
        f"RLIMIT_AS {2**42} {2**42}",
    ], done.stderr
