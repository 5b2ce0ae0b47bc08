"""How much faster is it to recompute activations only where a batch does not fit otherwise?

Question: a model cannot train on its longest samples under a budget, unless it recomputes its
activations in the backward. The same optimizer steps are made twice, in turn: with activations
always recomputed, and with `alternatives(plain, recomputed)`, where each micro-batch is made in the
faster way that fits. Both are cut by their own measured cost under the same budget: what the
smallest sample needs in the plain way, and 0.6 of what the longest one needs beyond that.

Command: PYTHONPATH=.:examples python examples/benchmarks/alternatives.py [--samples N] [--steps K]
[--models TEXT …] [--json PATH]

Hardware: 2 cores of an AMD EPYC, one thread, Python 3.11, torch 2.13.0 CPU.

    kind                     plain   budget  cut into  again  always  seconds  speed   peak
    text                        no  459 MiB        23      1      14      2.5   1.32  0.936
    encoder of transformers     no  600 MiB        26      1      22      6.0   1.40  0.981
    images, two axes            no  536 MiB        44      4      45     15.8   1.13  0.996
    text: it / always, in speed ≤ 1: 0.94735, holds
    encoder of transformers: it / always, in speed ≤ 1: 0.81967, holds
    images, two axes: it / always, in speed ≤ 1: 1.01636, DOES NOT HOLD
    peak / budget ≤ 1: 0.99568, holds

The arguments of these runs: `--samples 48 --steps 1`; that on images was one of its own. The bars
are a speed of 1.25 times that of the other run on text, and of 1.15 times elsewhere.

`cut into` counts the micro-batches, of which those `again` were recomputed; `always` are those of
the other run. `seconds` are those of the micro-batches without the optimizer's step; `speed` are
the seconds of the run that always recomputes, divided by them. `peak` is the highest peak of the
process in a micro-batch, as a share of the budget. `plain` says whether all samples fit in the
plain way. The gradients of the last step on text must be those of the other run, to 1e-5; dropout
draws other numbers there, and convolutions see padding, which is in other places.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from _common import Results, lognormal, parser
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchbudget as tb
from torchbudget.machine.peaks import peak_memory

AGAIN = partial(checkpoint, use_reentrant=False)


@dataclass(frozen=True)
class Case:
    """A training: `switch` says whether its activations are computed again."""

    data: Any
    loss: Callable[[Any], Tensor]
    model: nn.Module
    switch: Callable[[bool], object]
    is_exact: bool = True  # the gradient does not depend on the cut


class Switched(nn.Module):
    """Blocks, each of which is computed again in the backward if `recomputes`."""

    recomputes = False

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = AGAIN(block, x) if self.recomputes else block(x)
        return x


def text(samples: int) -> Case:
    """A byte model of six layers on docstrings, as in examples/train_text.py."""
    from train_text import ByteData, Transformer, docstrings, loss_sum

    model = Transformer(2048, width=128, heads=4, layers=6)
    model.blocks = blocks = Switched([*model.blocks])
    data = ByteData(list(islice(docstrings(0), samples)), 2048)
    return Case(data, partial(loss_sum, model), model, partial(setattr, blocks, "recomputes"))


def encoder(samples: int) -> Case:
    """An encoder of transformers, by its own switch."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=2048,
    )  # fmt: skip
    model = BertForMaskedLM(config).train()
    lengths = lognormal(samples, 4.6, 0.9, 16, 1536)
    data = [{"input_ids": torch.randint(5, 1000, (n,))} for n in lengths.tolist()]

    def switch(again: bool) -> None:
        if again:
            model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            model.activation_checkpointing_disable()

    def loss(batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        ids, mask = batch["input_ids"], batch["attention_mask"]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return (losses * mask.flatten()).sum()

    return Case(data, loss, model, switch, is_exact=False)


def images(samples: int) -> Case:
    """Convolutions on images of any height and width."""

    def block(width: int) -> nn.Module:
        layers = [[nn.Conv2d(width, width, 3, padding=1), nn.GELU()] for _ in range(3)]
        return nn.Sequential(*chain.from_iterable(layers))

    blocks = Switched([block(8) for _ in range(4)])
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), blocks, nn.Conv2d(8, 3, 3, padding=1))
    height = lognormal(samples, 5.4, 0.4, 64, 768)
    width = lognormal(samples + 1, 5.4, 0.4, 64, 768)[1:]
    data = [torch.randn(3, h, w) for h, w in zip(height.tolist(), width.tolist(), strict=True)]

    def loss(batch: Any) -> Tensor:
        return (model(batch.data) - batch.data).square().sum()

    return Case(data, loss, model, partial(setattr, blocks, "recomputes"), is_exact=False)


