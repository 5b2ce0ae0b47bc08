"""Which shapes are probed, and whether `make_batch` makes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.cost.measuring.shapes import Domain, run_shapes, traced_shapes
from torchbudget.errors import CostError


@pytest.mark.parametrize("ignored", ["n", "size"])
def test_make_batch_that_ignores_what_it_is_asked_for(ignored: str) -> None:
    training = CASES["encoder, fused attention"]()

    def make_batch(n: int, size: int) -> Any:
        return training.make_batch(4, 16)

    with pytest.raises(CostError, match="make_batch ignores what it is asked for"):
        measure_cost(training.step, make_batch, max_size=128, budget="1GiB")


@pytest.mark.parametrize("multiple", [1, 8, 100])
@pytest.mark.parametrize("max_size", [1, 7, 4096, (30, 700), (5, 60, 7000)])
def test_every_probe_has_a_size_of_the_domain(max_size: Any, multiple: int) -> None:
    """Multiples of the size multiple, at least 1, up to the largest rounded up; few shapes."""
    domain = Domain.of(max_size, multiple)
    shapes = traced_shapes(domain)
    sizes = [size for _, size, _ in shapes]
    for traced in (False, True):
        runs = run_shapes(domain, traced=traced)
        assert len(runs) <= 7
        sizes += [size for _, size, _ in runs]
    for size in sizes:
        assert all(0 < n <= most for n, most in zip(size, domain.largest, strict=True))
        assert not any(n % multiple for n in size)
    assert domain.largest in sizes
    assert len({shape[:2] for shape in shapes}) == len(shapes)
