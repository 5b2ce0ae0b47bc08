"""Ranks that measure steps together, and one that cannot."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.costs import two_ways
from tests.support.rank_scripts import error_of, join
from tests.support.steps import step_of
from torchbudget import GradAccumulator, MemoryBudgetBatchSampler, alternatives, measure_cost
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory


def batch_of(n: int, size: int, **options: Any) -> torch.Tensor:
    return torch.ones(n, size, 8, **options)


def trained(wrapped: str, method: Any, at: int = 2) -> Any:
    """Parameters and buffers after each step, and the cost that was measured in between."""
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    if wrapped == "sharded":
        for part in (model[1], model[4], model):
            fully_shard(part)
    else:
        model = DistributedDataParallel(model)
    adam = torch.optim.AdamW
    step = step_of(lambda batch: model(batch).square().mean(), model, optimizer=adam)
    found, cost = [], None
    for number in range(10):
        if number == at and method:
            resident: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(resident, process_memory().resident_bytes)
            budget = max(resident) + (40 + dist.get_rank()) * 2**20
            cost = measure_cost(
                step, batch_of, max_size=64, min_size=2, method=method, budget=budget
            )
        step(torch.randn(3, 5, 8))
        found += [getattr(p, "to_local", lambda p=p: p)().tolist() for p in model.parameters()]
        found += [b.tolist() for b in model.buffers()]
    return found, cost


def together(wrapped: str) -> Any:
    """Whether all is as it was, and what was found, by each method; then one rank fails."""
    warnings.simplefilter("ignore")
    rank, _ = join()
    ballast = torch.ones(rank * 60 * 2**20, dtype=torch.uint8)  # it must take smaller batches
    expected, _ = trained(wrapped, None)
    told = []
    # A model that FSDP2 wraps is not ready before its first forward.
    cases = [("trace", 2), ("auto", 2), ("trace", 0), ("auto", 0)]
    for method, at in cases if wrapped == "sharded" else [*cases[:2], ("run", 2)]:
        found, cost = trained(wrapped, method, at)
        sampled = [(p.n, p.size, p.peak_bytes, p.held_out) for p in cost.probes]
        notes = [note for note in cost.notes if "not traced" in note]
        same = cost.batch_bytes([1, 9], [20, 64]).tolist()
        told.append([found == expected, same, cost.margin, sampled, notes])
    del ballast
    model = DistributedDataParallel(nn.Linear(8, 8))
    step = step_of(lambda batch: model(batch).square().mean(), model)

    def failing(n: int, size: int) -> torch.Tensor:
        if rank == 1:
            raise ValueError("no such file")
        return batch_of(n, size)

    options: dict[str, Any] = {"max_size": 200, "budget": "1GiB"}
    said = [
        error_of(partial(measure_cost, step, failing, method=method, **options))
        for method in ("trace", "auto")
    ]
    return told, said


class Block(nn.Module):
    """Computes its activations again if it is told to, inside what is sharded."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = partial(checkpoint, self.inner, use_reentrant=False)
        more: torch.Tensor = again(x) if Block.recomputes else self.inner(x)
        return x + more


def in_ways(wrapped: str) -> Any:
    """One step of micro-batches, some made in one way and some in another.

    Returns:
        The ways of this rank; how far its gradients are off those of all samples, plain; and the
        error where ways differ on one rank.
    """
    rank, ranks = join()
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(), Block()).double()
    whole = copy.deepcopy(model)
    if wrapped == "sharded":
        for part in (*model, model):
            fully_shard(part)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = [90, 3, 50, 4, 4, 60, 7, 20]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(1, size, 8, dtype=torch.float64, generator=generator) for size in sizes]
    sampler = MemoryBudgetBatchSampler(
        sizes, two_ways(axes=3), 8000, samples_per_step=8, num_replicas=ranks, rank=rank
    )
    accumulator = GradAccumulator(optimizer, module=model, steps=sampler)

    def step_of(recomputes: bool, factor: float = 1.0) -> Any:
        def step(batch: torch.Tensor) -> None:
            Block.recomputes = recomputes
            with accumulator.micro_batch(weight=len(batch)):
                accumulator.backward(factor * model(batch).square().sum())

        return step

    found: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        found.extend(getattr(one, "full_tensor", one.clone)() for one in gradients(model))

    options: dict[str, Any] = {"max_size": 9, "min_size": 2, "budget": "1GiB"}
    wrong = alternatives(step_of(False), step_of(True, 1.0 + rank))
    error = error_of(lambda: measure_cost(wrong, partial(batch_of, dtype=torch.double), **options))
    optimizer.register_step_pre_hook(keep)
    step, ways = alternatives(step_of(False), step_of(True)), []
    step.bind(sampler)
    for indices in sampler:
        longest = max(sizes[i] for i in indices)
        # Padding of zeros makes zeros, and no gradient.
        batch = torch.cat([F.pad(data[i], (0, 0, 0, longest - sizes[i])) for i in indices])
        ways.append(step.choose(batch))
        step(batch)
    Block.recomputes = False
    sum(whole(one).square().sum() for one in data).backward()
    pairs = zip(found, gradients(whole), strict=True)
    off = max(float((one - g / len(data)).norm() / one.norm()) for one, g in pairs)
    return ways, off, error


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def accumulated(wrapped: str) -> float:
    """The highest peak of micro-batches of one step, as a share of the budget of this rank."""
    warnings.simplefilter("ignore")
    rank, ranks = join()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))  # 48 MiB
    if wrapped == "sharded":
        for part in (*model, model):
            fully_shard(part)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    make = lambda n, size: torch.ones(n, size, 1024)  # noqa: E731
    step = step_of(lambda batch: model(batch).square().mean(), model)
    resident: list[Any] = [None] * ranks
    dist.all_gather_object(resident, process_memory().resident_bytes)
    budget = max(resident) + 300 * 2**20
    options: dict[str, Any] = {"max_size": 128, "min_size": 16, "accumulate": True}
    cost = measure_cost(step, make, budget=budget, time=False, **options)
    sizes = torch.randint(16, 128, (400,)).tolist()
    sampler = MemoryBudgetBatchSampler(
        sizes, cost, budget, samples_per_step=200, num_replicas=ranks, rank=rank
    )
    accumulator = GradAccumulator(optimizer, module=model, steps=sampler)
    with peak_memory("cpu") as peak:
        for indices in sampler:
            batch = make(len(indices), max(sizes[i] for i in indices))
            with accumulator.micro_batch(weight=len(indices)):
                accumulator.backward(model(batch).square().sum())
    assert accumulator.last is not None, sampler.steps
    assert min(sampler.steps) > 2, sampler.steps
    return peak.bytes / budget
