"""Outputs of a model for every sample of a data set, in the data set's order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from operator import length_hint
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader

from torchbudget.distributed import Ranks
from torchbudget.errors import OptionError
from torchbudget.progress import with_bar
from torchbudget.protocols import HasNumSamples, IndexSource
from torchbudget.train.batches import masked_rows, moved
from torchbudget.train.loop import evaluation_mode, modules_of

# Bytes that a rank sends in one collective: a few of them for many small outputs, while their
# copies take little memory beside the outputs.
_CHUNK_BYTES: Final = 64 * 2**20

_MISSING: Final = object()
_OTHER_PLANS: Final = "every rank must plan with the same sizes, cost, budget and epoch"

Split: TypeAlias = Callable[[Any, Any], Sequence[Any]]


def predict(
    model: Callable[[Any], Any],
    loader: DataLoader[Any],
    *,
    split_outputs: Split | None = None,
    gather: Literal["all", "first"] = "all",
    device: torch.device | str | None = None,
    group: Any = None,
    progress: bool = False,
) -> list[Any]:
    """The model's output for every sample, in the data set's order, on any number of ranks.

    The forward runs in evaluation mode and under `torch.no_grad()`. (The outputs of
    `torch.inference_mode()` could not be used to train on.) Afterwards every module is in the mode
    that it was in, and the sampler where it was, also within a loop over it.

    With several ranks every rank must call it. If one fails, all of them raise when the others are
    done with their batches.

    Args:
        model: called with each batch. A module, or a function such as
            `lambda batch: model(batch["ids"])`; the modules that it refers to are found as
            `measure_cost` finds them.
        loader: a `DataLoader` over a map-style data set whose `batch_sampler` is a
            `MemoryBudgetBatchSampler` that yields every sample once. `shuffle=False` has the least
            padding. The collate must keep the order of its samples.
        split_outputs: `split_outputs(outputs, batch)` returns a sequence of one output for each
            sample of the batch. Default: row i of every tensor in the outputs, which may be a
            tensor or a tuple, list, dict or `ModelOutput` of tensors, all of shape `(n, …)`. Rows
            of shape `(L, …)` then keep the padding of their batch.
        gather: "all": every rank returns the list; "first": the others return an empty one.
        device: that batches are moved to; `None`: they are not moved.
        group: of processes, those that the sampler deals to. Default: all. Not used where the
            sampler has `num_replicas=1`.
        progress: show a bar, where tqdm is installed and there is a terminal.

    Returns:
        An output for each sample, shape `(N,)`. Their tensors, in
        any structure that `torch.utils._pytree` knows (a dataclass must be registered there), are
        on the CPU, each in memory of its own.
        Where the step runs on the CPU too, leave room for them in the budget.

    Raises:
        OptionError: the loader is of another kind, or its epoch leaves out or repeats samples
            (`oversize="skip"`, `drop_last`, `weights`, `batches_per_epoch`); its ranks are not
            those of the group; or outputs cannot be split.
        SampleError: the loader ended before the epoch did.
        RankError: another rank failed.

    >>> from torch.utils.data import DataLoader
    >>> import torchbudget as tb
    >>> texts = [torch.ones(n) for n in (3, 9, 4, 8, 1)]
    >>> sampler = tb.MemoryBudgetBatchSampler(
    ...     [len(text) for text in texts], tb.PaddedCost(unit_bytes=1), 18, shuffle=False
    ... )
    >>> loader = DataLoader(texts, batch_sampler=sampler, collate_fn=tb.PadCollate())
    >>> [int(total) for total in tb.predict(lambda batch: batch.data.sum(1), loader)]
    [3, 9, 4, 8, 1]
    """
    if gather not in ("all", "first"):
        raise OptionError(f"gather must be 'all' or 'first', got {gather!r}")
    sampler = _checked_sampler(loader)
    host = None if sampler.num_replicas == 1 else _checked_ranks(sampler, group)
    together = nullcontext if host is None else host.together
    dataset: Any = loader.dataset
    with together():
        sampler.check_dataset(dataset)
    rows = _rows if split_outputs is None else list
    results: list[Any] = [_MISSING] * len(dataset)
    kept: list[bytes] = []  # pickled here, where an error is that of all ranks
    # Also where ranks have come to different places. A rank without a batch repeats one, so that
    # all take part in each collective of a model that is sharded.
    with together(), sampler.whole_pass(), closing(sampler.tracked(loader)) as run:
        batches: Iterator[Any] = run
        if progress and (host is None or host.rank == 0):
            batches = with_bar(batches, total=length_hint(loader), unit="batches", leave=False)
        with evaluation_mode(modules_of(model)), torch.no_grad():
            number = 0
            for batch in batches:
                batch = moved(batch, device)  # the one on the host ends now
                indices = run.last.indices.tolist()
                outputs = _outputs(model, batch, number, indices, split_outputs)
                if host is None:
                    _enter(results, indices, rows(outputs))
                else:
                    fresh = np.where(run.last.repeated, -1, run.last.indices).tolist()
                    kept.append(pickle.dumps((fresh, outputs)))
                del batch, outputs  # before the next ones are made
                number += 1  # noqa: SIM113  (enumerate would keep the batch)
    for indices, outputs in () if host is None else _gathered(kept, host):
        if gather == "all" or (host is not None and not host.rank):
            _enter(results, indices, rows(outputs))
    if host is not None and host.rank and gather == "first":
        return []
    missing = [index for index, output in enumerate(results) if output is _MISSING]
    if missing:
        raise OptionError(f"index {missing[0]} did not come: {_OTHER_PLANS}")
    return results


def _checked_sampler(loader: DataLoader[Any]) -> IndexSource:
    """The loader's batch sampler, which must know the samples of each batch that comes."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, IndexSource):
        raise OptionError(
            "predict needs a DataLoader with batch_sampler=MemoryBudgetBatchSampler(…, "
            "shuffle=False), which knows the samples of each batch: got "
            f"{type(loader).__name__} with batch_sampler={type(sampler).__name__}"
        )
    return sampler


