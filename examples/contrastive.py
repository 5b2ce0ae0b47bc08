"""A contrastive loss over a large batch, with the activations of a small one.

    python examples/contrastive.py --pairs 512 --micro-batch 32

The first half of a docstring is to find its second half among all those of the batch. Such a loss
cannot be cut into micro-batches: it depends on all pairs at once. `joint_backward` gives its exact
gradient all the same, in two passes. The table compares it with the whole batch at once: the
gradient, and the memory that each took beyond what was in use before, as the kernel counted it.
Then the encoder learns for some steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
from itertools import islice

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor, nn
from train_text import Transformer, docstrings

from torchbudget import (
    GradAccumulator,
    PadCollate,
    PaddedBatch,
    configure_allocators,
    format_bytes,
    joint_backward,
)
from torchbudget.machine.peaks import peak_memory


class Encoder(nn.Module):
    """Both halves of a text as unit vectors, by one byte-level transformer."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.body = Transformer(max_length)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        return self._one(batch, "first"), self._one(batch, "second")

    def _one(self, batch: PaddedBatch, field: str) -> Tensor:
        weight = batch.measured_by(field).mask[..., None].float()
        states = self.body(batch[field])
        return F.normalize((states * weight).sum(1) / weight.sum(1), dim=1)

    def contrast(self, found: tuple[Tensor, Tensor]) -> Tensor:
        """Each first half finds its second half, and the other way round."""
        first, second = found
        scores = first @ second.T * self.scale.exp()
        truth = torch.arange(len(scores))
        return (F.cross_entropy(scores, truth) + F.cross_entropy(scores.T, truth)) / 2


def halves(text: bytes, max_length: int) -> dict[str, Tensor]:
    middle = len(text) // 2
    parts = {"first": text[:middle], "second": text[middle:]}
    return {name: torch.tensor(list(part[:max_length])) for name, part in parts.items()}


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train with a contrastive loss over large batches in little memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--pairs", type=int, default=512, help="pairs in a batch")
    add("--micro-batch", type=int, default=32, help="pairs whose activations are kept")
    add("--steps", type=int, default=4)
    add("--max-length", type=int, default=256, help="bytes at which halves are cut")
    options = parser.parse_args()
    configure_allocators()
    torch.manual_seed(0)
    texts = (text for text in docstrings(0) if len(text) > 1)
    samples = [halves(t, options.max_length) for t in islice(texts, options.pairs * 2)]
    samples.sort(key=lambda sample: len(sample["first"]))
    collate = PadCollate(fields={"second": "padded"})
    batches = [collate(samples[start::2]) for start in (0, 1)]
    parts = [batch.split(max(batch.num_samples // options.micro_batch, 1)) for batch in batches]

    model = Encoder(options.max_length)
    whole = copy.deepcopy(model)
    for name, backward in (
        ("whole batch", lambda: whole.contrast(whole(batches[0])).backward()),
        ("joint_backward", lambda: joint_backward(model, parts[0], model.contrast)),
    ):
        gc.collect()
        with peak_memory("cpu") as before:
            pass
        with peak_memory("cpu") as peak:
            backward()
        print(f"{name:>15}: {format_bytes(peak.bytes - before.bytes)} more than before")
    apart = (gradient_of(model) - gradient_of(whole)).norm() / gradient_of(whole).norm()
    print(f"{'gradients':>15}: {apart.item():.1e} apart, relatively, in float32\n")

    model.zero_grad()
    accumulator = GradAccumulator(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for number in range(options.steps):
        loss = joint_backward(model, parts[number % 2], model.contrast, accumulator)
        print(f"step {number + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
