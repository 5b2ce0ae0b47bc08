"""How fast training is on a card that is more or less full: why 0.9 is the default part of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.gpu.epoch import on_card, outside_bytes, run
from torchbudget import MemoryBudget, limit_device_memory, measure_cost

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fraction", [0.85, 0.9, 0.94, 0.98])
def test_an_epoch_at_a_part_of_the_card(
    fraction: float, record_property: Callable[[str, object], None]
) -> None:
    """Nothing fails; samples a second are recorded (`--junit-xml`) and printed (`-s`)."""
    budget = MemoryBudget.detect("cuda", fraction=fraction).device
    assert budget is not None
    training = on_card("decoder, scores kept")
    cost = measure_cost(
        training.step, training.make_batch, max_size=training.max_size, budget=budget
    )
    limit_device_memory(budget, "cuda")
    run(training, cost, budget, batches=5)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    figures = run(training, cost, budget, batches=30)
    seconds = time.perf_counter() - start_s
    full = (torch.cuda.max_memory_reserved() + outside_bytes()) / torch.cuda.mem_get_info()[1]
    row = {
        **figures,
        "fraction": fraction,
        "full": full,
        "samples_per_second": figures["samples"] / seconds,
    }
    for name, value in row.items():
        record_property(name, value)
    print(row)  # noqa: T201  (what it was run for)
    assert figures["failures"] == 0
    assert figures["share"] <= 1