def _checked_ranks(sampler: IndexSource, group: Any) -> Ranks:
    """The ranks that the sampler deals to, joined on the host."""
    ranks = Ranks(group)
    if (len(ranks), ranks.rank) != (sampler.num_replicas, sampler.rank):
        raise OptionError(
            f"the sampler deals to {sampler.num_replicas} ranks, of which this is number "
            f"{sampler.rank}, but the process group joins {len(ranks)}, of which this is number "
            f"{ranks.rank}: each rank would get only a part of the outputs"
        )
    return ranks.on_host()


def _outputs(
    model: Callable[[Any], Any],
    batch: Any,
    number: int,
    indices: list[int],
    split_outputs: Split | None,
) -> Any:
    """Call the model on a batch; return its outputs on the host, in memory of their own."""
    n = len(indices)
    called = f"batch {number}, of {n} samples, first of indices {indices[:4]}"
    if isinstance(batch, HasNumSamples) and batch.num_samples != n:
        raise OptionError(f"{called}, came from the loader with {batch.num_samples} samples")
    outputs = model(batch)
    rows = n + masked_rows(batch)
    if split_outputs is None:
        _check_rows(outputs, rows, called)
        outputs = tree_map_only(Tensor, lambda one: one[:n], outputs)
    else:
        outputs = list(split_outputs(outputs, batch))
        if len(outputs) not in (n, rows):
            raise OptionError(
                f"{called}: split_outputs must return {n} outputs, got {len(outputs)}"
            )
        outputs = outputs[:n]
    # A view would keep all of its batch.
    return tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), outputs)


def _check_rows(outputs: Any, n: int, called: str) -> None:
    leaves = tree_leaves(outputs)
    for leaf in leaves:
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n):
            shape = f"tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else ""
            raise OptionError(
                f"{called}: the model's outputs must be tensors of shape ({n}, …), got a "
                f"{shape or type(leaf).__name__}; pass split_outputs, a function of (outputs, "
                f"batch) that returns a sequence of {n} outputs, or a model that returns no loss"
            )
    if all(leaf is None for leaf in leaves):
        raise OptionError(f"{called}: the model returned no tensor, but {outputs!r}")


def _rows(outputs: Any) -> list[Any]:
    """Row i of every tensor of a batch's outputs, for each i, in memory of its own."""
    leaves, structure = tree_flatten(outputs)
    n = next(len(leaf) for leaf in leaves if leaf is not None)
    columns = [[None] * n if leaf is None else [row.clone() for row in leaf] for leaf in leaves]
    return [tree_unflatten(list(row), structure) for row in zip(*columns, strict=True)]


def _gathered(kept: list[bytes], ranks: Ranks) -> Iterator[tuple[list[int], Any]]:
    """The outputs of all ranks, batch by batch.

    Collectives, each of at most 64 MiB of every rank, or of one batch. Exhaust the iterator.

    Args:
        kept: the indices and the outputs of each batch of this rank, pickled; emptied.
        ranks: joined by a process group on the host.
    """
    while any(ranks.gather_objects(bool(kept))):
        chunk: list[bytes] = []
        room = _CHUNK_BYTES
        while kept and (not chunk or len(kept[-1]) <= room):
            chunk.append(kept.pop())
            room -= len(chunk[-1])
        for received in ranks.gather_objects(chunk):
            yield from map(pickle.loads, received)


def _enter(results: list[Any], indices: list[int], outputs: Sequence[Any]) -> None:
    for index, output in zip(indices, outputs, strict=True):
        if index < 0:  # another micro-batch has the sample, too
            continue
        if index >= len(results) or results[index] is not _MISSING:
            raise OptionError(f"index {index} came more than once: {_OTHER_PLANS}")
        results[index] = output
