"""Random cuts, wrappings and options: how far each step is from the large batch's."""

import copy
import json
import random
import sys
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.large_steps import (
    MODELS,
    OPTIMIZERS,
    Data,
    large_step,
    loss_sum,
    make_model,
)
from torchbudget import GradAccumulator

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="torch")
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first, cases = map(int, sys.argv[2:])


class Scaled(nn.Module):
    """A model, and a parameter beside it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = make_model(name)
        self.scale = nn.Parameter(torch.full((5,), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def wrapped(model: nn.Module, how: str, draw: random.Random) -> tuple[nn.Module, nn.Module]:
    """What is called, and what the accumulator is given."""
    if how == "ddp":
        model = DistributedDataParallel(model)
        return model, model
    if how == "subgroup":  # of all ranks, in another group
        model = DistributedDataParallel(model, process_group=everybody)
        return model, model
    if how == "fsdp":
        fully_shard(model, ignored_params={model.scale} if draw.random() < 0.5 else None)
    if how == "inner":
        fully_shard(model.inner)
        if draw.random() < 0.5:
            model.inner.set_gradient_divide_factor(draw.choice([0.5, 3.0]))
        return model, model.inner
    return model, model


def full(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def check(number: int) -> list[object]:
    """Three steps with options that the number chooses, the same on every rank."""
    draw = random.Random(number)
    # FSDP needs every parameter to be used in every backward: what is never used is not in them.
    how = draw.choice(["plain", "ddp", "subgroup", "fsdp", "inner"])
    sharded = how in ("fsdp", "inner")
    name = draw.choice([one for one in MODELS if not (sharded and one in ("frozen", "tied"))])
    optimizer = draw.choice(["SGD", "AdamW"]) if name != "LSTM" else "SGD"
    mean, max_norm = draw.random() < 0.5, draw.choice([None, 0.1, float("inf")])
    options = {"mean": mean, "max_norm": max_norm, "divisor": draw.choice([1, 8, 3])}
    large = Scaled(name)
    called, given = wrapped(copy.deepcopy(large), how, draw)
    theirs = OPTIMIZERS[optimizer](large.parameters())
    mine = OPTIMIZERS[optimizer](called.parameters())
    accumulator = GradAccumulator(mine, given, **options)
    worst, left = 0.0, [False]

    def micro_batch(batch: tuple[Tensor, Tensor], *, last: bool) -> None:
        part = Data(*batch)
        with accumulator.micro_batch(part.weight, last=last):
            loss = loss_sum(called, part)
            accumulator.backward(loss / max(part.weight, 1) if mean else loss)
            if left[0] and len(part) > 1:
                left[0] = False
                raise MemoryError

    for _ in range(3):
        data = Data.make(draw.randint(2 * ranks, 24), seed=draw.randrange(10**6))
        clips = max_norm is not None and max_norm < float("inf")
        large_step(large, theirs, data, max_norm if clips else None)
        rows = list(range(len(data)))
        draw.shuffle(rows)
        parts = draw.randint(1, 3) * ranks if sharded else draw.randint(1, 8)
        parts = min(parts, len(rows) // ranks * ranks)
        ends = [0, *sorted(draw.sample(range(1, len(rows)), parts - 1)), len(rows)]
        pieces = [rows[a:b] for a, b in pairwise(ends)]
        owner = [place % ranks if sharded else draw.randrange(ranks) for place in range(parts)]
        own = [piece for piece, whose in zip(pieces, owner, strict=True) if whose == rank]
        fails = [draw.random() < 0.3 for _ in pieces]
        for place, piece in enumerate(own):
            batch, run = (data.x[piece], data.y[piece]), partial(micro_batch, last=piece is own[-1])
            left[0] = fails[place] and not sharded
            if sharded:
                run(batch)
            else:
                accumulator.run_or_split(run, batch)
        if not own:
            accumulator.step()
        assert accumulator.stepped
        assert accumulator.last.weight == data.weight
        for one, other in zip(called.parameters(), large.parameters(), strict=True):
            norm = other.detach().norm() + 1e-30
            worst = max(worst, float((full(one) - other).detach().norm() / norm))
    return [number, how, name, optimizer, str(options), worst]


everybody = dist.new_group(range(ranks))
told = [check(number) for number in range(first, first + cases)]
(folder / f"{rank}.json").write_text(json.dumps(told))
