"""Samples of one shape, beyond what holds of every `PaddedCost`: how many fit, and shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.budget import MemoryBudget
from torchbudget.cost.dense import DenseCost
from torchbudget.errors import BudgetError, CostError, OptionError, OversizeError

LIMIT = 2**63 - 1


amounts = st.integers(0, 2**40) | st.integers(0, 2**53 - 1)


costs = st.builds(
    DenseCost,
    fixed_bytes=amounts,
    sample_bytes=st.integers(1, 2**40),
    floor_bytes=amounts,
    host_sample_bytes=st.integers(1, 2**40),
    variants_per_read=st.integers(1, 9),
)


@given(cost=costs, one=st.integers(0, 100))
def test_the_padded_size_is_ignored_but_for_its_shape(cost, one):
    """Both methods broadcast as the other cost models do, and give int64."""
    for shape in [(), (3,), (2, 3), (0,)]:
        for number in (one, np.full((2, 1, 1), one)):
            expected = np.broadcast_shapes(np.shape(number), shape)
            sizes = np.arange(int(np.prod(shape))).reshape(shape)
            result = cost.batch_bytes(number, sizes)
            assert (result.dtype, result.shape) == (np.int64, expected)
            result = cost.capacity(sizes, number)
            assert (result.dtype, result.shape) == (np.int64, expected)


@pytest.mark.parametrize("n", [2**63, 2**64, 2**100, [2**63, 2**63 + 1]])
def test_numbers_past_64_bits_are_refused(n):
    with pytest.raises(CostError, match="n must be"):
        DenseCost(sample_bytes=1).batch_bytes(n, 0)
    with pytest.raises(CostError, match="budget_bytes must be"):
        DenseCost(sample_bytes=1).capacity(0, n)


@pytest.mark.parametrize("n", [-1, 1.0, "1", None, True, [1, -1]])
def test_what_is_no_number_of_samples_is_refused(n):
    with pytest.raises(CostError):
        DenseCost(sample_bytes=1).batch_bytes(n, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"sample_bytes": 0},
        {"sample_bytes": -1},
        {"sample_bytes": 1, "unit_bytes": 2},
        {"sample_bytes": True},
        {"sample_bytes": "1 KiB"},
        {"sample_bytes": 2**63},
        {"sample_bytes": 1, "fixed_bytes": -1},
        {"sample_bytes": 1, "floor_bytes": None},
        {"sample_bytes": 1, "variants_per_read": 0},
    ],
)
def test_what_is_no_number_of_bytes_is_refused(values):
    with pytest.raises((CostError, OptionError), match=list(values)[-1]):
        DenseCost(**values)


@given(cost=costs, budget=st.integers(1, LIMIT), preferred=st.integers(1, 2**40))
def test_a_batch_fits_is_whole_reads_and_near_what_was_wanted(cost, budget, preferred):
    """A multiple of the read, within the budget; the nearest one wherever that fits."""
    variants = cost.variants_per_read
    if int(cost.capacity(0, budget)) < variants:
        for ask in (cost.largest_batch, lambda b: cost.batch_for(preferred, b)):
            with pytest.raises(OversizeError, match=str(max(cost.fixed_bytes, cost.floor_bytes))):
                ask(budget)
        return
    largest = cost.largest_batch(budget)
    assert largest % variants == 0
    assert largest <= cost.capacity(0, budget) < largest + variants
    batch = cost.batch_for(preferred, budget)
    assert batch % variants == 0
    assert 0 < batch <= largest
    if batch < largest:
        assert 2 * abs(batch - preferred) <= variants or batch == variants


def test_what_the_budget_does_not_limit():
    cost = DenseCost(sample_bytes=1, host_sample_bytes=1, variants_per_read=4)
    with pytest.raises(BudgetError, match="device"):
        cost.largest_batch(MemoryBudget(host=1))
    with pytest.raises(BudgetError, match="host"):
        cost.samples_in_host(MemoryBudget(device=1))
    with pytest.raises(CostError, match="host_sample_bytes"):
        DenseCost(sample_bytes=1).samples_in_host(100)
    assert cost.batch_for(9, MemoryBudget(host=1)) == 8


@pytest.mark.parametrize("preferred", [0, -1, 1.5, True, "8", None])
def test_what_is_no_batch_is_refused(preferred):
    with pytest.raises(OptionError, match="preferred"):
        DenseCost(sample_bytes=1).batch_for(preferred, 10)


def test_without_a_module_a_sample_is_its_input_and_target():
    cost = DenseCost.of((3, 32, 32), (), torch.float16, output_dtype=torch.int64)
    assert cost.sample_bytes == cost.host_sample_bytes == 3 * 32 * 32 * 2 + 8
    assert (cost.fixed_bytes, cost.floor_bytes, cost.variants_per_read) == (0, 0, 1)


@pytest.mark.parametrize(
    "shape", [5, None, (0,), (-1, 2), (1.5,), "abc", [[1], 2], [[]][1:], [[[1]]]]
)
def test_what_is_no_shape_is_refused(shape):
    if shape == []:
        assert DenseCost.of(shape, (1,)).host_sample_bytes == 8  # a scalar
        return
    with pytest.raises(CostError, match="input_shape"):
        DenseCost.of(shape, (1,))


def test_an_optimizer_needs_a_module():
    with pytest.raises(CostError, match="pass module="):
        DenseCost.of((3,), (3,), optimizer=torch.optim.SGD)


def test_states_of_an_optimizer_may_be_a_number():
    """Of elements for each that is trained: as many as the optimizer itself would show, 0 too."""
    module = torch.nn.Linear(30, 20)

    def bytes_with(optimizer):
        return DenseCost.of((30,), (20,), module=module, optimizer=optimizer)

    assert bytes_with(0) == bytes_with(torch.optim.SGD) == bytes_with(None)
    assert bytes_with(2) == bytes_with(torch.optim.Adam)
    assert bytes_with(1).fixed_bytes < bytes_with(2).fixed_bytes
    for wrong in (-1, True, 1.5):
        with pytest.raises(CostError, match="number of states"):
            bytes_with(wrong)
