from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from torchbudget import PadCollate
from torchbudget.errors import CollateError
from torchbudget.readers import HookedCollate


def louder(x: torch.Tensor) -> torch.Tensor:
    return 10 * x


def test_hooks_on_inputs_and_targets() -> None:
    """A pair of samples gives a pair of batches, each through its own hook, or as it is."""
    pairs = [(torch.full((n,), float(n)), n) for n in (1, 3)]
    hooked = HookedCollate(collate_fn=PadCollate(), on_input=louder, on_target=torch.neg)
    for collate in (hooked, pickle.loads(pickle.dumps(hooked))):  # noqa: S301  (our own bytes)
        inputs, targets = collate(pairs)
        assert inputs.tolist() == [[10, 0, 0], [30, 30, 30]]
        assert targets.tolist() == [-1, -3]
    inputs, targets = HookedCollate(collate_fn=PadCollate(), on_target=torch.neg)(pairs)
    assert inputs.tolist() == [[1, 0, 0], [3, 3, 3]]
    assert targets.tolist() == [-1, -3]


@pytest.mark.parametrize("sample", [[torch.ones(2), 1], {"x": torch.ones(2), "y": 1}])
def test_a_hook_on_targets_that_there_are_not(sample: Any) -> None:
    """It would never be called, and the other one would get the targets, too."""
    hooked = HookedCollate(collate_fn=PadCollate(), on_target=torch.neg)
    with pytest.raises(CollateError, match="on_target is for samples that are pairs"):
        hooked([sample])


def test_samples_without_targets() -> None:
    alone = HookedCollate(collate_fn=torch.stack, on_input=louder)
    assert alone([torch.ones(2)]).tolist() == [[10, 10]]
    assert HookedCollate(collate_fn=torch.stack)([torch.ones(2)]).tolist() == [[1, 1]]
