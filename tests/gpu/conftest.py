"""Tests on a real GPU: a clean card before and after each, and why they are skipped elsewhere."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchbudget import configure_allocators
from torchbudget.machine.device import device_memory

SHARED = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
AVAILABLE = torch.cuda.is_available() and not SHARED
REASON = "processes would share the card: run with -n 0" if SHARED else "there is no CUDA device"
if AVAILABLE:
    configure_allocators()  # expandable segments, before CUDA is first used


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests in this folder where there is no card for them alone."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # torch says it where a backward's thread begins with a product of matrices.
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))
            item.add_marker(pytest.mark.skipif(not AVAILABLE, reason=REASON))


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    device_memory("cuda").source.set_fraction(1.0)  # which remembers it, where torch does not
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture(autouse=True)
def clean_card() -> Iterator[None]:
    """Nothing cached, and no limit; what is measured is measured before anything is limited."""
    if AVAILABLE:
        clean()
    yield
    if AVAILABLE:
        clean()
