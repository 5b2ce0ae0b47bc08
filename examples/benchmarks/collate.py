"""How fast are the collates?

Question: how long does it take to make one batch of 64 dict samples of three ragged fields
(`input_ids`, `attention_mask`, `token_type_ids`; int64; lengths log-normal(5, 1), clipped to 16 to
512), beside `DataCollatorWithPadding` of transformers and `pad_sequence` of torch for each field?

Command: python examples/benchmarks/collate.py [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, torch 2.13 (CPU), transformers 5.23, Python 3.11.

=======  =======================  =======  =============  =====
samples  collate                       µs  PadCollate µs  ratio
=======  =======================  =======  =============  =====
lists    DataCollatorWithPadding    67636           1798  35.13
lists    PackCollate                 2557           2852   0.92
lists    JaggedCollate               2770           4141   0.92
tensors  DataCollatorWithPadding    73770            774  97.42
tensors  pad_sequence                 558            441   1.31
tensors  PackCollate                  318            394   0.80
tensors  JaggedCollate                324            411   0.77
arrays   PackCollate                  293            397   0.74
arrays   JaggedCollate                293            363   0.80
=======  =======================  =======  =============  =====

Other processes kept both cores busy meanwhile, which slows transformers most: on idle cores its
collator took 25 ms, 15 times as long as `PadCollate` on lists and 31 times on tensors.

Each row is a race of its own between `PadCollate` and one other collate: in every repetition both
collate the same samples, and take turns in who meets them first. The times are medians, and the
ratio is the median of (the other's time / PadCollate's time). Batches are checked to be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from torchbudget import JaggedCollate, PackCollate, PadCollate

Collate: TypeAlias = Callable[[list[Any]], Any]

ROW = "{samples:<8} {collate:<24} {us:>7.0f} {pad_collate_us:>14.0f} {ratio:>6.2f}"
NUM_SAMPLES = 64
FIELDS = ("input_ids", "attention_mask", "token_type_ids")


def make_samples(seed: int) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5, 1, NUM_SAMPLES), 16, 512).astype(int).tolist()
    return [
        {
            "input_ids": rng.integers(1, 30_000, length).tolist(),
            "attention_mask": [1] * length,
            "token_type_ids": rng.integers(0, 2, length).tolist(),
        }
        for length in lengths
    ]


def transformers_collate() -> Collate | None:
    """DataCollatorWithPadding over a tokenizer that is made here: nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from tokenizers import Tokenizer, models
        from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast
    except ImportError:
        return None
    pad, unknown = "[PAD]", "[UNK]"
    words = Tokenizer(models.WordLevel({pad: 0, unknown: 1}, unk_token=unknown))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, unk_token=unknown)
    # The collator reminds its user, once, that calling the tokenizer would be faster.
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    collator: Collate = DataCollatorWithPadding(tokenizer)
    return collator


def pad_sequence_per_field(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in FIELDS
    }


def race(
    ours: Collate,
    peer: Collate,
    batches: list[list[Any]],
    repetitions: int,
) -> tuple[list[float], list[float]]:
    """Seconds of both in each repetition. They take turns in who meets the samples first."""
    times: dict[int, list[float]] = {id(ours): [], id(peer): []}
    for repetition in range(-4, repetitions):  # the first four warm up
        samples = batches[repetition // 2 % len(batches)]
        for collate in (ours, peer) if repetition % 2 else (peer, ours):
            start_s = time.perf_counter()
            batch = collate(samples)
            elapsed_s = time.perf_counter() - start_s
            del batch
            if repetition >= 0:
                times[id(collate)].append(elapsed_s)
    return times[id(ours)], times[id(peer)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the collates beside their peers.")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--repetitions", type=int, default=200)
    arguments = parser.parse_args()

    lists: list[list[Any]] = [make_samples(seed) for seed in range(8)]
    tensors = [
        [{k: torch.tensor(v) for k, v in sample.items()} for sample in batch] for batch in lists
    ]
    arrays = [[{k: v.numpy() for k, v in s.items()} for s in batch] for batch in tensors]

    pad = PadCollate()
    collator = transformers_collate()
    if collator is None:
        print("transformers is not installed: its rows are skipped", file=sys.stderr)
    transformers = {} if collator is None else {"DataCollatorWithPadding": collator}
    ours: dict[str, Collate] = {"PackCollate": PackCollate(), "JaggedCollate": JaggedCollate()}
    cases: dict[str, tuple[list[Any], dict[str, Collate]]] = {
        "lists": (lists, transformers | ours),
        "tensors": (tensors, transformers | {"pad_sequence": pad_sequence_per_field} | ours),
        "arrays": (arrays, ours),
    }

    results: list[dict[str, Any]] = []
    print("samples  collate                       µs  PadCollate µs  ratio")
    for kind, (batches, others) in cases.items():
        expected = pad_sequence_per_field(tensors[0])
        for name, other in others.items():
            for collate in (pad,) if name in ours else (pad, other):
                padded = collate(batches[0])
                assert all(torch.equal(padded[field], expected[field]) for field in FIELDS)
            own_s, other_s = race(pad, other, batches, arguments.repetitions)
            row = {
                "samples": kind,
                "collate": name,
                "us": statistics.median(other_s) * 1e6,
                "pad_collate_us": statistics.median(own_s) * 1e6,
                "ratio": statistics.median(b / a for a, b in zip(own_s, other_s, strict=True)),
            }
            results.append(row)
            print(ROW.format(**row))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
