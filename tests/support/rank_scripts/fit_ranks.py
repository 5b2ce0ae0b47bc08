"""Two ranks that train, are broken off, end, fail, and have other folders or callbacks."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.trainings import After, BrokenOff, Plateau, Training, loss_of, samples, tokens
from torchbudget import BudgetedIterableDataset, GradAccumulator, PaddedCost, fit
from torchbudget.errors import TorchBudgetError
from torchbudget.train.step import Step

folder, files = map(Path, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
seen: list[int] = []
found: dict[str, Any] = {"weights": {"sampler": [], "uneven": []}, "ended": []}


def source(shard: int, num_shards: int) -> Iterator[dict[str, Tensor]]:
    return iter(samples([24, 7][shard], shard))


def criterion(model: nn.Module, batch: Any) -> Tensor:
    seen.append(batch.num_samples)
    return loss_of(model, batch)


def train(kind: str, name: str, *callbacks: Any) -> list[Any]:
    training = Training()
    loader, accumulator = training.loader, training.accumulator
    if kind == "uneven":
        stream = BudgetedIterableDataset(
            source, PaddedCost(unit_bytes=1), 60, size="x", window=6, uneven=True
        )
        loader = DataLoader(stream, batch_size=None)
        accumulator = GradAccumulator(training.optimizer, training.model, steps=2)
    torch.manual_seed(100 + rank)  # every rank drops others
    fit(
        training.model, loader, criterion, accumulator, epochs=2, weight=tokens,
        folder=files / name, checkpoint_steps=1, callbacks=callbacks,
    )  # fmt: skip
    return training.model.head.weight.tolist()


def broken_off(kind: str, name: str, records: int) -> None:
    with contextlib.suppress(BrokenOff):
        train(kind, name, After(records))


for kind, weights in found["weights"].items():
    seen.clear()
    weights.append(train(kind, f"{kind} whole"))
    found["seen"] = len(seen)
    for stop in (3, 4, 5, 6):
        broken_off(kind, f"{kind} at {stop}", stop)
        weights.append(train(kind, f"{kind} at {stop}", After(0)))


def ends(record: Any) -> bool:
    return rank == 1 and isinstance(record, Step) and record.number == 2


class Fails:
    def __call__(self, record: Any) -> None:
        if ends(record):
            raise RuntimeError("no such metric")


class WithoutState(Plateau):
    def state_dict(self) -> dict[str, Any]:
        if rank == 1:
            raise RuntimeError("no average yet")
        return super().state_dict()


def error_of(name: str, *callbacks: Any) -> str:
    try:
        train("sampler", name, *callbacks)
    except (TorchBudgetError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


for _ in range(2):
    training = Training()
    found["ended"].append(
        fit(
            training.model, training.loader, loss_of, training.accumulator, epochs=2,
            weight=tokens, folder=files / "ended", callbacks=[ends],
        )
    )  # fmt: skip
found["failed"] = error_of("fails", Fails())
found["no state"] = error_of("no state", WithoutState(training.optimizer))
found["callbacks"] = error_of("callbacks", *[Plateau(training.optimizer)][rank:])
train("sampler", f"node {rank}")
found["folders"] = error_of(f"node {rank}")
# The checkpoint of two ranks, on one of them alone, as if it had other ranks.
state = torch.load(files / "uneven at 3" / "last.pt", weights_only=True)
state["ranks"][1]["is_over"] = not state["ranks"][0]["is_over"]
state["ranks"] = [*state["ranks"], state["ranks"][0]]
if rank == 0:
    (files / "three").mkdir()
    torch.save(state, files / "three" / "last.pt")
dist.barrier()
found["other number"] = error_of("three").replace("the 3 ranks", "").replace("3 ranks", "2 ranks")
(folder / f"{rank}.json").write_text(json.dumps(found))
