"""The plan of a sampler, for the ranks that there are, and where its epoch begins."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Sampler

from torchbudget.checks import optional
from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.iterations import Iterations
from torchbudget.data.read_once import ReadOnce
from torchbudget.data.resumed_by_host import check_not_resumed
from torchbudget.distributed import AskedRanks
from torchbudget.errors import OptionError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.fingerprint import Plain
from torchbudget.plan.plan import Plan
from torchbudget.plan.report import PlanReport
from torchbudget.plan.step_source import IndexSource
from torchbudget.plan.whole_epoch import whole_epoch


class PlannedSampler(Sampler[list[int]], IndexSource):
    """A sampler whose plan is that of the ranks that there are when it is asked.

    Args:
        plan: for the ranks of now.
        ranks: asked again whenever the plan is needed.
        window: its windows' length; `None`: the default one.
        order: what must be the same for positions to mean the same samples.
    """

    def __init__(self, plan: Plan, ranks: AskedRanks, *, window: int | None, order: Plain) -> None:
        self._plan = plan
        self._ranks = ranks
        self._window = window
        self._order = order
        self._cursor = Cursor(epoch=0)
        self._loaded: tuple[Cursor, Mapping[str, Any]] | None = None  # the last one, of its state
        self._iterations = Iterations()
        self._length: tuple[Cursor, int] | None = None
        self._read_once = ReadOnce()

    @property
    def num_replicas(self) -> int:
        """Ranks that share each window."""
        return self._ranks.now()[0]

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._ranks.now()[1]

    @property
    def plan(self) -> Plan:
        """Of every epoch, for the ranks that there are now.

        Raises:
            OptionError: there were others when this epoch's iteration began; or the window is below
                their number.
            UnevenRanksError: fewer samples than ranks.
        """
        number = self.num_replicas
        if number != self._plan.ranks.number:
            self._plan_for(number)
        return self._plan

    def _plan_for(self, number: int) -> None:
        before = self._plan
        if self._iterations.present is not None:
            raise OptionError(
                f"an iteration began on num_replicas={before.ranks.number}, and torch.distributed "
                f"has {number} ranks now, which would take other samples: start it before the "
                "first iter(), or call set_epoch() after it started"
            )
        plan = before.for_ranks(number, window=self._window)
        cursor = self._cursor
        if self._loaded is not None and self._loaded[0] is cursor:
            state = self._loaded[1]
            cursor = Cursor.decode(state, self._order, plan)
            self._loaded = cursor, state
        self._plan, self._cursor, self._length = plan, cursor, None

    def _load(self, state: Mapping[str, Any], plan: Plan) -> None:
        """Begin at a state's position; ranks that start later decode it again."""
        cursor = Cursor.decode(state, self._order, plan)
        self._plan, self._cursor = plan, cursor
        self._loaded = cursor, copy.deepcopy(dict(state))

    def __len__(self) -> int:
        """Micro-batches of the whole epoch on this rank; O(samples) once an epoch.

        From a loaded position on they are those that were done, as they were counted then, and
        those that are left.

        Raises:
            StateError: a framework reads it that goes on from a checkpoint without a position.
        """
        check_not_resumed()
        left = self.batches_left
        length = self._cursor.done + left
        self._read_once.note(length)
        return length

    @property
    def batches_left(self) -> int:
        """Micro-batches that the next `iter()` yields on this rank: fewer after a loaded state."""
        plan, cursor, known = self.plan, self._cursor, self._length
        if known is None or known[0] is not cursor:
            known = self._length = cursor, plan.micro_batches(cursor)
        return known[1]

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` yields."""
        return self._cursor.epoch

    @property
    def size_multiple(self) -> int:
        """Padded sizes are multiples of it; `PadCollate(size_multiple=sampler)` reads it."""
        return self._plan.rules.size_multiple

    def extremes(self) -> dict[str, IntArray]:
        """The micro-batches of the coming epoch that are likeliest to fail: see `warm_up`."""
        return self.plan.extremes(self.epoch)

    def batch_bytes(self, indices: IntArray) -> int:
        """Predicted bytes of a micro-batch of these samples."""
        return self._plan.batch_bytes(indices)

    def check_dataset(self, dataset: Any) -> None:
        """Raise an `OptionError` where a data set has not one sample for each size."""
        if isinstance(dataset, Sized):
            self._plan.order.check_length(len(dataset))

    def whole_epoch(self, dataset_length: int) -> Iterator[list[int]]:
        """Indices of each batch of the coming epoch on this rank: see `predict`."""
        return whole_epoch(self.plan, self._cursor, rank=self.rank, dataset_length=dataset_length)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """An iteration inside changes nothing for a loop around it: see `predict`."""
        before = vars(self).copy()
        self._iterations = Iterations(self._iterations.begun)
        try:
            yield
        finally:
            vars(self).update(before)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, a shallow one too, begins where `iter()` would, and counts its own iterations.
        return {**vars(self), "_iterations": Iterations(self._iterations.begun)}

    def report(self) -> PlanReport:
        """Fill, padding and imbalance of the coming epoch; O(samples)."""
        return self.plan.report(self.epoch)


def window_of(samples_per_step: int | None, window: int | None) -> int | None:
    """The length of windows; `None`: the default one.

    Raises:
        OptionError: both are given.
    """
    if samples_per_step is not None and window is not None:
        raise OptionError(
            "with samples_per_step a window is one step: leave window out, "
            f"got window={window}, samples_per_step={samples_per_step}"
        )
    return optional("samples_per_step", samples_per_step) or optional("window", window)
