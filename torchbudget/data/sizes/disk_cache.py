"""Sizes kept in a file, with a fingerprint of the dataset and the key that they are of."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import uuid
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

import numpy as np

from torchbudget.cost.models.protocol import Sizes
from torchbudget.data.sizes.key import SizeKey
from torchbudget.data.sizes.quick import is_exactly
from torchbudget.data.sizes.size_dataset import SizeDataset
from torchbudget.errors import OptionError

Fingerprint: TypeAlias = dict[str, Any]

_PROBES: Final = 64

logger = logging.getLogger(__name__)


def fingerprint_of(dataset: Any, sizes: SizeDataset) -> Fingerprint:
    """What a cached file must agree in: the dataset's type and length, the key, the content.

    The content is that of up to 64 samples, read here and spread evenly.

    Raises:
        OptionError: a callable key cannot be described.
        SizesError: one of those samples has no size.
    """
    # Only of the library itself: a wrapper may hand on the fingerprint of what it then changes.
    # It vouches for the samples, but not for what a callable makes of them.
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
    """The sizes that the file keeps; None, with a warning, where it is torn or of other samples."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            found = dict(json.loads(str(file["fingerprint"])))
            sizes: Sizes = file["sizes"]
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  (torn or no such file: whatever it raises)
        logger.warning("measuring anew: the cache of sizes %s is unreadable: %s", path, error)
        return None
    differs = [name for name, value in fingerprint.items() if found.get(name) != value]
    if differs:
        logger.warning(
            "measuring anew: the cache of sizes %s is of another %s", path, ", ".join(differs)
        )
        return None
    return sizes


def save_sizes(path: Path, fingerprint: Fingerprint, sizes: Sizes) -> None:
    """Write a whole file or none: readers and other ranks never see half of one."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            np.savez(file, sizes=sizes, fingerprint=np.array(json.dumps(fingerprint)))
        partial.replace(path)
    except OSError as error:  # hours of measuring are not lost to a full disk
        logger.warning("the sizes are not cached: %s cannot be written: %s", path, error)
    finally:
        partial.unlink(missing_ok=True)


def describe_key(key: SizeKey) -> str:
    """The same text for the same key in another process, and another for another key.

    Raises:
        OptionError: a callable other than a function cannot be pickled.
    """
    if not callable(key):
        return repr(key)
    if isinstance(key, FunctionType):
        cells = [cell.cell_contents for cell in key.__closure__ or ()]
        content = repr(
            (_stable(key.__code__), key.__defaults__, key.__kwdefaults__, cells)
        ).encode()
    else:
        try:
            content = pickle.dumps(key)
        except Exception as error:
            raise OptionError(
                f"with a cache, a callable key must be a function or picklable: {error}"
            ) from error
    return hashlib.sha256(content).hexdigest()


def _stable(constant: object) -> object:
    if isinstance(constant, CodeType):
        constants = tuple(map(_stable, constant.co_consts))
        return constant.co_code, constant.co_names, constant.co_varnames, constants
    if isinstance(constant, frozenset):  # its order depends on the process
        return sorted(map(repr, constant))
    return constant
