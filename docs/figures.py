"""Draws how windows are cut into batches, for two pages of the docs: `python docs/figures.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

IMAGES: Final = Path(__file__).parent / "images"
LENGTHS: Final = np.clip(np.random.default_rng(4).lognormal(3, 0.8, 96), 3, 90).astype(int)
WINDOW, BUDGET, RANKS = 48, 180, 2
COLORS: Final = ("C0", "C1")


def batches_of(**options: Any) -> list[list[list[int]]]:
    """The batches of each rank."""
    return [
        list(
            MemoryBudgetBatchSampler(
                LENGTHS,
                PaddedCost(unit_bytes=1),
                BUDGET,
                window=WINDOW,
                num_replicas=RANKS,
                rank=rank,
                **options,
            )
        )
        for rank in range(RANKS)
    ]


def draw(name: str, titles: tuple[str, str], windows: list[str], **options: Any) -> None:
    """Samples as they come, above the batches that two ranks get of them."""
    ranks = batches_of(**options)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, sharey=True)
    first, place = 0, 0
    rounds = list(zip(*ranks, strict=True))
    for label in windows:
        count, mine = 0, []
        while count < WINDOW:
            mine.append(rounds[first])
            count += sum(map(len, rounds[first]))
            first += 1
        # Every window's samples in the order in which they were drawn or read.
        samples = np.sort([index for pair in mine for batch in pair for index in batch])
        if options["shuffle"]:
            samples = np.random.default_rng(0).permutation(samples)
        above.bar(place + np.arange(count), LENGTHS[samples], width=0.8, color="0.6")
        above.text(place + count / 2, 98, label, ha="center")
        at = place
        for pair in mine:
            for rank, batch in enumerate(pair):
                longest = LENGTHS[batch].max()
                color = COLORS[rank]
                corner, size = (at - 0.45, 0), (len(batch) - 0.1, longest)
                below.add_patch(Rectangle(corner, *size, facecolor=color, alpha=0.25))
                heights = np.sort(LENGTHS[batch])[::-1]
                below.bar(at + np.arange(len(batch)), heights, width=0.8, color=color)
                at += len(batch)
        place += count + 4
    for rank, color in enumerate(COLORS):
        below.bar(0, 0, color=color, label=f"rank {rank}")
    below.add_patch(Rectangle((0, 0), 0, 0, facecolor="0.5", alpha=0.25, label="padding"))
    figure.legend(loc="outside lower center", frameon=False, ncols=3)
    for axes, title in zip((above, below), titles, strict=True):
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_ylabel("length")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks([])
    below.set_ylim(0, 112)
    figure.savefig(IMAGES / f"{name}.png", dpi=100)


def main() -> None:
    """Write both pictures."""
    draw(
        "sampling",
        (
            "drawn uniformly at random, window by window",
            "each window: sorted, cut into batches of at most 180 padded elements, dealt, shuffled",
        ),
        ["window 0", "window 1"],
        shuffle=True,
    )
    draw(
        "streams",
        (
            "read in the source's order; each window by one worker",
            "each window: sorted, cut into batches of at most 180 padded elements, dealt",
        ),
        ["window 0: worker 0 of every rank", "window 1: worker 1 of every rank"],
        shuffle=False,
    )


if __name__ == "__main__":
    main()
