"""Training on a GPU: half precision, real out-of-memory, synchronisations, generators."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchbudget import GradAccumulator
from torchbudget.random_state import RandomState

pytestmark = pytest.mark.gpu


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
    parameters = ([*one.parameters()] for one in (model, by_hand))
    torch.testing.assert_close(*parameters, rtol=1e-5, atol=1e-6)


def limited(more_bytes: int) -> None:
    """Let the allocator reserve so much more than it has."""
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + more_bytes
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])


def test_a_batch_that_does_not_fit_is_split() -> None:
    """Every sample counts once, gradients are the batch's, and no memory is left behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 65_536), nn.GELU(), nn.Linear(65_536, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = GradAccumulator(optimizer, model)
    x = torch.randn(8192, 64, device="cuda")
    counted = []

    def step(part: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(part)):
            accumulator.backward(model(part).square().sum())
        counted.append(len(part))

    step(x[:8])  # the libraries' workspaces
    accumulator.flush()
    counted.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    limited(3 * 2**30)
    accumulator.run_or_split(step, x)
    assert accumulator.out_of_memory > 0
    assert sum(counted) == 8192
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    accumulator.flush()
    torch.cuda.set_per_process_memory_fraction(1.0)
    step(x)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        error = (gradient - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error.item() < 1e-4
    accumulator.flush()
    del gradients, gradient, parameter, error
    assert torch.cuda.memory_allocated() <= before + 2**20


def synchronisations(function: Callable[[], object]) -> int:
    """How often it waits for the device, as far as torch sees it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in said)


# How many optimizers, whether they are fused, whether weights are on the device, what else is
# given, and how often a step may wait.
WAITING: dict[str, tuple[int, bool, bool, dict[str, Any], int]] = {
    "clipped": (1, False, False, {"max_norm": 1.0}, 0),
    "scaler, fused": (1, True, False, {"scaler": True}, 1),
    "scaler, two optimizers": (2, False, False, {"max_norm": 1.0, "scaler": True}, 1),
    "scaler, two fused optimizers": (2, True, False, {"max_norm": 1.0, "scaler": True}, 1),
    "weights on the device": (1, False, True, {}, 1),
    "weights on the device, scaler": (1, False, True, {"scaler": True}, 1),
}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("case", WAITING)
def test_no_micro_batch_waits_for_the_device(case: str, splits: bool) -> None:
    """None does, nor one that could be split; a step waits as often as the docs say."""
    number, fused, on_device, options, waits = WAITING[case]
    models = [nn.Linear(64, 64).cuda() for _ in range(number)]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=fused) for model in models]
    if "scaler" in options:
        options = options | {"scaler": torch.amp.GradScaler("cuda")}
    accumulator = GradAccumulator(optimizers, models, **options)
    x = torch.randn(16, 64, device="cuda")
    weight = torch.full((), 16, device="cuda") if on_device else 16

    def run(part: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=weight):
            for model in models:
                accumulator.backward(model(part).square().sum())

    def micro_batch() -> None:
        if splits:
            accumulator.run_or_split(run, x)
        else:
            run(x)

    micro_batch()
    accumulator.flush()
    assert synchronisations(lambda: x.sum().item()) == 1  # they are seen at all
    assert [synchronisations(micro_batch) for _ in range(8)] == [0] * 8
    assert synchronisations(accumulator.flush) <= waits


def test_the_numbers_of_every_device_come_back() -> None:
    devices = range(torch.cuda.device_count())
    torch.cuda.init()
    state = RandomState.take()
    expected = [torch.rand(4, device=device) for device in devices]
    state.restore()
    again = [torch.rand(4, device=device) for device in devices]
    assert all(map(torch.equal, again, expected))
