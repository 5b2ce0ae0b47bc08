"""Measures a BERT or trains it by a cost, without any call of `configure_allocators`; prints JSON.

python script_saved_cost.py measure|load|trace PATH
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import warnings
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

import torchbudget as tb
from torchbudget.machine.peaks import peak_memory

gc.freeze()  # what is imported takes 0.2 s of each collection
torch.manual_seed(0)
BUDGET = tb.MiB(800)
lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 0.7, 4_000), 8, 256).astype(int)
config = BertConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    intermediate_size=256,
)  # fmt: skip
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters())
told: dict[str, Any] = {}


def step(batch: Any) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def make_batch(n: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1))
    mask[0] = True
    ids = torch.randint(1, 1000, (n, length)) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.arange(n) % 2}


def train(cost: tb.MeasuredCost) -> None:
    """Steps on batches that fill the budget, and their highest peak."""
    sampler = tb.MemoryBudgetBatchSampler(lengths, cost, BUDGET)
    with peak_memory("cpu") as peak:
        for indices in islice(sampler, 12):
            step(make_batch(len(indices), int(lengths[indices].max())))
    told["peak"] = peak.bytes / BUDGET


mode, path = sys.argv[1:]
logging.getLogger("transformers").setLevel(logging.ERROR)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    if mode == "load":
        train(tb.load_cost(path))
    else:
        method = "trace" if mode == "trace" else "auto"
        cost = tb.measure_cost(step, make_batch, sizes=lengths, budget=BUDGET, method=method)
        cost.save(path)
        if mode == "trace":
            train(cost)
told["warned"] = [f"{one.category.__name__}: {one.message}" for one in caught]
sys.stdout.write(json.dumps(told))
