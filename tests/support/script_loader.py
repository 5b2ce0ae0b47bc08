"""Trains a small encoder by `loader`, and calls `predict`, under one budget; prints JSON.

python script_loader.py CACHE
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchbudget as tb
from torchbudget.machine.peaks import peak_memory

gc.freeze()  # what is imported takes 0.2 s of each collection
warnings.simplefilter("ignore")
tb.configure_allocators()
torch.manual_seed(0)
MIB = 2**20
BUDGET = 500 * MIB
lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 0.8, 5_000), 4, 256).astype(int)
data = [{"ids": torch.randint(1, 500, (n,)), "label": n % 2} for n in lengths.tolist()]
layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = nn.ModuleList([nn.Embedding(500, 64), encoder, nn.Linear(64, 2)])
optimizer = torch.optim.AdamW(model.parameters())
runs: list[int] = []


def step(batch: dict[str, Tensor]) -> None:
    embedding, encoder, head = model
    hidden = encoder(embedding(batch["ids"]), src_key_padding_mask=batch["ids"] == 0)
    cross_entropy(head(hidden.mean(1)), batch["label"]).backward()
    optimizer.step()
    optimizer.zero_grad()
    runs.append(len(batch["label"]))


cache = Path(sys.argv[1])
told: dict[str, Any] = {"runs": [], "costs": []}
for _ in range(2):  # the second one reads the cost
    runs.clear()
    loader = tb.loader(data, step, BUDGET, cost_cache=cache)
    told["runs"].append(len(runs))
    told["costs"].append(cache.read_text())
with peak_memory("cpu") as peak:
    for batch in islice(loader, 10):
        step(batch)
told["peak"] = peak.bytes / BUDGET


def embed(batch: dict[str, Tensor]) -> Tensor:
    embedding, encoder, _ = model
    hidden: Tensor = encoder(embedding(batch["ids"]), src_key_padding_mask=batch["ids"] == 0)
    return hidden.mean(1)


del batch, loader
with peak_memory("cpu") as peak:
    vectors = tb.predict(embed, data, BUDGET, cost_cache=cache.with_suffix(".embed"))
told |= {"outputs": [*vectors.shape], "peak of outputs": peak.bytes / BUDGET}
sys.stdout.write(json.dumps(told))
