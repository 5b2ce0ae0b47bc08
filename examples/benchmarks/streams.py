"""How much padding is left in batches of a stream, and how fast are they made?

Question: a Python generator yields samples, of which at most 20,000 may wait at a time, and a batch
has at most 8,192 padded units. What are padding, fill and time? What do other libraries reach with
the same look-ahead?

Command: python examples/benchmarks/streams.py [--samples N] [--lhotse-samples N] [--json PATH]

Hardware: 2 cores of an AMD EPYC, Python 3.11, torch 2.13.0 CPU, NumPy 2.4;
infinibatch 0.1.1, lhotse 1.33.0.

    stream                            samples  batches  padding    fill  over  µs a sample
    lengths, reading                1,000,000        –        –       –     –        0.045
    lengths, torchbudget            1,000,000    4,232   2.656%  0.9874     0        0.143
    lengths, by hand                1,000,000    4,232   2.674%  0.9876     0        0.241
    lengths, infinibatch            1,000,000    4,232   2.858%  0.9895     0        0.251
    lengths, torchbudget, fewer       100,000      422   2.733%  0.9893     0        0.162
    lengths, lhotse, fewer            100,000      453   7.705%  0.9712     4        8.083
    docstrings, reading                66,040        –        –       –     –        0.051
    docstrings, torchbudget            66,040    1,722   0.555%  0.9692     0        0.218
    docstrings, by hand                66,040    1,722   0.567%  0.9693     0        0.287
    docstrings, infinibatch            66,040    1,722   0.557%  0.9692     0        0.297
    docstrings, torchbudget, fewer     66,040    1,722   0.555%  0.9692     0        0.205
    docstrings, lhotse, fewer          66,040    1,845   6.639%  0.9635     9       12.165
    lengths: points of padding more than by hand ≤ 0.15: -0.018279, holds
    lengths: fill less than by hand ≤ 0.005: 0.00018544, holds
    lengths: points of padding more than infinibatch ≤ 0.15: -0.20257, holds
    lengths: fill less than infinibatch ≤ 0.005: 0.002059, holds
    lengths: points of padding more than lhotse, fewer ≤ 0.15: -4.9721, holds
    lengths: fill less than lhotse, fewer ≤ 0.005: -0.018052, holds
    lengths: speed / the fastest one's ≥ 1.5: 1.6718, holds
    lengths: batches over the budget ≤ 0: 0, holds
    docstrings: points of padding more than by hand ≤ 0.15: -0.01163, holds
    docstrings: fill less than by hand ≤ 0.005: 0.00011335, holds
    docstrings: points of padding more than infinibatch ≤ 0.15: -0.001622, holds
    docstrings: fill less than infinibatch ≤ 0.005: 1.5808e-05, holds
    docstrings: points of padding more than lhotse, fewer ≤ 0.15: -6.0836, holds
    docstrings: fill less than lhotse, fewer ≤ 0.005: -0.0056679, holds
    docstrings: speed / the fastest one's ≥ 1.25: 1.3285, holds
    docstrings: batches over the budget ≤ 0: 0, holds

`lengths` are log-normal(3.2, 0.8), clipped to 1 to 1,024; `docstrings` are those of Python's
standard library, eight times in random order, in bytes, cut at 2,048. `by hand` is the
`IterableDataset` that people write: a buffer that is sorted and cut. Infinibatch runs its
BucketedReadaheadBatchIterator, lhotse 30 buckets and a buffer of 20,000, on fewer samples. The time
is that of all batches, the median of fifteen turns; `reading` is the time of the generator alone.
The ratio of speeds is the median of the ratios within each turn. All yield lists of samples, which
are not collated.
"""

from __future__ import annotations

import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
from _common import Results, Sizes, alternate, lognormal, median, options, padded_figures
from torch.utils.data import IterableDataset

from torchbudget import BudgetedIterableDataset, PaddedCost

sys.path.append(str(Path(__file__).parent.parent))

BUDGET = 8192
LOOK_AHEAD = 20_000
FASTER = {"lengths": 1.5, "docstrings": 1.25}
Make: TypeAlias = Callable[[], list[list[int]]]


class Generated(IterableDataset[int]):
    """Numbers of samples, from a generator; their lengths are looked up."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples)


def ours(lengths: list[int]) -> Make:
    stream = BudgetedIterableDataset(
        Generated(len(lengths)),
        PaddedCost(unit_bytes=1),
        BUDGET,
        size=lengths.__getitem__,
        window=LOOK_AHEAD,
        collate_fn=list,
    )
    return lambda: list(stream)


class ByHand(IterableDataset[list[int]]):
    """What people write: fill a buffer, sort it, cut it."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        rng = random.Random(0)
        buffer: list[int] = []
        for sample in Generated(len(self.lengths)):
            buffer.append(sample)
            if len(buffer) == LOOK_AHEAD:
                yield from self._cut(buffer, rng)
                buffer = []
        yield from self._cut(buffer, rng)

    def _cut(self, buffer: list[int], rng: random.Random) -> Iterator[list[int]]:
        buffer.sort(key=self.lengths.__getitem__)
        batches: list[list[int]] = []
        batch: list[int] = []
        for sample in buffer:
            if (len(batch) + 1) * self.lengths[sample] > BUDGET:
                batches.append(batch)
                batch = []
            batch.append(sample)
        batches += [batch] if batch else []
        rng.shuffle(batches)
        yield from batches


