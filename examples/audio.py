"""Recordings of any length, decoded in threads, cached, in batches of a given number of seconds.

    python examples/audio.py --folder /usr/share/asterisk/sounds --seconds 60

Every `.wav` below the folder is a sample: its log-mel spectrogram, computed when it is read. The
lengths are unknown before that, so a `BudgetedIterableDataset` reads a window of samples and cuts
it into batches of at most so many seconds, padding included. `SampleCache` keeps decoded samples in
memory that all workers share. Each row of the table is an epoch: its seconds, the cache's hits,
padding, and how full the batches were.

Debian's asterisk-core-sounds-en-wav has 568 spoken prompts. Without a folder, chirps are written to
a temporary one.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchbudget import (
    BudgetedIterableDataset,
    PadCollate,
    PaddedCost,
    SampleCache,
    TorchBudgetError,
)

FRAMES_PER_SECOND = 100


class Recordings(Dataset[Tensor]):
    """Log-mel spectrograms of files, each of shape `(frames, 80)`."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with wave.open(str(self.files[index])) as file:
            rate, channels = file.getframerate(), file.getnchannels()
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        signal = torch.from_numpy(samples.astype(np.float32).reshape(-1, channels).mean(axis=1))
        signal = signal.clone() / 2**15
        hop = rate // FRAMES_PER_SECOND
        window = torch.hann_window(4 * hop)
        spectrum = torch.stft(
            signal, 8 * hop, hop, 4 * hop, window, pad_mode="constant", return_complex=True
        )
        mel = mel_filters(spectrum.shape[0], rate) @ spectrum.abs().square()
        return mel.clamp_min(1e-10).log().t().contiguous()


def mel_filters(bins: int, rate: int, bands: int = 80) -> Tensor:
    """Triangles, equally spaced in mel, shape `(bands, bins)`."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, bins)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0)


def write_chirps(folder: Path, number: int = 200, rate: int = 8000) -> None:
    """Tones that rise, of log-normal lengths."""
    rng = np.random.default_rng(0)
    for index, seconds in enumerate(np.clip(rng.lognormal(0.4, 0.8, number), 0.2, 30)):
        times = np.arange(int(seconds * rate)) / rate
        signal = np.sin(2 * np.pi * (200 * times + 150 * times**2 / seconds))
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes((signal * 2**14).astype(np.int16).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="with .wav files, at any depth")
    parser.add_argument("--seconds", type=float, default=60, help="of a batch, padding included")
    parser.add_argument("--cache", default="256MiB", help="bytes of the cache")
    parser.add_argument("--threads", type=int, default=2, help="that decode, in each worker")
    parser.add_argument("--workers", type=int, default=1, help="processes of the DataLoader")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder
        if folder is None:
            folder = Path(temporary)
            write_chirps(folder)
        files = sorted(folder.rglob("*.wav"))
        if not files:
            parser.error(f"there is no .wav below {folder}")
        try:
            cache = SampleCache(Recordings(files), arguments.cache)
            stream = BudgetedIterableDataset(
                cache,
                PaddedCost(unit_bytes=1),  # a budget in frames
                int(arguments.seconds * FRAMES_PER_SECOND),
                window=min(4096, max(len(files) // 2, 1)),
                threads=arguments.threads,
                collate_fn=PadCollate(),
                oversize="alone",
            )
        except TorchBudgetError as error:
            parser.error(str(error))
        loader = DataLoader(stream, batch_size=None, num_workers=arguments.workers)
        print(f"{len(files):,} files, batches of {arguments.seconds:g} seconds")
        print("epoch  seconds  batches    hits  padding   fill  largest")
        for epoch in range(arguments.epochs):
            began, hits = time.perf_counter(), cache.hits
            sizes = [(math.prod(batch.data.shape[:2]), batch.num_tokens) for batch in loader]
            padded, frames = map(sum, zip(*sizes, strict=True))
            largest, batches = max(sizes)[0], len(sizes)
            took = time.perf_counter() - began
            rate = (cache.hits - hits) / len(files)
            fill = padded / batches / (arguments.seconds * FRAMES_PER_SECOND)
            print(
                f"{epoch:5}  {took:7.2f}  {batches:7,}  {rate:6.1%}  {1 - frames / padded:7.2%}  "
                f"{fill:5.3f}  {largest / FRAMES_PER_SECOND:5.1f} s"
            )
        print(cache)


if __name__ == "__main__":
    main()
