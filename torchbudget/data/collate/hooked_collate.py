"""A collate with functions that change its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchbudget.data.collate.fields import sized_by
from torchbudget.errors import CollateError


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedCollate:
    """A collate with hooks on the batch of inputs and on the batch of targets.

    Args:
        collate_fn: makes a batch of a list of samples.
        on_input: applied to the batch, or to its first field if samples are pairs; its result is
            used instead.
        on_target: applied to the second field of pairs.

    Raises:
        CollateError: when called with samples that are no pairs, if there is `on_target`.

    >>> collate = HookedCollate(collate_fn=PadCollate(), on_input=lambda x: x / 10)
    >>> collate([([1.0, 2.0], 3)])
    (tensor([[0.1000, 0.2000]]), tensor([3]))
    """

    collate_fn: Callable[[list[Any]], Any]
    on_input: Callable[[Any], Any] | None = None
    on_target: Callable[[Any], Any] | None = None

    def __call__(self, samples: list[Any]) -> Any:
        """The batch after the hooks: a pair if samples are pairs."""
        batch = self.collate_fn(samples)
        if not (isinstance(samples[0], tuple) and len(samples[0]) == 2):
            if self.on_target is not None:
                raise CollateError(
                    "on_target is for samples that are pairs, tuples of an input and a target; got "
                    f"samples of type {type(samples[0]).__name__}"
                )
            return batch if self.on_input is None else self.on_input(batch)
        inputs, targets = batch
        return (
            inputs if self.on_input is None else self.on_input(inputs),
            targets if self.on_target is None else self.on_target(targets),
        )

    def of_sized_field(self, name: Any | None) -> HookedCollate:
        """The same collate for samples whose sizes are those of a field."""
        return replace(self, collate_fn=sized_by(self.collate_fn, name))
