"""Data sets of other libraries: how they are split already, and what their states leave out."""

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


def library(given: Any) -> str | None:
    """Which of the libraries that are known here its class, or one that it derives from, is of."""
    for kind in type(given).__mro__:
        for name, modules in _MODULES.items():
            if f"{kind.__module__}.".startswith(modules):
                return name
    return None


def split_by(given: Any) -> Literal["workers", "ranks"] | None:
    """Which processes get other samples of it than others do, by its own doing."""
    match library(given):
        case "datasets":  # by worker, and by node if it was told to
            return "workers" if getattr(given, "_distributed", None) is None else "ranks"
        case "webdataset" | "ray":
            return "ranks"
    return None


def seeks(given: Any) -> bool:
    """Whether it has a state that says everything.

    The state of a `datasets` stream leaves out the samples in its shuffle buffer, and may be a
    batch off where tables are mapped in batches, as its documentation says.
    """
    if not (hasattr(given, "state_dict") and hasattr(given, "load_state_dict")):
        return False
    if library(given) != "datasets":
        return True
    if getattr(getattr(given, "_formatting", None), "is_table", False):
        return False
    waiting = [getattr(given, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if stage is None or "Buffer" in type(stage).__name__:
            return False
        if hasattr(stage, "ex_iterable"):
            waiting.append(stage.ex_iterable)
        waiting += getattr(stage, "ex_iterables", [])
    return True


def beginning(given: Any) -> Any:
    """A state that makes it begin at its beginning, whatever was loaded since.

    What was loaded into it before stays its beginning, but in `datasets`, which says where it
    stands only once it is read; a state of an epoch that never is has it begin at its beginning.
    """
    state = given.state_dict()
    return {**state, "epoch": -1} if library(given) == "datasets" else state


def is_iterable(given: Any) -> bool:
    """Whether it gives samples one by one, `iter` or not."""
    return isinstance(given, Iterable) or (library(given) == "ray" and hasattr(given, "iter_rows"))


@dataclass(frozen=True, slots=True)
class RayRows:
    """The rows of a Ray Data set, or of one of the parts that `streaming_split` makes.

    Args:
        given: the data set or iterator.
        ranks: that read it.
        workers: of this rank's loader, 0 for none.

    Raises:
        OptionError: samples would come several times.
    """

    given: Any
    ranks: int
    workers: int

    def __post_init__(self) -> None:
        if self.workers:
            raise OptionError(
                "Ray reads ahead in processes of its own, and gives each worker of a DataLoader "
                "all samples: use num_workers=0"
            )
        if self.ranks > 1 and "Split" not in type(self.given).__name__:
            raise OptionError(
                f"each of {self.ranks} ranks would get all samples of a Ray data set: pass "
                f"data.streaming_split({self.ranks})[rank], or Ray Train's get_dataset_shard"
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given.iter_rows())
