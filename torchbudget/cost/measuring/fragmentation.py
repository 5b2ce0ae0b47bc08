"""What torch's allocator on CUDA keeps reserved when shapes take turns, and what keeps more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Final

import torch

from torchbudget.cost.measuring.shapes import Size, Subject
from torchbudget.cost.measuring.step_runner import ProbeOutOfMemoryError, StepRunner
from torchbudget.cost.models.probe import Probe
from torchbudget.machine.device import DeviceMemory
from torchbudget.units import format_bytes

# Shares of the probed samples that are replayed: smaller batches where larger ones in turn do not
# fit the budget.
_SHARES: Final = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4)


def with_reserve(
    probes: Sequence[Probe], runner: StepRunner, subject: Subject, room: int
) -> list[Probe]:
    """Probes with what their shapes in turn keep reserved beyond the largest of them alone.

    A probe's peak is that of its shape on an empty cache. In training shapes take turns, and blocks
    that one has left may not fit the next, above all in segments of fixed sizes. All probed shapes
    are run in turn, twice, with the allocator limited to the budget; what was reserved beyond the
    largest probe is added to each.

    Args:
        probes: on CUDA; nothing is added on the CPU.
        runner: that has run them.
        subject: its notes are appended to.
        room: the budget, in bytes.
    """
    memory = runner.memory
    if memory is None:
        return list(probes)
    reserve = _reserve(probes, runner, memory, room)
    if reserve is None:
        reserve = room // 2
        subject.warn(
            "the probed shapes in turn do not fit the budget, although each of them does: half of "
            "it is left free for gaps between blocks; ask for expandable segments, as of "
            "configure_allocators(), before CUDA is first used"
        )
    subject.notes.append(
        f"{format_bytes(reserve)} are added for shapes that take turns: {memory.source.allocator()}"
    )
    return [replace(probe, peak_bytes=probe.peak_bytes + reserve) for probe in probes]


def note_device(subject: Subject, memory: DeviceMemory) -> None:
    """Note how the device's bytes were told apart, and warn of what keeps memory on it."""
    figures = memory.source.figures()
    outside = format_bytes(memory.outside_bytes(figures))
    subject.notes.append(
        f"outside torch's allocator this process uses {outside}: {memory.told_apart_by(figures)}"
    )
    warn_of_kept(subject, memory)


def warn_of_kept(subject: Subject, memory: DeviceMemory | None) -> None:
    """Warn of what keeps memory of its own on CUDA for every new shape.

    Args:
        subject: that is warned.
        memory: of the device; `None`: this process does not use it, so that it has no graphs there.
    """
    if torch.backends.cudnn.benchmark:
        subject.warn(
            "torch.backends.cudnn.benchmark is on: cuDNN tries its algorithms on every new shape, "
            "with workspaces of any size, and keeps a plan of each; ragged batches have ever new "
            "shapes, so set it to False, or give the sampler a coarse size_multiple"
        )
    graphs = 0 if memory is None else memory.source.graph_bytes()
    if graphs:
        subject.warn(
            f"CUDA graphs, or other memory pools, keep {format_bytes(graphs)} reserved, and more "
            "for every new shape that is captured; the cost has those of the probed shapes at "
            "most. Compile without mode='reduce-overhead', or give the sampler a coarse "
            "size_multiple"
        )


def _reserve(
    probes: Sequence[Probe], runner: StepRunner, memory: DeviceMemory, room: int
) -> int | None:
    """Bytes that shapes in turn take beyond the largest one; `None` if small ones do not fit."""
    fraction = memory.source.figures().fraction
    memory.limit(room)
    try:
        for share in _SHARES:
            shapes = [(max(int(share * probe.n), 1), probe.size) for probe in probes]
            try:
                together = runner.peak_of(_in_turn(shapes))
                if together.retries:  # gaps were closed by flushing, at the limit
                    continue
                if share == 1:
                    alone = max(probe.peak_bytes for probe in probes)
                    return max(together.bytes - alone, 0)
                alone = max(runner.peak_of([shape] * 2).bytes for shape in shapes)
            except ProbeOutOfMemoryError:
                continue
            # Batches as large as these are known to fit in turn; larger ones may, if gaps grow
            # with them.
            return round(min(room - alone, (together.bytes - alone) / share))
        return None
    finally:
        memory.source.set_fraction(fraction)


def _in_turn(shapes: Sequence[tuple[int, Size]]) -> list[tuple[int, Size]]:
    """Long and short sizes alternately; then all of them once more, the other way round."""
    ordered = sorted(shapes, key=lambda shape: shape[1])
    middle = len(ordered) // 2
    pairs = zip_longest(reversed(ordered[middle:]), ordered[:middle])
    mixed = [shape for shape in chain.from_iterable(pairs) if shape is not None]
    return mixed + mixed[::-1]
