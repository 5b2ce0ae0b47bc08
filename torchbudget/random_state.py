"""The states of all global random generators, taken together and restored together."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
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
        devices: of torch on each accelerator, such as every CUDA device; none where it was not
            initialized, since reading them would initialize it.

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
    def take(cls) -> RandomState:
        """The states as they are now, copied."""
        numpy = np.random.get_state(legacy=False)
        return cls(
            python=random.getstate(),
            numpy=tree_map(lambda leaf: np.asarray(leaf).tolist(), dict(numpy)),
            cpu=torch.get_rng_state(),
            devices=[read() for read, _ in _of_devices()],
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


def states_outside_torch(generators: Iterable[Any]) -> bytes:
    """The states of Python's and NumPy's global generators, and of further ones, to be compared."""
    states: list[Any] = [random.getstate(), np.random.get_state()]
    for one in generators:
        if isinstance(one, np.random.Generator):
            states.append(one.bit_generator.state)
        else:
            states.append(one.getstate() if isinstance(one, random.Random) else one.get_state())
    return pickle.dumps(states)


def reseed_outside_torch(generators: Iterable[Any], seed: int) -> None:
    """Seed Python's and NumPy's global generators, and further ones."""
    for one in (random, np.random, *generators):
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(seed).state
        else:
            one.seed(seed)


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
