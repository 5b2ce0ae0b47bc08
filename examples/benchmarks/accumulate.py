"""What does an accumulated step cost, against a loop by hand over the same micro-batches?

Question: the same model, the same micro-batches, the same division by the weight at the step: how
much longer does `GradAccumulator` take? The loop by hand, timed twice, shows the noise.

Command: PYTHONPATH=. python examples/benchmarks/accumulate.py

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU.

    loop  by hand, ms  ours, ms  ours / by hand  by hand again  own µs a micro-batch
    step       280.11    283.45          0.9835         0.9934                 416.9
    tiny        20.87     23.13          1.0675         1.0051                 281.5
    ours / by hand ≤ 1.01: 0.98353, holds

The model is a transformer encoder of 2 layers of width 128 on sequences of 64, in steps of 8
micro-batches of 16 samples, with AdamW. The contenders take turns, step by step, and the ratio is
the median over the steps. `tiny` is the same with a width of 16 and single samples of length 4:
what is left then is the accumulator's own time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from _common import Results, alternate, median, options, ratio
from torch import Tensor, nn

from torchbudget import GradAccumulator

MICRO_BATCHES = 8
SIZES = {"step": (128, 16, 64), "tiny": (16, 1, 4)}


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Training:
    """What all contenders train: the same, because memory elsewhere differs by half a percent."""

    def __init__(self, width: int, n: int, length: int) -> None:
        self.model = Model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batches = [torch.randn(n, length, width) for _ in range(MICRO_BATCHES)]
        self.labels = torch.randint(32, (n * length,))
        self.accumulator = GradAccumulator(self.optimizer, self.model, steps=MICRO_BATCHES)

    def loss(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).flatten(0, 1), self.labels, reduction="sum")

    def by_hand(self) -> float:
        loss_sum, weight = torch.zeros(()), 0
        for x in self.batches:
            loss = self.loss(x)
            loss.backward()
            loss_sum += loss.detach()
            weight += len(self.labels)
        for parameter in self.model.parameters():
            parameter.grad /= weight
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss_sum.item() / weight

    def ours(self) -> None:
        for x in self.batches:
            with self.accumulator.micro_batch(weight=len(self.labels)):
                self.accumulator.backward(self.loss(x))


def main() -> None:
    arguments = options(__doc__, repetitions=100)
    results = Results(
        {
            "loop": "",
            "by hand, ms": ".2f",
            "ours, ms": ".2f",
            "ours / by hand": ".4f",
            "by hand again": ".4f",
            "own µs a micro-batch": ".1f",
        }
    )
    for name, size in SIZES.items():
        training = Training(*size)
        contenders = {
            "by hand": training.by_hand,
            "ours": training.ours,
            "again": training.by_hand,
        }
        for contender in contenders.values():
            contender()
        times = alternate(contenders, arguments.repetitions)
        extra_s = median(times["ours"]) - median(times["by hand"])
        results.row(
            **{
                "loop": name,
                "by hand, ms": 1e3 * median(times["by hand"]),
                "ours, ms": 1e3 * median(times["ours"]),
                "ours / by hand": ratio(times["ours"], times["by hand"]),
                "by hand again": ratio(times["again"], times["by hand"]),
                "own µs a micro-batch": 1e6 * extra_s / MICRO_BATCHES,
            }
        )
    results.bar("ours / by hand", results.rows[0]["ours / by hand"], 1.01)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
