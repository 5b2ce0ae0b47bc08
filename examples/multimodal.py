"""Text with any number of images, in rows without padding: under bytes and two limits.

    python examples/multimodal.py --budget 700MiB
    torchrun --nproc-per-node 2 examples/multimodal.py --budget 700MiB

A small Qwen2-VL of transformers, made from its configuration, learns texts with none to four images
each; 30 % have none. The bytes of a row are measured by runs: some are fixed, and the others follow
from its tokens of text and its patches. The first table compares the slowest rank of a step with
the mean, if ranks are balanced by tokens alone, and by the time of text and images: predicted, and
under torchrun also measured. The second one has the real peaks of rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLModel,
)

from torchbudget import (
    GradAccumulator,
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PackCollate,
    PackedCost,
    TorchBudgetError,
    configure_allocators,
    measure_cost,
    parse_bytes,
    sizes_of,
)
from torchbudget.integrations.transformers import check_kept_apart
from torchbudget.machine.peaks import peak_memory

IMAGE, START, END, WORDS = 3, 1, 2, 1024  # ids of a placeholder and of the ends of an image
MERGED = 4  # patches for each placeholder: 2 × 2
FULL = 0.96  # of the budget, as predicted: the next sample did not fit
# Sizes are (tokens of text, patches).
TOKENS = PackedCost(unit_bytes=(1, 1 / MERGED), unit="tokens")  # placeholders included
PATCHES = PackedCost(unit_bytes=(0, 1), unit="patches")


def config() -> Qwen2VLConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return Qwen2VLConfig(
        text_config={
            "vocab_size": WORDS,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={"depth": 4, "embed_dim": 64, "hidden_size": 128, "num_heads": 4},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


# ---------------------------------------------------------------------- data


class TextWithImages(Dataset[dict[str, Tensor]]):
    """Random words, before each image some and after the last one the rest."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)
        with torch.device("meta"):  # for its positions, which need no weights
            self.model = Qwen2VLModel(config())

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng(index)
        words = np.clip(rng.lognormal(3.5, 0.7), 8, 160).astype(int)
        images = [
            Image.fromarray(rng.integers(0, 256, (*rng.integers(40, 250, 2), 3), dtype=np.uint8))
            for _ in range(rng.integers(1, 5) if rng.random() < 0.7 else 0)
        ]
        made = dict(self.process(images, return_tensors="pt")) if images else {}
        grids = made.get("image_grid_thw", torch.empty(0, 3, dtype=torch.int64))
        ids: list[int] = []
        for patches in grids.prod(dim=1).tolist():
            ids += [*rng.integers(5, WORDS, 3), START, *[IMAGE] * (patches // MERGED), END]
        ids += rng.integers(5, WORDS, words).tolist()
        return {**sample_of(self.model, torch.tensor(ids), grids), **made}


def sample_of(model: Any, ids: Tensor, grids: Tensor) -> dict[str, Tensor]:
    """The fields of a text of these ids: labels of words alone, and the model's own positions."""
    is_image = ids == IMAGE
    positions, _ = model.get_rope_index(ids[None], is_image[None].int(), image_grid_thw=grids)
    labels = ids.masked_fill(is_image, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions[:, 0]}


def size(sample: dict[str, Tensor]) -> tuple[int, int]:
    """Tokens of text, without placeholders, and patches."""
    return int((sample["input_ids"] != IMAGE).sum()), len(sample.get("pixel_values", ()))


collate = PackCollate(
    layout="transformers",
    fields={"pixel_values": ("joined", "optional"), "image_grid_thw": ("joined", "optional")},
)


# ---------------------------------------------------------------------- cost and time


def make_batch(n: int, size: tuple[int, int]) -> Any:
    """A row of n texts, with patches in whole 2 × 2 merges, and in images of up to 16 merges."""
    tokens, merges = size[0], -(-size[1] // MERGED)
    images = [16] * (merges // 16) + [merges % 16] * (merges % 16 > 0)
    ids = torch.tensor([IMAGE] * merges + [5] * tokens)
    sample = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == IMAGE, -100),
        "position_ids": torch.arange(len(ids)).expand(3, -1),  # bytes do not depend on their values
        "pixel_values": torch.zeros(merges * MERGED, 3 * 2 * 14 * 14),
        # The patches of each image, since attention is within an image.
        "image_grid_thw": torch.tensor([(1, 2, 2 * one) for one in images]),
    }
    return collate([sample] * n)


def measured_cost(model: Any, optimizer: Any, sizes: Any, budget: str) -> MeasuredCost:
    """The bytes and the seconds of rows, by runs: the model reads the grids as Python's numbers."""

    def step(batch: Any) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure_cost(
        step,
        make_batch,
        sizes=sizes,
        size_multiple=MERGED,
        budget=budget,
        method="run",
        time=False,
        accumulate=True,
    )


def time_of(measured: MeasuredCost) -> PackedCost:
    """The nanoseconds of a row: some for each token of text, and for each patch."""
    runs = [(1, *(one.n * size for size in one.size), one.seconds) for one in measured.probes]
    *terms, seconds = np.array(runs, float).T
    relative = np.stack(terms / seconds, axis=1)
    solved, *_ = np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)
    fixed, *each = np.maximum(1e9 * solved, 0)
    return PackedCost(fixed_bytes=fixed, unit_bytes=each, unit="ns")


def by_step(rows: Sequence[float], sampler: MemoryBudgetBatchSampler) -> Any:
    """The sums over the rows of each optimizer step, after a loop over the sampler."""
    return np.add.reduceat(rows, np.cumsum([0, *sampler.steps])[:-1])


def slowest_over_mean(ranks: Any) -> float:
    """Of the steps' times on each rank, `(ranks, steps)`: ranks wait for the slowest."""
    return float(np.max(ranks, axis=0).sum() / np.mean(ranks, axis=0).sum())


# ---------------------------------------------------------------------- training


def train(model: nn.Module, optimizer: Any, data: Any, sampler: MemoryBudgetBatchSampler) -> Any:
    """An epoch; of each row the tokens of text, the patches, the seconds and the peak bytes."""
    accumulator = GradAccumulator(optimizer, model, steps=sampler)
    rows = []
    for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate):
        predicted = int(batch["labels"].ne(-100).sum())
        with peak_memory("cpu") as peak, accumulator.micro_batch(weight=predicted):
            start_s = time.perf_counter()
            accumulator.backward(model(**batch).loss * predicted)  # the loss is their mean
            seconds = time.perf_counter() - start_s
        patches = len(batch.get("pixel_values", ()))
        rows.append((batch.num_tokens - patches // MERGED, patches, seconds, peak.bytes))
    return np.array(rows).T


def run(options: argparse.Namespace) -> None:
    configure_allocators()  # freed memory is returned: rows need ever new shapes
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config()).train()
    optimizer = torch.optim.AdamW(model.parameters())
    data = TextWithImages(options.samples)
    check_kept_apart(model, collate([data[index] for index in range(8)]))

    sizes = sizes_of(data, size, progress=False)
    found: list[Any] = [None]
    if rank == 0:
        measured = measured_cost(model, optimizer, sizes, options.budget)
        found = [(measured.packed(no_padding=True), time_of(measured))]
    if ranks > 1:  # all ranks plan with the same cost
        dist.broadcast_object_list(found)
    cost, both = found[0]
    limits = [(TOKENS, options.tokens), (PATCHES, options.patches)]

    def samplers(number: int, by: PackedCost) -> list[MemoryBudgetBatchSampler]:
        options_of_all: dict[str, Any] = {"limits": limits, "time": by, "num_replicas": number}
        options_of_all["samples_per_step"] = options.samples_per_step
        return [
            MemoryBudgetBatchSampler(sizes, cost, options.budget, rank=one, **options_of_all)
            for one in range(number)
        ]

    def predicted(number: int, by: PackedCost) -> float:
        """Slowest / mean of a number of ranks, by the time of text and images."""
        every = samplers(number, by)
        rows = [list(own) for own in every]
        assert sorted(chain(*chain(*rows))) == [*range(len(sizes))]  # each sample once
        took = [
            [both.base_bytes + both.item_bytes(sizes[row]).sum() for row in own] for own in rows
        ]
        return slowest_over_mean([*map(by_step, took, every)])

    trained: Any = model if ranks == 1 else DistributedDataParallel(model)
    print_first = print if rank == 0 else (lambda *_: None)
    for what, one in (("bytes", cost), ("ns", both)):
        text, patch = (f"{each:,.0f}" for each in one.unit_bytes)
        print_first(f"{what} of a row: {one.fixed_bytes:,}, and {text} a token, {patch} a patch")
    print_first(f"{'slowest rank / mean':22}{'8 ranks':>9}{'2 ranks':>9}{'measured':>10}")
    for name, by in (("by tokens", TOKENS), ("by text and patches", both)):
        cells = f"{name:22}{predicted(8, by):9.3f}{predicted(2, by):9.3f}"
        if ranks > 1 or by is both:
            sampler = samplers(ranks, by)[rank]
            tokens, patches, seconds, peaks = train(trained, optimizer, data, sampler)
        if ranks > 1:
            of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(of_ranks, by_step(seconds, sampler))
            cells += f"{slowest_over_mean(of_ranks):10.3f}"
        print_first(cells)

    budget = parse_bytes(options.budget)
    rows = np.stack([tokens, patches], axis=1).astype(np.int64)
    for limit, amount in limits:
        assert limit.item_bytes(rows).max() <= amount
    expected = (cost.base_bytes + rows @ cost.unit_bytes) / budget
    shares = peaks / budget
    full = expected > FULL
    print_first(f"{'peak / budget':22}{'rows':>6}{'lowest':>8}{'mean':>8}{'highest':>9}")
    for name, some in (("rows the bytes end", full), ("other rows", ~full)):
        if some.any():
            own = shares[some]
            cells = f"{own.min():8.3f}{own.mean():8.3f}{own.max():9.3f}"
            print_first(f"{name:22}{some.sum():6,}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", default="700MiB", help="memory of each rank's process")
    add("--tokens", type=int, default=4096, help="in a row at the most, placeholders included")
    add("--patches", type=int, default=4096, help="in a row at the most")
    add("--samples", type=int, default=1600)
    add("--samples-per-step", type=int, default=400)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        run(options)
    except TorchBudgetError as error:
        parser.error(str(error))
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # see train_ddp.py


if __name__ == "__main__":
    main()
