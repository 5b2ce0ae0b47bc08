"""The states of all global random generators, taken together and restored together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Where the global random generators stand.

    Its fields are tensors and plain types, so that `dataclasses.asdict` of it can be saved with
    `torch.save` and loaded with `weights_only=True`.

    Attributes:
        python: of the module `random`.
        numpy: of `numpy.random`; its arrays as lists.
        cpu: of torch on the CPU.
        cuda: of torch on each CUDA device; `None` where CUDA was not initialized, since reading
            them would initialize it.

    >>> state = RandomState.take()
    >>> drawn = torch.rand(3)
    >>> state.restore()
    >>> torch.rand(3).equal(drawn)
    True
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    cpu: Tensor
    cuda: list[Tensor] | None

    @classmethod
    def take(cls) -> RandomState:
        """The states as they are now, copied."""
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002 (users' code may draw from it)
        return cls(
            python=random.getstate(),
            numpy=tree_map(lambda leaf: np.asarray(leaf).tolist(), dict(numpy)),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        )

    def restore(self) -> None:
        """Set every generator to its state, but for devices that this machine does not have."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 (as above)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            for device, state in zip(range(torch.cuda.device_count()), self.cuda, strict=False):
                torch.cuda.set_rng_state(state, device)
