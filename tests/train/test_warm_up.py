"""The extreme batches of an epoch, run before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from tests.support.fake_device import FakeDevice, put_in_place
from tests.support.training_cases import CASES, tokens
from torchbudget import (
    MemoryBudgetBatchSampler,
    PackedCost,
    PadCollate,
    PaddedBatch,
    PaddedCost,
    warm_up,
)
from torchbudget.errors import OptionError
from torchbudget.restoring import TrainingState


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, sizes: list[int]) -> None:
        self.texts = [tokens(1, size)["x"][0] for size in sizes]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.texts[index]}


@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_the_extremes_are_those_of_the_epoch(seed: int, epoch: int, packed: bool) -> None:
    """No batch costs more, none has a longer sample, and none has only shorter ones."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(3, 1, 300), 1, 400).astype(int)
    cost = (PackedCost if packed else PaddedCost)(unit_bytes=1)
    sampler = MemoryBudgetBatchSampler(sizes, cost, 1000, window=64, seed=seed)
    sampler.set_epoch(epoch)
    extremes = sampler.extremes()
    batches = list(sampler)
    bytes_of = sampler.batch_bytes
    longest = [sizes[batch].max() for batch in batches]
    assert all(sorted(one.tolist()) in map(sorted, batches) for one in extremes.values())
    assert bytes_of(extremes["largest"]) == max(bytes_of(np.array(batch)) for batch in batches)
    assert sizes[extremes["longest"]].max() == max(longest)
    assert sizes[extremes["shortest"]].max() == min(longest)


def test_they_are_run_and_nothing_changes() -> None:
    """Three real steps, on the epoch's own batches; the model and the sampler stay as they are."""
    training = CASES["encoder, fused attention"]()
    sizes = np.random.default_rng(0).integers(4, 200, 100).tolist()
    data = Texts(sizes)
    sampler = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 1000)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())
    seen: list[tuple[int, int]] = []

    def step(batch: PaddedBatch) -> None:
        seen.append((batch.num_samples, *batch.padded_size))
        training.step({"x": batch["x"]})

    before = {name: t.clone() for name, t in training.model.state_dict().items()}
    state = sampler.state_dict()
    ran = warm_up(step, loader)
    assert [one.name for one in ran] == ["largest", "longest", "shortest"]
    assert [one.predicted_bytes for one in ran] == [n * length for n, length in seen[1:]]
    assert all(one.peak_bytes > 2**20 for one in ran)
    assert seen[1][1] == max(sizes)
    assert all(torch.equal(before[name], t) for name, t in training.model.state_dict().items())
    assert not training.optimizer.state
    assert sampler.state_dict() == state


def test_what_was_reserved_before_is_in_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """On figures that stand in for a GPU's: 9 GiB of earlier work are returned first."""
    device = put_in_place(monkeypatch, FakeDevice(process_bytes=2**29))
    device.take(9 * 2**30)
    device.free(9 * 2**30)
    monkeypatch.setattr(TrainingState, "device", property(lambda _: torch.device("cuda")))
    training = CASES["encoder, fused attention"]()
    sizes = [4, 8, 16] * 9
    sampler = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 64)
    loader = DataLoader(Texts(sizes), batch_sampler=sampler, collate_fn=PadCollate())

    def step(batch: PaddedBatch) -> None:
        device.take(2**30)
        training.step({"x": batch["x"]})
        device.free(2**30)

    peaks = [one.peak_bytes for one in warm_up(step, loader)]
    assert peaks == [2**30 + 2**29] * 3


def test_another_sampler_is_refused() -> None:
    loader: Any = DataLoader([1, 2, 3], batch_size=2)
    with pytest.raises(OptionError, match="got batch_sampler=BatchSampler"):
        warm_up(lambda batch: batch, loader)
