"""Data sets of other libraries: how they split themselves, and whether their states are exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from torchbudget.errors import OptionError

_MODULES: Final = {
    "datasets": ("datasets.iterable_dataset",),
    "webdataset": ("webdataset.",),
    "ray": ("ray.data.",),
}


def library(data: Any) -> str | None:
    """The library that its class, or one of its base classes, is from, if it is known here."""
    for kind in type(data).__mro__:
        for name, modules in _MODULES.items():
            if f"{kind.__module__}.".startswith(modules):
                return name
    return None


def split_by(data: Any) -> Literal["workers", "ranks"] | None:
    """The processes by which it splits itself, if it does."""
    match library(data):
        case "datasets":  # by worker, and by node after `split_dataset_by_node`
            return "workers" if getattr(data, "_distributed", None) is None else "ranks"
        case "webdataset" | "ray":
            return "ranks"
    return None


def seeks(data: Any) -> bool:
    """Whether it has a state that is exact.

    The state of a `datasets` stream does not contain its shuffle buffer, and may be a batch off
    where tables are mapped in batches, as its documentation says.
    """
    if not (hasattr(data, "state_dict") and hasattr(data, "load_state_dict")):
        return False
    if library(data) != "datasets":
        return True
    if getattr(getattr(data, "_formatting", None), "is_table", False):
        return False
    waiting = [getattr(data, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if stage is None or "Buffer" in type(stage).__name__:
            return False
        if hasattr(stage, "ex_iterable"):
            waiting.append(stage.ex_iterable)
        waiting += getattr(stage, "ex_iterables", [])
    return True


def initial_state(data: Any) -> Any:
    """A state that makes it start over, whatever is loaded later.

    If a state was loaded into it before, it starts there. That does not hold for `datasets`, whose
    `state_dict` is up to date only after it is read; epoch -1 makes it start over.
    """
    state = data.state_dict()
    return {**state, "epoch": -1} if library(data) == "datasets" else state


def is_iterable(data: Any) -> bool:
    """Whether its samples can be iterated, with `iter` or in another way."""
    return isinstance(data, Iterable) or (library(data) == "ray" and hasattr(data, "iter_rows"))


@dataclass(frozen=True, slots=True)
class RayRows:
    """The rows of a Ray Data set, or of one of the parts that `streaming_split` makes.

    Args:
        data: the data set or iterator.
        ranks: number of them that read it.
        workers: of this rank's loader, 0 for none.

    Raises:
        OptionError: samples would be read several times.
    """

    data: Any
    ranks: int
    workers: int

    def __post_init__(self) -> None:
        if self.workers:
            raise OptionError(
                "Ray reads ahead in its own processes, and each worker of a DataLoader would get "
                "all samples: use num_workers=0"
            )
        if self.ranks > 1 and "Split" not in type(self.data).__name__:
            raise OptionError(
                f"each of {self.ranks} ranks would get all samples of a Ray data set: pass "
                f"data.streaming_split({self.ranks})[rank], or Ray Train's get_dataset_shard"
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data.iter_rows())