def by_hand(lengths: list[int]) -> Make:
    dataset = ByHand(lengths)
    return lambda: list(dataset)


def infinibatch(lengths: list[int]) -> Make:
    from infinibatch.iterators import BucketedReadaheadBatchIterator, NativeCheckpointableIterator

    return lambda: list(
        BucketedReadaheadBatchIterator(
            NativeCheckpointableIterator(range(len(lengths))),
            read_ahead=LOOK_AHEAD,
            key=lengths.__getitem__,
            batch_size=lambda longest: BUDGET // lengths[longest],
        )
    )


def lhotse(lengths: list[int]) -> Make:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet(
        MonoCut(id=str(index), start=0, duration=float(length), channel=0)
        for index, length in enumerate(lengths)
    ).to_eager()

    def make() -> list[list[int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would rather read the cuts from a file
            sampler = DynamicBucketingSampler(
                cuts, max_duration=BUDGET, num_buckets=30, buffer_size=LOOK_AHEAD, shuffle=True
            )
            return [[int(cut.id) for cut in batch] for batch in sampler]

    return make


def docstring_lengths(texts: int) -> Sizes:
    from train_text import docstrings

    return np.array([max(min(len(text), 2048), 1) for text in islice(docstrings(0), texts)])


def prepared(prepare: Callable[[list[int]], Make], of: list[int]) -> Make | None:
    """What makes the batches; `None` where the peer is not installed."""
    try:
        return prepare(of)
    except ImportError:
        return None


def main() -> None:
    arguments = options(
        __doc__, samples=1_000_000, lhotse_samples=100_000, texts=10_000, repetitions=15
    )
    results = Results(
        {
            "stream": "",
            "samples": ",d",
            "batches": ",d",
            "padding": ".3%",
            "fill": ".4f",
            "over": ",d",
            "µs a sample": ".3f",
        }
    )
    texts = docstring_lengths(arguments.texts)
    rng = np.random.default_rng(0)
    for corpus, sizes in {
        "lengths": lognormal(arguments.samples, 3.2, 0.8, 1, 1024),
        "docstrings": np.concatenate([rng.permutation(texts) for _ in range(8)]),
    }.items():
        lengths = sizes.tolist()
        few = lengths[: arguments.lhotse_samples]
        contenders = {
            "torchbudget": (lengths, ours),
            "by hand": (lengths, by_hand),
            "infinibatch": (lengths, infinibatch),
            "torchbudget, fewer": (few, ours),
            "lhotse, fewer": (few, lhotse),
        }
        runs = {name: prepared(prepare, of) for name, (of, prepare) in contenders.items()}
        present = {name: make for name, make in runs.items() if make is not None}
        reading = Generated(len(lengths))
        times = alternate(
            {"reading": lambda one=reading: list(one), **present}, arguments.repetitions
        )
        per = 1e6 * median(times["reading"]) / len(lengths)
        results.row(stream=f"{corpus}, reading", samples=len(lengths), **{"µs a sample": per})
        figures = {}
        for name, (of, _) in contenders.items():
            if name not in present:
                results.row(stream=f"{corpus}, {name}: not installed")
                continue
            batches = present[name]()
            assert sorted(chain.from_iterable(batches)) == list(range(len(of)))
            figures[name] = figure = padded_figures(np.array(of), batches, BUDGET)
            figure["µs a sample"] = 1e6 * median(times[name]) / len(of)
            del figure["largest"]
            results.row(stream=f"{corpus}, {name}", samples=len(of), **figure)
        for peer in (name for name in figures if "torchbudget" not in name):
            mine = figures["torchbudget, fewer" if "fewer" in peer else "torchbudget"]
            more = 100 * (mine["padding"] - figures[peer]["padding"])
            results.bar(f"{corpus}: points of padding more than {peer}", more, 0.15)
            less = figures[peer]["fill"] - mine["fill"]
            results.bar(f"{corpus}: fill less than {peer}", less, 0.005)
        peers = [times[name] for name in figures if "torch" not in name and "fewer" not in name]
        speed = statistics.median(
            min(time.wall_s for time in theirs) / mine.wall_s
            for mine, *theirs in zip(times["torchbudget"], *peers, strict=True)
        )
        results.bar(f"{corpus}: speed / the fastest one's", speed, FASTER[corpus], at_least=True)
        results.bar(f"{corpus}: batches over the budget", figures["torchbudget"]["over"], 0)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
