"""What a batch knows beside its fields: its samples, and where they are in each field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.structure import FieldPath, field_at

T = TypeVar("T")
ArrangementT = TypeVar("ArrangementT", bound="Arrangement")


class Layout(Protocol):
    """Where the n samples are in a field's tensor."""

    @property
    def lengths(self) -> IntArray:
        """Each sample's lengths on the ragged axes, `(n, k)`."""

    @property
    def shapes(self) -> IntArray:
        """Each sample's lengths on all axes in which samples may differ, `(n, d)`."""

    def samples(self, field: Tensor) -> Sequence[Tensor]:
        """The n samples, as views of the tensor."""

    def part(self, start: int, stop: int) -> tuple[Any, Layout]:
        """What cuts samples `start` to `stop` out of the tensor, and their layout in the result."""

    def fits(self, field: Tensor) -> bool:
        """Whether the samples can be in this tensor; it may have more axes, after theirs."""

    @property
    def most(self) -> int:
        """No axis of a padded tensor is longer; of a packed one, what its samples have in all."""

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors, which go wherever the field goes."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Layout:
        """The same with a function applied to its own tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """The samples of a batch, and where each is in every field.

    Attributes:
        num_samples: n.
        paths: one per field, in the order of `take_apart`.
        layouts: likewise; None for texts.
        length_field: the index of the field whose lengths are the batch's.
    """

    num_samples: int
    paths: tuple[FieldPath, ...]
    layouts: tuple[Layout | None, ...]
    length_field: int

    @property
    def nbytes(self) -> int:
        """Bytes of the layouts' own tensors."""
        return sum(each_layout(lambda layout: layout.nbytes, self.layouts).values())

    def fields(self, data: Any) -> list[Any]:
        """The value of every field in a batch's data."""
        return [field_at(data, path) for path in self.paths]

    def map(self: ArrangementT, function: Callable[[Tensor], Tensor]) -> ArrangementT:
        """The same with a function applied to the layouts' own tensors."""
        return self._with(each_layout(lambda layout: layout.map(function), self.layouts))

    def of(self: ArrangementT, data: Any) -> ArrangementT | None:
        """The same for what a function made of each field; None if it changed their shapes.

        The layouts' own tensors are moved to where the fields are. The function is not applied to
        them: twice the ids are not at twice the offsets.
        """
        fields = {}
        for field, layout in zip(self.fields(data), self.layouts, strict=True):
            if layout is not None:
                if not isinstance(field, Tensor) or not layout.fits(field):
                    return None
                fields[id(layout)] = field
        return self._with(
            each_layout(lambda layout: _beside(fields[id(layout)], layout), self.layouts)
        )

    def _with(self: ArrangementT, changed: dict[int, Layout]) -> ArrangementT:
        layouts = tuple(changed.get(id(layout)) for layout in self.layouts)
        same = all(a is b for a, b in zip(layouts, self.layouts, strict=True))
        return self if same else replace(self, layouts=layouts)


def _beside(field: Tensor, layout: Layout) -> Layout:
    """The layout with its own tensors on the field's device."""
    return layout.map(lambda tensor: tensor.to(field.device))


def each_layout(function: Callable[[Layout], T], layouts: Sequence[Layout | None]) -> dict[int, T]:
    """What a function gives for each layout, by `id`: fields that share one share its result."""
    each = {id(layout): layout for layout in layouts if layout is not None}
    return {key: function(layout) for key, layout in each.items()}
