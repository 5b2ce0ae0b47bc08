"""Samplers that are stopped and started again: on other ranks, under other budgets.

What must hold over the whole chain of starts: each index comes in each epoch as often as it is to
come, and in epochs of a given length as often as any other, within one; all ranks have as many
batches, and save the same state; none is over the budget of its start; where a start is on the
ranks and under the budget of the one before, it yields what that one would have yielded; `len` is
what was done and what comes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader

from tests.fuzzing.faults import drawn
from tests.support.oracles import bytes_of
from tests.support.refusals import Refused, accepted, reasons_of
from tests.support.resuming import as_json
from tests.support.sampler_cases import (
    cases,
    check_batch,
    check_shapes,
    check_state_size,
    samplers,
    sharing_ranks,
)
from tests.support.samplers import counted
from torchbudget.plan.cursor import PART

EPOCHS = 2
STARTS = 12  # after which each start is the last of its epoch


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """One sampler, two epochs, and as many starts as it takes."""
    oversize = chance.choice(["raise", "raise", "raise", "skip", "alone"])
    most, most_ranks = chance.choice([12, 12, 24, 24, 48, 150]), chance.choice([1, 2, 3, 8])
    strategy = cases(most_ranks=most_ranks, fits=oversize == "raise", most=most)
    sizes, cost, budget, ranks, options = drawn(strategy, chance)
    if oversize != "raise":
        options = options | {"drop_last": False, "oversize": oversize}
        if oversize == "alone":
            options.pop("max_shapes", None)
    chain = Chain(chance, sizes, cost, budget, ranks, options)
    with patch("torchbudget.plan.cursor.PART", chance.choice([1, 5, PART])):
        while chain.epoch < EPOCHS:
            chain.start()
    chain.check_samples()
    return chain.told


class Chain:
    """The starts of one sampler; what came before the last save counts."""

    def __init__(
        self, chance: random.Random, sizes: Any, cost: Any, budget: int, ranks: int, options: Any
    ) -> None:
        self.chance, self.sizes, self.cost, self.options = chance, sizes, cost, options
        self.kept, multiple = set(range(len(sizes))), options["size_multiple"]
        if options.get("oversize") == "skip":
            self.kept = {n for n in self.kept if bytes_of(sizes, cost, [n], multiple) <= budget}
        if not self.kept:
            raise Refused("no sample fits the budget")
        self.first = min(ranks, len(self.kept)), budget
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

    def check_samples(self) -> None:
        """Each index has come as often as it is to come, however it was dealt."""
        for counts in self.came:
            assert set(counts) <= self.kept, "samples that are skipped"
        if "batches_per_epoch" not in self.options:
            for epoch, counts in enumerate(self.came):
                assert counts == self.expected(epoch), f"the samples of epoch {epoch}"
        elif "weights" not in self.options and not self.options["drop_last"]:
            total = sum(self.came, Counter[int]())
            numbers = {total[one] for one in self.kept}
            assert max(numbers) - min(numbers) <= 1, "the samples of passes"

    def expected(self, epoch: int) -> Counter[int]:
        """How often each index comes in an epoch that is one pass."""
        if not self.options["drop_last"]:
            return Counter(self.kept)
        those = samplers(self.sizes, self.cost, self.first[1], self.first[0], **self.options)
        for one in those:
            one.set_epoch(epoch)
        counts = counted(batch for one in those for batch in one)
        assert set(counts.values()) == {1}, "a sample twice"
        return counts

    def drawn_options(self) -> dict[str, Any]:
        """The options with the labels of the samples that are drawn."""
        if len(self.kept) == len(self.sizes):
            return self.options
        kept, labels = sorted(self.kept), {"groups", "units"} & {*self.options}
        return self.options | {name: self.options[name][kept] for name in labels}

    # ------------------------------------------------------------------ one start

    def start(self) -> None:
        """Some batches on all ranks; then they are saved, or killed."""
        self.told["starts"] += 1
        ranks, budget = self.now
        those = samplers(self.sizes, self.cost, budget, ranks, **self.options)
        reasons = reasons_of(self.sizes, self.cost, budget, ranks, self.drawn_options())
        # Ranks that take over may find too few samples for them.
        reasons |= {"too few for": ranks > 1 and self.saved is not None}
        try:
            loops, found, left = accepted(lambda: self.draw(those), reasons)
        except Refused as refused:
            if ranks == 1 or self.options["drop_last"]:
                raise
            self.told[f"refused starts: {refused}"] += 1
            self.now, self.following = (1, self.first[1]), None
            return
        number = len(found[0])
        assert {len(batches) for batches in found} == {number}, "numbers of batches of the ranks"
        for batch in (batch for batches in found for batch in batches):
            check_batch(self.sizes[batch], self.cost, budget, self.options)
            self.told["batches"] += 1
        if "max_shapes" in self.options:
            check_shapes(those[0], found, self.sizes)
        if self.following is not None:
            rest = [batches[:number] for batches in self.following]
            assert found == rest, "resumed is not as uninterrupted"
        if self.told["starts"] <= STARTS and self.chance.random() < 0.2:
            self.told["killed"] += 1
        else:
            try:
                accepted(lambda: self.save(those, loops, found, ended=number == left), reasons)
            except Refused:  # a later batch, which was not to come
                self.following = None

    def draw(self, those: list[Any]) -> tuple[list[Any], list[list[Any]], int]:
        """The loops of the ranks, the batches that came, and how many were left before."""
        if self.saved is not None:
            for one in those:
                one.load_state_dict(as_json(self.saved))
        self.kind = self.chance.choice(["plain", "tracked", "ahead"])
        left = int(self.chance.choice(those).batches_left)
        assert len(self.chance.choice(those)) == self.done + left, "len"
        loops = [self.loop(one) for one in those]
        stays = self.told["starts"] > STARTS or self.chance.random() < 0.4
        number = left if stays else self.chance.randint(0, left)
        found = [list(islice(loop, number)) for loop in loops]
        if number == left:
            assert all(next(loop, None) is None for loop in loops), "more batches than batches_left"
            assert all(sum(one.steps) == left for one in those), "steps"
        return loops, found, left

    def loop(self, sampler: Any) -> Any:
        if self.kind == "plain":
            return iter(sampler)
        numbers: Any = range(len(self.sizes))
        return sampler.tracked(DataLoader(numbers, batch_sampler=sampler, collate_fn=list))

    def save(self, those: list[Any], loops: list[Any], found: list[Any], *, ended: bool) -> None:
        """Every rank saves, some after they have read ahead."""
        number, epoch, ahead = len(found[0]), self.epoch, [list[Any]()] * len(loops)
        if self.kind == "ahead" and not ended:
            ahead = [list(islice(loop, self.chance.randint(0, 2))) for loop in loops]
            states = [
                loop.position(back=len(more)) for loop, more in zip(loops, ahead, strict=True)
            ]
        else:
            states = [one.state_dict() for one in those]
        assert all(as_json(state) == states[0] for state in states), "states of the ranks"
        check_state_size(json.dumps(states[0]), len(self.sizes))
        assert states[0]["epoch"] == epoch + ended, "the epoch of the state"
        self.came[epoch].update(counted(batch for batches in found for batch in batches))
        self.saved, self.following = states[0], None
        self.done = 0 if ended else self.done + number
        assert self.done == states[0]["done"], "what was done"
        if not self.choose() and not ended:
            self.following = [[*first, *rest] for first, rest in zip(ahead, loops, strict=True)]

    def choose(self) -> bool:
        """Choose ranks and a budget for the next start; whether they differ from these."""
        if self.chance.random() < 0.4 or self.options["drop_last"]:
            return False
        ranks, budget = self.chance.choice([1, 1, 2, 3, 4, 8]), self.first[1]
        if len(self.kept) == len(self.sizes):
            budget *= self.chance.choice([1, 1, 2, 3])
        left = len(self.kept)
        if "batches_per_epoch" not in self.options and self.epoch < EPOCHS:
            left -= self.came[self.epoch].total()
        ranks = ranks if ranks <= sharing_ranks(self.drawn_options(), left) else 1
        before, self.now = self.now, (ranks, budget)
        return self.now != before
