"""Rollouts for reinforcement learning: the responses to a prompt stay on one rank in each step.

    python examples/rollouts.py --prompts 512 --ranks 8 --tokens 32768

Each prompt has 8 to 16 responses of correlated lengths. First `plan_step` cuts one step that is in
memory. Then a sampler goes through all prompts in steps of whole prompts, as an off-policy trainer
does. The table compares the slowest rank's work with that of responses that are dealt in turn.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from torchbudget import MemoryBudgetBatchSampler, PackedCost, TorchBudgetError, plan_step

TOKENS = PackedCost(unit_bytes=1, unit="tokens")
WORK = PackedCost(
    unit_bytes=24_576, pair_bytes=1, unit="FLOPs"
)  # a sample's own time: 24,576 L + L²


def rollouts(prompts: int, longest: int) -> tuple[Any, Any]:
    """Tokens of each response, shape `(n,)`, and the number of its prompt."""
    rng = np.random.default_rng(0)
    prompt_of = np.repeat(np.arange(prompts), rng.integers(8, 17, prompts))
    tokens = rng.lognormal(7, 0.8, prompts)[prompt_of] * rng.lognormal(0, 0.5, len(prompt_of))
    return np.clip(tokens, 16, longest).astype(np.int64), prompt_of


def slowest(tokens: Any, ranks: list[Any]) -> float:
    """The slowest rank's work / the mean rank's."""
    sums = [WORK.item_bytes(tokens[np.asarray(mine)]).sum() for mine in ranks]
    return float(max(sums) / np.mean(sums))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32_768, help="in a micro-batch at the most")
    parser.add_argument("--step", type=int, default=1024, help="responses in a step, about")
    arguments = parser.parse_args()
    ranks, budget = arguments.ranks, arguments.tokens
    tokens, prompt_of = rollouts(arguments.prompts, longest=budget // 2)
    options: Any = {"units": prompt_of, "time": WORK}
    try:
        step = plan_step(tokens, TOKENS, budget, num_replicas=ranks, **options)
        samplers = [
            MemoryBudgetBatchSampler(
                tokens,
                TOKENS,
                budget,
                samples_per_step=arguments.step,
                num_replicas=ranks,
                rank=rank,
                **options,
            )
            for rank in range(ranks)
        ]
    except TorchBudgetError as error:
        parser.error(str(error))
    epochs = [list(sampler) for sampler in samplers]
    for batch in (batch for mine in [*step.micro_batches, *epochs] for batch in mine):
        assert tokens[batch].sum() <= budget
    ours = [np.concatenate(mine) for mine in step.micro_batches]
    in_turn = [np.arange(rank, len(tokens), ranks) for rank in range(ranks)]
    prompts = [set(prompt_of[mine]) for mine in ours]
    assert sum(map(len, prompts)) == len(set().union(*prompts)), "a prompt on two ranks"
    print(samplers[0].report())
    print(f"\n{'one step':<16}{'micro-batches':>14}{'slowest / mean':>16}")
    print(f"{'plan_step':<16}{sum(map(len, step.micro_batches)):14,}{slowest(tokens, ours):16.4f}")
    print(f"{'dealt in turn':<16}{'':>14}{slowest(tokens, in_turn):16.4f}")


if __name__ == "__main__":
    main()
