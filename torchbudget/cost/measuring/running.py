"""The shapes that a step is run on, and the forms that fit its peaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from torch import nn

from torchbudget.cost.measuring.explaining import Explained, explained
from torchbudget.cost.measuring.fitting import total_form
from torchbudget.cost.measuring.fragmentation import note_device, with_reserve
from torchbudget.cost.measuring.least_squares import non_negative
from torchbudget.cost.measuring.peaks import fit_peaks
from torchbudget.cost.measuring.shapes import Domain, Size, Subject
from torchbudget.cost.measuring.step_runner import ProbeOutOfMemoryError, StepRunner
from torchbudget.cost.measuring.terms import features, plain_powers, powers_of_runs
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.protocol import FloatArray
from torchbudget.errors import CostError
from torchbudget.machine.allocators import kernel_caches_are_stated, trim_malloc
from torchbudget.units import format_bytes

# What oneDNN runs on the CPU by kernels that it compiles for each shape.
_CONVOLUTIONS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Less than this is lost in what a process gains and loses by itself.
_SEEN_BYTES: Final = 2**24
# Batches that did not leave the floor are enlarged so many times, though what they need may be just
# below it.
_BELOW_FLOOR: Final = 4
# Traced forms that an offset and a factor bring this near to the runs need no further terms.
_SCALED: Final = 0.01
# A prediction that is further off becomes a probe.
_EXACT: Final = 0.01
# Without a trace, several runs climb to the largest batch of a size.
_MOST_RUNS: Final = 8
_MOST_BLIND_RUNS: Final = 18
_MOST_CLIMBS: Final = 4
# Where one sample of a size may need too much for all that is known, how far on the way to it, on a
# logarithmic scale, sizes are run first.
_STONES: Final = (0.8, 0.6, 0.4, 0.2)
# A run that reached this share of its target needs no larger one of its size.
_REACHED: Final = 0.9
_MORE: Final = 0.9
# Memory that grows no faster than this times the number of samples is linear in it.
_LINEAR: Final = 1.15
# Shares of the budget that runs aim at. The first one shows, at a safe distance, how the machine's
# bytes relate to the trace's.
_SAFE: Final = 0.4
_NEAR: Final = 0.95
# Of that, the first batch of a size without a trace.
_FIRST: Final = 0.6


def run_probes(
    subject: Subject, room: int, traced: tuple[Form, ...]
) -> tuple[tuple[Form, ...], tuple[Probe, ...]]:
    """Run the step on a few shapes, and fit its peaks; everything is restored.

    The shapes lie where the budget is filled, from the smallest size to the largest. The last ones
    are predicted first; what is off by more than a percent becomes a probe, and the fit is made
    again.

    Args:
        subject: the step and its batches.
        room: bytes that no probe may exceed.
        traced: the forms that a trace has found; none if nothing is known.

    Returns:
        The forms whose maximum counts, and what was run.
    """
    if subject.state.device.type == "cpu":
        if not trim_malloc():
            subject.notes.append(
                "this C library keeps freed memory: the peak depends on the shapes before"
            )
        _warn_of_kernels(subject)
    with subject.state.restored(contents=True):
        runner = StepRunner(subject)
        runs = _Runs(subject, runner, room, traced)
        runs.run_all()
        runs.probes = runner.settled(runs.probes)
        runs.fit_to_bad()
        probes = with_reserve(runs.probes, runner, subject, runs.room)
        if runner.memory is not None:
            note_device(subject, runner.memory)
    runner.empty_cache()  # or what was reserved would be taken for what the next step needs
    if runner.sampled:
        subject.notes.append(
            "the peak of resident memory was sampled: /proc/self/clear_refs is not writable"
        )
    if runner.not_finite:
        subject.warn(
            "the step returned a loss that is not finite; does make_batch make a valid batch?"
        )
    fitted = [p for p in probes if not p.held_out]
    return fit_runs(fitted, traced, subject.domain, runner.idle_bytes), tuple(probes)


def _warn_of_kernels(subject: Subject) -> None:
    """Warn of convolutions whose kernels are cached by the thousand, more than any probe shows."""
    if not kernel_caches_are_stated() and any(
        isinstance(part, _CONVOLUTIONS)
        for module in subject.state.modules
        for part in module.modules()
    ):
        subject.warn(
            "convolutions on the CPU keep compiled kernels for each new shape, up to those of "
            "1,024, so that steps after many shapes may exceed the budget: call "
            "configure_allocators() first in the script, here and where it trains"
        )


@dataclass(slots=True)
class _Runs:
    """Runs of shapes so far, none of which was predicted to exceed the budget."""

    subject: Subject
    runner: StepRunner
    room: int
    traced: tuple[Form, ...]
    probes: list[Probe] = field(default_factory=list)
    known: tuple[tuple[Probe, ...], Explained] | None = None

    @property
    def _floor_bytes(self) -> int:
        """What a step needs however few its samples are.

        The least of any run: what a process holds beside a step may be freed while it is measured,
        as that of a compiler is.
        """
        return min(probe.peak_bytes for probe in self.probes)

    @property
    def left(self) -> int:
        """How many more shapes may be run."""
        return (_MOST_RUNS if self.traced else _MOST_BLIND_RUNS) - len(self.probes)

    def run_all(self) -> None:
        """Run one small batch, then at each size one that nearly fills the budget."""
        domain = self.subject.domain
        judged = [*domain.judged]
        if not self.traced and domain.short in judged[1:-1]:
            judged.remove(domain.short)
        smallest, largest = judged[0], judged[-1]
        # On several axes those between are long on one only, and say little of what is long on all.
        middle = judged[len(judged) // 2] if domain.axes == 1 else domain.between(0.5)
        self._run_first(smallest)
        self._reach_for(_SAFE, middle)
        # The ends early: nothing is vouched for beyond them. Then what tells the axes apart.
        corners = [domain.between((0.0, 1.0)), domain.between((1.0, 0.0))]
        fitted = list(dict.fromkeys([middle, largest, smallest, *corners]))
        for size in fitted:
            self._reach_for(_NEAR, size)
        # At first the guess may have been far too high, or climbing from the floor took long.
        for size in [largest] if self.traced else fitted:
            if self._can_reach_more(size):
                self._reach_for(_NEAR, size)
        if all(probe.size != largest for probe in self.probes):
            self.subject.notes.append(
                f"no batch of the largest size, {largest}, was run: by the runs before, one sample "
                "needs more than the budget"
            )
        if self.traced:
            for size in judged:
                if size not in fitted:
                    self._reach_for(_NEAR, size, held_out=True)
        # What was predicted badly is fitted to, while something is left to judge the fit by.
        while (self.fit_to_bad() or not self.traced) and self.left > 0:
            before = len(self.probes)
            self._reach_for(_NEAR, self._next_size(), held_out=True)
            if len(self.probes) == before and not self.traced:
                break

    def fit_to_bad(self) -> bool:
        """Whether probes that were held out were predicted badly; they are fitted to now."""
        found = False
        while off := self._badly_predicted():
            found = True
            for at in off:
                self.probes[at] = replace(self.probes[at], held_out=False)
        return found

    def _next_size(self) -> Size:
        """Where the next batch tells most: where explanations of the runs so far differ most."""
        domain = self.subject.domain
        if self.traced:
            return domain.between((3 - math.sqrt(5)) / 2 * len(self.probes) % 1)
        found = self._explained([probe for probe in self.probes if not probe.held_out])
        top = MeasuredCost(forms=found.forms(domain), margin=0)
        sizes = found.sizes if domain.axes > 1 else found.sizes[:, 0]
        disputes = found.disputes(np.maximum(top.capacity(sizes, self.room), 1))
        known = {probe.size for probe in self.probes}
        new = [s not in known and self._reach(s, self.room) > 0 for s in domain.spread()]
        return domain.spread()[int(np.where(new, disputes, 0).argmax())]

    def _run_first(self, smallest: Size) -> None:
        try:
            first = self.runner.run(1, smallest)
        except ProbeOutOfMemoryError as error:
            raise CostError(f"one sample of size {smallest} does not fit into memory") from error
        if first.peak_bytes > self.room:
            raise CostError(
                "model, gradients, optimizer state and all else in the process need "
                f"{format_bytes(first.peak_bytes)} with one sample of size {smallest}; the budget "
                f"is {format_bytes(self.room)}"
            )
        self.probes.append(first)

    def _reach_for(self, share: float, size: Size, *, held_out: bool = False) -> None:
        """Run batches of a size until one takes this share of the budget, or may not be larger."""
        floor = self._floor_bytes
        if not self.traced:
            self._climb_to(size, int(floor + share * (self.room - floor)))
        # One that is held out vouches for nothing, and need not be larger.
        for _ in range(1 if self.traced or held_out else _MOST_CLIMBS):
            target = int(floor + share * (self.room - floor))
            n = min(self._most_samples(size, target), self.runner.most_samples(size))
            if (
                n < 1
                or self.left < 1
                or any(p.size == size and p.n >= _MORE * n for p in self.probes)
            ):
                return
            probe = self._run(n, size, held_out=held_out)
            if probe is None or probe.peak_bytes - floor >= _REACHED * (target - floor):
                return

    def _can_reach_more(self, size: Size) -> bool:
        """Whether no batch of a size was run, or, without a trace, none that is nearly full."""
        floor = self._floor_bytes
        above = [probe.peak_bytes - floor for probe in self.probes if probe.size == size]
        full = _REACHED * _NEAR * (self.room - floor)
        return not above or (not self.traced and max(above) < full)

    def _run(self, n: int, size: Size, *, held_out: bool = False) -> Probe | None:
        """Run a batch; `None` where memory ran out."""
        try:
            probe = self.runner.run(n, size, held_out=held_out)
        except ProbeOutOfMemoryError as error:
            # There is less memory than the budget: later probes aim at what was reached, or at
            # half as much.
            self.subject.notes.append(
                f"out of memory at {n} samples of size {size}, below the budget"
            )
            half = self.room - (self.room - self._floor_bytes) // 2
            self.room = max(half, min(error.reached_bytes, self.room))
            return None
        self.probes.append(probe)
        self.subject.advance(1)
        return probe

    def _climb_to(self, size: Size, target: int) -> None:
        """Run sizes on the way to one of which the runs so far do not bound one sample."""
        way = self.subject.domain.up_to(size)
        known = {probe.size for probe in self.probes}
        stones = [stone for stone in map(way.between, _STONES) if stone not in known]
        while self.left > 1 and self._most_samples(size, target) < 1:
            bounded = (at for at, s in enumerate(stones) if self._most_samples(s, target) > 0)
            at = next(bounded, None)
            if at is None:
                return
            n = min(self._most_samples(stones[at], target), self.runner.most_samples(stones[at]))
            self._run(n, stones[at])
            del stones[at:]  # shorter ones say no more

    def _most_samples(self, size: Size, target: int) -> int:
        n = _capacity(self._guess(), size, target)
        if self.traced:
            return n
        # One form fitted to few points is unreliable far beyond them.
        reach = self._reach(size, target)
        if self._is_linear():
            # The first batch of a size may show a moment that was nowhere the peak before.
            floor = self._floor_bytes
            if all(size != probe.size for probe in self.probes):
                target = int(floor + _FIRST * (target - floor))
            reach = max(reach, _capacity(self._fit(self.probes), size, target))
        # Where the runs bound one sample, a guess that says less is wrong.
        return min(max(n, 1), reach)

    def _guess(self) -> tuple[Form, ...]:
        """The forms to choose the next shape by, from the runs so far."""
        if not self.traced:
            n, sizes, peaks = columns(self.probes)
            return fit_peaks(n, sizes, peaks, few=True).forms(n, sizes)
        if len(self.probes) > 1:
            return self._fit(self.probes)
        # A third on top of the tensors, for what kernels may need.
        [first] = self.probes
        offset = first.peak_bytes - 4 / 3 * _predicted(self.traced, self.probes)[0]
        return tuple(total_form(form, offset, 4 / 3, []) for form in self.traced)

    def _fit(self, probes: Sequence[Probe]) -> tuple[Form, ...]:
        domain = self.subject.domain
        if self.traced:
            return fit_runs(probes, self.traced, domain, self.runner.idle_bytes)
        return self._explained(probes).forms(domain)

    def _explained(self, probes: Sequence[Probe]) -> Explained:
        """All explanations of these runs; those of the last ones are kept, since they take long."""
        if self.known is None or self.known[0] != tuple(probes):
            found = _explained(probes, self.subject.domain, self.runner.idle_bytes)
            self.known = tuple(probes), found
        return self.known[1]

    def _reach(self, size: Size, target: int) -> int:
        """The most samples that cannot need more than the target, judged by runs alone.

        Two runs of this size show how bytes grow with n, which is taken to be as n² until a third
        one has shown that it is linear. Runs of other sizes bound the first one of this size: with
        coefficients of at least 0, bytes grow at most by the factor of the feature that grows most.
        That is what two runs of a size differ by; where there is but one, all that is allocated
        during a step is attributed to its samples. As long as nothing shows what a sample needs,
        one is tried: it must fit, to be trained on.
        """
        floor = self._floor_bytes
        idle = min(self.runner.idle_bytes, floor)
        runs = [probe for probe in self.probes if probe.size == size]
        seen = [probe for probe in runs if self._left_floor(probe)]
        if len(seen) > 1:
            few, many = seen[-2:]
            power = 1 if self._is_linear() else 2
            grown = max(many.peak_bytes - few.peak_bytes, _SEEN_BYTES)
            times = (target - many.peak_bytes) / grown
            most: float = many.n**power + times * (many.n**power - few.n**power)
            return int(max(most, 1) ** (1 / power))
        most = 0 if any(map(self._left_floor, self.probes)) else 1
        if runs and not seen:
            most = _BELOW_FLOOR * runs[-1].n
        for probe in self.probes:
            new, old = features([1, 1], [size, probe.size], powers_of_runs(len(size))[1:])
            larger = float((new / old).max())  # how much more one sample may need
            growth = (target - idle) / max(probe.peak_bytes - idle, _SEEN_BYTES) / larger
            most = max(most, probe.n * (growth if growth < 1 or self._is_linear() else growth**0.5))
            for few in self.probes:
                if few.size == probe.size and few.n < probe.n and self._left_floor(few):
                    grown = max(probe.peak_bytes - few.peak_bytes, _SEEN_BYTES)
                    each = grown / (probe.n - few.n) * larger
                    most = max(most, min((target - floor) / each, 1))
        return int(most)

    def _left_floor(self, probe: Probe) -> bool:
        """Whether a peak is visibly the samples'; below the floor they may need anything."""
        return probe.peak_bytes - self._floor_bytes > _SEEN_BYTES

    def _is_linear(self) -> bool:
        """Whether three runs of one size lie on a line, and no three lie above one."""
        found = []
        for size in {probe.size for probe in self.probes}:
            same = [p for p in self.probes if p.size == size and self._left_floor(p)]
            for one, two, three in zip(same, same[1:], same[2:], strict=False):
                slope = (two.peak_bytes - one.peak_bytes) / (two.n - one.n)
                if two.peak_bytes - one.peak_bytes > _SEEN_BYTES:
                    later = (three.peak_bytes - two.peak_bytes) / (three.n - two.n)
                    found.append(later <= _LINEAR * slope)
        return bool(found) and all(found)

    def _badly_predicted(self) -> list[int]:
        held_out = [at for at, probe in enumerate(self.probes) if probe.held_out]
        if not held_out:
            return []
        forms = self._fit([p for p in self.probes if not p.held_out])
        errors = MeasuredCost(forms=forms, margin=0, probes=tuple(self.probes)).errors()
        return [at for at in held_out if abs(errors[at]) > _EXACT]


