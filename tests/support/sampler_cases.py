"""Any sizes, costs, budgets, ranks and options of a sampler that go together."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.strategies import StairCost, formulas, problems, rules
from torchbudget import MemoryBudgetBatchSampler
from torchbudget.errors import OptionError, UnevenRanksError


@st.composite
def settings_of(draw: st.DrawFn, n: int, ranks: int, *, draws: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**40)),
        "shuffle": draws or draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "size_multiple": draw(st.sampled_from([1, 1, 4])),
    }
    window = draw(st.integers(ranks, max(n, ranks)))
    options[draw(st.sampled_from(["window", "samples_per_step"]))] = window
    if draw(st.booleans()):
        options["num_samples"] = draw(st.integers(ranks, 2 * max(n, ranks)))
    if options["drop_last"] and "samples_per_step" in options:
        options["samples_per_step"] = min(window, options.get("num_samples", n))
    if draws or (options["shuffle"] and draw(st.integers(0, 3)) == 0):
        options["replacement"] = draw(st.booleans())
        if options["replacement"] or options.get("num_samples", n) <= n:
            options["weights"] = draw(
                st.lists(st.floats(0.01, 9), min_size=n, max_size=n)
                if n < 20
                else st.just(np.linspace(0.5, 5, n))
            )
    return options


def drawn_once(options: dict[str, Any]) -> bool:
    """Whether each index comes once in each pass over the data set."""
    return not options.get("replacement") and "weights" not in options


def without_draws(options: dict[str, Any]) -> dict[str, Any]:
    """The options less those that change how often an index comes."""
    changing = ("replacement", "weights", "num_samples")
    return {name: value for name, value in options.items() if name not in changing}


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    most_ranks: int = 16,
    fits: bool = True,
    most: int = 150,
    draws: bool = False,
) -> Any:
    """Sizes, a cost, a budget, a number of ranks and options.

    Args:
        draw: of hypothesis.
        most_ranks: ranks.
        fits: whether each sample fits the budget.
        most: samples.
        draws: whether indices are always drawn with replacement or by weights, and not rarely.
    """
    sizes, cost, budget = draw(problems(most=most, fits=fits))
    if sizes.ndim == 1 and draw(st.integers(0, 4)) == 0:
        cost = StairCost(draw(st.integers(1, 100)))
        budget = int(cost.batch_bytes(1, sizes.max())) * draw(st.integers(1, 10))
    ranks = draw(st.integers(1, min(most_ranks, len(sizes))))
    options = draw(settings_of(len(sizes), ranks, draws=draws))
    options |= draw(rules(packed=hasattr(cost, "base_bytes")))
    # Rounding up a size may push a sample past a budget that it just fitted.
    multiple = options["size_multiple"]
    largest = -(-sizes.max(axis=0).astype(np.int64) // multiple) * multiple
    if fits and not hasattr(cost, "base_bytes") and draw(st.integers(0, 3)) == 0:
        on_host = draw(formulas(sizes.shape[1] if sizes.ndim == 2 else 1, packed=False))
        alone = int(on_host.batch_bytes(1, largest))
        options["host_batch_bytes"] = on_host, alone * draw(st.integers(1, 8))
    if fits:
        budget = max(budget, int(cost.batch_bytes(1, largest)))
        options |= draw(numbers_for(sizes, cost, budget, ranks, options))
    return sizes, cost, budget, ranks, options


@st.composite
def numbers_for(
    draw: st.DrawFn, sizes: Any, cost: Any, budget: int, ranks: int, options: Any
) -> dict[str, Any]:
    """Numbers of micro-batches that the first two epochs can have."""
    # Every rank of a test counts up to 100 epochs for "auto".
    few = ["auto"] if ranks <= 4 else []
    asked = draw(st.sampled_from(["", "", "", *few, "epoch", "step", "both"]))
    if not asked:
        return {}
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget, num_replicas=ranks, rank=0, **options)
    epochs = []
    try:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler.steps))
    except (OptionError, UnevenRanksError):
        return {}
    found: dict[str, Any] = {}
    each = options.get("samples_per_step")
    if asked in ("step", "both") and each is not None:
        needed = max(map(max, epochs))
        if needed * ranks > each:  # of a last step that is larger
            return {}
        found["micro_batches_per_step"] = draw(st.integers(needed, each // ranks))
    if asked in ("auto", "both"):
        found["batches_per_epoch"] = "auto"
    if asked == "epoch":
        needed = max(map(sum, epochs))
        most = options.get("num_samples", len(sizes)) // ranks
        more = draw(st.integers(0, 9)) if draw(st.booleans()) else 0
        found["batches_per_epoch"] = draw(
            st.sampled_from([needed, min(needed + more, most), max(most - more, needed)])
        )
    return found


def samplers(sizes: Any, cost: Any, budget: int, ranks: int, **options: Any) -> Any:
    return [
        MemoryBudgetBatchSampler(sizes, cost, budget, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]
