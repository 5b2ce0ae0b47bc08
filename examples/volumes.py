"""Volumes of any shape: samples padded on three axes, in batches of a given number of voxels.

    python examples/volumes.py --voxels 4000000

Scans differ in height, width and depth. A batch is padded to the largest of each, so its cost is
the product of the three. Instead of a cost model, a predicate says whether one more sample fits: it
counts the voxels that the batch would then have. The table compares this with fixed batches of the
same mean number of volumes. `--folder` takes the shapes of NIfTI files, for example those of
Debian's mricron-data.
"""

from __future__ import annotations

import argparse
import gzip
import math
import struct
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchbudget import BudgetedIterableDataset, PadCollate, TorchBudgetError

Shape = tuple[int, ...]


class Volumes:
    """Volumes of given shapes, read one by one."""

    def __init__(self, shapes: list[Shape]) -> None:
        self.shapes = shapes

    def __iter__(self) -> Iterator[Tensor]:
        for shape in self.shapes:
            yield torch.zeros(shape, dtype=torch.float16)


def nifti_shape(file: Path) -> Shape:
    """The first three dimensions in a NIfTI-1 header."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        header = opened.read(348)
    order = "<" if struct.unpack("<i", header[:4])[0] == 348 else ">"
    return struct.unpack(f"{order}8h", header[40:56])[1:4]


def drawn_shapes(number: int) -> list[Shape]:
    """Shapes of scans: slices that are nearly square, and any number of them."""
    rng = np.random.default_rng(0)
    sides = rng.integers(40, 130, number)
    shapes = np.stack([sides, sides * rng.uniform(0.8, 1.2, number), rng.integers(10, 90, number)])
    return [tuple(shape) for shape in shapes.astype(int).T.tolist()]


def voxels(batch: list[Tensor]) -> int:
    """Of a batch that is padded to its largest extents."""
    return len(batch) * math.prod(max(extents) for extents in zip(*(v.shape for v in batch)))  # noqa: B905  (all have three)


def should_add(batch: list[Tensor], volume: Tensor, most: int) -> bool:
    return voxels([*batch, volume]) <= most


def shape_of(volume: Tensor) -> Shape:
    return tuple(volume.shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voxels", type=int, default=4_000_000, help="of a batch, padded")
    parser.add_argument("--volumes", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="of NIfTI files, at any depth")
    arguments = parser.parse_args()
    shapes = drawn_shapes(arguments.volumes)
    if arguments.folder is not None:
        files = [p for p in arguments.folder.rglob("*.nii*") if p.is_file()]
        shapes = [nifti_shape(file) for file in sorted(files)]
        if not shapes:
            parser.error(f"there is no .nii below {arguments.folder}")
    volumes = Volumes(shapes)
    collate = PadCollate(length_axes=(0, 1, 2), side=0.5)
    try:
        stream = BudgetedIterableDataset(
            volumes,
            partial(should_add, most=arguments.voxels),
            None,
            size=shape_of,
            window=128,
            look_ahead="512MiB",
            collate_fn=collate,
        )
        ours = [(b.num_samples, b.data.numel(), b.num_tokens) for b in stream]
    except TorchBudgetError as error:
        parser.error(str(error))
    mean = max(round(len(shapes) / len(ours)), 1)
    scans = iter(volumes)
    fixed = [
        (len(batch), voxels(batch), sum(v.numel() for v in batch))
        for batch in iter(lambda: list(islice(scans, mean)), [])
    ]
    print("batches            number  volumes  padding  mean / most  largest / most")
    for name, batches in (("of the voxels", ours), (f"of {mean} each", fixed)):
        counts, padded, real = map(np.array, zip(*batches, strict=True))
        padding = 1 - real.sum() / padded.sum()
        print(
            f"{name:17}  {len(batches):6,}  {counts.sum():7,}  {padding:7.2%}  "
            f"{padded.mean() / arguments.voxels:11.3f}  {padded.max() / arguments.voxels:14.3f}"
        )


if __name__ == "__main__":
    main()
