"""A file that keeps sizes, with a fingerprint of their dataset and key."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import numpy as np

from torchbudget.cost.models.protocol import Sizes
from torchbudget.data.callables import values_fingerprint
from torchbudget.data.sizes.key import SizeDataset, SizeKey
from torchbudget.data.sizes.quick import is_exactly
from torchbudget.errors import OptionError
from torchbudget.files import write_whole

Fingerprint: TypeAlias = dict[str, Any]

_PROBES: Final = 64

logger = logging.getLogger(__name__)


def fingerprint_of(dataset: Any, sizes: SizeDataset) -> Fingerprint:
    """What must be the same for a file to be used: the dataset's type and length, key, content.

    The content is the sizes of up to 64 evenly spread samples, which are read here.

    Raises:
        OptionError: a part of a callable key is known by its name alone.
        SizesError: one of those samples has no size.
    """
    # Only a `datasets.Dataset` itself: a wrapper may pass on the fingerprint of a dataset whose
    # samples it changes. And it says nothing of the size that a callable computes.
    if is_exactly(dataset, "datasets", "Dataset") and not callable(sizes.key):
        content = dataset._fingerprint
    else:
        spread = np.linspace(0, len(dataset) - 1, min(_PROBES, len(dataset)))
        content = sizes[spread.astype(np.int64).tolist()].tolist()
    return {
        "dataset": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "length": len(dataset),
        "key": describe_key(sizes.key),
        "content": content,
    }


def load_sizes(path: Path, fingerprint: Fingerprint) -> Sizes | None:
    """The sizes in the file; None, with a logged warning, if it is broken or of other samples."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            found = dict(json.loads(str(file["fingerprint"])))
            sizes: Sizes = file["sizes"]
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  (a broken file may raise anything)
        logger.warning("measuring again: the cache of sizes %s is unreadable: %s", path, error)
        return None
    differs = [name for name, value in fingerprint.items() if found.get(name) != value]
    if differs:
        logger.warning(
            "measuring again: the cache of sizes %s is of another %s", path, ", ".join(differs)
        )
        return None
    return sizes


def save_sizes(path: Path, fingerprint: Fingerprint, sizes: Sizes) -> None:
    """Write the file; other processes never see half of it."""

    def write(file: IO[bytes]) -> None:
        np.savez(file, sizes=sizes, fingerprint=np.array(json.dumps(fingerprint)))

    try:
        write_whole(path, write, by_several=True)
    except OSError as error:  # a full disk must not cost hours of measuring
        logger.warning("the sizes are not cached: %s cannot be written: %s", path, error)


def describe_key(key: SizeKey) -> str:
    """A fingerprint of a key, which is the same in every process.

    Raises:
        OptionError: a part of a callable is known by its name alone.
    """
    if not callable(key):
        return repr(key)
    found, by_name_alone = values_fingerprint(key)
    if by_name_alone:
        raise OptionError(
            "with a cache, what a callable key computes must be known, but of "
            f"{', '.join(sorted(set(by_name_alone)))} in {key!r} only the name is: keep it out of "
            "the key, or out of what pickling the key keeps (__getstate__), or leave out cache"
        )
    return found
