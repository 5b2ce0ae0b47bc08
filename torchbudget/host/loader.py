"""`loader` and `predict`: batches that fit, or outputs, of a data set, a step and a budget."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

import torchbudget
from torchbudget.budget import MemoryBudget, limit_device_memory
from torchbudget.checks import check_call, size_multiple_of
from torchbudget.cost.agree import agree
from torchbudget.cost.alternatives import Alternatives
from torchbudget.cost.measure import describe_step, measure_cost, why_not
from torchbudget.cost.measured import MeasuredCost, differing, saved_costs
from torchbudget.cost.protocol import CostModel
from torchbudget.data.collate.collates import IDS, PackCollate, PadCollate
from torchbudget.data.indexed import check_indexed
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.size_check import check_elements
from torchbudget.data.sizes import SizeDataset, SizeKey, spread
from torchbudget.display import say
from torchbudget.distributed import Ranks, part_bytes, plain_parts
from torchbudget.errors import BudgetError, CostError, OptionError, SizesError
from torchbudget.host.options import LoaderOptions, loader_options
from torchbudget.host.real_batches import RealBatches
from torchbudget.machine.device import is_cpu
from torchbudget.machine.host import host_memory
from torchbudget.plan.rules import NEED_STEPS, BatchRules
from torchbudget.protocols import MapStyle
from torchbudget.random_state import RandomState
from torchbudget.restoring import TrainingState
from torchbudget.train.loop import evaluation_mode, modules_of
from torchbudget.train.predict import Forward, PieceFolder, Split, of_samples, outputs_of
from torchbudget.units import Amount, format_bytes

_CALL: Final = "loader(dataset, step, budget, …), with options of MemoryBudgetBatchSampler"
# Options of a loader that is given in place of the data set; the second ones need workers.
_OF_LOADERS: Final = ("num_workers", "pin_memory", "worker_init_fn", "generator", "in_order")
_TEXTS: Final = 1000  # that are tokenized at once
_OBJECT_BYTES: Final = 1024  # of a small tensor, beside its values
_OF_WORKERS: Final = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout")


def loader(
    dataset: MapStyle | DataLoader[Any],
    step: Callable[[Any], object] | CostModel,
    budget: MemoryBudget | Amount,
    *,
    size: SizeKey = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    tokenizer: Any = None,
    make_batch: Callable[[int, Any], Any] | None = None,
    cost_cache: str | Path | None = None,
    device: str | torch.device | None = None,
    num_workers: int | None = None,
    packed: bool | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Make a `DataLoader` whose batches fit a budget, as measured on your training step.

    It reads the sizes of all samples, measures the cost of the step on batches of real samples, and
    makes a `MemoryBudgetBatchSampler`: `loader.batch_sampler`. It writes a summary to standard
    error. Afterwards model, optimizer and random generators are as they were, bit for bit. A step
    that writes a log or a file skips it if `is_measuring()`.

    Under `torch.distributed` every rank must call it, unless you pass `num_replicas=1`. The largest
    cost of any rank counts, and the smallest number of workers that `loader_options` chose. The
    budget is that of one process.

    Args:
        dataset: a map-style data set of N samples, whose sizes depend on their indices alone; or a
            `DataLoader`, whose data set, collate, workers and pinning are taken, and whose batch
            size and `drop_last` are ignored.
        step: the training step, a function of a batch, or `alternatives` of several; or a forward;
            or a cost model, and nothing is measured.
        budget: bytes of the device, or a `MemoryBudget`. If it has `host` bytes, `loader_options`
            chooses workers and prefetching.
        size: the ragged field, several in a tuple, or a function of a sample, as for `sizes_of`.
            Default: the ragged field, if a single field shows all lengths in which samples differ.
        collate_fn: makes a batch of a list of samples. Default: a `PadCollate`. If samples have
            `input_ids`, but no `attention_mask`, and the step's model takes one, it is added, and
            ids are padded with `model.config.pad_token_id`.
        tokenizer: a tokenizer of transformers. Texts are tokenized, and batches are padded as it
            pads, with an attention mask and labels of -100.
        make_batch: as in `measure_cost`. Default: it collates real samples.
        cost_cache: a JSON file that keeps a cost for each step, budget, sizes and versions. A cost
            is used if these are the same and one real step at the largest shape stays within it.
            Otherwise the step is measured, a line says why, and its cost is added to the file.
        device: as in `measure_cost`.
        num_workers: number of workers; with `host` bytes in the budget, the most workers.
        packed: whether the collate concatenates samples and neither it nor the step pads them. The
            measured cost of a batch is then the sum over its samples: see `MeasuredCost.packed`.
            Default: true with a `PackCollate`, and with a collate of your own whose batches of a
            few samples show it, if the measured cost is such a sum. If only the cost is not, a line
            says so, and batches are planned as if padded, which takes more of them.
        options: options of `MemoryBudgetBatchSampler`, such as `samples_per_step` and `limits`; and
            of `DataLoader`: `pin_memory`, `generator`, `worker_init_fn`, and those of workers, if
            there are any.

    Raises:
        OptionError: an argument is invalid, or two arguments cannot be combined.
        SizesError: the data set is a stream; several fields are ragged; or a sample has another
            size when it is read again.
        CostError: the step cannot be measured; or batches are packed, but their cost is no sum.
        BudgetError: the budgets of this machine's ranks exceed its memory.
        RankError: another rank failed.

    >>> dataset = [{"ids": torch.arange(n)} for n in (5, 9, 2, 7)]
    >>> loader = torchbudget.loader(dataset, PaddedCost(unit_bytes=1), 18, shuffle=False)
    >>> [batch["ids"].shape for batch in loader]
    [torch.Size([2, 9]), torch.Size([2, 5])]
    """
    names: tuple[str, ...] = (*_OF_LOADERS, *_OF_WORKERS)
    workers = {name: options.pop(name) for name in names if name in options}
    _check_options(step, budget, options)
    chooser = step.model if isinstance(step, Forward) else step
    measured: Any = step
    if isinstance(step, Forward) and isinstance(chooser, Alternatives):
        measured = Alternatives(*(replace(step, model=way) for way in chooser.ways))
    budget = MemoryBudget.of(budget)
    needless = {"persistent_workers", "pin_memory", "prefetch_factor"} & workers.keys()
    if budget.host is not None and needless:
        raise OptionError(f"the budget's host bytes choose {' and '.join(needless)}: leave it out")
    workers |= {} if num_workers is None else {"num_workers": num_workers}
    samples: Any = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    check_indexed(samples, SizesError)
    if isinstance(dataset, DataLoader):
        workers = _taken_from(dataset, options) | workers
        if collate_fn is None and tokenizer is None and dataset.collate_fn is not default_collate:
            collate_fn = dataset.collate_fn
    alone = options.get("num_replicas") == 1
    ranks, reserve = Ranks(alone=alone), 0
    with RandomState.take():  # samples may draw
        with ranks.together():
            samples = _tokenized(samples, tokenizer)
            batches = RealBatches.of(
                samples, size, collate_fn, tokenizer,
                modules=[] if isinstance(step, CostModel) else TrainingState(step).modules,
                multiple=size_multiple_of(options.get("size_multiple", 1)),
                num_workers=workers.get("num_workers", 0),
            )  # fmt: skip
            padding = batches.padding()
        make_batch = make_batch or batches
        cost: CostModel
        if isinstance(step, CostModel):
            cost = step
        else:
            device = TrainingState(step).device if device is None else torch.device(device)
            if isinstance(step, Forward):
                with ranks.together():
                    reserve = _output_bytes(getattr(measured, "ways", [step])[0], batches)
                    budget = _less(budget, reserve) if is_cpu(device) else budget
            _check_machine(budget, device, ranks)
            # Only where a plan uses it: each batch that is a step is as full as fits.
            time = isinstance(step, Forward) or isinstance(chooser, Alternatives)
            accumulate = options.get("samples_per_step") is not None
            time |= accumulate and options.get("time") is None
            cost = _measured(
                measured, make_batch, batches, budget, device, cost_cache, ranks,
                time=time, accumulate=accumulate,
            )  # fmt: skip
        told = str(cost)
        if isinstance(cost, MeasuredCost) and packed is not False:
            cost = ranks.each(partial(_packed, cost, batches, packed))[0]
        if not alone:
            cost, budget = agree(cost, budget)
        if device is not None and budget.device is not None:
            limit_device_memory(budget, device)
        sampler = MemoryBudgetBatchSampler(batches.sizes, cost, budget, **options)
        if isinstance(chooser, Alternatives):
            chooser.bind(sampler)
        collate = _checked(batches, sampler.plan.uncapped)
        chosen: Mapping[str, Any] = {}
        if budget.host is not None and workers.get("num_workers") != 0:
            chosen = loader_options(
                sampler, budget, dataset=samples, collate_fn=collate,
                worker_init_fn=workers.get("worker_init_fn"),
                multiprocessing_context=workers.get("multiprocessing_context"),
                max_workers=workers.get("num_workers"),
                reserve=reserve,
            )  # fmt: skip
    workers = {"pin_memory": torch.device(device or "cpu").type == "cuda"} | workers | {**chosen}
    if not workers.get("num_workers"):
        workers = {name: one for name, one in workers.items() if name not in _OF_WORKERS}
    say(_summary(batches, padding, told, sampler, chosen))
    return DataLoader(samples, batch_sampler=sampler, collate_fn=collate, **workers)