def fit_runs(
    probes: Sequence[Probe], traced: tuple[Form, ...], domain: Domain, idle_bytes: int
) -> tuple[Form, ...]:
    """The traced forms with an offset, a scale, and what kernels need beside tensors, all ≥ 0.

    Without a trace, all forms that explain the runs.
    """
    n, sizes, peaks = columns(probes)
    if not traced:
        return _explained(probes, domain, idle_bytes).forms(domain)
    target = np.array(peaks, np.float64)
    tensors = _predicted(traced, probes)
    powers = plain_powers(traced[0].axes)[1:]
    shape = features(n, sizes, powers)
    # The tensors are certain: only what comes on top of them is fitted. The simplest explanation,
    # an offset and a scale, is tried first; more terms only where it does not fit.
    above = np.stack([np.ones(len(target)), tensors], axis=1)
    for used in (0, len(powers)):
        matrix = np.concatenate([above, shape[:, :used]], axis=1)
        offset, share, *terms = x = non_negative(matrix / target[:, None], 1 - tensors / target)
        if np.abs((tensors + matrix @ x) / target - 1).max() < _SCALED:
            break
    beside = [Term(bytes_, *power) for bytes_, power in zip(terms, powers, strict=False)]
    totals = (total_form(form, offset, 1 + share, beside) for form in traced)
    return tuple(dict.fromkeys(totals))  # they may have become equal


def _explained(probes: Sequence[Probe], domain: Domain, idle_bytes: int) -> Explained:
    """All explanations of runs, the first of which was on the floor."""
    floor_bytes = probes[0].peak_bytes + _SEEN_BYTES
    return explained(
        *columns(probes), idle_bytes=idle_bytes, floor_bytes=floor_bytes, at=domain.spread()
    )


def _capacity(forms: tuple[Form, ...], size: Size, target: int) -> int:
    cost = MeasuredCost(forms=forms, margin=0)
    return int(cost.capacity(size if len(size) > 1 else size[0], target))


def _predicted(forms: tuple[Form, ...], probes: Sequence[Probe]) -> FloatArray:
    n, sizes, _ = columns(probes)
    several = np.array(sizes) if len(sizes[0]) > 1 else np.array(sizes)[:, 0]
    return MeasuredCost(forms=forms, margin=0).fitted_bytes(n, several).astype(np.float64)
