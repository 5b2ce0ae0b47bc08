"""Hypothesis profiles, a check of every law, and what processes of the tests have imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch.utils.data._utils as loader_utils
from hypothesis import HealthCheck, Phase, settings

from tests.support.refusals import REFUSALS

settings.register_profile(
    "default",
    deadline=None,  # two noisy cores
    max_examples=32,
    derandomize=True,  # a run says of a commit what any other run says of it
    phases=[phase for phase in Phase if phase is not Phase.explain],  # minutes, for a few comments
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "thorough", parent=settings.get_profile("default"), max_examples=2000, derandomize=False
)
# As many cases as by default, but others each time.
settings.register_profile("random", parent=settings.get_profile("default"), derandomize=False)
settings.load_profile(os.environ.get("TORCHBUDGET_HYPOTHESIS", "default"))

# Errors that a test keeps leave loaders to the garbage collector, whose workers do not learn that
# they shall end: torch waits so many seconds for each, by default five.
loader_utils.MP_STATUS_CHECK_INTERVAL = 1.0

# Ranks and workers are forked from a process that has imported these; `torch._dynamo` is what
# optimizers and `DistributedDataParallel` import when they are first used.
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torchbudget", "tests.support.large_steps"]
)


@pytest.fixture(autouse=True)
def _most_cases_of_a_law_are_accepted() -> Iterator[None]:
    yield
    REFUSALS.check()
