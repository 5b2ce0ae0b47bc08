"""The two ways to read a batch: by name, as a mapping, and by position, as a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves_with_path

from torchbudget.data.collate.batch import Batch
from torchbudget.errors import CollateError


class MappingView(Batch, Mapping[Any, Any]):
    """A batch of dict samples: a mapping from field to tensor."""

    @staticmethod
    def _read(data: Any) -> dict[Any, Any]:
        if not isinstance(data, Mapping):
            raise _not_fields("a mapping from field to tensor", data)
        return dict(data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def update(self, fields: Mapping[Any, Any]) -> None:
        """Accept the batch's own fields, which change nothing, or pinned copies of them.

        A `DataLoader` with `batch_size=None` copies each mapping and updates the copy with its own
        fields; torch 2.6 pins a mapping that way. Without this method both would return a plain
        dict instead.

        Raises:
            TypeError: the fields are neither.
        """
        _accept(self, {**self.data, **fields})


class SequenceView(Batch, Sequence[Any]):
    """A batch of tuple samples: a sequence of tensors."""

    @staticmethod
    def _read(data: Any) -> tuple[Any, ...]:
        if isinstance(data, (Tensor, str, Mapping)) or not isinstance(data, Iterable):
            raise _not_fields("the fields in their order", data)
        return data if isinstance(data, tuple) else tuple(data)

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        fields = list(self.data)
        fields[index] = value
        named = hasattr(self.data, "_fields")  # as in MappingView.update
        _accept(self, type(self.data)(*fields) if named else tuple(fields))

    def __len__(self) -> int:
        return len(self.data)


# `torch.utils.data.default_convert` keeps the type of mutable containers only.
MutableMapping.register(MappingView)
MutableSequence.register(SequenceView)


def _accept(batch: Batch, given: Any) -> None:
    """Take over pinned copies of a batch's fields; the fields themselves change nothing.

    Raises:
        TypeError: something else was given, since a batch cannot be changed.
    """
    ours, theirs = (tree_leaves_with_path(tree) for tree in (batch.data, given))
    pairs = zip(ours, theirs, strict=False)
    same = [path == other and _is_same(mine, leaf) for (path, mine), (other, leaf) in pairs]
    if len(ours) != len(theirs) or not all(same):
        raise TypeError("a batch cannot be changed; dict(batch) or list(batch) can")
    if any(mine is not leaf for (_, mine), (_, leaf) in zip(ours, theirs, strict=True)):
        batch._data = given
        vars(batch).update(vars(batch.pin_memory()))  # its layouts' tensors, too


def _is_same(mine: Any, given: Any) -> bool:
    """Whether it is the same object, or a pinned copy of a tensor."""
    if mine is given:
        return True
    tensors = isinstance(mine, Tensor) and isinstance(given, Tensor)
    return tensors and given.is_pinned() and (given.shape, given.dtype) == (mine.shape, mine.dtype)


def _not_fields(expected: str, came: Any) -> CollateError:
    return CollateError(f"a batch is rebuilt from {expected}, got {type(came).__name__}")
