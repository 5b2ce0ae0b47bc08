"""Running a step until memory runs out."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOO_MUCH = """
import resource

import torchbudget as tb
from tests.support.training_cases import CASES

training = CASES["decoder, scores kept"]()
training.step(training.make_batch(2, 512))
status = open("/proc/self/status").read()
limit = int(status.partition("VmData:")[2].split()[0]) * 1024 + 400 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
cost = tb.measure_cost(training.step, training.make_batch, max_size=512, budget="1200MiB")
assert all(before[name].equal(t) for name, t in training.model.state_dict().items())
assert len(cost.probes) > 3
print(*cost.notes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
def test_a_real_out_of_memory_is_survived() -> None:
    """A budget beyond what there is: probes that fail are noted, and the others are smaller."""
    done = subprocess.run(
        [sys.executable, "-c", TOO_MUCH], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    assert "out of memory at" in done.stdout
