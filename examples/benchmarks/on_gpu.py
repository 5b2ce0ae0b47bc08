"""Is a trace of a model on the CPU what its step allocates on a GPU, and is a measured budget kept?

Command, on a machine with a GPU: PYTHONPATH=. python examples/benchmarks/on_gpu.py [--steps TEXT …]
[--mib M] [--json PATH]

Hardware: one NVIDIA H200 (139 GiB), driver 580.159.04, CUDA 13.0, torch 2.11.0, transformers
5.17.0, expandable segments. MiB. The traces were made again afterwards, on a CPU with torch 2.13
and transformers 5.24.0.

    step                                n       size    traced  allocated      off  reserved    gaps
    decoder, scores kept              107        512    2976.4     3041.4   +0.00%      3288   +8.1%
    decoder, scores kept             1403        102    2998.9     3063.9   +0.00%      3210   +4.8%
    encoder, fused attention          419        512    2998.7     3063.7   +0.00%      3132   +2.2%
    encoder, fused attention         2104        102    2999.9     3066.5   +0.05%      3092   +0.8%
    encoder, bfloat16                 548        512    2729.3     2794.3   +0.00%      3186  +14.0%
    encoder, bfloat16                2753        102    2731.6     2796.5   -0.00%      3186  +13.9%
    encoder, checkpointed             906        512    2999.5     3065.5   +0.03%      3366   +9.8%
    encoder, checkpointed            4547        102    2999.0     3065.0   +0.03%      3366   +9.8%
    encoder, foreach                  419        512    2998.7     3063.7   +0.00%      3092   +0.9%
    encoder, foreach                 2104        102    2999.9     3066.5   +0.05%      3092   +0.8%
    encoder and decoder               278    256x256    2993.3     3059.3   +0.03%      3230   +5.6%
    encoder and decoder              2811      51x51    3000.7     3066.6   +0.03%      3252   +6.0%
    heavy                           12000       1000    1466.7     1531.7   +0.00%      1646   +7.5%
    heavy                           12000        200     880.8      945.8   +0.00%      1066  +12.7%
    graphs                           2541    200x800    2999.2     3073.4   +0.31%      3844  +25.1%
    graphs                          12000     40x160    2832.8     2907.0   +0.32%      3664  +26.0%
    waves                            1003      16000    2999.9     3073.6   +0.29%      3104   +1.0%
    waves                            5015       3200    3000.0     3073.6   +0.29%      3104   +1.0%
    images                            151    256x256    2982.3     3048.3   +0.03%      3104   +1.8%
    images                           3911      51x51    2999.4     4176.1  +37.06%      4364   +4.5%
    BERT                               57        512    2975.6     2812.6   -7.66%      2848   +1.3%
    BERT                              307        102    2993.7     3010.4   -1.61%      3048   +1.2%
    GPT-2, eager attention             27        512    2904.1     2970.1   +0.03%      3110   +4.7%
    GPT-2, eager attention            192        102    2992.7     3058.7   +0.03%      3150   +3.0%
    Llama, bfloat16                    30        512    2434.0     2409.0   -3.70%      2766  +14.8%
    Llama, bfloat16                   160        102    2529.2     2549.6   -1.76%      2926  +14.8%
    T5                                 24        512    3695.7     3471.6   -7.82%      3610   +4.0%
    T5                                160        102    3188.6     3177.4   -2.39%      3330   +4.8%

`traced` is traced on the CPU for CUDA; `off` is what the second step allocated on the card, less 65
MiB of workspaces of cuBLAS, against it; `gaps` is what torch's allocator reserved beyond, from an
empty cache. Off are images of 51 × 51, for which cuDNN takes a workspace of 1.8 GiB, which only a
run shows, and models of transformers that leave out a mask without padding: a trace does not know
its values, and keeps it. Outside the allocator the process used 742 to 766 MiB, 610 of them before
its first kernel.

Costs that were measured on the card (`measure_cost`), saved, and loaded by a second process, which
trained on planned batches: first free, then under `limit_device_memory`. All figures but the counts
are shares of the budget; the last one is what NVML showed of the whole card to a third process.

    step                                budget  segments    measuring  free  over  limited  failed  retries  whole card
    decoder, scores kept              1500 MiB  expandable     14.5 s  1.015  384/400  0.992    0       57       1.020
    8 layers of 768, bfloat16        12000 MiB  expandable     24.8 s  0.968     0/33  0.970    0        0       0.971
    8 layers of 768, bfloat16        12000 MiB  fixed          28.0 s  0.635     0/30  0.671    0        0       0.671

These three rows are of the state before shapes in turn were drawn from the whole domain: the
decoder's seven probes left smaller gaps than most of its other shapes. The wider measure, which
`tests/gpu/test_budgets.py` states, has not run on a card yet.
"""  # noqa: E501  (tables)

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from _common import Results, parser

from tests.gpu.epoch import epoch
from tests.support import training_cases
from tests.support.training_cases import CASES, Training
from torchbudget import configure_allocators
from torchbudget.cost.tracing import Tracer
from torchbudget.machine.peaks import peak_memory
from torchbudget.restoring import TrainingState

