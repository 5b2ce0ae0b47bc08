"""The states of all global random generators, taken together and restored together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomState:
    """States of the global random generators.

    Its fields are tensors and plain types, so that `dataclasses.asdict` of it can be saved with
    `torch.save` and loaded with `weights_only=True`.

    Attributes:
        python: of the module `random`.
        numpy: of `numpy.random`; its arrays as lists.
        cpu: of torch on the CPU.
        devices: of torch on each accelerator, such as every CUDA device; none where they were not
            asked for, or the accelerator was not initialized, since reading would initialize it.

    >>> state = RandomState.take()
    >>> drawn = torch.rand(3)
    >>> state.restore()
    >>> torch.rand(3).equal(drawn)
    True
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    cpu: Tensor
    devices: list[Tensor]

    @classmethod
    def take(cls, *, devices: bool = True) -> RandomState:
        """The states as they are now, copied; without those of accelerators in 0.15 ms."""
        return cls(
            python=random.getstate(),
            numpy=_plain(np.random.get_state(legacy=False)),
            cpu=torch.get_rng_state(),
            devices=[read() for read, _ in _of_devices()] if devices else [],
        )

    @classmethod
    def seeded(cls, word: int) -> RandomState:
        """The states after seeding with a number below 2⁶⁴, without those of accelerators."""
        return cls(
            python=random.Random(word).getstate(),
            numpy=_plain(np.random.RandomState(word & 0xFFFFFFFF).get_state(legacy=False)),
            cpu=torch.Generator().manual_seed(word).get_state(),
            devices=[],
        )

    def __enter__(self) -> None:
        """Begin a context whose end restores the states."""

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Set every generator to its state, but for devices that this machine does not have."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.devices:
            for (_, write), state in zip(_of_devices(), self.devices, strict=False):
                write(state)


def _plain(numpy: Any) -> dict[str, Any]:
    found: dict[str, Any] = tree_map(lambda leaf: np.asarray(leaf).tolist(), dict(numpy))
    return found


def _of_devices() -> list[tuple[Callable[[], Tensor], Callable[[Tensor], object]]]:
    """How to read and how to write the generator's state of each accelerator in use."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # of torch 2.6, where there is none
        return []
    if accelerator is None:
        return []
    module: Any = torch.get_device_module(accelerator)
    devices = range(module.device_count()) if module.is_initialized() else ()
    return [
        (partial(module.get_rng_state, device), partial(module.set_rng_state, device=device))
        for device in devices
    ]
