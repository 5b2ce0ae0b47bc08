"""How far is an accumulated gradient from that of the large batch?

Question: sixteen texts of unequal lengths in four micro-batches, one optimizer step: how far is the
gradient that the step takes from that of the mean loss over all labels of the sixteen?

Command: PYTHONPATH=. python examples/benchmarks/gradient_error.py

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, accelerate 1.15.0,
transformers 5.23.0, float64.

    loop                               relative error  kept
    GradAccumulator, sums                     6.4e-16     1
    Accelerate, mean losses                   1.6e+00     1
    Accelerate, counted before                3.6e-16     4
    Trainer, the model's loss                 6.3e-02     4
    Trainer, a mean loss of one's own         6.9e+00     4
    GradAccumulator's error ≤ 1e-12: 6.4012e-16, holds

The model is a GPT-2 of 2 layers of width 32 without dropout. The optimizer is plain SGD, so that
the change of the parameters shows the gradient. Accelerate is used in two ways of its
documentation: `accumulate` around a mean loss; and its guide's weighting, which keeps all
micro-batches of a step to count their labels first. The `Trainer` runs with the model's own loss,
which gets the number of labels, and with a user's loss that does not take this number. `kept` is
the number of micro-batches in memory at a time. If a peer is not installed, its rows are left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _common import Results, options
from torch import Tensor, nn

from torchbudget import GradAccumulator

WIDTH, CLASSES, MICRO, STEPS = 32, 50, 4, 4
PEERS = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers"))


class Small(nn.Module):
    """Stands in for GPT-2 where transformers is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return {"logits": self.head(self.embed(input_ids).cumsum(1).tanh())}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    if not PEERS:
        return Small().double()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=CLASSES,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).double()


def texts() -> list[dict[str, Tensor]]:
    """Padded alike; what is padding has the label -100."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(MICRO * STEPS):
        length = [3, 6, 14, 40][number // MICRO]  # micro-batches differ in labels
        ids = torch.randint(CLASSES, (40,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids.where(torch.arange(40) < length, -100)})
    return samples


def batches() -> Iterator[dict[str, Tensor]]:
    samples = texts()
    for start in range(0, len(samples), MICRO):
        part = samples[start : start + MICRO]
        yield {name: torch.stack([one[name] for one in part]) for name in part[0]}


def loss_of(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
    )


def labels_in(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"])["logits"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def whole(model: nn.Module) -> None:
    samples = texts()
    batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    optimizer = sgd(model)
    loss_of(logits_of(model, batch), batch["labels"], "mean").backward()
    optimizer.step()


def ours(model: nn.Module) -> None:
    accumulator = GradAccumulator(sgd(model), model, steps=STEPS)
    for batch in batches():
        with accumulator.micro_batch(weight=labels_in(batch)):
            accumulator.backward(loss_of(logits_of(model, batch), batch["labels"], "sum"))


def accelerate_means(model: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    for batch in batches():
        with accelerator.accumulate(wrapped):
            loss = loss_of(logits_of(wrapped, batch), batch["labels"], "mean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_counted(model: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    kept = list(batches())
    labels = sum(map(labels_in, kept))
    for batch in kept:
        with accelerator.accumulate(wrapped):
            loss = loss_of(logits_of(wrapped, batch), batch["labels"], "sum") / labels
            accelerator.backward(loss * STEPS)  # backward divides by it
            optimizer.step()
            optimizer.zero_grad()


def trainer(model: nn.Module, *, own_loss: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    class WithMeanLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return loss_of(logits_of(model, inputs), inputs["labels"], "mean")

    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=STEPS,
            max_steps=1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        kind = WithMeanLoss if own_loss else Trainer
        kind(
            model,
            arguments,
            train_dataset=texts(),  # type: ignore[arg-type]
            optimizers=(optimizer, constant),
        ).train()


LOOPS: dict[str, tuple[Callable[[nn.Module], None], int]] = {"GradAccumulator, sums": (ours, 1)}
if PEERS:
    LOOPS |= {
        "Accelerate, mean losses": (accelerate_means, 1),
        "Accelerate, counted before": (accelerate_counted, STEPS),
        "Trainer, the model's loss": (trainer, STEPS),
        "Trainer, a mean loss of one's own": (partial(trainer, own_loss=True), STEPS),
    }


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    arguments = options(__doc__)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    start = parameters(make_model())
    large = make_model()
    whole(large)
    truth = start - parameters(large)
    results = Results({"loop": "", "relative error": ".1e", "kept": "d"})
    for name, (loop, kept) in LOOPS.items():
        model = make_model()
        with redirect_stdout(sys.stderr):  # Trainer prints a line of its own
            loop(model)
        error = (start - parameters(model) - truth).norm() / truth.norm()
        results.row(loop=name, **{"relative error": error.item(), "kept": kept})
    results.bar("GradAccumulator's error", results.rows[0]["relative error"], 1e-12)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
