"""Samplers that are stopped and started again: on other ranks, under other budgets.

What must hold over the whole chain of starts: each index comes in each epoch as often as it is to
come; all ranks have as many batches, and save the same state; none is over the budget of its start;
where a start is on the ranks and under the budget of the one before, it yields what that one would
have yielded; `len` is what was done and what comes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.fuzzing.drawing import drawn
from tests.support.oracles import stated_bytes
from tests.support.refusals import Refused, accepted, reasons_of
from tests.support.resuming import as_json
from tests.support.sampler_cases import cases, drawn_once, samplers, without_draws
from tests.support.samplers import Numbers, as_list, counted

EPOCHS = 2
STARTS = 12  # after which each start is the last of its epoch


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """One sampler, two epochs, and as many starts as it takes."""
    oversize = chance.choice(["raise", "raise", "raise", "skip", "alone"])
    most, most_ranks = chance.choice([12, 12, 24, 24, 48, 150]), chance.choice([1, 2, 3, 8])
    strategy = cases(most_ranks=most_ranks, fits=oversize == "raise", most=most)
    sizes, cost, budget, ranks, options = drawn(strategy, chance)
    if oversize != "raise":
        options = without_draws(options) | {"drop_last": False, "oversize": oversize}
    chain = Chain(chance, sizes, cost, budget, ranks, options)
    while chain.epoch < EPOCHS:
        chain.start()
    for epoch in range(EPOCHS):
        assert chain.came[epoch] == chain.expected(epoch), f"the samples of epoch {epoch}"
    return chain.told


class Chain:
    """The starts of one sampler; what came before the last save counts."""

    def __init__(
        self, chance: random.Random, sizes: Any, cost: Any, budget: int, ranks: int, options: Any
    ) -> None:
        self.chance, self.sizes, self.cost, self.options = chance, sizes, cost, options
        multiple = options["size_multiple"]
        self.rounded = -(-sizes.astype(np.int64) // multiple) * multiple
        alone = [stated_bytes(cost, self.rounded[one : one + 1]) for one in range(len(sizes))]
        self.over = {one for one, bytes_ in enumerate(alone) if bytes_ > budget}
        self.skipped = self.over if options.get("oversize") == "skip" else set()
        if len(self.skipped) == len(sizes):
            raise Refused("no sample fits the budget")
        self.first = min(ranks, len(sizes) - len(self.skipped)), budget
        self.now = self.first
        self.saved: Any = None
        self.done = 0  # batches of a rank in this epoch, until the last save
        self.following: list[list[Any]] | None = None  # what each rank yields if nothing changes
        self.came = [Counter[int]() for _ in range(EPOCHS)]
        self.told: Counter[str] = Counter()

    @property
    def epoch(self) -> int:
        """That the next start is in."""
        return 0 if self.saved is None else int(self.saved["epoch"])

    # ------------------------------------------------------------------ the oracle

    def expected(self, epoch: int) -> Counter[int]:
        """How often each index comes in an epoch, however it is dealt."""
        options = {
            name: value
            for name, value in self.options.items()
            if name not in ("batches_per_epoch", "micro_batches_per_step")
        }
        n, kept = len(self.sizes), sorted(set(range(len(self.sizes))) - self.skipped)
        if drawn_once(options) and not options["drop_last"] and "num_samples" not in options:
            return Counter(kept)
        ranks = 1
        if options["drop_last"]:  # of each rank, and given numbers change what is dropped
            ranks, options = self.first[0], self.options
        those = samplers(self.sizes, self.cost, self.first[1], ranks, **options)
        for one in those:
            one.set_epoch(epoch)
        counts = counted(batch for one in those for batch in one)
        total = options.get("num_samples", n)
        if not options["drop_last"]:
            assert counts.total() == total
        if drawn_once(options):
            least = 0 if options["drop_last"] else total // n
            assert all(least <= counts[one] <= -(-total // n) for one in range(n))
        return counts

    # ------------------------------------------------------------------ one start

    def start(self) -> None:
        """Some batches on all ranks; then they are saved, or killed."""
        self.told["starts"] += 1
        ranks, budget = self.now
        those = samplers(self.sizes, self.cost, budget, ranks, **self.options)
        try:
            loops, left = accepted(
                lambda: self.begin(those),
                reasons_of(self.sizes, self.cost, budget, ranks, self.options),
            )
        except Refused as refused:
            if self.now == self.first or self.told["refused starts"] > STARTS:
                raise
            self.told[f"refused starts: {refused}"] += 1
            self.told["refused starts"] += 1
            self.now, self.following = self.first, None
            return
        stays = self.told["starts"] > STARTS or self.chance.random() < 0.4
        number = left if stays else self.chance.randint(0, left)
        found = [list(islice(loop, number)) for loop in loops]
        assert {len(batches) for batches in found} == {number}, "numbers of batches of the ranks"
        if number == left:
            assert all(next(loop, None) is None for loop in loops), "more batches than batches_left"
        self.check_batches([batch for batches in found for batch in batches], budget)
        if self.following is not None:
            rest = [batches[:number] for batches in self.following]
            assert found == rest, "resumed is not as uninterrupted"
        if self.told["starts"] <= STARTS and self.chance.random() < 0.2:
            self.told["killed"] += 1
        else:
            self.save(those, loops, found, ended=number == left)

    def begin(self, those: list[Any]) -> tuple[list[Iterator[Any]], int]:
        """The loops of the ranks, and how many batches come."""
        if self.saved is not None:
            for one in those:
                one.load_state_dict(as_json(self.saved))
        self.kind = self.chance.choice(["plain", "tracked", "ahead"])
        loops = [iter(self.loop(one)) for one in those]
        one = self.chance.choice(those)
        left = int(one.batches_left)
        assert len(one) == self.done + left, "len"
        assert sum(self.chance.choice(those).steps) == left, "steps"
        return loops, left

    def loop(self, sampler: Any) -> Any:
        if self.kind != "tracked":
            return sampler
        numbers = Numbers(len(self.sizes))
        return sampler.tracked(DataLoader(numbers, batch_sampler=sampler, collate_fn=as_list))

    def save(self, those: list[Any], loops: list[Any], found: list[Any], *, ended: bool) -> None:
        """Every rank saves, some after they have read ahead."""
        number, epoch, ahead = len(found[0]), self.epoch, []
        counts = self.kind == "ahead" and not ended
        if counts:
            ahead = [list(islice(loop, self.chance.randint(0, 3))) for loop in loops]
        states = [one.state_dict(**{"batches_done": number} if counts else {}) for one in those]
        assert all(as_json(state) == states[0] for state in states), "states of the ranks"
        bits = states[0]["stop"] - states[0]["start"]
        assert len(json.dumps(states[0])) <= 1000 + 2 * bits // 6 + 8, "a large state"
        assert states[0]["epoch"] == epoch + ended, "the epoch of the state"
        self.came[epoch].update(counted(batch for batches in found for batch in batches))
        self.saved, self.following = states[0], None
        self.done = 0 if ended else self.done + number
        changes = self.choose()
        if not changes and not ended:
            begun = ahead or [[]] * len(loops)
            self.following = [[*first, *rest] for first, rest in zip(begun, loops, strict=True)]

    def check_batches(self, batches: list[Any], budget: int) -> None:
        """None is empty, over a budget, or of too many samples."""
        limits = [(self.cost, budget)]
        if "host_batch_bytes" in self.options:
            limits.append(self.options["host_batch_bytes"])
        for batch in batches:
            assert batch, "an empty batch"
            assert len(batch) <= self.options.get("max_batch_size", len(batch)), "max_batch_size"
            if self.options.get("oversize") == "alone" and len(batch) == 1:
                continue
            for cost, limit in limits:
                bytes_ = stated_bytes(cost, self.rounded[batch])
                assert bytes_ <= limit * (1 + 1e-12), f"{bytes_} bytes of {limit}"
        self.told["batches"] += len(batches)

    def choose(self) -> bool:
        """Choose ranks and a budget for the next start; whether they differ from these."""
        if self.chance.random() < 0.4 or self.options["drop_last"]:
            return False
        ranks, budget = self.chance.choice([1, 1, 2, 3, 4, 8]), self.first[1]
        if not self.skipped:
            budget *= self.chance.choice([1, 1, 2, 3])
        left = self.options.get("num_samples", len(self.sizes) - len(self.skipped))
        left -= self.came[self.epoch].total() if self.epoch < EPOCHS else 0
        each = self.options.get("samples_per_step", left)
        each //= self.options.get("micro_batches_per_step", 1)
        if ranks > min(left, self.options.get("window", left), each):
            ranks = 1
        before, self.now = self.now, (ranks, budget)
        return self.now != before
