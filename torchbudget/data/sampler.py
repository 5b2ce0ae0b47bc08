"""`MemoryBudgetBatchSampler`: micro-batches that fit the budget, for a stock `DataLoader`."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy.typing as npt
from torch.utils.data import DataLoader, Sampler

from torchbudget.budget import MemoryBudget
from torchbudget.checks import called_as, check_flags, natural, optional
from torchbudget.cost.measured import MOST_MARGIN, MeasuredCost
from torchbudget.cost.protocol import CostModel, IntArray
from torchbudget.data.frameworks import Caller
from torchbudget.data.indexed import check_indexed
from torchbudget.data.run import Run, warn_of_discarded_state
from torchbudget.data.same_on_ranks import check_same_on_ranks
from torchbudget.data.size_check import SizeCheck
from torchbudget.distributed import AskedRanks, largest_of_all_ranks
from torchbudget.errors import OptionError, SampleError, StateError
from torchbudget.plan.check_cost import check_cost, check_keeps_gradients
from torchbudget.plan.cursor import PLACE, Cursor
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.fingerprint import cost_fingerprint, fingerprint, order_identity
from torchbudget.plan.micro_batch import Draw, MicroBatch, Window
from torchbudget.plan.mixture import Mixture
from torchbudget.plan.order import Order
from torchbudget.plan.oversize import Oversize
from torchbudget.plan.plan import Plan
from torchbudget.plan.report import PlanReport
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.shapes import fitted
from torchbudget.plan.size_table import SizeTable
from torchbudget.protocols import IndexSource, MapStyle, StepSource
from torchbudget.units import Amount


class MemoryBudgetBatchSampler(Sampler[list[int]], IndexSource, StepSource):
    """Yields lists of indices: batches of ragged samples that fit a budget and fill it.

    It draws windows of samples uniformly at random, sorts each by size, and cuts it into
    micro-batches, each of which is the longest run of samples whose predicted cost is within the
    budget. Pass it to a `DataLoader` as `batch_sampler`.

    Args:
        sizes: the size of each sample of the data set: non-negative ints, shape `(N,)` or `(N, d)`.
            An array of more than 32 MiB in its smallest integer type (a memory map too) is not
            copied: do not change it.
        cost: bytes of a micro-batch, such as a `PaddedCost`; a `PackedCost` for packed batches.
        budget: a `MemoryBudget`, or the device's bytes as an int or text such as `"8GiB"`.
        samples_per_step: number of samples in one optimizer step, over all ranks. A window is then
            one step, and the ranks' costs are balanced over a step. The last step of an epoch may
            be smaller; if it is too small for all ranks, its samples join the step before.
        window: number of samples that are drawn, sorted and cut together, over all ranks. A larger
            window pads less, and makes the samples of a micro-batch more alike. Default:
            `samples_per_step`, else 4,096 for each rank, or as many as fill 32 micro-batches on
            each rank if that is more; but at most a quarter of a shuffled epoch, so that epochs
            differ, unless that is less than 8 micro-batches on each rank.
        shuffle: draw samples at random. Otherwise windows follow the data set's order, and the
            micro-batches of a window come longest first.
        seed: seed of all randomness. The order is a function of (seed, epoch, position) alone.
        drop_last: drop the incomplete last window if `samples_per_step` is set, else the last
            micro-batch that could still have taken a sample. With `weights` there is neither.
        weights: relative frequencies, shape `(N,)`, as in `torch.utils.data.WeightedRandomSampler`:
            samples are drawn with replacement. Or a `Mixture` of sources in stated shares. There is
            no last sample then, so `batches_per_epoch` or `steps_per_epoch` is required.
        max_batch_size: largest number of samples in a micro-batch.
        batch_size_multiple: numbers of samples are multiples of it, unless fewer fit or are left,
            or a micro-batch is split so that all ranks get equally many.
        size_multiple: padded sizes are rounded up to a multiple of it. The collate must use the
            same multiple, also one of another library; `tracked` warns if it does not.
        limits: pairs of a further cost model and an amount that no micro-batch exceeds, such as
            `[(PaddedCost(unit_bytes=16), "64MiB")]` for two int64 fields on the host. A
            `PackedCost` limits the sum over the samples, and is the only kind for packed batches;
            with `sample_bytes` alone it limits the number of samples.
        groups: one label for each sample, ints or text, shape `(N,)`. No micro-batch has samples of
            two groups. Each window has one group, so all ranks have the same group at the same
            time; with `samples_per_step` a window mixes groups, and ranks may differ.
        max_shapes: a number K, or a list of shapes (n, L) such as `best_shapes` returns, for
            compiled models. Padded batches then have at most K shapes, the best ones for these
            sizes and the budget, and all ranks have the same shape at the same time. The collate
            must pad to them: `PadCollate(size_multiple=sampler)`, or another one by `shape_of`.
            Only for sizes of one axis, and with no limits other than numbers of samples.
        units: one label for each sample, as `groups`. The samples of a label, a unit, stay on one
            rank within one step, which has about `samples_per_step` samples. With a pair `(labels,
            "micro_batch")` they stay in one micro-batch.
        oversize: if a sample (or a unit of one micro-batch) alone exceeds the budget or a limit,
            raise an error (`"raise"`), leave it out (`"skip"`; counted and logged once), or give it
            a micro-batch of its own, over the budget (`"alone"`).
        time: cost model of a micro-batch's time, in any unit. With `samples_per_step` a step is cut
            into the micro-batches that take the least time, and not into the fewest; its sums over
            the ranks are made as equal as possible. Without it, or if n samples take no less time
            together than one by one, it only balances the ranks. A `PackedCost` for packed batches.
            Default: with `samples_per_step` the measured time of the cost, if it has one; else
            none, so that micro-batches are full, and ranks are balanced by `cost`.
        batches_per_epoch: number of micro-batches of an epoch on each rank. The next epoch
            continues in the order where the last one ended; after the last sample a new order
            begins. Not with `samples_per_step`. Default: an epoch is one pass over the data.
        steps_per_epoch: the same with `samples_per_step`, in optimizer steps.
        num_replicas: number of ranks that share each window. Default: the world size of
            `torch.distributed`, read when it is needed; 1 if it is not initialised. If each rank
            measured or detected for itself, call `agree(cost, budget)` first.
        rank: rank of this process. Default: its rank in `torch.distributed`, else 0.

    Attributes:
        cost: the cost that batches are planned by.
        size_multiple: padded sizes are multiples of it; `PadCollate(size_multiple=sampler)` reads
            it, and the shapes.
        shapes: pairs (n, L) of rows and padded length, the longest first; empty without
            `max_shapes`.
        keeps_units: whether the samples of a unit stay in one micro-batch.

    Raises:
        SizesError: the sizes have a wrong shape, type or sign.
        CostError: the cost is not vectorised, or its capacity contradicts its bytes; or it was
            measured without the gradients of earlier micro-batches, which `samples_per_step` needs.
        BudgetError: the budget does not limit the device.
        OversizeError: a sample alone exceeds the budget, with `oversize="raise"`.
        OptionError: an option is invalid, or two options cannot be combined.

    Planning takes O(samples of a window) before the first micro-batch of each window, and no memory
    per sample beside `sizes` and labels. `len` plans the whole epoch once.

    After the last micro-batch of an epoch the sampler advances to the next epoch; `set_epoch`
    chooses one. After a `break` the next loop starts the epoch over; after a `break` in a `tracked`
    loop it continues.

    >>> from torchbudget import MemoryBudgetBatchSampler, PaddedCost
    >>> tokens = PaddedCost(unit_bytes=1, unit="tokens")  # a budget in tokens, padding included
    >>> sampler = MemoryBudgetBatchSampler([3, 9, 4, 8, 1], tokens, 18, shuffle=False)
    >>> list(sampler)
    [[1, 3], [2, 0, 4]]
    """

    @called_as("MemoryBudgetBatchSampler(sizes, cost, budget, …), with a cost such as PaddedCost")
    def __init__(
        self,
        sizes: npt.ArrayLike,
        cost: CostModel,
        budget: MemoryBudget | int | str,
        *,
        samples_per_step: int | None = None,
        window: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        weights: npt.ArrayLike | Mixture | None = None,
        max_batch_size: int | None = None,
        batch_size_multiple: int = 1,
        size_multiple: int = 1,
        limits: Sequence[tuple[CostModel, Amount]] = (),
        groups: npt.ArrayLike | None = None,
        units: Any = None,
        max_shapes: int | Sequence[tuple[int, int]] | None = None,
        oversize: Oversize = "raise",
        time: CostModel | None = None,
        batches_per_epoch: int | None = None,
        steps_per_epoch: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_flags(shuffle=shuffle, drop_last=drop_last)
        ranks = AskedRanks(num_replicas, rank)
        if samples_per_step is not None and (window, batches_per_epoch) != (None, None):
            raise OptionError(
                "with samples_per_step a window is one step: leave window out, and state the "
                f"length of an epoch by steps_per_epoch, got {window=}, {batches_per_epoch=}"
            )
        if samples_per_step is None and steps_per_epoch is not None:
            raise OptionError(
                f"{steps_per_epoch=} needs samples_per_step; or use batches_per_epoch"
            )
        per_epoch = optional("batches_per_epoch", batches_per_epoch)
        per_epoch = per_epoch or optional("steps_per_epoch", steps_per_epoch)
        if weights is not None and per_epoch is None:
            raise OptionError(
                "weights= draws without an end, so an epoch has none of its own: pass "
                "batches_per_epoch=, or steps_per_epoch= with samples_per_step"
            )
        self._window = optional("samples_per_step", samples_per_step) or optional("window", window)
        table = SizeTable.of(sizes)
        rules = BatchRules.of(
            cost,
            budget,
            limits=limits,
            size_multiple=size_multiple,
            max_batch_size=max_batch_size,
            batch_size_multiple=batch_size_multiple,
            time=time,
            max_shapes=max_shapes,
        )
        if samples_per_step is not None:
            check_keeps_gradients(cost)
        check_cost(rules, table.values, table.largest)
        order = Order.of(
            table,
            rules,
            oversize,
            apart=samples_per_step is None,
            groups=groups,
            units=units,
            shuffle=shuffle,
            weights=weights,
            seed=natural("seed", seed),
        )
        units_need_steps = order.units is not None and (drop_last or not order.labels.whole)
        if units_need_steps and samples_per_step is None:
            raise OptionError(
                "units need samples_per_step. Without it, pass units=(labels, 'micro_batch'), "
                "which keeps each unit in one micro-batch, and leave drop_last out"
            )
        rules = fitted(rules, table.values, order.skipped)
        self.cost: Any = rules.cost
        self.size_multiple, self.shapes = rules.size_multiple, rules.shapes
        self._ranks, self._max_shapes, self.keeps_units = ranks, max_shapes, order.labels.whole
        self._order = order_identity(order, table.fingerprint)
        self._plan = Plan(
            table,
            rules,
            order,
            Dealing(number=ranks.now()[0], even_sums=samples_per_step is not None),
            window=self._window,
            drop_last=drop_last,
            per_epoch=per_epoch,
        )
        self._begin_at(Cursor(epoch=0))

    def _begin_at(self, place: Cursor, loaded: Mapping[str, Any] | None = None) -> None:
        """Make the next `iter()` begin at a place, which no loop of before moves any more."""
        self._place: Cursor | MicroBatch = place
        self._loaded = loaded  # the state that the place was decoded from
        self._runs: WeakSet[Run[Any]] = WeakSet()  # those that are open
        self._beginning: SamplerRun | None = None  # the run whose `iter(loader)` is under way
        self._present: _Iteration | None = None  # the one that drew a batch, or yielded one, last
        self._length: tuple[Cursor, int] | None = None

    # ------------------------------------------------------------------ the plan

    @property
    def plan(self) -> Plan:
        """The plan of every epoch, for the ranks that there are now.

        Raises:
            OptionError: there were others when this epoch's iteration began; or the window is below
                their number.
        """
        number, before = self.num_replicas, self._plan.ranks.number
        if number == before:
            return self._plan
        if self._present is not None:
            raise OptionError(
                f"the iteration began with num_replicas={before}, but torch.distributed now has "
                f"{number} ranks, which plan other batches: initialise it before the first iter(), "
                "or call set_epoch() afterwards"
            )
        plan = self._plan.changed(number=number, window=self._window)
        if self._loaded is not None:
            self._place = Cursor.decode(self._loaded, self._order, plan)
        self._plan, self._length = plan, None
        return plan

    def __repr__(self) -> str:
        rules, place = self._plan.rules, f"epoch {self.epoch}, rank {self.rank}"
        amount = rules.limits[0].text(rules.budget_bytes)
        samples = self._plan.order.dataset_length
        return f"<MemoryBudgetBatchSampler: {samples:,} samples, at most {amount}; {place}>"

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole epoch on this rank.

        After a loaded position, it is the number of micro-batches that were done plus the number
        that is left. Counting takes O(samples), once for each epoch.

        Raises:
            StateError: a framework that resumes from a checkpoint without a position reads it.
            OptionError: a framework reads it once for all epochs, and their numbers of batches
                differ.
        """
        plan, done = self.plan, self._cursor.done
        alike = plan.per_epoch is not None and not plan.ranks.even_sums
        differ = not alike and (plan.order.shuffle or done > 0)
        Caller.find().check_length(epochs_differ=differ)
        return done + self.batches_left

    @property
    def batches_left(self) -> int:
        """The number of micro-batches that the next `iter()` yields on this rank."""
        plan, cursor, known = self.plan, self._cursor, self._length
        if known is None or known[0] is not cursor:
            known = self._length = cursor, plan.batches_left(cursor)
        return known[1]

    @property
    def steps_left(self) -> int:
        """Optimizer steps that the next `iter()` begins, if `samples_per_step` makes them."""
        return self.plan.windows_left(self._cursor)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` yields."""
        return self._cursor.epoch

    @property
    def sampler(self) -> MemoryBudgetBatchSampler:
        """The sampler itself: frameworks call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` yield this epoch.

        If that is the next epoch anyway, a loaded position is kept, and with `batches_per_epoch`
        or `steps_per_epoch` the order continues. Any other epoch starts a new pass over the data,
        and a mixture starts over: the passes over its sources, and the counting of their shares.
        """
        cursor, epoch = self._cursor, natural("epoch", epoch)
        if epoch != cursor.epoch:
            if self._loaded is not None:
                warn_of_discarded_state(cursor.epoch, epoch, within=cursor.done > 0)
            self._begin_at(Cursor(epoch=epoch))
        else:
            self._begin_at(cursor, self._loaded)

    @property
    def _cursor(self) -> Cursor:
        """The place where the next `iter()` begins."""
        if isinstance(self._place, MicroBatch):
            self._place = self._place.after
        return self._place

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the epoch, from its beginning or from the position of a run.

        Raises:
            UnevenRanksError: the samples cannot be shared so that all ranks have equally many
                batches.
            OptionError: the loader has the sampler as `sampler=`, not as `batch_sampler=`; or a
                framework counts epochs from 0 again.
            ShardedTwiceError: a framework splits the batches of this rank among its processes
                again.
            RankError: sizes, costs, budgets or options differ between the ranks of
                `torch.distributed`, or a rank does not begin within the timeout of the process
                group. They are compared at the first `iter()` in the main thread, if `num_replicas`
                was not given.
        """
        caller = Caller.find()
        caller.check_loader(self.num_replicas)
        if caller.loader is not None:
            self.check_dataset(caller.loader.dataset)
        plan, cursor = self.plan, self._cursor
        at = {name: getattr(cursor, name) for name in PLACE}
        at |= {"per_epoch": plan.per_epoch, "done_of_groups": str(cursor.groups)}
        sources = plan.order.sources
        at["turns"] = fingerprint(repr((cursor.turns, None if sources is None else sources.turns)))
        check_same_on_ranks(self._ranks, lambda: self._order | at | plan.dealing)
        run = self._beginning
        iterator = _Iteration(
            self, plan, cursor, is_tracked=run is not None, reads_ahead=caller.reads_ahead
        )
        if run is not None:
            run.iteration = iterator
        if not self._runs:  # an open run goes on to count
            self._present = iterator
        return iterator

    def tracked(self, loader: DataLoader[Any]) -> SamplerRun:
        """Begin a loop over a loader that knows which batches it has received.

        After each batch, `state_dict()` is the position after that batch, although workers prefetch
        others.

        Args:
            loader: a `DataLoader` with this sampler as its `batch_sampler`.

        Raises:
            OptionError: the loader has another sampler, yields batches out of order, or its data
                set has more or fewer samples than there are sizes.
            SampleError: in the loop, the loader ended before the epoch did.
            StateError: in the loop, another loop over the same persistent workers began.
        """
        is_mine = isinstance(loader, DataLoader) and loader.batch_sampler is self
        if not is_mine or hasattr(loader, "state_dict"):
            raise OptionError(
                f"tracked needs a DataLoader with this batch_sampler, got {type(loader).__name__}; "
                "of a wrapper, such as Fabric's, pass the DataLoader that it was made of; a "
                "StatefulDataLoader saves its position itself"
            )
        if loader.num_workers and not loader.in_order:
            raise OptionError(
                "with in_order=False the loop's position is unknown: pass in_order=True"
            )
        self.check_dataset(loader.dataset)
        return SamplerRun(self, loader)

    @property
    def steps(self) -> Sequence[int]:
        """Numbers of micro-batches of the optimizer steps on this rank, in the present loop.

        The list grows as batches are drawn. A new loop has a new list.
        """
        return () if self._present is None else self._present.steps

    def accumulates(self) -> bool:
        """Whether the first steps of the coming epoch have several micro-batches."""
        plan = self.plan
        first = next(plan.spans(self._cursor), None) if plan.ranks.even_sums else None
        return first is not None and bool((first.block.rounds > 1).any())

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Iterate over every sample inside, without a change for a loop around it: see `predict`.

        Where samples cannot be dealt evenly to the ranks, some come again: see `Dealing.repeats`.

        Raises:
            OptionError: an epoch leaves samples out or repeats them.
        """
        plan = self.plan
        first = next(iter(plan.order.skipped.tolist()), None)
        for name, given, instead in (
            (f"oversize='skip' (at index {first} first)", first is not None, "use 'alone'"),
            ("drop_last", plan.drop_last, "leave it out"),
            ("weights", plan.order.endless, "leave it out"),
            ("batches_per_epoch or steps_per_epoch", plan.per_epoch is not None, "leave it out"),
        ):
            if given:
                raise OptionError(
                    f"{name} drops or repeats samples, but predict needs one output for each "
                    f"sample: {instead}"
                )
        if plan.order.units is not None:
            raise OptionError(
                "predict takes no units, which cannot be split over every number of ranks: leave "
                "units out"
            )
        before = vars(self).copy()
        self._begin_at(Cursor(epoch=self.epoch))
        self._plan = plan.changed(repeats=True)
        try:
            yield
        finally:
            vars(self).update(before)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, a shallow one too, begins where `iter()` would, and has loops of its own.
        begun = {"_place": self._cursor, "_present": None, "_beginning": None}
        return {**vars(self), **begun, "_runs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _runs=WeakSet())

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, in plain JSON types.

        In a loop over `tracked(loader)` it is the position after the last batch that the loop
        received. In any other loop it is the position after the last batch that was drawn.

        Raises:
            StateError: workers of the `DataLoader` prefetch batches, and the loop is not tracked.
        """
        cursor, present = self._cursor, self._present
        if present is not None and not present.is_tracked and not self._runs:
            cursor = present.cursor
            if present.reads_ahead and cursor is not present.began:
                raise StateError(
                    "workers of the DataLoader prefetch batches, so the position of its loop is "
                    "unknown: loop over sampler.tracked(loader), use a StatefulDataLoader, or call "
                    "set_epoch first"
                )
        return self._state_of(cursor)

    def _state_of(self, cursor: Cursor) -> dict[str, Any]:
        plan = self._plan
        cost, replanned = plan.rules.cost, None
        if isinstance(cost, MeasuredCost):
            of_cost = cost_fingerprint(cost, plan.sizes.largest)
            replanned = {"margin": float(cost.margin), "cost": of_cost}
        return cursor.encode(self._order) | {"replanned": replanned}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make every `iter()` start at a saved position, until its epoch ends.

        The number of ranks, the budget, the cost and other options may have changed: every
        remaining sample is still used once. A smaller budget or another number of ranks takes
        effect with the first micro-batch. If the cost is the same, the margin of `replan` is kept.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: the state belongs to another data set or order; the message names
                the difference.
        """
        plan = _with_margin_of(self._plan, state_dict, self._max_shapes)
        cursor = Cursor.decode(state_dict, self._order, plan)
        self._plan, self.shapes = plan, plan.rules.shapes
        self._begin_at(cursor, copy.deepcopy(dict(state_dict)))

    def replan(self) -> float:
        """Plan later windows with the margin that `MeasuredCost.observe` has found.

        It takes effect at the first window from which no rank has drawn a batch; batches that
        workers have prefetched keep their plan. The present epoch may then have more micro-batches
        than its `len` was. A sample that now exceeds the budget gets a micro-batch of its own.

        With `torch.distributed` it is a collective: every rank must call it after the same
        micro-batch, and all ranks continue with the largest margin of any rank. If micro-batches of
        single samples cannot be shared evenly, the iteration raises `UnevenRanksError` on all
        ranks.

        Returns:
            The margin.

        Raises:
            OptionError: the cost is not a `MeasuredCost`; with the margin, the shapes of
                `max_shapes`, which are kept, exceed the budget; or there are several ranks without
                `torch.distributed`.
        """
        used = self.plan.rules.cost
        if not isinstance(used, MeasuredCost):
            raise OptionError(f"replan needs a cost of measure_cost, got {used!r}")
        margin = used.with_observed_margin().margin
        present = self._present
        place = (self._cursor if present is None else present.cursor).place
        ranks = self.num_replicas
        if ranks > 1:
            margin, place = largest_of_all_ranks(ranks, margin, place)
        if margin > used.margin:
            rules = replace(self._plan.uncapped, cost=used.planned_with(margin))
            self._plan = plan = self._plan.changed(rules=rules)
            self._length = None
            if present is not None:
                present.replan(plan, place)
        return margin

    # ------------------------------------------------------------------ what an epoch holds

    def extremes(self) -> dict[str, IntArray]:
        """The micro-batches of the coming epoch that are likeliest to fail: see `warm_up`."""
        return self.plan.extremes(self._cursor)

    def batch_bytes(self, indices: IntArray) -> int:
        """Predicted bytes of a micro-batch of these samples."""
        return self._plan.batch_bytes(indices)

    def report(self) -> PlanReport:
        """Report fill, padding and imbalance of the coming pass; with `weights`, of the epoch.

        Of an epoch that was begun, it is the rest.
        """
        return self.plan.report(self._cursor)

    def check_dataset(self, dataset: Any) -> None:
        """Raise an `OptionError` if a data set has no index, or not one sample for each size."""
        if isinstance(dataset, MapStyle) and self._present is None:  # reads samples: once
            check_indexed(dataset, OptionError)
        sizes = self._plan.order.dataset_length
        if isinstance(dataset, Sized) and len(dataset) != sizes:
            raise OptionError(
                f"the sampler has {sizes:,} sizes, but the data set has {len(dataset):,} samples: "
                "pass one size for each sample"
            )


def best_shapes(
    sizes: npt.ArrayLike,
    cost: CostModel,
    budget: MemoryBudget | int | str,
    number: int,
    *,
    max_batch_size: int | None = None,
    size_multiple: int = 1,
) -> list[tuple[int, int]]:
    """Choose the shapes with which these sizes need the fewest padded batches.

    `MemoryBudgetBatchSampler(max_shapes=number)` chooses the same shapes. A stream needs a list of
    shapes: choose them for the sizes of some of its samples, the longest included.

    Args:
        sizes: sizes of samples, non-negative ints, shape `(N,)`.
        cost: bytes of a micro-batch, as in `MemoryBudgetBatchSampler`.
        budget: budget of a micro-batch, as in `MemoryBudgetBatchSampler`.
        number: largest number of shapes.
        max_batch_size: largest number of rows of a shape; never more than N.
        size_multiple: lengths are multiples of it.

    Returns:
        Pairs (n, L) of rows and length, the longest first. O(N + V²·number) for V ≤ 1,024 different
        capacities; if there are more, some are left out.

    Raises:
        SizesError: sizes of a wrong shape, type or sign.
        CostError: a cost that is not vectorised, or whose capacity does not fit the budget.
        BudgetError: the budget does not limit the device.
        OversizeError: a sample is over the budget.
        OptionError: an invalid option, a packed cost, or sizes of several axes.

    >>> from torchbudget import PaddedCost
    >>> best_shapes([10, 20, 30, 90, 100], PaddedCost(unit_bytes=1), 120, 2)
    [(1, 100), (4, 30)]
    """
    sampler = MemoryBudgetBatchSampler(
        sizes,
        cost,
        budget,
        max_batch_size=max_batch_size,
        size_multiple=size_multiple,
        max_shapes=number,
        num_replicas=1,
        rank=0,
    )
    return list(sampler.shapes)


class _Iteration(Iterator[list[int]]):
    """One iteration of a sampler: the micro-batches of an epoch on one rank, as lists of indices.

    Args:
        sampler: the sampler that is iterated.
        plan: plan of the epoch.
        began: the place where the iteration begins.
        is_tracked: a run takes a record for each batch.
        reads_ahead: the workers of a plain `DataLoader` iterate.

    Attributes:
        steps: micro-batches of each optimizer step of the windows that were begun.
        queue: records of batches on their way to the run.
    """

    def __init__(
        self,
        sampler: MemoryBudgetBatchSampler,
        plan: Plan,
        began: Cursor,
        *,
        is_tracked: bool,
        reads_ahead: bool,
    ) -> None:
        self._sampler, self._rank = sampler, sampler.rank
        self._runs = sampler._runs
        self._plan, self.began = plan, began
        self.is_tracked, self.reads_ahead = is_tracked, reads_ahead
        self.steps = array("q")
        self.queue: deque[MicroBatch] = deque()
        self._draws = plan.draws(began, rank=self._rank)
        self._window: Window | None = None  # of the batch that was drawn last
        self._turn = 0  # its round

    @property
    def cursor(self) -> Cursor:
        """The place where the epoch stands after the last batch that was drawn."""
        return self.began if self._window is None else MicroBatch(self._window, self._turn).after

    def __next__(self) -> list[int]:
        try:
            window, self._turn, indices = next(self._draws)
        except StopIteration:
            if self._window is None:  # nothing is left of the epoch
                self._end(self._plan.next_epoch(self.began))
                if self._sampler._present is self:
                    self._sampler._present = None
            raise
        except Exception:  # a generator that raised is over: the next call raises again
            self._draws = self._plan.draws(self.cursor, rank=self._rank)
            raise
        if window is not self._window:
            self._window = window
            self.steps.extend(window.steps)
        if self._sampler._present is not self and self._counts():
            self._sampler._present = self
        if self.is_tracked:
            self.queue.append(MicroBatch(window, self._turn))
        elif window.ends_epoch and self._turn == window.rounds[-1]:
            self._end(self.cursor)
        return indices

    def _counts(self) -> bool:
        """Whether no run is open, and no other position was chosen since this began."""
        return not self._runs and self._sampler._runs is self._runs

    def _end(self, after: Cursor) -> None:
        """The epoch's last batch was drawn: the next epoch follows, unless a run is open."""
        if not self.is_tracked and self._counts():
            self._sampler._place, self._sampler._loaded = after, None

    def replan(self, plan: Plan, place: tuple[int, int, int]) -> None:
        """Go on with another plan from the first window at or after a place."""
        self._draws = self._replanned(self._draws, plan, place)
        self._plan = plan

    def _replanned(
        self, draws: Iterator[Draw], plan: Plan, place: tuple[int, int, int]
    ) -> Iterator[Draw]:
        for window, turn, indices in draws:
            if window.place >= place:
                yield from plan.draws(self.cursor, rank=self._rank)
                return
            yield window, turn, indices


