"""Half precision and real out-of-memory on a CUDA device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchbudget import GradAccumulator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()


def test_half_precision_skips_what_a_loop_by_hand_skips() -> None:
    """float16 autocast: the same steps are skipped, and the scale grows and shrinks alike."""
    model, by_hand = make_model(), make_model()
    mine, theirs = (torch.optim.AdamW(m.parameters()) for m in (model, by_hand))
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**15, growth_interval=3) for _ in "ab"]
    accumulator = GradAccumulator(mine, model, steps=4, scaler=scalers[0], max_norm=1.0)
    skipped = []
    for seed in range(12):
        torch.manual_seed(seed)
        parts = torch.randn(32, 64, device="cuda").split(8)
        factor = math.inf if seed % 5 == 3 else 1.0
        before = scalers[1].get_scale()
        for part in parts:
            with accumulator.micro_batch(weight=8), torch.autocast("cuda", torch.float16):
                accumulator.backward(model(part).square().sum() * factor)
            with torch.autocast("cuda", torch.float16):
                loss = by_hand(part).square().sum() * factor
            scalers[1].scale(loss).backward()
        for parameter in by_hand.parameters():
            parameter.grad /= 32
        scalers[1].unscale_(theirs)
        nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        scalers[1].step(theirs)
        scalers[1].update()
        theirs.zero_grad()
        assert accumulator.last.skipped == (scalers[1].get_scale() < before)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        skipped.append(accumulator.last.skipped)
    assert 3 <= sum(skipped) < 12
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_that_does_not_fit_is_split() -> None:
    """Under a cap of the allocator's: every sample counts once, and dropout's numbers go on."""
    total = torch.cuda.mem_get_info()[1]
    model = nn.Sequential(nn.Linear(64, 65_536), nn.Dropout(0.1), nn.Linear(65_536, 1)).cuda()
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=1e-3), model, steps=2)
    counted = []

    def step(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).square().sum())
        counted.append(len(x))

    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2 * 2**30
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        for _ in range(2):
            accumulator.run_or_split(step, torch.randn(8192, 64, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert accumulator.out_of_memory > 0
    assert sum(counted) == 2 * 8192
    assert accumulator.last.weight == 2 * 8192
