"""Any sizes, costs, budgets, ranks and options of a sampler that go together."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.costs import two_ways
from tests.support.oracles import bytes_of
from tests.support.strategies import StairCost, formulas, limits, problems, rules
from torchbudget import MemoryBudgetBatchSampler, Mixture, TableCost

_MOST_OF_WAYS = 1000  # the size up to which tables of measured costs are made


@st.composite
def settings_of(draw: st.DrawFn, n: int, ranks: int, epochs: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**40)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "size_multiple": draw(st.sampled_from([1, 1, 4])),
    }
    window = draw(st.integers(ranks, max(n, ranks)))
    given = epochs == "given" or (epochs == "any" and draw(st.booleans()))
    if given:
        if draw(st.booleans()):
            options["window"] = window
            options["batches_per_epoch"] = draw(st.integers(1, 2 * (n // ranks) + 5))
        else:
            options["samples_per_step"] = window
            options["steps_per_epoch"] = draw(st.integers(1, 2 * (n // window) + 3))
        kind = draw(st.sampled_from(["passes", "passes", "weights", "mixture"]))
        if kind == "weights":
            options |= {"shuffle": True, "weights": np.linspace(0.5, 5, n)}
        elif kind == "mixture":
            options["weights"] = draw(mixtures(n))
    elif draw(st.booleans()):
        options["window"] = window
    else:
        options["samples_per_step"] = min(window, n) if options["drop_last"] else window
    return options


@st.composite
def mixtures(draw: st.DrawFn, n: int) -> Mixture:
    """A mixture of n samples from one to four sources, one of which may be left out."""
    names = ["web", "code", "papers", "mail"][: draw(st.integers(1, min(4, n)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sources = np.append(names, rng.choice(names, n - len(names)))
    shares = {name: draw(st.floats(1e-3, 1)) for name in names}
    if len(names) > 1 and draw(st.integers(0, 3)) == 0:
        shares[names[0]] = 0
    return Mixture(rng.permutation(sources), shares, by="samples")


def given_length(options: dict[str, Any]) -> bool:
    """Whether epochs have a given length, and passes go on from one to the next."""
    return bool({"batches_per_epoch", "steps_per_epoch"} & {*options})


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    most_ranks: int = 8,
    fits: bool = True,
    most: int = 120,
    epochs: str = "any",
) -> Any:
    """Sizes, a cost, a budget, a number of ranks and options.

    Args:
        draw: of hypothesis.
        most_ranks: ranks.
        fits: whether each sample fits the budget.
        most: samples.
        epochs: "passes" over the data, of "given" lengths, or "any" of them.
    """
    sizes, cost, budget = draw(problems(most=most, fits=fits))
    if sizes.ndim == 1 and draw(st.integers(0, 4)) == 0:
        cost = StairCost(draw(st.integers(1, 100)))
        budget = int(cost.batch_bytes(1, sizes.max())) * draw(st.integers(1, 10))
    ranks = draw(st.integers(1, min(most_ranks, len(sizes))))
    options = draw(settings_of(len(sizes), ranks, epochs))
    packed = hasattr(cost, "base_bytes")
    options |= draw(rules(packed=packed))
    # Rounding up a size may push a sample past a budget that it just fitted.
    multiple = options["size_multiple"]
    largest = -(-sizes.max(axis=0).astype(np.int64) // multiple) * multiple
    axes = sizes.shape[1] if sizes.ndim == 2 else 1
    options["limits"] = draw(limits(largest, packed=packed, least=1 if fits else 2))
    if draw(st.integers(0, 3)) == 0:
        options["time"] = draw(formulas(axes, packed=packed))
    weighted = "weights" in options
    may_group = not weighted or "samples_per_step" in options
    if len(sizes) >= 8 * ranks and may_group and draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        options["groups"] = rng.integers(0, draw(st.integers(1, 3)), len(sizes))
    mixed = "groups" in options and "samples_per_step" in options
    if sizes.ndim == 1 and not packed and not mixed and draw(st.integers(0, 2)) == 0:
        options["max_shapes"] = draw(st.integers(1, 6))
        options["batch_size_multiple"] = 1
        options["limits"] = [one for one in options["limits"] if getattr(one[0], "counts", False)]
    steps = "samples_per_step" in options
    is_plain = sizes.ndim == 1 and not packed and "max_shapes" not in options
    if steps and is_plain and largest <= _MOST_OF_WAYS and draw(st.integers(0, 3)) == 0:
        cost = two_ways(largest=(max(int(largest), 1),))  # a step that is made in several ways
        budget = int(cost.batch_bytes(1, largest)) * draw(st.integers(1, 10))
    if fits:
        budget = max(budget, int(cost.batch_bytes(1, largest)))
    known = not isinstance(cost, TableCost)  # which knows batches of few samples
    whole = fits and known and (steps or not options["drop_last"]) and draw(st.booleans())
    some = not weighted and (steps or whole) and (fits or ranks == 1)
    some = some and "max_shapes" not in options
    if some and draw(st.integers(0, 2)) == 0:
        together(draw(st.integers(0, 2**32)), sizes, options, whole=whole)
        budget = max(budget, whole_bytes(sizes, cost, options))
        ranks = min(ranks, sharing_ranks(options, len(sizes)))
    return sizes, cost, budget, ranks, options


def together(seed: int, sizes: Any, options: dict[str, Any], *, whole: bool) -> None:
    """Put units among the options, of one group each, and make the limits fit them as a whole."""
    rng, n = np.random.default_rng(seed), len(sizes)
    labels = rng.integers(0, max(n // rng.integers(1, 5), 1), n)
    labels += n * np.asarray(options.get("groups", 0))
    options["units"] = (labels, "micro_batch") if whole else labels
    if whole:
        options["batch_size_multiple"] = 1
        options["limits"] = [
            (model, max(amount, whole_bytes(sizes, model, options)))
            for model, amount in options["limits"]
        ]
        if options.get("max_batch_size"):
            options["max_batch_size"] += int(np.unique(labels, return_counts=True)[1].max())


def whole_bytes(sizes: Any, cost: Any, options: dict[str, Any]) -> int:
    """The most that a unit costs which stays in one micro-batch; 0 without such units."""
    if not isinstance(options.get("units"), tuple):
        return 0
    labels = labels_of(options)
    units = [np.flatnonzero(labels == one) for one in set(labels.tolist())]
    return max(bytes_of(sizes, cost, unit, options["size_multiple"]) for unit in units)


def sharing_ranks(options: dict[str, Any], left: int) -> int:
    """The largest number of ranks that can share a window; `left` samples are left of the pass."""
    window = options.get("window", options.get("samples_per_step", left))
    if "units" in options:
        labels = labels_of(options)
        units = len(set(labels.tolist()))
        window = max(round(window * units / len(labels)), 1)
    return int(min(window, left))


def labels_of(options: dict[str, Any]) -> Any:
    """Each sample's unit."""
    given = options["units"]
    return given[0] if isinstance(given, tuple) else given