class SamplerRun(Run["Cursor | MicroBatch"]):
    """A loop over a loader with a `MemoryBudgetBatchSampler`: see `Run`.

    Attributes:
        iteration: iteration of the sampler, whose batches come.
    """

    iteration: _Iteration

    def __init__(self, sampler: MemoryBudgetBatchSampler, loader: DataLoader[Any]) -> None:
        plan = sampler.plan
        self._sampler = sampler
        self._sizes = SizeCheck(plan.rules, plan.sizes.values)
        self._delivered = 0
        sampler._beginning = self
        try:
            super().__init__(sampler._runs, loader)
        finally:
            sampler._beginning = None

    def _began(self) -> Cursor:
        if not hasattr(self, "iteration"):
            raise StateError(
                "iter(loader) began no iteration of this sampler: an __iter__ of your own must "
                "call super().__iter__() at once; a generator calls it only with its first batch"
            )
        return self.iteration.began

    def _take(self, came: Any) -> tuple[MicroBatch, Any]:
        queue = self.iteration.queue
        if not queue:
            raise StateError(
                f"the loader returned batch {self._delivered}, which its sampler did not draw: "
                "another loop runs over the same workers, or the loader makes batches itself"
            )
        record = queue.popleft()
        self._delivered += 1
        self._sizes.compare(came, record.padded_size, record.indices)
        return record, came

    def _end(self) -> Cursor:
        place, began = self.last, self.iteration.began
        plan = self._sampler._plan
        after = place.after if isinstance(place, MicroBatch) else plan.next_epoch(place)
        if after.epoch == began.epoch or (place is began and next(self.iteration, None)):
            raise SampleError(
                f"the loader ended after {self._delivered} batches, before the end of epoch "
                f"{began.epoch}: its data set or its collate_fn raised StopIteration, as next() "
                "does at the end of an iterator; call next(iterator, None)"
            )
        return after

    def _state(self, place: Cursor | MicroBatch) -> dict[str, Any]:
        cursor = place.after if isinstance(place, MicroBatch) else place
        return self._sampler._state_of(cursor)

    def _move_to(self, place: Cursor | MicroBatch) -> None:
        sampler = self._sampler
        if sampler._runs is self._runs:
            sampler._place, sampler._present, sampler._loaded = place, self.iteration, None


def _with_margin_of(plan: Plan, state: Any, max_shapes: Any) -> Plan:
    """The plan with the margin that a saved one had gone on with, if it is of the same cost.

    A malformed state changes nothing here: decoding its cursor refuses it.
    """
    cost = plan.rules.cost
    match state:
        case {"replanned": {"margin": float(margin), "cost": saved}} if (
            isinstance(cost, MeasuredCost)
            and cost.margin < margin <= MOST_MARGIN
            and cost_fingerprint(cost.with_margin(margin), plan.sizes.largest) == saved
        ):
            rules = replace(plan.uncapped, cost=cost.planned_with(margin), max_shapes=max_shapes)
            rules = fitted(rules, plan.sizes.values, plan.order.skipped)
            return plan.changed(rules=rules)
    return plan
