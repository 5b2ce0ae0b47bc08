"""Speech-like lengths: an encoder of frames, on lengths of LibriSpeech's percentiles."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from _peers_runs import Way, Work

TITLE = "Speech-like lengths"
TEXT = (
    "A convolutional transformer encoder on random frames, whose lengths are drawn from the "
    "percentiles of LibriSpeech test-clean (1.3 to 35 s). Settings are samples, or seconds; "
    "tokens are frames of 10 ms."
)
SHARES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)
SECONDS = (1.3, 2.3, 3.7, 5.8, 9.6, 17.8, 25.5, 35.0)  # k2-fsa/icefall, test-clean
FRAMES = 100  # a second
BANDS = 80


def prepare(folder: Path, samples: int) -> None:
    drawn = np.interp(np.random.default_rng(0).random(samples), SHARES, SECONDS)
    np.save(folder / "frames.npy", (drawn * FRAMES).astype(np.int64))


def sizes(folder: Path) -> list[int]:
    found: list[int] = np.load(folder / "frames.npy").tolist()
    return found


class Recordings:
    """Frames that are made when they are read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"frames": torch.zeros(self.lengths[index], BANDS), "index": index}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    frames = [sample["frames"] for sample in samples]
    return {
        "frames": torch.nn.utils.rnn.pad_sequence(frames, batch_first=True),
        "lengths": torch.tensor([len(one) for one in frames]),
        "index": torch.tensor([sample["index"] for sample in samples]),
    }


def work(job: dict[str, Any]) -> Work:
    """Model and optimizer, after a first small step."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(BANDS, 128, 3, 2, 1)
            self.second = nn.Conv1d(128, 128, 3, 2, 1)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(128, 64)

        def forward(self, frames: Any, lengths: Any) -> Any:
            x = self.second(self.first(frames.mT).relu()).relu().mT
            padding = torch.arange(x.shape[1]) >= ((lengths + 3) // 4)[:, None]
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=padding)
            return self.head(x)

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        logits = model(batch["frames"], batch["lengths"])
        labels = torch.zeros(logits.shape[:2], dtype=torch.int64)
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    folder = Path(job["folder"])
    lengths = sizes(folder)
    recordings = Recordings(lengths)
    step(collate([recordings[int(np.argmin(lengths))]]))
    return Work(
        samples=recordings,
        sizes=lengths,
        step=step,
        padded=lambda batch: batch["frames"].shape[:2].numel(),
        room=job["room"],
        folder=folder,
    )


def fixed(work: Work, batch_size: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(work.samples, batch_size=batch_size, shuffle=True, collate_fn=collate)


def bucketed(work: Work, seconds: int) -> Any:
    from torch.utils.data import DataLoader

    sampler = Indices(_buckets(work, seconds))
    return DataLoader(work.samples, batch_sampler=sampler, collate_fn=collate)


def bucketed_tuned(work: Work, seconds: int) -> Any:
    """With a penalty for long recordings, as icefall's recipes set it."""
    from torch.utils.data import DataLoader

    sampler = Indices(_buckets(work, seconds, quadratic_duration=20.0))
    return DataLoader(work.samples, batch_sampler=sampler, collate_fn=collate)


def _buckets(work: Work, seconds: int, **options: Any) -> Any:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    warnings.simplefilter("ignore")
    cuts = CutSet(
        MonoCut(id=str(index), start=0, duration=size / FRAMES, channel=0)
        for index, size in enumerate(work.sizes)
    ).to_eager()
    return DynamicBucketingSampler(
        cuts, max_duration=seconds, num_buckets=30, shuffle=True, rank=0, world_size=1, **options
    )


class Indices:
    """Indices of a sampler's cuts."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        for batch in self.sampler:
            yield [int(cut.id.partition("_dup")[0]) for cut in batch]


def ours(work: Work, _: None) -> Any:
    import torchbudget

    return torchbudget.loader(
        work.samples, work.measured_or(work.step), work.budget, size="frames", collate_fn=collate,
        cost_cache=work.cost_file,
    )  # fmt: skip


def ours_tuned(work: Work, _: None) -> Any:
    """A larger window."""
    import torchbudget

    return torchbudget.loader(
        work.samples, work.measured_or(work.step), work.budget, size="frames", collate_fn=collate,
        cost_cache=work.cost_file, window=2048,
    )  # fmt: skip


WAYS = (
    Way(name="torchbudget.loader", make=ours, tuned=ours_tuned, resumed="tried"),
    Way(name="fixed batches", make=fixed, documented=16),
    Way(name="lhotse DynamicBucketing", make=bucketed, tuned=bucketed_tuned, documented=200,
        in_tokens=True, needs="lhotse.dataset", resumed="refused"),
)  # fmt: skip
BASE = "fixed batches"