CASES = {"text": text, "encoder of transformers": encoder, "images, two axes": images}


def measured(name: str, samples: int, steps: int) -> dict[str, Any]:
    """A row of the table; in a process of its own, whose memory is the budget's."""
    warnings.simplefilter("ignore")
    tb.configure_allocators()  # convolutions keep kernels of many shapes otherwise
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[name](samples * steps)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-5)

    def step_of(again: bool) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            case.switch(again)
            case.loss(batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain, recomputed = step_of(False), step_of(True)
    load = partial(tb.loader, case.data)
    load(recomputed, "4GiB")  # what measuring leaves in the process is a part of the budget
    cost: Any = load(plain, "4GiB").batch_sampler.cost  # type: ignore[union-attr]
    least, most = (int(cost.batch_bytes(1, _size(one))) for one in (cost.smallest, cost.largest))
    budget = int(least + 0.6 * (most - least))
    step = tb.alternatives(plain, recomputed)
    load = partial(load, budget=budget, samples_per_step=samples)
    loaders = {"always": load(recomputed), "either": load(step)}
    try:
        load(plain)
        fits = "yes"
    except tb.errors.OversizeError:
        fits = "no"
    seconds = dict.fromkeys(loaders, 0.0)
    counts = {"always": 0, "either": 0, "again": 0}
    peaks, gradients = [0], {}
    batches = {title: iter(loader) for title, loader in loaders.items()}
    for number in range(steps):
        for title, loader in loaders.items():
            sampler: Any = loader.batch_sampler
            while True:
                batch = next(batches[title])
                way = step.choose(batch) if title == "either" else 1
                counts[title] += 1
                counts["again"] += way if title == "either" else 0
                case.switch(bool(way))
                with peak_memory(torch.device("cpu")) as peak:
                    start_s = time.perf_counter()
                    case.loss(batch).backward()  # type: ignore[no-untyped-call]
                    seconds[title] += time.perf_counter() - start_s
                peaks.append(peak.bytes if title == "either" else 0)
                if counts[title] == sum(sampler.steps[: number + 1]):
                    break
            gradients[title] = [one.grad for one in case.model.parameters()]
            optimizer.zero_grad()
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients.values(), strict=True))
    assert off < 1e-5 or not case.is_exact, off
    return {
        "kind": name, "plain": fits, "budget": tb.format_bytes(budget),
        "cut into": counts["either"], "again": counts["again"],
        "always": counts["always"], "seconds": seconds["either"],
        "speed": seconds["always"] / seconds["either"],
        "peak": max(peaks) / budget,
    }  # fmt: skip


def _size(size: tuple[int, ...]) -> Any:
    return size if len(size) > 1 else size[0]


def main() -> None:
    arguments = parser(__doc__, samples=128, steps=2)
    arguments.add_argument("--models", nargs="*", default=[""], metavar="TEXT")
    arguments.add_argument("--one", help="a model to run in this process; prints JSON")
    options = arguments.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.samples, options.steps)))
        return
    formats = {
        "kind": "", "plain": "", "budget": "", "cut into": "d", "again": "d",
        "always": "d", "seconds": ".1f", "speed": ".2f", "peak": ".3f",
    }  # fmt: skip
    results = Results(formats)
    for name in CASES:
        if any(text in name for text in options.models):
            command = [sys.executable, __file__, "--one", name]
            command += ["--samples", str(options.samples), "--steps", str(options.steps)]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.row(**json.loads(found.stdout.splitlines()[-1]))
    for row in results.rows:
        bar = 1.25 if row["kind"] == "text" else 1.15
        results.bar(f"{row['kind']}: it / always, in speed", bar / row["speed"], 1.0)
    results.bar("peak / budget", max(row["peak"] for row in results.rows), 1.0)
    results.finish(options.json)


if __name__ == "__main__":
    main()
