"""Training with a compiled model, whose batches of ragged text take at most 16 shapes.

    python examples/compiled_shapes.py --shapes 16 --tokens 16384

A compiler that is told of no dynamic shapes compiles a model once for each shape of its batches.
Batches that fill a budget of tokens have hundreds of shapes; with `max_shapes` they have the best
few of them. Rows that fill up the last batch of a window are masked by their labels. The table has
the shapes, and the number of times that the model was compiled.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchbudget import MemoryBudgetBatchSampler, PadCollate, PaddedCost, TorchBudgetError

TOKENS = PaddedCost(unit_bytes=1, unit="tokens")
VOCABULARY, WIDTH = 1000, 32


class Tagger(nn.Module):
    """A label for each token, by attention over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=attention_mask == 0)
        logits: Tensor = self.head(hidden)
        return logits


def texts(number: int, longest: int) -> list[dict[str, Tensor]]:
    """Random ids; the label of each says whether it is above half of the vocabulary."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 1, number), 4, longest).astype(int)
    ids = [torch.from_numpy(rng.integers(0, VOCABULARY, length)) for length in lengths]
    return [{"ids": one, "labels": (one > VOCABULARY // 2).long()} for one in ids]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a text at the most")
    parser.add_argument("--tokens", type=int, default=16_384, help="in a batch at the most")
    parser.add_argument("--shapes", type=int, default=16)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    arguments = parser.parse_args()
    samples: Any = texts(arguments.texts, arguments.longest)
    sizes = np.array([len(sample["ids"]) for sample in samples])
    try:
        anything = MemoryBudgetBatchSampler(sizes, TOKENS, arguments.tokens)
        sampler = MemoryBudgetBatchSampler(
            sizes, TOKENS, arguments.tokens, max_shapes=arguments.shapes
        )
    except TorchBudgetError as error:
        parser.error(str(error))
    # The collate reads the shapes from the sampler, and masks rows by labels of -100.
    collate = PadCollate(size_multiple=sampler, mask="attention_mask")
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=collate)

    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch._dynamo.config.recompile_limit = arguments.shapes  # 8 by default
    compiled = torch.compile(model, dynamic=False, backend=arguments.backend)
    came = Counter[tuple[int, ...]]()
    for batch in sampler.tracked(loader):
        logits = compiled(batch["ids"], batch["attention_mask"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        came[tuple(batch["ids"].shape)] += 1
        print(f"batch {came.total()}: loss {loss.item():.3f}", end="\r")
    print(f"\n{'rows':>8}{'length':>8}{'batches':>9}")
    for (rows, length), batches in sorted(came.items()):
        print(f"{rows:8,}{length:8,}{batches:9,}")
    print(sampler.report())
    print(f"batches without max_shapes: {len(anything):,}")
    print(f"compilations: {torch._dynamo.utils.counters['stats']['unique_graphs']}")


if __name__ == "__main__":
    main()
