"""One sampler that is stopped anywhere, saved, and started again on any ranks.

What must hold over the whole chain of starts: each index comes in each epoch as often as it is to
come, and in epochs of a given length as often as any other, within one; all ranks have as many
batches, and save the same state; none is over the budget of its start; where a start is on the
ranks, under the budget, cost and time of the one before, it yields what that would have yielded;
`len` is what was done and what comes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.support.oracles import bytes_of
from tests.support.refusals import Refused, accepted, reasons_of
from tests.support.resuming import as_json
from tests.support.sampler_cases import (
    check_batch,
    check_shapes,
    check_state_size,
    given_length,
    samplers,
    sharing_ranks,
    whole_bytes,
)
from tests.support.samplers import counted
from torchbudget import Mixture, PackedCost, PaddedCost
from torchbudget.cost.protocol import AdditiveCost

EPOCHS = 2
STARTS = 12  # after which each start is the last of its epoch


class Chain:
    """The starts of one sampler; what came before the last save counts.

    Args:
        chance: chooses where it stops, and how it goes on.
        case: sizes, a cost, a budget, a number of ranks and options, of `sampler_cases.cases`.
        oversize: the sampler's option.
    """

    def __init__(self, chance: random.Random, case: Any, oversize: str = "raise") -> None:
        sizes, cost, budget, ranks, options = case
        if oversize != "raise":
            options = options | {"drop_last": False, "oversize": oversize}
        if oversize == "alone":
            options.pop("max_shapes", None)
        self.chance, self.sizes, self.cost, self.options = chance, sizes, cost, options
        self.kept, multiple = set(range(len(sizes))), options["size_multiple"]
        if oversize == "skip":
            self.kept = {n for n in self.kept if bytes_of(sizes, cost, [n], multiple) <= budget}
        if not self.kept:
            raise Refused("no sample fits the budget")
        if isinstance(weights := options.get("weights"), Mixture):
            sources = {str(weights.sources[one]) for one in self.kept}  # type: ignore[index]
            if sources != {*weights.shares}:
                raise Refused("no sample of a source fits the budget")
        self.first = min(ranks, len(self.kept)), budget
        self.now = self.first
        self.saved: Any = None
        self.done = 0  # batches of a rank in this epoch, until the last save
        self.following: list[list[Any]] | None = None  # what each rank yields if nothing changes
        self.mixture = options.get("weights")
        self.came = [Counter[int]() for _ in range(EPOCHS)]
        self.told: Counter[str] = Counter()

    @property
    def epoch(self) -> int:
        """That the next start is in."""
        return 0 if self.saved is None else int(self.saved["epoch"])

    def check(self) -> Counter[str]:
        """As many starts as two epochs take; counts of what was checked."""
        while self.epoch < EPOCHS:
            self.start()
        self.check_samples()
        return self.told

    # ------------------------------------------------------------------ the oracle

    def check_samples(self) -> None:
        """Each index has come as often as it is to come, however it was dealt."""
        for counts in self.came:
            assert set(counts) <= self.kept, "samples that are skipped"
        weights, total = self.options.get("weights"), sum(self.came, Counter[int]())
        if not given_length(self.options):
            for epoch, counts in enumerate(self.came):
                assert counts == self.expected(epoch), f"the samples of epoch {epoch}"
        elif isinstance(weights, Mixture):
            self.check_sources(weights, total)
        elif weights is None and not self.options["drop_last"]:
            numbers = {total[one] for one in self.kept}
            assert max(numbers) - min(numbers) <= 1, "the samples of passes"

    def check_sources(self, mixture: Mixture, total: Counter[int]) -> None:
        """No sample comes twice in a source's pass; sources have as many samples as their shares.

        Without steps an epoch may end within a window, which has samples of several passes.
        """
        labels, shares = np.array(mixture.sources), mixture.shares
        steps = "steps_per_epoch" in self.options
        for name in shares:
            each = [total[one] for one in self.kept if labels[one] == name]
            most = 1 if steps else 2 + len(labels) // len(each)
            assert max(each) - min(each) <= most, f"the samples of passes of {name}"
            if steps and mixture is self.mixture:
                part = shares[name] / sum(shares.values())
                assert abs(sum(each) - part * total.total()) < 2, f"the share of {name}"

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
                one.set_epoch(one.epoch)  # as trainers do at their start
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
        """Choose ranks, a budget, a time for the next start; whether they differ from these."""
        if self.chance.random() < 0.4 or self.options["drop_last"]:
            return False
        ranks, cost = self.chance.choice([1, 1, 2, 3, 4, 8]), self.cost
        options, is_summed = self.options, isinstance(cost, AdditiveCost)
        if not is_summed and self.chance.random() < 0.2:  # as measured anew
            fixed_bytes = self.chance.choice([0, 10, 100, 1000])
            time = PaddedCost(fixed_bytes=fixed_bytes, sample_bytes=1, unit_bytes=self.units())
            self.options = options | {"time": time}
        if len(self.kept) == len(self.sizes) and self.chance.random() < 0.2:
            self.choose_cost()
        if not {"units", "max_shapes"} & {*self.options} and self.chance.random() < 0.2:
            self.choose_rules()
        if isinstance(self.options.get("weights"), Mixture) and self.chance.random() < 0.3:
            self.choose_shares()
        budget = self.first[1]
        if len(self.kept) == len(self.sizes):
            budget *= self.chance.choice([1, 1, 2, 3])
        left = len(self.kept)
        if not given_length(self.options) and self.epoch < EPOCHS:
            left -= self.came[self.epoch].total()
        ranks = ranks if ranks <= sharing_ranks(self.drawn_options(), left) else 1
        before, self.now = self.now, (ranks, budget)
        return self.now != before or self.cost is not cost or self.options is not options

    def units(self) -> Any:
        """What an element on each axis costs."""
        each = [self.chance.randint(0, 50) for _ in range(self.sizes[0].size)]
        return each[0] if len(each) == 1 else each

    def choose_rules(self) -> None:
        """Choose another window and other caps."""
        multiple = self.options.get("batch_size_multiple", 1)
        limit = PackedCost(sample_bytes=1), self.chance.randint(1, 40)
        rules = {"max_batch_size": self.chance.randint(multiple, 40)}
        if "window" in self.options:
            rules["window"] = self.chance.randint(1, len(self.sizes))
        self.options = self.options | rules | {"limits": [*self.options["limits"], limit]}

    def choose_shares(self) -> None:
        """Choose other shares of the sources."""
        before = self.options["weights"]
        shares = {name: self.chance.uniform(0.01, 1) for name in before.shares}
        mixture = Mixture(before.sources, shares, by="samples")
        self.options = self.options | {"weights": mixture}

    def choose_cost(self) -> None:
        """Choose another cost, and a budget that each sample and unit fits."""
        kind: Any = PaddedCost
        multiple = self.options["size_multiple"]
        if not self.options["limits"] and not {"units", "max_shapes", "time"} & {*self.options}:
            multiple = self.chance.choice([1, 4, 8])
            self.options = self.options | {"size_multiple": multiple, "batch_size_multiple": 1}
            kind = PackedCost if self.chance.random() < 0.5 else PaddedCost
        self.cost = kind(
            fixed_bytes=self.chance.randint(0, 1000),
            sample_bytes=self.chance.randint(1, 9),
            unit_bytes=self.units(),
        )
        largest = self.sizes.astype(np.int64).max(axis=0) + multiple
        whole = whole_bytes(self.sizes, self.cost, self.options)
        self.first = self.first[0], max(int(self.cost.batch_bytes(1, largest)), whole)
