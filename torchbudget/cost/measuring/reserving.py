"""Reserved bytes of a step on CUDA, where none is at hand: its trace, replayed through a model.

Batches of ever other shapes leave gaps between the blocks of torch's caching allocator, so that it
reserves more than ever lives at once. How much more shows in an epoch of mixed shapes, not in any
single step. Such an epoch is replayed through the `CachingAllocator` model, in batches that fill
the budget. The requests of a step on any shape are computed from those of the traced ones: where
steps allocate in one order, the bytes of each storage are a polynomial of the shape, as those of
each moment are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.allocator_blocks import LARGE_SEGMENT_BYTES
from torchbudget.cost.measuring.assumed_device import AssumedDevice
from torchbudget.cost.measuring.caching_allocator import CachingAllocator
from torchbudget.cost.measuring.fitting import explain, total_form
from torchbudget.cost.measuring.requests import Requests
from torchbudget.cost.measuring.shapes import Size, Subject
from torchbudget.cost.measuring.terms import (
    Powers,
    choices_of,
    features,
    plain_powers,
    powers_of,
)
from torchbudget.cost.measuring.traced import Traced
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.protocol import FloatArray
from torchbudget.units import format_bytes

Shape: TypeAlias = tuple[int, Size]

# Steps of an epoch, a share of which do not fill the budget. There are fewer where they make more
# requests in all, 300,000 of which take about a second.
_STEPS: Final = 300
_LEAST_STEPS: Final = 50
_MOST_REQUESTS: Final = 10**6
_PARTIAL: Final = 1 / 5
_MOST_SAMPLES: Final = 2**16
# A plan leaves room for what an epoch reserves; its batches are then smaller: another epoch.
_ROUNDS: Final = 8
_LEAST_GROWTH: Final = 1.005
# Where the peaks of computed steps are off by more, the traced steps are replayed instead.
_OFF: Final = 0.1


def reserved(traced: Traced, subject: Subject, device: AssumedDevice, room: int | None) -> Traced:
    """What traces show, in bytes of the device instead of bytes of tensors.

    What the device has at every moment (context, workspaces, parameters, optimizer state) is added;
    what comes and goes in a step is multiplied by what an epoch reserves for it. The notes say what
    is assumed.

    Args:
        traced: forms and probes in bytes of tensors.
        subject: what was traced; its notes are appended to.
        device: what is assumed of it.
        room: the budget; `None`: as much as the largest probe takes.
    """
    one = next(iter(traced.requests.values()))
    always = device.fixed_bytes + sum(one.loaded) + sum(one.made)
    living = _scaled(traced, device.fixed_bytes, always, 1.0)
    if room is None:
        room = max(probe.peak_bytes for probe in living.probes)
    epoch = _Epoch(living, subject, device, always)
    factor = epoch.factor(room)
    subject.notes.append(
        f"predicted for CUDA with {device.segments}, not measured there: {epoch.steps} steps of "
        f"mixed shapes reserve {factor:.3f} times what comes and goes in the costliest of them"
    )
    subject.notes.append(
        f"assumed: {format_bytes(device.context_bytes)} for the context and libraries, "
        f"{format_bytes(sum(device.workspaces))} for the workspaces of cuBLAS (of "
        f"{device.architecture})"
    )
    subject.notes.append("no trace sees temporaries inside kernels, as in convolutions and sorts")
    if device.settings.not_modelled:
        subject.warn(
            f"PYTORCH_CUDA_ALLOC_CONF sets {', '.join(device.settings.not_modelled)}, without "
            "which the cost was predicted: the device may reserve more; leave it out, or measure "
            "on a device"
        )
    return _scaled(traced, device.fixed_bytes, always, factor)


def _scaled(traced: Traced, fixed_bytes: int, always: int, factor: float) -> Traced:
    """Add `fixed_bytes`, and multiply what exceeds `always`, in bytes, by a factor."""
    offset = factor * fixed_bytes + (1 - factor) * always
    return replace(
        traced,
        forms=tuple(total_form(form, offset, factor, []) for form in traced.forms),
        probes=tuple(
            replace(probe, peak_bytes=round(offset + factor * probe.peak_bytes))
            for probe in traced.probes
        ),
    )


@dataclass(frozen=True, slots=True)
class _Epoch:
    """An epoch of mixed shapes.

    Attributes:
        living: what traces show, with what is fixed.
        subject: what was traced.
        device: what is assumed of it.
        always: bytes that are on the device at every moment.
    """

    living: Traced
    subject: Subject
    device: AssumedDevice
    always: int

    @property
    def steps(self) -> int:
        """How many."""
        requests = max(len(one.order) for one in self.living.requests.values())
        return min(max(_MOST_REQUESTS // max(requests, 1), _LEAST_STEPS), _STEPS)

    def factor(self, room: int) -> float:
        """How many times the bytes that come and go in its costliest step are reserved for them.

        Batches fill the room, planned with the factor of the epoch before, until it is kept.
        """
        factor, domain = 1.0, self.subject.domain
        rng = np.random.default_rng(0)
        sizes = [domain.between(share) for share in rng.uniform(size=(self.steps, domain.axes))]
        partial = rng.uniform(size=(2, self.steps))
        filled = np.where(partial[0] < _PARTIAL, partial[1], 1.0)
        for _ in range(_ROUNDS):
            scaled = _scaled(self.living, 0, self.always, factor)
            cost = MeasuredCost(forms=scaled.forms, margin=0)
            n = np.minimum(cost.capacity(_array(sizes), room), _MOST_SAMPLES) * filled
            shapes = [(int(k), size) for k, size in zip(n, sizes, strict=True) if k >= 1]
            steps = requests_at(self.living.requests, shapes) if shapes else None
            if steps is None or self._is_off(steps, shapes):
                return max(factor, self._factor_of_traced())
            peak = self._reserved(steps)
            if peak <= room:
                return factor
            factor = max(_LEAST_GROWTH * factor, self._ratio(peak, shapes))
        self.subject.warn(
            f"no plan was found whose epoch reserves less than {format_bytes(room)} on CUDA; the "
            f"last one reserved {format_bytes(peak)}"
        )
        return factor

    def _factor_of_traced(self) -> float:
        """The factor of the shapes that were traced, in a random order."""
        shapes = [*self.living.requests]
        order = np.random.default_rng(0).integers(0, len(shapes), self.steps).tolist()
        steps = [self.living.requests[shapes[at]] for at in order]
        return self._ratio(self._reserved(steps), shapes)

    def _reserved(self, steps: Sequence[Requests]) -> int:
        """The most bytes that the steps reserve in any of three orders, and one page more.

        Where batches grow, segments of fixed sizes never fit the next one. The page is for what
        other orders, and longer epochs, need beyond these.
        """
        growing = sorted(steps, key=lambda step: int(step.sizes.sum()))
        shuffled = np.random.default_rng(1).permutation(len(steps)).tolist()
        orders = steps, growing, [steps[at] for at in shuffled]
        return LARGE_SEGMENT_BYTES + max(reserved_in_epoch(one, self.device) for one in orders)

    def _is_off(self, steps: Sequence[Requests], shapes: Sequence[Shape]) -> bool:
        """Whether computed steps have more alive than was fitted to their shapes, or less."""
        n, sizes = zip(*shapes, strict=True)
        fitted = MeasuredCost(forms=self.living.forms, margin=0).fitted_bytes(n, _array(sizes))
        peaks = self.always + np.array([step.peak_bytes for step in steps])
        return bool((np.abs(peaks / fitted - 1) > _OFF).any())

    def _ratio(self, peak: int, shapes: Sequence[Shape]) -> float:
        n, sizes = zip(*shapes, strict=True)
        cost = MeasuredCost(forms=self.living.forms, margin=0)
        most = int(cost.fitted_bytes(n, _array(sizes)).max())
        return (peak - self.always) / max(most - self.always, 1)


def reserved_in_epoch(steps: Sequence[Requests], device: AssumedDevice) -> int:
    """The most bytes on the device while steps are replayed in their order, context included."""
    allocator = CachingAllocator(device.settings)
    replay_epoch(steps, device, allocator)
    return device.context_bytes + allocator.peak_reserved_bytes


def replay_epoch(
    steps: Sequence[Requests], device: AssumedDevice, allocator: CachingAllocator
) -> None:
    """Make the requests of a process that loads a model, and steps.

    Raises:
        AllocatorOutOfMemoryError: a request failed.
    """
    steps[0].load(allocator)
    for num_bytes in device.workspaces:
        allocator.malloc(num_bytes)
    steps[0].replay(allocator)
    steps[0].make(allocator)
    for step in steps[1:]:
        step.replay(allocator)


def requests_at(traced: Mapping[Shape, Requests], shapes: Sequence[Shape]) -> list[Requests] | None:
    """The requests of steps on other shapes, from those of the traced ones.

    Returns:
        One for each shape; `None` where too few of the traced steps share their order.
    """
    orders = Counter(one.order.tobytes() for one in traced.values())
    order, times = orders.most_common(1)[0]
    axes = len(shapes[0][1])
    if times < len(plain_powers(axes)) + 2:
        return None
    alike = {shape: one for shape, one in traced.items() if one.order.tobytes() == order}
    bytes_ = np.stack([one.sizes for one in alike.values()]).astype(np.float64)
    total = bytes_.sum(axis=1, keepdims=True)
    powers = powers_of(axes)
    known = _features(list(alike), powers)
    _, coefficients, _ = explain(known / total, bytes_ / total, choices_of(powers))
    wanted = _features(shapes, powers) @ coefficients
    first = next(iter(alike.values()))
    return [replace(first, sizes=row) for row in np.maximum(np.rint(wanted), 0).astype(np.int64)]


def _features(shapes: Sequence[Shape], powers: Sequence[Powers]) -> FloatArray:
    n, sizes = zip(*shapes, strict=True)
    return features(n, sizes, powers)


def _array(sizes: Sequence[Size]) -> npt.NDArray[Any]:
    array = np.array(sizes)
    return array if array.shape[1] > 1 else array[:, 0]
