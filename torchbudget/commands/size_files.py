"""Sizes of samples, out of the files that people have them in."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchbudget.commands.answer import UsageError
from torchbudget.cost.models.protocol import Sizes

HELP: Final = (
    "a file of ints, one line or entry for each sample: .npy, .npz (as sizes_of keeps them), "
    ".json, .csv or .txt; several columns are several ragged axes; - reads stdin, JSON or text"
)


def read_sizes(name: str) -> Sizes:
    """The sizes in a file, shape `(N,)` or `(N, d)`; `-` is stdin.

    A first line of a .csv file that has no numbers is its header. A .npy file is mapped, not read.

    Raises:
        UsageError: it cannot be read, or has no sizes in it.
    """
    try:
        if name == "-":
            text = sys.stdin.read()
            return _parsed(text, ".json" if text.lstrip()[:1] == "[" else ".txt")
        path = Path(name)
        if path.suffix == ".npy":
            mapped: Sizes = np.load(path, mmap_mode="r", allow_pickle=False)
            return mapped
        if path.suffix == ".npz":
            return _from_archive(path)
        return _parsed(path.read_text("utf-8"), path.suffix)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:  # of NumPy, JSON and Unicode
        raise UsageError(f"{name} has no sizes in it: {error}") from error


def _from_archive(path: Path) -> Sizes:
    with np.load(path, allow_pickle=False) as archive:
        if "sizes" not in archive:
            raise ValueError(f'it has no array "sizes" but {", ".join(archive.files)}')
        sizes: Sizes = archive["sizes"]
        return sizes


def _parsed(text: str, suffix: str) -> Sizes:
    if not text.strip():
        raise ValueError("it is empty")
    if suffix == ".json":
        return _whole(np.asarray(json.loads(text)))
    if suffix not in (".txt", ".csv"):
        raise ValueError(f"expected .npy, .npz, .json, .csv or .txt, got {suffix or 'no suffix'!r}")
    separator = "," if suffix == ".csv" else None
    lines = text.rstrip().splitlines()
    blank = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if blank is not None:  # NumPy leaves it out, and all samples after it had another's number
        raise ValueError(f"line {blank} is blank: a sample without elements is a 0")
    first = lines[0]
    header = suffix == ".csv" and not any(character.isdigit() for character in first)
    numbers = np.loadtxt(io.StringIO(text), delimiter=separator, skiprows=int(header), ndmin=2)
    return _whole(numbers[:, 0] if numbers.shape[1] == 1 else numbers)


def _whole(numbers: Any) -> Sizes:
    """Numbers as int64, which they must be without rounding."""
    if numbers.dtype.kind not in "iuf":
        raise ValueError(f"expected whole numbers, got {numbers.dtype}")
    with np.errstate(invalid="ignore"):  # NaN and what has more than 64 bits
        whole: Sizes = numbers.astype(np.int64)
    if not (whole == numbers).all():
        raise ValueError("expected whole numbers, got fractions")
    return whole
