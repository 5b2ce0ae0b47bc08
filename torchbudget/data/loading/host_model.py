"""The model of a `DataLoader`'s memory: what each of its parts needs under given options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch.multiprocessing import get_sharing_strategy

from torchbudget.data.cache.shared_file import bytes_to_come
from torchbudget.data.loading.in_flight import InFlight
from torchbudget.data.loading.parts import HostBytes
from torchbudget.data.loading.trial import Trial
from torchbudget.machine.process_pages import mapped_data_bytes, process_pages
from torchbudget.machine.process_tree import process_tree

# Of what workers and batches need, for what differs between one trial and a long run. With 0.03,
# the worst of 30 settings was 0.6 % over its budget after six epochs.
_MARGIN: Final = 0.06
# Beside its batches: pipes of indices and results, events, semaphores.
_DESCRIPTORS_PER_WORKER: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of a `DataLoader` that decide what it needs.

    Attributes:
        workers: `num_workers`.
        prefetch: `prefetch_factor`; 0 without workers.
        pins: `pin_memory`, where an accelerator makes it effective.
        persists: `persistent_workers`.
    """

    workers: int
    prefetch: int
    pins: bool
    persists: bool

    @property
    def batches(self) -> int:
        """Consecutive batches that exist at once.

        What workers were asked for, one that is returned, and one that the loop still has; without
        workers those two.
        """
        return self.workers * self.prefetch + 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostModel:
    """What a loader needs, by a trial of it.

    Attributes:
        trial: of one worker.
        in_flight: its batches.
        samples: that are read in an epoch on this rank; 0 where that is unknown.
        present: bytes that this process and its descendants have now.
        later: bytes that this process will allocate later on.
        caches: bytes that its sample caches will take yet.
        forks: workers share this process's memory when they start.
    """

    trial: Trial
    in_flight: InFlight
    samples: int
    present: int
    later: int
    caches: int
    forks: bool

    def needs(self, setting: Setting) -> HostBytes:
        """The parts of what a loader with these options needs, while it is iterated."""
        trial, flight, workers = self.trial, self.in_flight, setting.workers
        batches, builders = setting.batches, max(workers, 1)
        parts = {
            "this process and its descendants now": self.present,
            "reserved for later": self.later,
            "sample caches, once they are full": self.caches,
        }
        known = sum(parts.values())
        if workers:
            parts["workers"] = workers * trial.private
            parts["what this process has written to since"] = trial.originals
            parts["their copies of this process's objects"] = workers * self._copied(setting)
        else:
            parts["what reading keeps"] = trial.kept
        parts["batches in flight"] = flight.peak(batches)
        parts["samples of batches that are being built"] = builders * flight.building
        if setting.pins:
            parts["pinned copies"] = flight.peak_pinned(batches)
        # Workers start before any batch is on its way. One reads the data set that it is sent, of
        # which the text is built here and read there.
        starting = trial.starting + trial.sent if workers else 0
        parts["workers while they start, beyond that"] = max(
            0,
            starting
            - parts["batches in flight"]
            - parts["samples of batches that are being built"],
        )
        parts["margin"] = int(_MARGIN * (sum(parts.values()) - known))
        by_descriptor = get_sharing_strategy() == "file_descriptor"
        tensors = flight.tensors if workers and by_descriptor else 0
        return HostBytes(
            parts=tuple((name, size) for name, size in parts.items() if size),
            shared_bytes=flight.peak_shared(batches) if workers else 0,
            descriptors=tensors * batches + _DESCRIPTORS_PER_WORKER * workers,
            reclaimable_bytes=trial.mapped,
            basis=flight.source,
        )

    def _copied(self, setting: Setting) -> int:
        """What each worker copies of this process's memory, after what it did in the trial."""
        samples = self.samples if setting.persists else -(-self.samples // max(setting.workers, 1))
        return self.trial.copied_after(samples) if self.forks else 0


def present_bytes() -> int:
    """Bytes of this process and its descendants that the kernel cannot reclaim, and its libraries.

    Files of data that this process maps do not count: they can be read again.

    Raises:
        MachineError: there is no `/proc`.
    """
    libraries = process_pages().file - mapped_data_bytes()
    return sum(one.unreclaimable_bytes for one in process_tree()) + max(0, libraries)


def cache_bytes() -> int:
    """Bytes that sample caches of this process will take beyond `present_bytes`, if they fill up.

    Raises:
        MachineError: there is no `/proc`.
    """
    return bytes_to_come(one.pid for one in process_tree())
