"""Bytes that samples keep alive, and copies out of something much larger."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchbudget.data.stream.reader import KeptBytes


class Picture:
    """As Pillow's images are: their pixels are no Python object."""

    width, height, mode = 500, 400, "RGB"

    def getbands(self) -> tuple[str, ...]:
        return ("R", "G", "B")


LARGE = np.zeros(10**6)
HOLDERS: dict[str, tuple[Any, int]] = {
    "object": (SimpleNamespace(array=np.zeros(100_000)), 800_000),
    "nested": ({"a": [(deque([np.zeros(100_000)]),), "b"]}, 800_000),
    "bytes": (b"a" * 800_000, 800_000),
    "memoryview": (memoryview(bytearray(800_000))[:10], 800_000),
    "picture": (Picture(), 800_000),  # Pillow stores a pixel of several bands in 4 bytes
    "objects": (np.array([[np.zeros(100_000)], [None]], object), 800_000),
    "several sparse": ([torch.ones(50_000).to_sparse() for _ in range(9)], 5_400_000),
    "tokens": (list(range(1000, 30_000)), 29_000 * 28),
    "keys": ({"a" * 800_000: 1}, 800_000),
    "part of a tensor, as an array": (torch.zeros(200_000)[:5].numpy(), 800_000),
    "mapping": (MappingProxyType({"x": np.zeros(100_000)}), 800_000),
    "the program's": ({"module": np, "kind": Picture, "method": logging.info}, 0),
    "readers": ([iter([LARGE]), partial(len, LARGE), (x for x in [LARGE])], 0),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_bytes_are_found_wherever_they_are(kind: str) -> None:
    value, expected = HOLDERS[kind]
    assert expected <= KeptBytes().add(value) <= 1.4 * expected + 1000


def test_a_crop_is_copied_from_what_is_much_larger() -> None:
    """So the rest of it is not kept alive; a storage that two fields share counts once."""
    pixels = torch.zeros(1_000_000)
    for whole in (pixels, pixels.numpy().copy()):
        sample = {"crop": whole[5:15], "same": [whole[5:15]]}
        assert 4_000_000 < KeptBytes().add(sample) < 4_100_000
        small, counted = KeptBytes().without_rest(sample)
        assert counted == KeptBytes().add(small) < 2_000
        assert all(small["crop"] == sample["crop"])
        most = {"most": whole[:900_000]}
        assert KeptBytes().without_rest(most)[0]["most"] is most["most"]