def check_units(epochs: Any, steps: list[int], options: dict[str, Any]) -> None:
    """A unit's samples come on one rank, in one step; or in one micro-batch. So in every pass."""
    labels, whole = labels_of(options), isinstance(options["units"], tuple)
    step_of = np.repeat(np.arange(len(steps)), steps)
    came: dict[int, dict[Any, set[int]]] = {}
    for rank, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            place = rank, number if whole else step_of[number]
            for index in batch:
                came.setdefault(int(labels[index]), {}).setdefault(place, set()).add(index)
    for places in came.values():
        first, *others = places.values()
        assert all(other == first for other in others), "a unit was split"


def samplers(sizes: Any, cost: Any, budget: int, ranks: int, **options: Any) -> Any:
    """The sampler of each rank."""
    return [
        MemoryBudgetBatchSampler(sizes, cost, budget, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]


def check_batch(sizes: Any, cost: Any, budget: int, options: Any) -> None:
    """Law 1: it is not empty, nor over the budget, another limit, or of too many samples."""
    number = len(sizes)
    assert number, "an empty batch"
    assert number <= options.get("max_batch_size", number), "max_batch_size"
    if number > 1 or options.get("oversize") != "alone":
        for model, limit in [(cost, budget), *options.get("limits", ())]:
            bytes_ = bytes_of(sizes, model, multiple=options.get("size_multiple", 1))
            assert bytes_ <= limit, f"{bytes_} bytes of {limit}"


def check_shapes(sampler: Any, epochs: Any, sizes: Any) -> None:
    """At most as many shapes as asked for, each within the budget; one of all ranks in a round."""
    shapes = [[sampler.shape_of(len(sizes[b]), sizes[b].max()) for b in mine] for mine in epochs]
    assert all(mine == shapes[0] for mine in shapes), "ranks of a round have other shapes"
    rules = sampler.plan.rules
    assert len({*shapes[0]} | {*sampler.shapes}) <= sampler._max_shapes
    assert all(rules.cost.batch_bytes(*shape) <= rules.budget_bytes for shape in sampler.shapes)


def check_state_size(text: str, samples: int) -> None:
    """Law 7: 2 KB, and one bit, as text, for each sample of a window that was begun."""
    assert len(text) <= 2048 + 1.34 * samples / 8
