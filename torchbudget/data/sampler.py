"""`MemoryBudgetBatchSampler`: micro-batches that fit the budget, for a stock `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy.typing as npt
from torch.utils.data import DataLoader

from torchbudget.budget import MemoryBudget
from torchbudget.checks import check_flags, natural, optional
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.framework_loader import check_framework_loader
from torchbudget.data.iterations import Iterations
from torchbudget.data.loaded_state import warn_of_discarded_state, warn_of_other_numbers
from torchbudget.data.padded_sizes import PlannedLoop
from torchbudget.data.planned_sampler import PlannedSampler, window_of
from torchbudget.data.same_on_ranks import agreed, check_same_on_ranks
from torchbudget.data.sampler_loader import (
    WorkersLoop,
    check_end,
    check_loader,
    check_not_batched_again,
)
from torchbudget.distributed import AskedRanks, largest_of_all_ranks
from torchbudget.errors import OptionError, StateError
from torchbudget.plan.check_cost import check_cost
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.fingerprint import order_identity
from torchbudget.plan.iterator import PlanIterator
from torchbudget.plan.numbers import Numbers
from torchbudget.plan.order import Order, weights_of
from torchbudget.plan.oversize import Oversize, skipped_samples
from torchbudget.plan.plan import Plan
from torchbudget.plan.replanned import margins_of, with_margin_of
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.step_source import StepSource
from torchbudget.protocols import ResumableSource
from torchbudget.units import Amount


class MemoryBudgetBatchSampler(PlannedSampler, ResumableSource, StepSource):
    """Batches of ragged samples that fit a budget of bytes and fill it.

    Windows of samples are chosen uniformly at random, sorted by size and cut into micro-batches,
    each the longest run whose predicted cost is within the budget. Pass it to a `DataLoader` as
    `batch_sampler`.

    Args:
        sizes: what makes each sample ragged: non-negative ints, shape `(N,)` or `(N, d)`, one for
            each sample of the data set: `tracked`, `fit` and `predict` compare the two numbers, a
            plain loop over the loader cannot. An array of more than 32 MiB in its smallest integer
            type (a memory map too) is not copied: leave it as it is. `state_dict` compares it, in
            O(samples) once a window, unless it may not be written to.
        cost: bytes of a micro-batch, such as `PaddedCost` or `PackedCost` (whose batches are
            packed: the sum of their samples' costs fits).
        budget: a `MemoryBudget`, or the device's bytes as an int or text such as `"8GiB"`.
        samples_per_step: samples in one optimizer step, over all ranks. A window is then exactly
            one step (the last one may be smaller, or larger by what cannot be dealt evenly alone),
            and ranks are balanced by what they do in a step.
        window: samples that are chosen, sorted and cut together, over all ranks. Default:
            `samples_per_step`, else 4,096 for each rank, or as many as fill 32 micro-batches on
            each where that is more; but at most a quarter of a shuffled epoch, so that epochs
            differ, unless that is less than 8 micro-batches on each. A larger one pads less, and
            makes the samples of a micro-batch more alike.
        shuffle: take samples at random. Otherwise windows follow the data set's order and their
            micro-batches come longest first.
        seed: of all randomness. The order is a function of (seed, epoch, position) alone.
        drop_last: drop the incomplete last window if `samples_per_step` is set, else the last
            micro-batch that could still have taken a sample.
        max_batch_size: samples in a micro-batch at the most.
        batch_size_multiple: numbers of samples are multiples of it wherever that many fit, are
            left, and need no splitting to give every rank as many micro-batches.
        size_multiple: padded sizes are rounded up to a multiple of it (the collate's must be the
            same, of another library too; `tracked` warns).
        balance: the cost model whose sums are made equal over the ranks of a step, such as the
            measured time of a step (`balance=cost.time`). Default: the cost itself.
        oversize: what becomes of a sample that alone is over the budget: `"raise"`, `"skip"`
            (counted, logged once) or `"alone"` (a micro-batch of its own, over the budget).
        replacement: choose each position's sample independently.
        weights: relative frequencies, shape `(N,)`, as `torch.utils.data.WeightedRandomSampler`'s;
            copied.
        num_samples: samples in an epoch. Default: all. Without replacement, more than all are
            several passes.
        batches_per_epoch: micro-batches of every epoch on each rank, for trainers that read `len`
            once: by splitting, spread over the windows. `"auto"`: a number that hardly any epoch
            exceeds. One that does raises before its first batch.
        host_batch_bytes: the cost of a micro-batch on the host, and what it may not exceed, such as
            `(PaddedCost(unit_bytes=16), "64MiB")` for two fields of int64. See `loader_options`.
        micro_batches_per_step: micro-batches of every full step on each rank, for trainers that
            accumulate a constant number, likewise; the last step, where it has fewer samples, has
            at most as many.
        num_replicas: ranks that share each window. Default: those of `torch.distributed`, asked
            whenever they are needed, where it is initialised, else 1.
        rank: of this process. Default: that of `torch.distributed`, else 0.
        agree: take the smallest budget of all ranks of `torch.distributed`, and rank 0's `cost` and
            `balance`: a collective, here. `cost` is then what to observe steps by. Otherwise ranks
            that differ raise at the first loop.

    Attributes:
        cost: that batches are planned by.

    Raises:
        SizesError: sizes of a wrong shape, type or sign.
        CostError: a cost that is no vectorised one, or whose capacity does not fit the budget.
        BudgetError: the budget does not limit the device.
        OversizeError: a sample is over the budget and `oversize="raise"`.
        OptionError: an option, or a pair of options, that cannot hold.
        UnevenRanksError: fewer samples than ranks.

    Planning takes O(samples of a window) before each window's first micro-batch and keeps nothing
    per sample beside `sizes`. `len` counts the whole epoch once. With `batches_per_epoch` or
    `micro_batches_per_step` each epoch is counted before its first batch, O(samples), unless it
    goes on from a state; for `"auto"` those of 30 million samples, 10 to 100, are counted once.

    After an epoch's last micro-batch the next epoch follows; `set_epoch` chooses one.

    >>> from torchbudget import MemoryBudgetBatchSampler, PaddedCost
    >>> tokens = PaddedCost(unit_bytes=1)  # a budget in tokens, padding included
    >>> sampler = MemoryBudgetBatchSampler([3, 9, 4, 8, 1], tokens, 18, shuffle=False)
    >>> list(sampler)
    [[1, 3], [2, 0, 4]]
    """

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
        max_batch_size: int | None = None,
        batch_size_multiple: int = 1,
        size_multiple: int = 1,
        balance: CostModel | None = None,
        oversize: Oversize = "raise",
        replacement: bool = False,
        weights: npt.ArrayLike | None = None,
        num_samples: int | None = None,
        batches_per_epoch: int | Literal["auto"] | None = None,
        micro_batches_per_step: int | None = None,
        host_batch_bytes: tuple[CostModel, Amount] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        agree: bool = False,
    ) -> None:
        check_flags(shuffle=shuffle, drop_last=drop_last, replacement=replacement, agree=agree)
        ranks, length = AskedRanks(num_replicas, rank), window_of(samples_per_step, window)
        given = cost
        if agree:
            cost, budget, balance = agreed(cost, budget, balance)
        table = SizeTable.of(sizes)
        rules = BatchRules.of(
            cost,
            budget,
            size_multiple=size_multiple,
            max_batch_size=max_batch_size,
            batch_size_multiple=batch_size_multiple,
            balance=balance,
            host_batch_bytes=host_batch_bytes,
        )
        check_cost(rules, table.values, table.largest)
        order = Order(
            dataset_length=len(table),
            skipped=skipped_samples(table, rules, oversize),
            num_samples=optional("num_samples", num_samples),
            shuffle=shuffle,
            replacement=replacement,
            weights=weights_of(weights),
            seed=natural("seed", seed),
        )
        plan = Plan(
            table,
            rules,
            order,
            Ranks(number=ranks.now()[0], even_sums=samples_per_step is not None),
            window=length,
            drop_last=drop_last,
            numbers=Numbers.of(
                batches_per_epoch, micro_batches_per_step, samples_per_step=samples_per_step
            ),
        )
        identity = order_identity(order, table.fingerprint)
        super().__init__(plan, ranks, window=length, order=identity)
        self.cost, self._given = cost, given
        self._is_loaded = False  # a state, and no iteration has begun since
        self._beginning: PlannedLoop | None = None  # the tracked loop that begins now

    @property
    def sampler(self) -> MemoryBudgetBatchSampler:
        """Itself: frameworks call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` yield this epoch from its beginning.

        If that is the next epoch anyway, a loaded position stays.
        """
        epoch = natural("epoch", epoch)
        if epoch != self.epoch:
            if self._is_loaded:
                warn_of_discarded_state(self.epoch, epoch, within=bool(self._cursor.stop))
            self._cursor = Cursor(epoch=epoch)
        self._iterations, self._is_loaded = Iterations(self._iterations.begun), False

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the epoch from its beginning, or from the loaded position.

        Raises:
            UnevenRanksError: the samples cannot be dealt evenly to the ranks.
            OptionError: the loader has it as `sampler=`, not as `batch_sampler=`; the epoch needs
                more micro-batches than it is to have; or a framework has read `len` once, and this
                epoch has more, or counts epochs anew.
            ShardedTwiceError: a framework deals the batches of this rank to its processes again.
            RankError: ranks of `torch.distributed` plan by other sizes, costs, budgets or options,
                or one does not begin within the timeout of the process group; at the first `iter()`
                in the main thread, where `num_replicas` was not given.
        """
        check_not_batched_again()
        check_framework_loader(self.num_replicas)
        plan = self.plan
        check_same_on_ranks(self._ranks, lambda: self._order | plan.dealing | self._cursor.position)
        self._read_once.check(self.epoch, self.__len__)
        if self._cursor.is_uncounted:
            warn_of_other_numbers(plan.numbers, self._cursor)
        self._is_loaded = False
        iterator = PlanIterator(
            plan,
            self._cursor,
            rank=self.rank,
            when_asked=self._go_on,
            when_finished=self._finish,
        )
        shuffled = plan.order.shuffle
        self._iterations.begin(iterator, WorkersLoop.of_caller(), shuffled=shuffled)
        if self._beginning is not None:
            self._beginning.note(iterator)
        return iterator

    @property
    def iterations(self) -> int:
        """How often `iter()` was called, up to the iteration that was asked for a batch last."""
        return self._iterations.number

    @property
    def steps(self) -> Iterator[int]:
        """How many micro-batches each optimizer step takes on this rank.

        Of the epoch of the last `iter()`, or of the one that was asked for a batch since, from
        where it began; before the first `iter()`, and after `set_epoch`, of the coming one. Steps
        already yielded keep their plan; later ones are planned lazily.
        """
        iterator = self._iterations.present
        return self.plan.steps(self._cursor) if iterator is None else iterator.steps()

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a loader with this batch sampler, and count which of them came.

        After each of them `state_dict()` is the position after it, although workers read ahead.

        Args:
            loader: a `DataLoader` with this sampler as its `batch_sampler`.

        Raises:
            OptionError: it is another loader, yields batches out of their order, or its data set
                has not one sample for each size.
            SampleError: it ended before the epoch did.
        """
        check_loader(loader, self)
        batches: Iterator[Any] = self._track(loader)
        next(batches)  # up to where the loop begins
        return batches

    def _track(self, loader: DataLoader[Any]) -> Iterator[Any]:
        loop = self._beginning = PlannedLoop(self.plan)
        try:
            batches = iter(loader)
        finally:
            self._beginning = None
        iterator = self._iterations.present
        found = None if iterator is None else self._iterations.find(iterator)
        if iterator is None or found is None:
            raise StateError("the loader began no iteration of this sampler")
        found.came, found.is_open, done = 0, True, 0
        try:
            yield None
            for batch in batches:
                done += 1
                loop.compare(batch)
                found.came = done
                self._go_on(iterator)  # also after another loop inside this one
                given = [batch]
                del batch  # nothing keeps it here while the next one is made
                yield given.pop()
            check_end(iterator, done)
            loop.end()
        finally:
            found.is_open = False
            if self._iterations.present is iterator:
                # Where it was broken off it may have been read to its end, ahead of the loop.
                self._cursor = iterator.coming(done)

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """The position in the epoch, in plain JSON types.

        Args:
            batches_done: of the current loop: a plain `DataLoader`'s workers read ahead of it, so
                only the loop knows. Default: those that came in `tracked(loader)`, else those
                yielded, without workers or in a `StatefulDataLoader`.

        Raises:
            OptionError: `batches_done` is more than were yielded.
            StateError: another loop began within a tracked one, or workers read ahead of the loop.
            SizesError: the array of sizes was changed in place.
        """
        plan, cursor, iterator = self.plan, self._cursor, self._iterations.present
        if iterator is not None:
            given = None if batches_done is None else natural("batches_done", batches_done)
            plan, cursor = iterator.after(self._iterations.came() if given is None else given)
        elif batches_done:
            raise OptionError(f"batches_done={batches_done}, but no batch was yielded yet")
        plan.sizes.check_unchanged(when=(cursor.epoch, cursor.start))
        state = cursor.encode(plan.left_of(cursor), self._order, plan)
        return state | {"margins": margins_of(plan, self.plan)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make every `iter()` start at a saved position, until its epoch ends.

        The number of ranks, the budget, the cost and the other rules may differ from those it was
        saved under: every remaining sample comes once. A smaller budget or another number of ranks
        takes effect with the first micro-batch. Of the same cost, `replan`'s margin goes on.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: it is of another data set or order; the message names what differs.
        """
        self._load(state_dict, with_margin_of(self.plan, state_dict))
        self._iterations, self._is_loaded = Iterations(self._iterations.begun), True

    def replan(self) -> float:
        """Plan later windows with the margin that `MeasuredCost.observe` has found.

        The first window, and those of which a micro-batch was yielded, keep their plan; so does
        what a `DataLoader`'s workers have prefetched. An epoch that is being read may end with more
        micro-batches than its `len` was: `batches_per_epoch` holds again from the next one on. A
        sample over the budget now is a micro-batch of its own.

        With `torch.distributed` every rank must call it after the same micro-batch: it is a
        collective, and all ranks go on with the largest margin of any, from the same window on. If
        the micro-batches of single samples cannot be dealt evenly to the ranks, the iteration
        raises `UnevenRanksError` on all of them; where a later step needs more micro-batches than
        `micro_batches_per_step`, an `OptionError`.

        Returns:
            The margin.

        Raises:
            OptionError: the cost is not a measured one; or there are several ranks, and
                `torch.distributed` does not join them.
        """
        used = self.plan.rules.cost
        if not isinstance(used, MeasuredCost):
            raise OptionError(f"only a measured cost is corrected, this is {used!r}")
        given = self._given
        lost = given is not self.cost and isinstance(given, MeasuredCost) and given.was_observed
        # Observations are shared with the cost that was agreed on.
        margin = used.with_observed_margin().margin
        iterator = self._iterations.present
        after = 0 if iterator is None else iterator.windows_begun
        ranks = self.num_replicas
        if ranks > 1:
            margin, after, lost = largest_of_all_ranks(ranks, margin, after, lost=lost)
        if lost:
            raise OptionError(
                "steps were observed by the cost that was given, but ranks agreed on another one: "
                "call observe of sampler.cost"
            )
        if margin <= used.margin:
            return used.margin
        self._cursor = self._cursor.dealt_anew(self.plan.left_of(self._cursor))
        self._plan = self._plan.with_cost(used.planned_with(margin))
        if iterator is not None:
            iterator.replan(self._plan, after=after)
            if iterator.began.epoch == self.epoch:
                warn_of_other_numbers(self._plan.numbers, Cursor(epoch=self.epoch))
        return margin

    def _go_on(self, iterator: PlanIterator) -> None:
        if self._iterations.goes_on(iterator):
            self._cursor = iterator.coming()

    def _finish(self, iterator: PlanIterator) -> None:
        if self._iterations.find(iterator) is not None:  # the next epoch follows
            self._cursor = Cursor(epoch=iterator.began.epoch + 1)
