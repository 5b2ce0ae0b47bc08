"""How fast are the collates?

Question: how long does it take to make one batch of 64 dict samples of three ragged fields
(`input_ids`, `attention_mask`, `token_type_ids`; int64; lengths log-normal(5, 1), clipped to 16 to
512), compared with `DataCollatorWithPadding` of transformers and `pad_sequence` of torch?

Command: python examples/benchmarks/collate.py [--repetitions R] [--json PATH]

Hardware: 2 cores of an AMD EPYC, Python 3.11, torch 2.13.0 CPU, transformers 5.24.

    samples                  collate      µs  PadCollate, µs  ratio
    lists    DataCollatorWithPadding  11,887           1,258   9.45
    lists                PackCollate   1,199           1,297   0.92
    tensors  DataCollatorWithPadding  12,922             576  22.48
    tensors             pad_sequence     510             569   0.89
    tensors              PackCollate     387             543   0.72
    arrays               PackCollate     324             461   0.71
    lists, DataCollatorWithPadding ≥ 3: 9.4473, holds
    tensors, DataCollatorWithPadding ≥ 3: 22.48, holds
    tensors, pad_sequence ≥ 1.2: 0.89407, DOES NOT HOLD

Each row is a race of its own between `PadCollate` and one other collate, on the same eight batches
in every repetition, taking turns in going first. The times are medians, of a batch; the
ratio is the median of (the other's time / PadCollate's time). Batches are checked to be equal.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from _common import Results, alternate, median, options, ratio
from torch.nn.utils.rnn import pad_sequence

from torchbudget import PackCollate, PadCollate

Collate: TypeAlias = Callable[[list[Any]], Any]

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


def main() -> None:
    arguments = options(__doc__, repetitions=25)
    lists: list[list[Any]] = [make_samples(seed) for seed in range(8)]
    tensors = [
        [{k: torch.tensor(v) for k, v in sample.items()} for sample in batch] for batch in lists
    ]
    arrays = [[{k: v.numpy() for k, v in s.items()} for s in batch] for batch in tensors]

    results = Results(
        {"samples": "", "collate": "", "µs": ",.0f", "PadCollate, µs": ",.0f", "ratio": ".2f"}
    )
    pad = PadCollate()
    collator = transformers_collate()
    if collator is None:
        results.row(samples="–", collate="transformers is not installed")
    transformers = {} if collator is None else {"DataCollatorWithPadding": collator}
    ours: dict[str, Collate] = {"PackCollate": PackCollate()}
    cases: dict[str, tuple[list[Any], dict[str, Collate]]] = {
        "lists": (lists, transformers | ours),
        "tensors": (tensors, transformers | {"pad_sequence": pad_sequence_per_field} | ours),
        "arrays": (arrays, ours),
    }
    bars = {"DataCollatorWithPadding": 3, "pad_sequence": 1.2}
    expected = pad_sequence_per_field(tensors[0])
    for kind, (batches, others) in cases.items():
        for name, other in others.items():
            for collate in (pad,) if name in ours else (pad, other):
                padded = collate(batches[0])
                assert all(torch.equal(padded[field], expected[field]) for field in FIELDS)

            def run(collate: Collate, batches: list[Any] = batches) -> None:
                deque(map(collate, batches), maxlen=0)

            contenders = {name: partial(run, other), "PadCollate": partial(run, pad)}
            alternate(contenders, 2)  # warms up
            times = alternate(contenders, arguments.repetitions)
            others_ratio = ratio(times[name], times["PadCollate"])
            per_batch = 1e6 / len(batches)
            row = {
                "samples": kind,
                "collate": name,
                "µs": median(times[name]) * per_batch,
                "PadCollate, µs": median(times["PadCollate"]) * per_batch,
                "ratio": others_ratio,
            }
            results.row(**row)
            if name in bars:
                results.bar(f"{kind}, {name}", others_ratio, bars[name], at_least=True)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
