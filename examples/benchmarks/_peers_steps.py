"""The same optimizer steps for all: only how a step is cut into micro-batches differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import _peers_text
import numpy as np
from _peers_runs import Way, Work

TITLE = "The same optimizer steps"
TEXT = (
    "The same BERT and docstrings; all ways make the same optimizer steps, of 256 samples that are "
    "drawn at random, and cut each into micro-batches whose gradients are summed, as their library "
    "does. Settings are samples, or tokens."
)
STEP = 256
prepare, sizes = _peers_text.prepare, _peers_text.sizes


def work(job: dict[str, Any]) -> Work:
    """The model of `_peers_text`, which steps once the samples of a step have come."""
    import torch
    from torch.nn.functional import cross_entropy

    of = _peers_text.work(job)
    model = of.extra["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    left = [STEP]

    def backward(batch: Any) -> None:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = model(**inputs).logits
        (cross_entropy(logits, batch["labels"], reduction="sum") / STEP).backward()

    def whole(batch: Any) -> None:
        backward(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def step(batch: Any) -> None:
        backward(batch)
        left[0] -= len(batch["labels"])
        if left[0] <= 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            left[0] = STEP

    whole(of.extra["collate"]([dict(of.samples[0])]))
    of.step = step
    of.extra["whole"] = whole
    return of


def cut(work: Work, micro_batches: Callable[[Any], Iterator[Any]]) -> Any:
    """A loader of the micro-batches of each step's lengths, as places in the step."""
    from torch.utils.data import DataLoader

    lengths = np.array(work.sizes)
    drawn = np.random.default_rng(0).permutation(len(lengths))
    batches = [
        step[list(places)].tolist()
        for step in np.split(drawn, range(STEP, len(drawn), STEP))
        for places in micro_batches(lengths[step])
    ]
    return DataLoader(work.samples, batch_sampler=batches, collate_fn=work.extra["collate"])


def parts(order: Any, number: int) -> Iterator[Any]:
    return (order[start : start + number] for start in range(0, len(order), number))


# ---------------------------------------------------------------------- ways to cut a step


def fixed(work: Work, batch_size: int) -> Any:
    return cut(work, lambda lengths: parts(range(len(lengths)), batch_size))


def grouped(work: Work, batch_size: int) -> Any:
    """The order of `LengthGroupedSampler` within a step."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    def of_step(lengths: Any) -> Iterator[Any]:
        order = get_length_grouped_indices(lengths.tolist(), batch_size, STEP)
        return parts(order, batch_size)

    return cut(work, of_step)


def limit_of_tokens(work: Work, tokens: int) -> Any:
    """Sorted samples, as many as the limit allows with their padding: as fairseq does."""

    def of_step(lengths: Any) -> Iterator[Any]:
        batch: list[int] = []
        for place in np.argsort(lengths, kind="stable").tolist():
            if batch and (len(batch) + 1) * lengths[place] > tokens:
                yield batch
                batch = []
            batch.append(place)
        yield batch

    return cut(work, of_step)


def rebalanced(work: Work, batch_size: int) -> Any:
    """As the Trainer makes it: batches of alike total length, drawn for one step at a time."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    def of_step(lengths: Any) -> Iterator[Any]:
        number = max(len(lengths) // batch_size, 1)
        return iter(BatchRebalanceSampler(lengths.tolist(), STEP, 1, number, drop_last=False))

    return cut(work, of_step)


def ours(work: Work, _: None) -> Any:
    import torchbudget

    step = work.measured_or(work.extra["whole"])
    return torchbudget.loader(
        work.samples, step, work.budget, tokenizer=work.extra["tokenizer"],
        cost_cache=work.cost_file, samples_per_step=STEP,
    )  # fmt: skip


NEAR = "it has nearly the same micro-batches"
WAYS = (
    Way(name="torchbudget.loader", make=ours, resumed="tried"),
    Way(name="fixed, accumulated", make=fixed, documented=16),
    Way(name="LengthGroupedSampler", make=grouped, documented=16, why=NEAR,
        needs="transformers.trainer_pt_utils"),
    Way(name="BatchRebalanceSampler", make=rebalanced, documented=16,
        needs="transformers.trainer_pt_utils"),
    Way(name="limit of tokens", make=limit_of_tokens, documented=4096, in_tokens=True, why=NEAR),
)  # fmt: skip
BASE = "fixed, accumulated"
