"""The forward loop of `predict`: outputs for every sample, in the data set's order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader

from torchbudget.cost.protocol import IntArray
from torchbudget.display import counting
from torchbudget.distributed import Ranks
from torchbudget.errors import OptionError, StateMismatchError
from torchbudget.files import make_folder, write_whole
from torchbudget.protocols import HasNumSamples, IndexSource
from torchbudget.train.batches import masked_rows, moved
from torchbudget.train.loop import evaluation_mode, index_source_of, modules_of

_PIECES: Final = 100  # of a pass, in a folder: a kill loses 1 % of it
_OTHER_PLANS: Final = "every rank must plan with the same sizes, cost, budget and epoch"

Split: TypeAlias = Callable[[Any, Any], Sequence[Any]]


@dataclass(frozen=True)
class Forward:
    """A model without gradients, whose outputs are copied to the host: the step of `predict`.

    Attributes:
        model: called with each batch.
        split_outputs: makes a sequence of the model's outputs; `None`: they have rows.
        device: that batches are moved to; `None`: they are not moved.
    """

    model: Callable[[Any], Any]
    split_outputs: Split | None
    device: torch.device | str | None

    @torch.no_grad()
    def __call__(self, batch: Any) -> Any:
        """Return the outputs of a batch, in memory of their own."""
        batch = moved(batch, self.device)
        outputs = self.model(batch)
        if self.split_outputs is not None:
            outputs = list(self.split_outputs(outputs, batch))
        # A view would keep all of its batch.
        return tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), outputs)


def outputs_of(
    forward: Forward,
    loader: DataLoader[Any],
    *,
    gather: str,
    group: Any,
    progress: bool,
    folder: Callable[[Ranks], PieceFolder] | None,
) -> Any:
    """Return the outputs of all samples, as `torchbudget.predict` does.

    Args:
        forward: called with each batch.
        loader: of batches of every sample.
        gather: "all" or "first": the ranks that return the outputs.
        group: of the ranks that the sampler plans for.
        progress: show a bar.
        folder: opens a folder that keeps outputs.
    """
    sampler = index_source_of(loader, "predict without a budget", "…, shuffle=False")
    ranks = _ranks_of(sampler, group)
    dataset: Any = loader.dataset
    with ranks.together():  # or one of them would begin its loop alone
        sampler.check_dataset(dataset)
    saved = None if folder is None else folder(ranks)
    place, _ = ({}, ()) if saved is None else next(saved.pieces(), ({}, ()))
    results = _Results(len(dataset))
    kept: list[bytes] = []  # pickled here, where an error is that of all ranks
    # Ranks may be at different places. A rank without a batch repeats one, so that every rank
    # joins each collective of a sharded model.
    with ranks.together(), sampler.whole_pass(), evaluation_mode(modules_of(forward)):
        if place:
            sampler.load_state_dict(place)
        # Only pieces of a pass need to know how long it is, for which all of it is planned.
        left = 0 if saved is None or place is None else sampler.batches_left
        every = -(-left // _PIECES)
        total = len(dataset) * left // max(len(sampler), 1) if left else len(dataset)
        shown = counting(unit="samples", total=total, shown=progress and not ranks.rank)
        if place is not None:  # otherwise the pass was over
            with shown as advance, sampler.tracked(loader) as run:
                number = 0
                for batch in run:
                    outputs = of_samples(forward, batch, number, run.last.indices)
                    fresh = np.where(run.last.repeated, -1, run.last.indices)
                    if saved is None and len(ranks) == 1:
                        results.enter(fresh, outputs)
                    else:
                        kept.append(pickle.dumps((fresh, outputs)))
                    del batch, outputs  # before the next ones are made
                    number += 1  # noqa: SIM113  (enumerate would keep the batch)
                    if saved is not None and number < left and not number % every:
                        saved.add((run.position(), kept))
                        kept.clear()
                    advance(len(fresh) * len(ranks))
            if saved is not None:
                saved.add((None, kept))
    items = ranks.gather_in_pieces(kept)
    if saved is not None:
        items = (item for _, piece in saved.pieces() for item in piece)
    is_wanted = gather == "all" or not ranks.rank
    for item in items:
        if is_wanted:
            results.enter(*pickle.loads(item))  # noqa: S301
    return results.all() if is_wanted else []


def _ranks_of(sampler: IndexSource, group: Any) -> Ranks:
    """The ranks that the sampler plans for."""
    ranks = Ranks(group, alone=sampler.num_replicas == 1)
    if (len(ranks), ranks.rank) != (sampler.num_replicas, sampler.rank):
        raise OptionError(
            f"the sampler plans for rank {sampler.rank} of {sampler.num_replicas}, but this "
            f"process is rank {ranks.rank} of {len(ranks)} in the process group, so outputs would "
            "be missing: pass num_replicas and rank of the group to the sampler"
        )
    return ranks


def of_samples(forward: Forward, batch: Any, number: int, indices: IntArray) -> Any:
    """Return the outputs of a batch of n samples, without those of masked rows: a tensor or a list.

    Args:
        forward: called with the batch.
        batch: as it came.
        number: of the batch in the pass.
        indices: of its samples, shape `(n,)`.

    Raises:
        OptionError: they are not those of n samples.
    """
    n = len(indices)
    rows = n + masked_rows(batch)
    called = f"batch {number}, of {n} planned samples, first indices {indices[:4].tolist()}"
    if isinstance(batch, HasNumSamples) and batch.num_samples != n:
        raise OptionError(f"{called}, has {batch.num_samples} samples after the collate")
    outputs = forward(batch)
    if forward.split_outputs is None:
        _check_rows(outputs, rows, called)
        outputs = tree_map_only(Tensor, lambda one: one[:n], outputs)
        return outputs if isinstance(outputs, Tensor) else _rows(outputs)
    if len(outputs) not in (n, rows):
        raise OptionError(f"{called}: split_outputs must return {n} outputs, got {len(outputs)}")
    return outputs[:n]


def _check_rows(outputs: Any, n: int, called: str) -> None:
    for leaf in [one for one in tree_leaves(outputs) if one is not None] or [None]:
        if not (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n):
            shape = f"tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else ""
            raise OptionError(
                f"{called}: the model's outputs must be tensors of shape ({n}, …), got a "
                f"{shape or type(leaf).__name__}; pass split_outputs, a function of (outputs, "
                f"batch) that returns a sequence of {n} outputs, or a model that returns no loss"
            )


class _Results:
    """Outputs by the index of their samples: rows of one tensor if they are alike, or a list.

    Args:
        number: of samples.
    """

    def __init__(self, number: int) -> None:
        self._rows: Any = [None] * number
        self._came = np.zeros(number, bool)

    def enter(self, indices: IntArray, outputs: Any) -> None:
        """Enter the outputs of a batch.

        Args:
            indices: of its samples, shape `(n,)`; −1: another batch has the sample, too.
            outputs: a tensor of n rows, or a list of n outputs.

        Raises:
            OptionError: a sample has outputs already.
        """
        places = np.flatnonzero(indices >= 0)
        mine, number = indices[places], len(self._came)
        for index in mine[(mine >= number) | self._came[np.minimum(mine, number - 1)]].tolist():
            raise OptionError(f"index {index} has several outputs: {_OTHER_PLANS}")
        if isinstance(outputs, Tensor) and not self._came.any():
            with suppress(RuntimeError):  # no room for all samples padded as this batch is
                self._rows = outputs.new_empty((number, *outputs.shape[1:]))
        table = self._rows if isinstance(self._rows, Tensor) else None
        if table is not None and not (
            isinstance(outputs, Tensor)
            and (outputs.shape[1:], outputs.dtype) == (table.shape[1:], table.dtype)
        ):
            came = zip(table, self._came.tolist(), strict=True)
            self._rows, table = [row.clone() if one else None for row, one in came], None
        if table is not None:
            table[torch.from_numpy(mine)] = outputs[torch.from_numpy(places)]
        else:
            rows = _rows(outputs) if isinstance(outputs, Tensor) else outputs
            for place, index in zip(places.tolist(), mine.tolist(), strict=True):
                self._rows[index] = rows[place]
        self._came[mine] = True

    def all(self) -> Any:
        """Return them, once all samples have outputs.

        Raises:
            OptionError: a sample has none.
        """
        for index in np.flatnonzero(~self._came).tolist():
            raise OptionError(f"index {index} has no output: {_OTHER_PLANS}")
        return self._rows


class PieceFolder:
    """Objects in a folder that all ranks see, in numbered pieces; a piece counts on all ranks.

    Files are pickled: open no folder that others may write to.

    Args:
        folder: is made where it does not exist.
        key: describes the work that the pieces are of.
        ranks: all of them make one.

    Raises:
        StateMismatchError: the pieces in the folder have another key.
    """

    def __init__(self, folder: Path, key: Mapping[str, str], ranks: Ranks) -> None:
        self._folder, self._key, self._ranks = folder, dict(key), ranks
        ranks.each(lambda: make_folder(folder))
        self._names = ranks.each(lambda: [] if ranks.rank else self._begin())[0]
        self._number = len({name.split("-")[0] for name in self._names})

    def _begin(self) -> list[str]:
        """Check the key, remove pieces that a rank lacks and return the names of the others."""
        path = self._folder / "key.json"
        if path.exists():
            found = json.loads(path.read_text())
            if differing := [name for name, one in self._key.items() if found.get(name) != one]:
                raise StateMismatchError(
                    f"{self._folder} belongs to another {', '.join(differing)}: {differing[0]} is "
                    f"{self._key[differing[0]]!r}, was {found.get(differing[0])!r}; give another "
                    "folder, or remove this one"
                )
        else:
            text = json.dumps(self._key)
            write_whole(path, lambda file: file.write(text.encode()))
        files = sorted(self._folder.glob("*-of-*.piece"))
        whole: list[str] = []
        for number, (_, group) in enumerate(groupby(files, lambda one: one.name.split("-")[0])):
            names = [one.name for one in group]
            first = f"{number:06}-{names[0].split('-')[1]}-of-{len(names)}.piece"
            if names[0] != first:
                break
            whole += names
        for one in files[len(whole) :]:
            one.unlink()
        return whole

    def add(self, piece: object) -> None:
        """Write this rank's part of the next piece."""
        number, ranks = f"{self._number:06}", self._ranks
        names = [f"{number}-{rank}-of-{len(ranks)}.piece" for rank in range(len(ranks))]
        write_whole(self._folder / names[ranks.rank], lambda file: pickle.dump(piece, file))
        self._names += names
        self._number += 1

    def pieces(self) -> Iterator[Any]:
        """Read the parts of all ranks, the last piece first; once all ranks have written theirs."""
        for name in reversed(self._names):
            yield pickle.loads((self._folder / name).read_bytes())  # noqa: S301


def _rows(outputs: Any) -> list[Any]:
    """Row i of every tensor of a batch's outputs, for each i, in memory of its own."""
    leaves, structure = tree_flatten(outputs)
    n = next(len(leaf) for leaf in leaves if leaf is not None)
    columns = [[None] * n if leaf is None else [row.clone() for row in leaf] for leaf in leaves]
    return [tree_unflatten(list(row), structure) for row in zip(*columns, strict=True)]
