"""Accumulated steps of any cut, rule, wrapping and failure: each is the large batch's, in float64.

What must hold: after every step the parameters are those that torch's own loop makes of the whole
batch, to 1e-12; a step ends where its rule says, has the batch's weight and loss, and the next one
goes on from a state that was saved after it.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.faults import FUSE
from tests.support.large_steps import (
    CLASSES,
    EXACT,
    MODELS,
    OPTIMIZERS,
    Data,
    difference,
    large_step,
    loss_sum,
    make_model,
)
from torchbudget import GradAccumulator

STEPS = 3
SHARDED = ("fsdp", "inner fsdp")
WRAPPINGS = ("plain", "plain", "checkpointed", "two optimizers", "ddp", *SHARDED)
RULES = ("by hand", "steps", "samples", "weight", "last")


class Scaled(nn.Module):
    """A model, and a parameter beside it; its activations may be computed again in the backward."""

    def __init__(self, name: str, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.checkpointed = make_model(name), checkpointed
        self.scale = nn.Parameter(torch.full((CLASSES,), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(checkpoint, self.inner, use_reentrant=False)
        return (inner if self.checkpointed else self.inner)(x) * self.scale


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this rank alone, for what cannot be wrapped without one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a reducer must not outlive its group
        dist.destroy_process_group()


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """Three steps of random data."""
    wrapping = chance.choice(WRAPPINGS)
    if wrapping not in ("ddp", *SHARDED):
        return Accumulation(chance, wrapping).check()
    with group_of_one():
        return Accumulation(chance, wrapping).check()


class Accumulation:
    """A model that is trained by parts, and a copy that is trained as everybody does it."""

    def __init__(self, chance: random.Random, wrapping: str) -> None:
        self.chance, self.wrapping = chance, wrapping
        self.sharded = wrapping in SHARDED
        # FSDP needs every parameter to be used in every backward.
        names = [one for one in MODELS if not (self.sharded and one in ("frozen", "tied"))]
        self.name = chance.choice(names)
        # AdamW divides the rounding of a gradient that is nearly zero by itself.
        self.optimizer = "SGD" if self.name == "LSTM" else chance.choice(list(OPTIMIZERS))
        self.rule = chance.choice([one for one in RULES if not self.sharded or one != "weight"])
        if self.sharded and self.rule in ("by hand", "samples"):
            self.rule = "last"
        self.mean = chance.random() < 0.5
        self.max_norm = chance.choice([None, 0.1, float("inf")])
        self.scales = wrapping != "two optimizers" and chance.random() < 0.2
        self.divisor = chance.choice([1, 1, 8, 3])
        self.fails = 0 if self.sharded or wrapping == "ddp" else chance.choice([0, 0.2, 0.5])
        self.saves = not self.sharded and chance.random() < 0.4
        self.large = Scaled(self.name)
        self.theirs = OPTIMIZERS[self.optimizer](self.large.parameters())
        self.data = [
            Data.make(chance.randint(1, 24), chance.randrange(10**6)) for _ in range(STEPS)
        ]
        self.ending = self.rule_options()
        self.told: Counter[str] = Counter({wrapping: 1, f"rule: {self.rule}": 1})

    def make(self) -> tuple[nn.Module, list[torch.optim.Optimizer], GradAccumulator]:
        """What is called, what steps it, and what accumulates."""
        model = Scaled(self.name, checkpointed=self.wrapping == "checkpointed")
        called: nn.Module = model
        given: nn.Module = model
        optimize = OPTIMIZERS[self.optimizer]
        if self.wrapping == "ddp":
            called = given = DistributedDataParallel(model)
        elif self.wrapping == "fsdp":
            fully_shard(model)
        elif self.wrapping == "inner fsdp":
            given = fully_shard(model.inner)
        if self.wrapping == "two optimizers" or (self.wrapping == "inner fsdp" and self.scales):
            # A scaler does not unscale sharded gradients and others together.
            optimizers = [optimize(model.inner.parameters()), optimize([model.scale])]
        else:
            optimizers = [optimize(called.parameters())]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if self.scales else None
        accumulator = GradAccumulator(
            optimizers, given, mean=self.mean, max_norm=self.max_norm, scaler=scaler,
            divisor=self.divisor, **self.ending,
        )  # fmt: skip
        return called, optimizers, accumulator

    def rule_options(self) -> dict[str, Any]:
        """What ends the steps."""
        if self.rule == "steps":
            self.parts = self.chance.randint(1, min(map(len, self.data)))
            return {"steps": self.parts}
        if self.rule in ("samples", "weight"):
            self.data = [self.data[0]] * STEPS
            first = self.data[0]
            return {self.rule: len(first) if self.rule == "samples" else first.weight}
        return {}

    # ------------------------------------------------------------------ the steps

    def check(self) -> Counter[str]:
        """Each step against the large batch's."""
        self.called, self.optimizers, self.accumulator = self.make()
        for step in self.of_cuts():
            if self.saves and self.chance.random() < 0.4:
                self.go_on_from_a_state()
            data = Data(torch.cat([one.x for one in step]), torch.cat([one.y for one in step]))
            clips = self.max_norm is not None and self.max_norm < float("inf")
            if data.weight:
                large_step(self.large, self.theirs, data, self.max_norm if clips else None)
            for place, piece in enumerate(step):
                assert not place or not self.accumulator.stepped, "a step ended early"
                self.accumulate(piece, last=place == len(step) - 1)
            if self.rule == "by hand":
                self.chance.choice([self.accumulator.step, self.accumulator.flush])()
            last = self.accumulator.last
            assert self.accumulator.stepped, "the step did not end"
            assert last is not None
            assert last.weight == data.weight, "the weight of the step"
            assert last.micro_batches == len(step), "the micro-batches of the step"
            apart = difference(self.called, self.large)
            assert apart <= EXACT, f"{apart} from the large batch's step"
            self.told["steps"] += 1
        return self.told

    def of_cuts(self) -> Iterator[list[Data]]:
        """The parts of each step: of any sizes, and in any order."""
        for data in self.data:
            rows = list(range(len(data)))
            self.chance.shuffle(rows)
            parts = (
                self.parts if self.rule == "steps" else self.chance.randint(1, min(len(rows), 8))
            )
            ends = [0, *sorted(self.chance.sample(range(1, len(rows)), parts - 1)), len(rows)]
            pieces = [data[rows[a:b]] for a, b in pairwise(ends)]
            if self.rule == "weight":  # it ends where the last label is
                pieces.sort(key=lambda piece: piece.weight == 0, reverse=True)
            yield pieces

    def accumulate(self, piece: Data, *, last: bool) -> None:
        """One micro-batch, in whose forward or backward memory may run out."""
        fails, early = self.chance.random() < self.fails, self.chance.random() < 0.3
        FUSE.kind, FUSE.left = MemoryError, int(fails and len(piece) > 1)

        def micro_batch(batch: Any) -> None:
            part = Data(*batch)
            options = {"samples": len(part)} if self.rule == "samples" else {}
            ends = self.rule == "last" and last
            with self.accumulator.micro_batch(part.weight, last=ends, **options):
                loss = loss_sum(self.called, part)
                if early:
                    FUSE()
                self.accumulator.backward(loss / max(part.weight, 1) if self.mean else loss)
                FUSE()

        batch = (piece.x, piece.y)
        if self.sharded or not (self.fails or self.chance.random() < 0.3):
            micro_batch(batch)
        else:
            self.told["out of memory"] += fails
            self.accumulator.run_or_split(micro_batch, batch)

    def go_on_from_a_state(self) -> None:
        """In a new model, with new optimizers."""
        state = copy.deepcopy(self.accumulator.training_state())
        model = copy.deepcopy(self.called.state_dict())
        self.called, self.optimizers, self.accumulator = self.make()
        self.called.load_state_dict(model)
        self.accumulator.load_training_state(state)
        self.told["resumed"] += 1