def predict(
    model: Callable[[Any], Any],
    data: MapStyle | DataLoader[Any],
    budget: MemoryBudget | Amount | None = None,
    *,
    split_outputs: Split | None = None,
    gather: Literal["all", "first"] = "all",
    device: torch.device | str | None = None,
    group: Any = None,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> Any:
    """Return a model's output for every sample, in the data set's order, on any number of ranks.

    `predict(model, dataset, budget)` measures the forward and plans batches that fit, as `loader`
    does. `predict(model, loader)` uses the batches of a loader.

    The forward runs in evaluation mode and under `torch.no_grad()`. (Outputs of
    `torch.inference_mode()` could not be used in training.) Afterwards every module is in the mode
    that it was in. A loop over the same sampler is not disturbed.

    On several ranks every rank must call it. If one rank fails, all of them raise an error once the
    others are done with their batches.

    Args:
        model: a module or function that is called with each batch, such as `lambda batch:
            model(batch["ids"])`. The modules that a function refers to are put into evaluation
            mode.
        data: with a budget, a data set of N samples, or a `DataLoader` of one, as in `loader`.
            Without a budget, a `DataLoader` over a map-style data set, whose `batch_sampler` is a
            `MemoryBudgetBatchSampler` that yields every sample once; `shuffle=False` gives the
            least padding. The collate must keep the order of its samples.
        budget: as in `loader`. The bytes of the outputs, which stay in memory, are subtracted from
            the host's amount; on the CPU from the device's.
        split_outputs: `split_outputs(outputs, batch)` returns a sequence of one output for each
            sample of the batch. Default: row i of every tensor in the outputs, which may be a
            tensor or a tuple, list, dict or `ModelOutput` of tensors, all of shape `(n, …)`. Rows
            of shape `(L, …)` then include the padding of their batch.
        gather: "all": every rank returns the outputs; "first": rank 0 does, and other ranks return
            an empty list.
        device: device to which batches are moved; `None`: they are not moved.
        group: process group of the sampler's ranks. Default: all ranks. Not used if the sampler has
            `num_replicas=1`.
        progress: show a bar, if tqdm is installed and there is a terminal.
        folder: a folder, visible to all ranks, into which outputs are saved after each hundredth of
            the pass. If the process is killed, the same call continues with the remaining samples,
            on any number of ranks. It raises an error if the function's name, the model's
            parameters or buffers, the number of samples, or the contents of 64 of them differ.
        options: options of `loader`, such as `size`, `collate_fn`, `tokenizer` and
            `max_batch_size`.

    Returns:
        One tensor of shape `(N, …)` on the CPU, if the model returns a tensor whose rows have the
        same shape in all batches. Otherwise a list with the output of each sample: tensors on the
        CPU, each in memory of its own, in any structure that `torch.utils._pytree` knows (a
        dataclass must be registered there).

    Raises:
        OptionError: the loader is of another kind; its epoch leaves out or repeats samples
            (`oversize="skip"`, `drop_last`, `weights`, `batches_per_epoch`); its ranks are not
            those of the group; or outputs cannot be split.
        BudgetError: the outputs alone exceed the budget; or options of `loader` come without one.
        StateMismatchError: the folder belongs to another call: see `folder`.
        SampleError: the loader ended before the epoch did.
        CostError: the forward cannot be measured.
        SizesError: as in `loader`.
        RankError: another rank failed.

    >>> import torchbudget as tb
    >>> texts = [torch.ones(n) for n in (3, 9, 4, 8, 1)]
    >>> tokens = tb.PaddedCost(unit_bytes=1)
    >>> sampler = tb.MemoryBudgetBatchSampler([3, 9, 4, 8, 1], tokens, 18, shuffle=False)
    >>> batches = DataLoader(texts, batch_sampler=sampler, collate_fn=tb.PadCollate())
    >>> tb.predict(lambda batch: batch.data.sum(1), batches)
    tensor([3., 9., 4., 8., 1.])
    """
    if gather not in ("all", "first"):
        raise OptionError(f"gather must be 'all' or 'first', got {gather!r}")
    forward = Forward(model, split_outputs, device)
    made: Any = data
    if budget is not None or options:
        options = {"shuffle": False, "device": device, "budget": budget} | options
        with evaluation_mode(modules_of(model)):
            made = loader(data, forward, **options)
    opened = None if folder is None else _opened(Path(folder), forward, made)
    return outputs_of(forward, made, gather=gather, group=group, progress=progress, folder=opened)


def _checked(batches: RealBatches, rules: BatchRules) -> Callable[[list[Any]], Any]:
    """The collate that pads as the rules plan, and compares its batches with them."""
    made = batches.collate
    if rules.shapes and isinstance(made, PadCollate):
        made = replace(made, size_multiple=rules)
    multiple = None if rules.packing is None else batches.multiple
    return partial(_collate_checked, made, batches.most_elements(rules), multiple)


def _collate_checked(
    collate_fn: Callable[..., Any], most: int | None, multiple: int | None, samples: list[Any]
) -> Any:
    """Make a batch, and compare it with the plan: see `check_elements`."""
    batch = collate_fn(samples)
    check_elements(batch, most, multiple)
    return batch


def _check_options(step: Any, budget: Any, options: Mapping[str, Any]) -> None:
    check_call(MemoryBudgetBatchSampler, _CALL, (), step, budget, **options)
    if isinstance(step, type) or not (callable(step) or isinstance(step, CostModel)):
        hint = "; step and budget are swapped" if callable(budget) else ""
        raise OptionError(
            f"expected {_CALL}; the step is a function of a batch that makes a training step, or a "
            f"cost model: got step={step!r}{hint}"
        )
    if isinstance(step, Alternatives) and options.get("samples_per_step") is None:
        raise OptionError(NEED_STEPS)


def _taken_from(given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of workers that a loader has; the order that its sampler means is added."""
    batches, sampler = given.batch_sampler, given.sampler
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    in_order = is_random or type(sampler) is SequentialSampler
    if type(batches) is not BatchSampler or not in_order or len(sampler) != len(given.dataset):
        raise OptionError(
            f"loader cannot keep the order of a {type(batches).__name__} of a "
            f"{type(sampler).__name__}: pass its data set and collate_fn=. For draws with "
            "replacement, pass weights= and batches_per_epoch=; for a part of the data, a Subset; "
            "ranks are read from torch.distributed"
        )
    options.setdefault("shuffle", is_random)
    is_dropped = "; so is drop_last, the rest of such a batch" if given.drop_last else ""
    say([f"batch_size={given.batch_size} of the loader is ignored: the budget sets it{is_dropped}"])
    return {one: getattr(given, one) for one in (*_OF_LOADERS, *_OF_WORKERS)}


def _tokenized(dataset: Any, tokenizer: Any) -> Any:
    """The token ids of a data set of texts; another data set, or without a tokenizer, as it is."""
    if tokenizer is None or not len(dataset):
        return dataset
    if not isinstance(first := dataset[0], str):
        if isinstance(first, Mapping) and IDS in first:
            return dataset
        raise OptionError(
            f"tokenizer= takes texts, or samples with {IDS!r}, got {first!r:.50}: pass the texts "
            "alone, such as dataset['text'], or tokenize first, as dataset.map does"
        )
    found: list[dict[str, Any]] = []
    for start in range(0, len(dataset), _TEXTS):
        texts = [dataset[i] for i in range(start, min(start + _TEXTS, len(dataset)))]
        fields = tokenizer(texts, truncation=True, return_attention_mask=False)
        # Arrays take a fifth of the memory of lists.
        rows = zip(
            *([np.array(ids, np.int64) for ids in column] for column in fields.values()),
            strict=True,
        )
        found += [dict(zip(fields.keys(), row, strict=True)) for row in rows]
    return found


def _output_bytes(forward: Forward, batches: RealBatches) -> int:
    """Bytes of the outputs of all samples, by those of the smallest and the largest one alone."""
    rows = batches.rounded()
    elements = rows.prod(axis=1, dtype=np.float64)
    each = []
    for end in (np.where(elements > 0, elements, np.inf).argmin(), elements.argmax()):
        outputs = of_samples(forward, batches(1, rows[end]), 0, np.arange(1))
        leaves = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        objects = 0 if isinstance(outputs, Tensor) else _OBJECT_BYTES * len(leaves)
        each.append(objects + sum(map(part_bytes, leaves)))
    return int(np.interp(elements, [elements.min(), elements.max()], each).sum())


def _less(budget: MemoryBudget, outputs: int) -> MemoryBudget:
    """The budget of a CPU without the bytes of outputs, which stay in memory."""
    if budget.device is None:
        return budget
    if outputs >= budget.device:
        raise BudgetError(
            f"the outputs of all samples take about {format_bytes(outputs)}, of a budget of "
            f"{format_bytes(budget.device)}: return less from the model, or call predict on parts "
            "of the data set"
        )
    return replace(budget, device=budget.device - outputs)


def _check_machine(budget: MemoryBudget, device: torch.device, ranks: Ranks) -> None:
    """Raise a `BudgetError` where ranks on the CPUs of one machine have more than it has."""
    here = ranks.gather_objects(platform.node()).count(platform.node())
    if here < 2 or not is_cpu(device) or budget.device is None:
        return
    pool = min(host_memory(), key=lambda one: one.limit_bytes)
    if here * budget.device > pool.limit_bytes:
        raise BudgetError(
            f"the budget is for one process, but {here} ranks of {format_bytes(budget.device)} "
            f"exceed {pool.name}, {format_bytes(pool.limit_bytes)}; state at most "
            f"{format_bytes(pool.limit_bytes // here)}"
        )


def _measured(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    batches: RealBatches,
    budget: MemoryBudget,
    device: torch.device,
    cache: str | Path | None,
    ranks: Ranks,
    *,
    time: bool,
    accumulate: bool,
) -> MeasuredCost:
    """The cost of the step, from the cache or measured; the largest of any rank."""
    rows = np.unique(batches.rounded(), axis=0)
    asked = rows if rows.shape[1] > 1 else rows[:, 0]
    path = None if cache is None else Path(cache)
    room = budget.device or 0
    described = {
        **describe_step(step),  # which sets malloc, before any step runs
        "torchbudget": torchbudget.__version__,
        "budget": f"{room} bytes",
        "sizes": hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest(),
        **({"time": "timed"} if time else {}),
        "gradients": "accumulated" if accumulate else "of one step",
    }
    found = ranks.each(partial(_read, path, described))
    saved, reason = found[ranks.rank]
    if all(costs and not why for costs, why in found):
        cost = saved[0]
        reasons = ranks.each(partial(_why_not, cost, step, make_batch, batches.sizes, room))
        reason = next(filter(None, reasons), "")
        if not reason:
            return cost
    if reason:
        say([f"{path} is not used: {reason}"])
    say([f"measuring the step on real samples, in up to {format_bytes(room)}"])
    with ranks.together():
        cost = measure_cost(
            step, make_batch, sizes=batches.sizes, budget=budget, device=device,
            size_multiple=batches.multiple, time=time, accumulate=accumulate,
        )  # fmt: skip
    costs: list[MeasuredCost] = ranks.gather_objects(replace(cost, measured_on=described))
    cost = max(costs, key=lambda one: int(one.batch_bytes(1, asked).max()))
    if path is not None and not ranks.rank:
        cost.save(path, beside=[one for one in saved if differing(one, described)])
    return cost


def _why_not(*arguments: Any) -> str:
    """Return why a saved cost does not hold: also since the step was changed."""
    try:
        return why_not(*arguments)
    except CostError as error:
        return str(error)


def _read(path: Path | None, described: Mapping[str, str]) -> tuple[list[MeasuredCost], str]:
    """The costs in a file, if there is one, and why the first one cannot be used."""
    if path is None or not path.exists():
        return [], ""
    try:
        costs = saved_costs(path, described)
    except (OSError, CostError) as error:
        return [], str(error)
    return costs, "; ".join(differing(costs[0], described))


def _packed(cost: MeasuredCost, batches: RealBatches, packed: bool | None) -> CostModel:
    """The cost as a sum over the samples of a batch; as it is, if batches are padded.

    Raises:
        CostError: batches are stated to be packed, but the cost is no such sum.
    """
    is_stated = packed or isinstance(batches.collate, PackCollate)
    try:
        if not is_stated and not batches.concatenates():
            return cost
        multiple = getattr(batches.collate, "total_multiple", 1)
        return replace(cost.packed(no_padding=bool(packed)), total_multiple=multiple)
    except CostError as error:
        if is_stated:
            raise
        say([f"the collate concatenates, but batches are planned as if it padded: {error}"])
        return cost


def _summary(
    batches: RealBatches,
    padding: list[str],
    cost: str,
    sampler: MemoryBudgetBatchSampler,
    host: Mapping[str, Any],
) -> list[str]:
    """Lines about sizes, padding, cost, plan and host."""
    sizes, report = batches.sizes, sampler.report()
    rules = sampler.plan.uncapped
    longest = sizes[batches.rounded().prod(axis=1).argmax()]
    median = np.median(sizes, axis=0).astype(np.int64)
    one, other = (
        f"({_shown(size)}): {int(rules.alike(size)):,} at once" for size in (longest, median)
    )
    each, key = report.batches // report.ranks, batches.key
    by = "" if key is None else f", by {getattr(key, '__name__', key)!r}"
    least, most = _shown(sizes.min(axis=0)), _shown(sizes.max(axis=0))
    full = f"{report.fill:.1%} full"
    if report.epoch_s is not None:
        full = f"{report.epoch_s:,.3g} s an epoch by the measured time"
    lines = [
        f"sizes  {len(sizes):,} samples of {least} to {most}{by}",
        *padding,
        f"cost   {cost}",
        f"fits   longest sample {one}; median {other}",
        f"plan   {each:,} batches a rank, {full}, {report.padding:.1%} padding",
    ]
    if isinstance(host, LoaderOptions):
        lines.append(f"host   {host.explain().splitlines()[0]}; limited by {host.limited_by}")
    return lines


def _shown(size: Any) -> str:
    return " × ".join(f"{one:,}" for one in np.atleast_1d(size).tolist())


def _opened(folder: Path, forward: Forward, batches: DataLoader[Any]) -> Any:
    """Return a function of the ranks that opens the folder of this pass."""
    dataset: Any = batches.dataset
    few = SizeDataset(dataset, None).samples(spread(len(dataset)))
    name = getattr(forward.model, "__qualname__", type(forward.model).__qualname__)
    key = {
        "model": f"{name}, {_digest(TrainingState(forward).tensors())}",
        "data set": _digest([len(dataset), *few]),
    }
    return partial(PieceFolder, folder, key)


def _digest(values: Iterable[Any]) -> str:
    """A digest of the tensors, arrays, numbers and texts in any structure."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves([*values]):
        one: Any = leaf if isinstance(leaf, (str, bytes, int, float)) else type(leaf).__name__
        if isinstance(leaf, Tensor):
            for part in plain_parts(leaf.detach()):
                own = part.cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(own.numpy().data)
            one = (tuple(leaf.shape), str(leaf.dtype))
        elif hasattr(leaf, "__array_interface__") and not np.asarray(leaf).dtype.hasobject:
            array = np.asarray(leaf)  # of an image, too
            one = (array.shape, str(array.dtype), array.tobytes())
        digest.update(repr(one).encode())
    return digest.hexdigest()