MIB = 2**20
BUDGETS = {"decoder, scores kept": 1500, "encoder, bfloat16": 4000, "images": 4000}


def language_model(kind: str) -> Training:
    """A small model of transformers, from its configuration alone."""
    import transformers

    vocabulary, width = 8000 if kind == "Llama, bfloat16" else 2000, 256
    sizes = {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 4}
    model: Any
    if kind == "BERT":
        made = transformers.BertConfig(vocab_size=vocabulary, intermediate_size=1024, **sizes)
        model = transformers.BertForMaskedLM(made)
    elif kind == "Llama, bfloat16":
        options = {"num_key_value_heads": 2, "intermediate_size": 700}
        made = transformers.LlamaConfig(vocab_size=vocabulary, **sizes, **options)
        model = transformers.LlamaForCausalLM(made)
    elif kind == "T5":
        options = {"d_model": width, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 4}
        starts = {"decoder_start_token_id": 0, "pad_token_id": 0}
        made = transformers.T5Config(vocab_size=vocabulary, **options, **starts)
        model = transformers.T5ForConditionalGeneration(made)
    else:
        own: dict[str, Any] = {"n_embd": width, "n_layer": 4, "n_head": 4}
        made = transformers.GPT2Config(vocab_size=vocabulary, attn_implementation="eager", **own)
        model = transformers.GPT2LMHeadModel(made)

    def make_batch(n: int, length: int) -> dict[str, torch.Tensor]:
        x = torch.randint(5, 2000, (n, length))
        return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()}

    return training_cases.training(
        model.train(),
        lambda model, batch: model(**batch).loss,
        make_batch,
        512,
        autocast="bfloat16" in kind,
    )


def steps() -> dict[str, Callable[[], Training]]:
    """All steps that can be traced for CUDA."""
    kinds = "BERT", "GPT-2, eager attention", "Llama, bfloat16", "T5"
    recurrent = "LSTM", "GRU"
    return {name: make for name, make in CASES.items() if name not in recurrent} | {
        kind: (lambda kind=kind: language_model(kind)) for kind in kinds
    }


def compared(name: str, made: Training, wanted: int) -> Iterator[dict[str, Any]]:
    """At the largest and at a fifth of the size: traced on the CPU, and allocated on the card."""
    several = isinstance(made.max_size, tuple)

    def make_batch(shape: tuple[int, ...]) -> Any:
        return made.make_batch(shape[0], shape[1:] if several else shape[1])

    def traced(shape: tuple[int, ...]) -> int:
        return tracer.concrete(shape).peak(shape)

    tracer = Tracer(made.step, make_batch, TrainingState(made.step), target=torch.device("cuda"))
    ends, shapes = np.atleast_1d(made.max_size), []
    for part in (1.0, 0.2):
        size = (*np.maximum(ends * part, made.min_size).astype(int).tolist(),)
        few, more = traced((4, *size)), traced((12, *size))
        n = max(min(int(4 + 8 * (wanted - few) / (more - few)), 12_000), 1)
        shapes.append(((n, *size), traced((n, *size))))
    made.model.cuda()
    for shape, predicted in shapes:
        batch = {key: tensor.cuda() for key, tensor in make_batch(shape).items()}
        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(2):
            with (
                peak_memory("cuda") as peak,
                torch.autocast("cuda", torch.bfloat16, enabled="bfloat16" in name),
            ):
                made.step(batch)
        yield {
            "step": name,
            "n": shape[0],
            "size": "x".join(map(str, shape[1:])),
            "traced": predicted / MIB,
            "allocated": peak.allocated_bytes / MIB,
            "off": (peak.allocated_bytes - 65 * MIB) / predicted - 1,
            "reserved": peak.reserved_bytes / MIB,
            "gaps": peak.reserved_bytes / peak.allocated_bytes - 1,
        }


def main() -> None:
    """Print both tables."""
    line = parser(__doc__, mib=3000)
    line.add_argument("--steps", nargs="+", default=[""], help="parts of the names to compare")
    arguments = line.parse_args()
    configure_allocators()
    chosen = {
        name: make for name, make in steps().items() if any(s in name for s in arguments.steps)
    }
    mib = dict.fromkeys(("traced", "allocated"), ".1f")
    results = Results(
        {"step": "", "n": "d", "size": ""}
        | mib
        | {"off": "+.2%", "reserved": ".0f", "gaps": "+.1%"}
    )
    for name, make in chosen.items():
        for row in compared(name, make(), arguments.mib * MIB):
            results.row(**row)
    results.finish(arguments.json)
    shares, counts = (
        dict.fromkeys(("free", "limited"), ".3f"),
        dict.fromkeys(("failed", "retries"), "d"),
    )
    results = Results({"step": "", "MiB": "d"} | shares | counts)
    for name in chosen.keys() & BUDGETS.keys():
        figures = epoch(name, BUDGETS[name] * MIB)
        free, limited = figures["free"], figures["limited"]
        results.row(
            step=name,
            MiB=BUDGETS[name],
            free=free["share"],
            limited=limited["share"],
            failed=limited["failures"],
            retries=limited["retries"],
        )
    results.finish(None)


if __name__ == "__main__":
    main()
