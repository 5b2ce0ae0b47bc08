"""What would fill the budget better, tried out before it is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torchbudget.errors import TorchBudgetError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.numbers import Numbers
from torchbudget.plan.tally import BatchFigures, Tally

if TYPE_CHECKING:
    from torchbudget.plan.plan import Plan

# Shares of the budget from which on a reason is looked for, and a remedy is worth telling.
_EMPTY: Final = 0.02
_COARSE: Final = 0.1
_GAIN: Final = 0.02
# What is left over of a window is half a micro-batch on average: of this many, it is 3 %.
_ROUNDS: Final = 16
# Samples, and windows, that a plan is tried out on.
_TRIED_SAMPLES: Final = 2**17
_TRIED_WINDOWS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to change, and what it would do.

    Attributes:
        reason: why the budget is not full.
        change: what to do about it.
        options: the sampler's arguments that do it, by name.
        fill: of the budget, after it: of the epoch's first 131,072 samples or 4 windows, whichever
            is more.
    """

    reason: str
    change: str
    options: dict[str, Any]
    fill: float

    def __str__(self) -> str:
        """A sentence."""
        return f"{self.reason}: {self.change} (fill {self.fill:.1%})"


def advise(plan: Plan, found: BatchFigures, *, windows: int, epoch: int) -> tuple[Advice, ...]:
    """What raises the fill of an epoch, the best first.

    Each change is planned on a part of the epoch, beside the plan as it is on the same samples:
    what does not raise the fill by 2 points there is not told.

    Args:
        plan: of the epoch.
        found: its figures.
        windows: that it has.
        epoch: which one.
    """
    told = []
    for trial, reason, change, options in _changes(plan, found, windows):
        samples = max(_TRIED_SAMPLES, _TRIED_WINDOWS * trial.window)
        with suppress(TorchBudgetError):  # what cannot be planned helps nobody
            after = _fill(trial, epoch, samples)
            if after >= _fill(plan, epoch, samples) + _GAIN:
                told.append(Advice(reason=reason, change=change, options=options, fill=after))
    return tuple(sorted(told, key=lambda advice: -advice.fill))


def _fill(plan: Plan, epoch: int, samples: int) -> float:
    """The fill of the first windows of an epoch, of so many samples or a little more."""
    tally = Tally(plan.sizes, plan.rules)
    for span in plan.spans(Cursor(epoch=epoch)):
        tally.add(span.block)
        if tally.samples >= samples:
            break
    return tally.figures().fill


def _changes(
    plan: Plan, found: BatchFigures, windows: int
) -> Iterator[tuple[Plan, str, str, dict[str, Any]]]:
    """Plans to try, why, what is changed, and by which options."""
    shares, rules = found.shares, plan.rules
    if shares.left_over > _EMPTY:
        yield from _fuller_windows(plan, found, windows)
    if shares.limited > _EMPTY:
        for name, without in (
            ("max_batch_size", None),
            ("batch_size_multiple", 1),
            ("host_batch_bytes", None),
        ):
            options: dict[str, Any] = {name: without}
            trial = plan.changed(rules=replace(rules, **options))
            reason = f"{name}={getattr(rules, name)} keeps samples out that would fit"
            yield trial, reason, f"leave {name} out", options
    if shares.no_room > _COARSE:
        twice = 2 * rules.budget_bytes
        reason = f"{shares.no_room:.1%} of the budget is too little for another sample"
        change = "raise the budget: twice as much, for instance"
        trial = plan.changed(rules=replace(rules, budget_bytes=twice))
        yield trial, reason, change, {"budget": twice}


def _fuller_windows(
    plan: Plan, found: BatchFigures, windows: int
) -> Iterator[tuple[Plan, str, str, dict[str, Any]]]:
    """Windows that hold more micro-batches, or are not split into a given number of them."""
    if plan.numbers:
        names = {
            "batches_per_epoch": plan.numbers.per_epoch,
            "micro_batches_per_step": plan.numbers.per_step,
        }
        given = [f"{name}={number}" for name, number in names.items() if number is not None]
        reason = f"micro-batches are split to reach {' and '.join(given)}"
        options = dict.fromkeys(name for name, number in names.items() if number is not None)
        change = f"leave {' and '.join(options)} out, or lower"
        yield plan.changed(numbers=Numbers()), reason, change, options
        return
    ranks = plan.ranks.number
    rounds = found.batches / max(windows * ranks, 1)
    positions = len(plan.order)
    name = "samples_per_step" if plan.ranks.even_sums else "window"
    # A wider window would make the batches of shuffled epochs alike.
    most = positions if plan.ranks.even_sums or not plan.order.shuffle else positions // 4
    wider = plan.window
    while wider < plan.window * _ROUNDS / max(rounds, 1) and 2 * wider <= most:
        wider *= 2
    if wider == plan.window:
        return
    number = f"{rounds:.0f}" if abs(rounds - round(rounds)) < 0.15 else f"{rounds:.1f}"
    plural = "" if number == "1" else "es"
    on_ranks = "" if ranks == 1 else f" on each of {ranks} ranks"
    reason = f"a window holds {number} micro-batch{plural}{on_ranks}, one of what is left"
    yield plan.changed(window=wider), reason, f"raise {name} to {wider:,}", {name: wider}
