"""Accumulated steps of any cut, rule, wrapping and failure, on any number of ranks.

What must hold: after every step the parameters are those that torch's own loop makes of the whole
batch, in float64, to 1e-12; a step ends where its rule says, has the batch's weight and norm, and
the next one goes on from a state that was saved after it. A step that one rank gives up, or skips,
all of them do, and nothing of it stays.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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
from torchbudget.errors import ForeignStepWarning, TorchBudgetError
from torchbudget.train.gradients import GradientSums

STEPS = 3
SHARDED = ("fsdp", "inner fsdp", "hybrid")
RULES = ("by hand", "steps", "samples", "weight", "last")
# What a rank says that gives a step up, and what the others say.
GIVEN_UP = {
    "sample": ("out of memory with one sample", "out of memory on another rank"),
    "sum": ("out of memory while gradients were summed", "out of memory on another rank"),
    "batch": ("the forward changed batch[0] in place", "a batch was refused on another rank"),
}


class Scaled(nn.Module):
    """A model, and a parameter beside it, of whose gradient the last element may be `wrong`.

    Its activations may be computed again in the backward.
    """

    def __init__(self, name: str, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.checkpointed = make_model(name), checkpointed
        self.scale = nn.Parameter(torch.full((CLASSES,), 1.5, dtype=torch.float64))
        self.wrong = 0.0

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(checkpoint, self.inner, use_reentrant=False)
        scale = self.scale.clone()
        if self.wrong:
            scale.register_hook(lambda one: one.index_fill(0, torch.tensor([4]), self.wrong))
        return (inner if self.checkpointed else self.inner)(x) * scale


class Accumulation:
    """A model that is trained by parts, and a copy that is trained as everybody does it.

    Args:
        chance: chooses all there is to choose, the same on every rank.
        wrapping: how the model is wrapped.
        rank: of this process.
        ranks: their number.
        everybody: a group of all ranks beside the default one.
    """

    def __init__(
        self,
        chance: random.Random,
        wrapping: str,
        rank: int = 0,
        ranks: int = 1,
        everybody: Any = None,
    ) -> None:
        self.chance, self.wrapping, self.everybody = chance, wrapping, everybody
        self.rank, self.ranks = rank, ranks
        alone, self.sharded = ranks == 1, wrapping in SHARDED
        # FSDP needs every parameter to be used in every backward: what is never used is not there.
        names = [one for one in MODELS if not (self.sharded and one in ("frozen", "tied"))]
        self.name = chance.choice(names)
        # AdamW divides the rounding of a gradient that is nearly zero by itself.
        self.optimizer = "SGD" if self.name == "LSTM" else chance.choice(list(OPTIMIZERS))
        self.rule = chance.choice([one for one in RULES if not self.sharded or one != "weight"])
        if not alone or (self.sharded and self.rule in ("by hand", "samples")):
            self.rule = "last"
        self.max_norm = chance.choice([None, 0.1, float("inf")])
        self.options: dict[str, Any] = {
            "mean": chance.random() < 0.5,
            "divisor": chance.choice([1, 1, 8, 3]),
            "max_norm": self.max_norm,
        }
        skips = chance.choice(["", "", "skip_nonfinite", "scaler"])
        self.skips = "" if wrapping == "two optimizers" else skips
        self.fails = 0 if self.sharded else chance.choice([0, 0.2, 0.5])
        self.saves = alone and not self.sharded and chance.random() < 0.4
        self.faults = [""]
        if not alone:
            self.faults += ["raised", *([] if self.sharded else GIVEN_UP)]
            self.faults += ["nonfinite"] * 2 * bool(self.skips)
        self.large = Scaled(self.name)
        self.theirs = OPTIMIZERS[self.optimizer](self.large.parameters())
        least = 1 if alone else 2 * ranks
        self.data = [
            Data.make(chance.randint(least, 24), chance.randrange(10**6)) for _ in range(STEPS)
        ]
        self.ending = self.rule_options()
        self.told: Counter[str] = Counter({wrapping: 1, f"rule: {self.rule}": 1})

    def make(self) -> tuple[nn.Module, Scaled, GradAccumulator]:
        """What is called, the model in it, and what accumulates."""
        model = Scaled(self.name, checkpointed=self.wrapping == "checkpointed")
        called: nn.Module = model
        given: nn.Module = model
        if self.wrapping in ("ddp", "subgroup"):
            group = self.everybody if self.wrapping == "subgroup" else None
            called = given = DistributedDataParallel(model, process_group=group)
        elif self.wrapping == "fsdp":
            fully_shard(model, ignored_params={model.scale} if self.chance.random() < 0.5 else None)
        elif (
            self.wrapping == "hybrid"
        ):  # shards over one dimension of a mesh, replicas over another
            mesh = init_device_mesh("cpu", (2, self.ranks // 2), mesh_dim_names=("copies", "parts"))
            fully_shard(model, mesh=mesh)
        elif self.wrapping == "inner fsdp":
            given = fully_shard(model.inner)
            # On one rank torch 2.13 divides twice in float64, and once in float32.
            if self.ranks > 1 and self.chance.random() < 0.5:
                given.set_gradient_divide_factor(self.chance.choice([0.5, 3.0]))
        parts = [[*called.parameters()]]
        if self.wrapping == "two optimizers" or (self.sharded and self.skips == "scaler"):
            # A scaler does not unscale sharded gradients and others together.
            parts = [[one for one in parts[0] if one is not model.scale], [model.scale]]
        optimizers = [*map(OPTIMIZERS[self.optimizer], parts)]
        if self.skips:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
            self.options[self.skips] = scaler if self.skips == "scaler" else True
        return called, model, GradAccumulator(optimizers, given, **self.options, **self.ending)

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
        """Each step against the large batch's; counts of what was checked."""
        self.called, self.model, self.accumulator = self.make()
        for data in self.data:
            if fault := self.chance.choice(self.faults):
                self.told[f"fault: {fault}"] += 1
                self.give_up(fault)
            if self.saves and self.chance.random() < 0.4:
                self.go_on_from_a_state()
            self.step(data)
            self.told["steps"] += 1
        return self.told

    def step(self, data: Data) -> None:
        pieces = self.cut(data)
        norm = large_step(self.large, self.theirs, data, self.max_norm) if data.weight else None
        owners = [
            place % self.ranks if self.sharded else self.chance.randrange(self.ranks)
            for place in range(len(pieces))
        ]
        luck = [[self.chance.random() for _ in range(3)] for _ in pieces]
        own = [place for place, owner in enumerate(owners) if owner == self.rank]
        for place in own:
            assert place == own[0] or not self.accumulator.stepped, "a step ended early"
            self.accumulate(pieces[place], *luck[place], last=place == own[-1])
        if self.rule == "by hand":
            self.chance.choice([self.accumulator.step, self.accumulator.flush])()
        elif not own:
            self.accumulator.step()
        last = self.accumulator.last
        assert self.accumulator.stepped, "the step did not end"
        assert last is not None
        assert last.weight == data.weight, "the weight of the step"
        assert self.ranks > 1 or last.micro_batches == len(pieces), "its micro-batches"
        apart = difference(self.called, self.large)
        if norm is not None and last.gradient_norm is not None:
            apart = max(apart, abs(last.gradient_norm / float(norm) - 1))
        assert apart <= EXACT, f"{apart} from the large batch's step"

    def cut(self, data: Data) -> list[Data]:
        """The parts of a step: of any sizes, and in any order."""
        rows = list(range(len(data)))
        self.chance.shuffle(rows)
        parts = self.chance.randint(1, min(len(rows), 8))
        if self.rule == "steps":
            parts = self.parts
        elif self.sharded and self.ranks > 1:  # as many on each rank
            most = len(rows) // self.ranks
            parts = min(self.chance.randint(1, 3), most) * self.ranks
        ends = [0, *sorted(self.chance.sample(range(1, len(rows)), parts - 1)), len(rows)]
        pieces = [data[rows[a:b]] for a, b in pairwise(ends)]
        if self.rule == "weight":  # it ends where the last label is
            pieces.sort(key=lambda piece: piece.weight == 0, reverse=True)
        return pieces

    def accumulate(
        self, piece: Data, fails: float, early: float, splits: float, *, last: bool
    ) -> None:
        """One micro-batch, in whose forward or backward memory may run out."""
        runs_out = fails < self.fails and len(piece) > 1
        FUSE.kind, FUSE.left = MemoryError, int(runs_out)
        run = partial(self.micro_batch, last=self.rule == "last" and last, early=early < 0.3)
        batch = (piece.x, piece.y)
        if self.sharded or not (self.ranks > 1 or self.fails or splits < 0.3):
            run(batch)
        else:
            self.told["out of memory"] += runs_out
            self.accumulator.run_or_split(run, batch)

    def micro_batch(self, batch: Any, *, last: bool, early: bool = False, fault: str = "") -> None:
        part = Data(*batch)
        if fault == "batch":
            part.x.clamp_(max=3)
        options = {"samples": len(part)} if self.rule == "samples" else {}
        # Half of the ranks have weights on a device, for which tensors on the CPU stand.
        weight = torch.tensor(part.weight) if self.rank % 2 else part.weight
        with self.accumulator.micro_batch(weight, last=last, **options):
            loss = loss_sum(self.called, part)
            if early:
                FUSE()
            mean = self.options["mean"]
            self.accumulator.backward(loss / max(part.weight, 1) if mean else loss)
            FUSE()
            if fault == "sample":
                raise MemoryError
            if fault == "raised":
                raise KeyError

    def give_up(self, fault: str) -> None:
        """A step that is given up, or skipped, by all ranks, since one of them has a fault."""
        victim, data = self.chance.randrange(self.ranks), Data.make(3, self.rank)
        mine = fault if self.rank == victim or fault == "raised" else ""
        self.model.wrong = float("nan") if mine == "nonfinite" else 0.0
        allocate = mock.Mock(side_effect=MemoryError) if mine == "sum" else GradientSums.allocate
        act = partial(self.micro_batch, last=fault != "raised", fault=mine)
        with mock.patch.object(GradientSums, "allocate", allocate), warnings.catch_warnings():
            warnings.simplefilter("ignore", ForeignStepWarning)
            try:
                self.micro_batch((data.x, data.y), last=False)
                if fault in GIVEN_UP:
                    self.accumulator.run_or_split(act, (data.x, data.y))
                else:
                    act((data.x, data.y))
            except (TorchBudgetError, KeyError) as error:
                said = "" if fault == "raised" else GIVEN_UP[fault][self.rank != victim]
                assert said in str(error)  # noqa: PT017  (only where it is given up)
                assert all(one.grad is None for one in self.called.parameters())
            else:
                assert fault == "nonfinite"
                assert self.accumulator.last is not None
                assert self.accumulator.last.skipped
        self.model.wrong = 0.0

    def go_on_from_a_state(self) -> None:
        """In a new model, with new optimizers."""
        state = copy.deepcopy(self.accumulator.training_state())
        parameters = copy.deepcopy(self.called.state_dict())
        self.called, self.model, self.accumulator = self.make()
        self.called.load_state_dict(parameters)
        self.accumulator.load_training_state(state)
        self.told["resumed"] += 1
