"""The shapes that a step is traced on, and the forms that fit them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any, Final, TypeAlias

import numpy as np

from torchbudget.cost.measuring.fitting import fit_traces, of_same_operations
from torchbudget.cost.measuring.judging import fits
from torchbudget.cost.measuring.multiples import padded_multiple
from torchbudget.cost.measuring.peaks import fit_peaks
from torchbudget.cost.measuring.raising import raised, with_missed
from torchbudget.cost.measuring.requests import Requests
from torchbudget.cost.measuring.shapes import BatchLimit, Domain, Size, Subject, check_shape
from torchbudget.cost.measuring.terms import plain_powers
from torchbudget.cost.measuring.tracing import Trace, ValueDependentError, tracing
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.protocol import FloatArray
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES, format_bytes

Shape: TypeAlias = tuple[int, Size]
_Shares: TypeAlias = tuple[tuple[int, float | tuple[float, float]], ...]

# Traces in all, the first one and the repeated one included.
_MOST_TRACES: Final = {1: 16, 2: 30}
# A prediction that is further off becomes a probe.
_EXACT: Final = 2e-3
# Two steps on one shape that differ by less do not depend on values.
_ROUNDED: Final = 1e-4
_FEW: Final = 2
_MANY: Final = 256
# Activations must outweigh what is fixed: a larger peak than that of few samples by this.
_OUTWEIGHS: Final = 1.5
# A step of more operations is traced on shorter samples only: about half a second.
_OPERATIONS: Final = 2500
_TURNS: Final = 4
# One longer sample is traced as well, to see whether a loop goes on as it begins.
_LONGER: Final = 5
# Shapes that a fit is made to: samples (0: many), and the fraction of the largest size.
_FIT_1: Final[_Shares] = ((_FEW, 1.0), (0, 0.0), (0, 1.0), (16, 1 / 2))
_FIT_2: Final[_Shares] = (
    (_FEW, (1.0, 1.0)),
    (0, (0.0, 0.0)),
    (0, (1.0, 1.0)),
    (_FEW, (1.0, 0.0)),
    (0, (1.0, 0.0)),
    (_FEW, (0.0, 1.0)),
    (0, (0.0, 1.0)),
    (16, (1 / 2, 1.0)),
    (24, (1.0, 1 / 2)),
    (32, (1 / 4, 1 / 2)),
    (8, (1 / 2, 1 / 4)),
    (12, (0.7, 0.3)),
)
# Peaks that are missed by more may be those of a step that pads samples by itself.
_PADDED: Final = 0.05
# A size below such a multiple of the smallest may be one that a layer leaves one position of.
_SHORTEST: Final = 2
# The least margin where layers round sizes.
_OF_STAIRS: Final = 0.02
# Without a budget, samples of the shapes that a fit is judged at; their sizes are spread.
_JUDGED: Final = (12, 0, 5, 100, 40, 3)


@dataclass(frozen=True, slots=True)
class Traced:
    """What traces have shown.

    Attributes:
        forms: whose maximum counts.
        probes: what was traced.
        aligned: whether each moment of the step was fitted, otherwise only the peaks.
        margin: the least that the forms need.
        requests: what each step asked of the device's allocator, by shape.
    """

    forms: tuple[Form, ...]
    probes: tuple[Probe, ...]
    aligned: bool
    margin: float = 0.0
    requests: Mapping[Shape, Requests] = field(default_factory=dict)


def trace_probes(subject: Subject, room: int | None) -> Traced:
    """Trace the step on a few shapes, and fit its live bytes.

    A shape whose bytes are not predicted to 0.2 % becomes a probe, and others are predicted, until
    all are, or there were enough traces.

    Args:
        subject: the step and its batches.
        room: the budget, on whose frontier predictions are judged; `None`: all over the domain.

    Raises:
        BatchError: `make_batch` ignores its arguments.
        CostError: the step cannot be traced.
    """
    if subject.state.is_compiled:
        subject.notes.append(
            "what is compiled was traced as eager code; only runs count it compiled"
        )
    with tracing(subject.step, subject.state, subject.target, subject.checks) as trace:
        tracer = _Tracer(subject, trace)
        first = tracer.explore()
        tracer.fit_shapes()
        traced = tracer.judge(room)
        before = tracer.traces[first]
        again = trace(subject.batch(*first))
    kept_bytes = max(one.kept_bytes for one in tracer.traces.values())
    if kept_bytes > 0:
        subject.warn(
            f"a step leaves up to {format_bytes(kept_bytes)} allocated when it ends: a leak?"
        )
    elif abs(again.peak_bytes - before.peak_bytes) > _ROUNDED * before.peak_bytes:
        subject.warn(
            f"two steps on one shape took {format_bytes(before.peak_bytes)} and "
            f"{format_bytes(again.peak_bytes)}: the step's memory does not depend on shapes alone"
        )
    if before.assumed:
        subject.notes.append(
            f"the step asked tensors for {before.assumed} truth values; the trace assumes that "
            "all of them are False"
        )
    return replace(traced, requests={s: one.requests for s, one in tracer.traces.items()})


@dataclass(slots=True, eq=False)
class _Tracer:
    """Traces of shapes so far, in their order, and which of them a fit is made to.

    Attributes:
        domain: the sizes to trace; shorter than the subject's where loops take many operations.
        limit: how many samples a batch may have, by its bytes.
        held_out: shapes that no fit is made to.
        few: samples of a small batch.
        many: samples of a large batch.
        most: samples of any batch, where the step loops over them.
        checked: whether a step that reads integers from tensors was traced with other ones.
    """

    subject: Subject
    trace: Callable[..., Trace]
    domain: Domain = field(init=False)
    limit: BatchLimit = field(init=False)
    traces: dict[Shape, Trace] = field(default_factory=dict)
    held_out: set[Shape] = field(default_factory=set)
    few: int = _FEW
    many: int = _MANY
    most: int = MAX_BYTES
    checked: bool = False
    _shapes: dict[Any, Shape] = field(default_factory=dict)
    _spread: Iterator[FloatArray] = field(init=False)
    _reserved: int = 1  # traces, for where forms meet

    def __post_init__(self) -> None:
        self.domain = self.subject.domain
        self.limit = BatchLimit(self.subject)
        self._spread = _spread(self.domain.axes)

    @property
    def left(self) -> int:
        """How many more shapes may be traced; the first and the repeated step count, too."""
        axes = self.domain.axes
        most = _MOST_TRACES.get(axes, 3 * len(plain_powers(axes)) + 8)
        return most - 2 - len(self.traces) - self._reserved

    def add(self, n: int, size: Size, *, held_out: bool = False) -> Trace | None:
        """Trace a shape, unless it is known already, or there were enough."""
        n = max(min(n, self.most, self.limit.most_samples(size)), 1)
        if (n, size) in self.traces or self.left < 1:
            return self.traces.get((n, size))
        batch = self.subject.batch(n, size)
        check_shape(batch, n, size, self._shapes)
        traced = self._traced(batch, size)
        if traced.integers and not self.checked:  # at once, as the step may change later on
            self._traced(batch, size, integer=2).check_same(traced)
            self.checked = True
        self.traces[n, size] = traced
        self.subject.advance(1)
        if held_out:
            self.held_out.add((n, size))
        return traced

    def _traced(self, batch: Any, size: Size, **options: Any) -> Trace:
        try:
            return self.trace(batch, **options)
        except ValueDependentError:
            raise
        except CostError as error:
            if size != self.domain.smallest:
                raise
            raise CostError(
                f"{error}; this was a batch of size {size}: if there are no samples this short, "
                "pass min_size"
            ) from error

    def explore(self) -> Shape:
        """Find how many samples outweigh what is fixed, and how long they may be.

        Returns:
            The first shape that was traced.
        """
        low, mid = self.domain.smallest, self.domain.at(1 / 16)
        first = _FEW, low
        short, longer = self.add(*first), self.add(_FEW, mid)
        if short is not None and longer is not None:
            self._limit_sizes(low, mid, len(short.operations), len(longer.operations))
        mid = self.domain.at(1 / 4)
        few, many = self.add(_FEW, mid), self.add(self.many, mid)
        if few is None or many is None:
            return first
        turns = (len(many.operations) - len(few.operations)) / (self.many - _FEW)
        if turns * self.many > len(few.operations) / 2:  # a loop over the samples
            self.most = max(int(_OPERATIONS / turns), 4 * _TURNS)
            self.many = min(self.many, self.most)
            self.held_out |= {shape for shape in self.traces if shape[0] < _TURNS}
            self.few = _TURNS
        self.add(self.few, mid)
        for _ in range(3):
            if many is None or many.peak_bytes > _OUTWEIGHS * few.peak_bytes:
                break
            self.many = min(8 * self.many, self.most, self.limit.most_samples(mid))
            many = self.add(self.many, mid)
        return first

    def _limit_sizes(self, low: Size, mid: Size, short: int, longer: int) -> None:
        """Leave out sizes whose loops over the length take too many turns, or too few to tell."""
        turns = (longer - short) / max(sum(mid) - sum(low), 1)
        if turns * sum(mid) > longer / 2:  # most operations are in loops
            self.domain = self.domain.above(_TURNS)
            self.held_out |= {(_FEW, size) for size in (low, mid) if min(size) < _TURNS}
        if turns * sum(self.domain.largest) > _OPERATIONS:
            share = _OPERATIONS / turns / sum(self.domain.largest)
            self.domain = self.domain.up_to(self.domain.at(max(share, 1 / 16)))

    def fit_shapes(self) -> None:
        """Trace the shapes that a fit is made to."""
        if self.domain.axes > 2:
            for number in range(2 * len(plain_powers(self.domain.axes))):
                n = (self.few, self.many, 24)[number % 3]
                self.add(n, self.domain.between(next(self._spread)))
        ends = {_FEW: self.few, 0: self.many}
        for n, fractions in {1: _FIT_1, 2: _FIT_2}.get(self.domain.axes, ()):
            self.add(ends.get(n, n), self.domain.at(fractions))

    def judge(self, room: int | None) -> Traced:
        """Fit, predict other shapes, and fit to those, too, that are predicted badly."""
        self._reserved = int(room is None)
        best = self._fit(self.held_out)
        if not best.aligned and self.domain != self.subject.domain:
            # Loops of other lengths do not line up: they must be seen as long as they are.
            self.domain = self.subject.domain
            self.fit_shapes()
            best = self._fit(self.held_out)
        self._try_one_sample()
        wanted = iter(self._to_judge(room, best.forms))
        waiting: list[Shape] = []
        while True:
            for n, size in wanted:
                if self.add(n, size, held_out=True) is None:
                    waiting.append((n, size))
            best = self._fit(self.held_out)
            self._reserved *= best.aligned
            # Operations that differ with the shape may yet be found alike in more traces.
            off = _badly_predicted(best) if best.aligned else set(self.held_out)
            if not off:
                break
            # Sizes that layers round down fit no polynomial: they are safe where they are.
            trial = self._fit(self.held_out - off)
            if trial.aligned >= best.aligned and _badness(trial) < _badness(best):
                best, self.held_out = trial, self.held_out - off
            if self.left < 1:
                break
            wanted = islice(chain(waiting, self._more_to_judge(room, best.forms)), len(off))
            waiting = []
        if best.aligned:
            best = self._raised(best, on_frontier=room is not None)
        if best.aligned and not fits(_cost(best), everywhere=True):
            self._reserved = 0
            for n, size in waiting[:1]:
                self.add(n, size, held_out=True)
            best = self._fit_peaks(self.held_out)  # moments that only seemed to be the same
        elif best.aligned and room is None:
            self._reserved = 0
            for n, size in self._where_forms_meet(best.forms):
                self.add(n, size, held_out=True)
            best = replace(best, probes=self._probes(self.held_out))
        if not best.aligned:
            self.subject.notes.append(
                "the step's operations depend on the shape: fitted to the peaks alone"
            )
        self._note_multiple(best)
        return best

    def _note_multiple(self, best: Traced) -> None:
        """Say what the step pads samples to, if that may be why no form is near its peaks."""
        worst = max(_errors(best), key=abs)
        if self.domain.multiple > 1 or abs(worst) < _PADDED:
            return
        multiple = padded_multiple(best.probes)
        if multiple is not None:
            self.subject.notes.append(
                f"the step pads samples to multiples of {multiple}, which makes this cost far too "
                f"high: pass size_multiple={multiple} here, and to the sampler or stream"
            )
        else:
            self.subject.notes.append(
                f"no form is nearer to all shapes than {abs(worst):.0%}, as where layers have "
                "patches, strides or windows: if so, pass what they divide as size_multiple= here, "
                "to the sampler or stream and to the collate"
            )

    def _try_one_sample(self) -> None:
        """Predict one sample of the largest size, if the step takes that, as batch norm may not."""
        try:
            self.add(1, self.domain.largest, held_out=True)
        except CostError as error:
            self.subject.notes.append(f"one sample could not be traced: {error}")

    def _fit(self, held_out: set[Shape]) -> Traced:
        fitted = [shape for shape in self.traces if shape not in held_out]
        n, sizes = zip(*fitted, strict=True)
        traces = [self.traces[shape] for shape in fitted]
        whole = self.subject.domain
        domain = np.array([self.domain.smallest, whole.largest], np.float64)
        forms = fit_traces(n, sizes, traces, domain, whole.smallest)
        if forms is None:
            return self._fit_peaks(held_out)
        return Traced(forms, self._probes(held_out), aligned=True)

    def _fit_peaks(self, held_out: set[Shape]) -> Traced:
        probes = self._probes(held_out)
        n, sizes, peaks = columns([probe for probe in probes if not probe.held_out])
        fit = fit_peaks(n, sizes, peaks)
        forms = fit.forms(n, sizes)
        # What no polynomial follows, as sizes that layers round down, is fitted from above.
        margin = max(2 * fit.under, *map(abs, _errors(Traced(forms, probes, aligned=False))))
        return Traced(forms, probes, aligned=False, margin=margin)

    def _raised(self, traced: Traced, *, on_frontier: bool) -> Traced:
        """Aligned forms, raised above what they were not fitted to.

        Other operations are those of the shortest samples, or depend on more than that: then what
        is missed shows in the margin, or that these forms are not the step's.
        """
        alike = of_same_operations([*self.traces.values()], self.domain.axes)
        same = [False] * len(traced.probes) if alike is None else alike.tolist()
        fitted: list[Probe] = []
        shortest: list[Probe] = []
        shorter_than = _SHORTEST * np.array(self.domain.smallest)
        for probe, is_same in zip(traced.probes, same, strict=True):
            is_shortest = np.any(np.less(probe.size, shorter_than))
            (fitted if is_same or not is_shortest else shortest).append(probe)
        forms, margin = raised(traced.forms, fitted)
        if (
            forms != traced.forms and not on_frontier
        ):  # layers round sizes: some stairs were not seen
            margin = max(margin, _OF_STAIRS)
        return replace(traced, forms=with_missed(forms, shortest, shorter_than), margin=margin)

    def _probes(self, held_out: set[Shape]) -> tuple[Probe, ...]:
        return tuple(
            Probe(n, size, trace.peak_bytes, (n, size) in held_out, "trace")
            for (n, size), trace in self.traces.items()
        )

    def _to_judge(self, room: int | None, forms: tuple[Form, ...]) -> list[Shape]:
        if room is None:
            short = self.domain.short
            wanted = [(self.many, short)] if short != self.domain.smallest else []
            wanted += islice(self._more_to_judge(room, forms), len(_JUDGED) - 1 - len(wanted))
        else:
            wanted = [(self._fits(forms, size, room), size) for size in self.domain.judged]
        if self.domain.largest != self.subject.domain.largest:  # a loop: does it go on like this?
            wanted.insert(0, (self.many, self.subject.domain.at(self._share() * _LONGER)))
        return wanted

    def _where_forms_meet(self, forms: tuple[Form, ...]) -> list[Shape]:
        """The fewest samples of a middling size at which another form is the largest, if any.

        A moment that is the peak around there alone is not among those that were fitted: in a loop
        it may be in the middle, where no moments of other lengths match. The margin covers it.
        """
        size = self.domain.at(1 / 8)
        n = np.arange(_FEW, self.many)
        bytes_ = [form.batch_bytes(n, size if len(size) > 1 else size[0]) for form in forms]
        largest = np.argmax(bytes_, axis=0)
        return [(int(n[at + 1]), size) for at in np.flatnonzero(np.diff(largest))[:1]]

    def _share(self) -> float:
        whole = self.subject.domain.largest
        return max(a / b for a, b in zip(self.domain.largest, whole, strict=True))

    def _more_to_judge(self, room: int | None, forms: tuple[Form, ...]) -> Iterator[Shape]:
        for number, share in enumerate(self._spread):
            size = self.domain.between(share)
            if room is None:
                yield _JUDGED[number % len(_JUDGED)] or self.many, size
            else:
                yield self._fits(forms, size, room), size

    def _fits(self, forms: tuple[Form, ...], size: Size, room: int) -> int:
        cost = MeasuredCost(forms=forms, margin=0)
        # Not one, which some steps refuse, as batch norm may.
        return max(int(cost.capacity(size if len(size) > 1 else size[0], room)), _FEW)


def _badly_predicted(traced: Traced) -> set[Shape]:
    """The shapes that were held out, and are off by more than that."""
    return {
        (probe.n, probe.size)
        for probe, error in zip(traced.probes, _errors(traced), strict=True)
        if probe.held_out and abs(error) > _EXACT
    }


def _badness(traced: Traced) -> float:
    """The largest error of any shape; one that is on the safe side counts a tenth."""
    return max(max(-error, error / 10) for error in _errors(traced))


def _errors(traced: Traced) -> list[float]:
    return _cost(traced).errors()


def _cost(traced: Traced) -> MeasuredCost:
    return MeasuredCost(forms=traced.forms, margin=0, probes=traced.probes)


def _spread(axes: int) -> Iterator[FloatArray]:
    """Points spread evenly over the unit cube: fractional parts of multiples of roots of primes."""
    steps = np.sqrt([2, 3, 5, 7, 11, 13, 17, 19][:axes])
    for number in count(1):
        yield number * steps % 1
