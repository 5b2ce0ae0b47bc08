"""Small transforms of a sample that can be combined: each function returns a picklable callable.

>>> from torchbudget import transforms
>>> shorter = transforms.apply_at("ids", list.__getitem__, slice(2))
>>> shorter({"ids": [7, 8, 9], "label": 1})
{'ids': [7, 8], 'label': 1}

Random transforms use `transforms.rng()`, the generator of one sample. Its numbers are a
function of (seed, epoch, shard, position in the shard), and so the same for any number of threads
and workers. The exception is a source that splits itself, such as a function `(shard, num_shards)`:
its shards depend on the number of workers. Without threads Python's, NumPy's and torch's global
generators are seeded by the same numbers before each sample, so that transforms of other libraries
may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from torchbudget.errors import OptionError

Transform: TypeAlias = Callable[[Any], Any]


class SampleRandom:
    """The random generator of one sample.

    Args:
        seed: its numbers are a function of it.
    """

    __slots__ = ("_generator", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: np.random.Generator | None = None

    @property
    def generator(self) -> np.random.Generator:
        """Made at its first use, since most samples use no random numbers."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.Philox(self._seed))
        return self._generator


sample_random: ContextVar[SampleRandom] = ContextVar("sample_random")


def rng() -> np.random.Generator:
    """The random generator of the sample that is being transformed.

    For torch: `torch.Generator().manual_seed(int(rng().integers(2**63)))`.

    Raises:
        OptionError: called outside a stream's transforms.
    """
    try:
        return sample_random.get().generator
    except LookupError:
        raise OptionError("transforms.rng() works only inside a stream's transforms") from None


@dataclass(frozen=True, slots=True)
class _Call:
    """A function with further arguments after the sample."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, value: Any) -> Any:
        return self.function(value, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class _Unpacked(_Call):
    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self.function(*self.args, **value, **self.kwargs)
        return self.function(*value, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class _At:
    places: tuple[Any, ...]
    call: _Call

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {**value, **{place: self.call(value[place]) for place in self.places}}
        fields = list(value)
        for place in self.places:
            fields[place] = self.call(fields[place])
        return _like(value, fields)


@dataclass(frozen=True, slots=True)
class _Zipped:
    calls: tuple[Transform | None, ...]

    def __call__(self, value: Any) -> Any:
        fields = list(value.values() if isinstance(value, Mapping) else value)
        if len(fields) != len(self.calls):
            raise ValueError(f"zip_apply has {len(self.calls)} functions for {len(fields)} fields")
        new = [one if f is None else f(one) for f, one in zip(self.calls, fields, strict=True)]
        return (
            dict(zip(value, new, strict=True)) if isinstance(value, Mapping) else _like(value, new)
        )


@dataclass(frozen=True, slots=True)
class _Each(_Call):
    def __call__(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: _Call.__call__(self, one) for name, one in value.items()}
        return _like(value, [_Call.__call__(self, one) for one in value])


@dataclass(frozen=True, slots=True)
class _Sometimes:
    probability: float
    call: _Call

    def __call__(self, value: Any) -> Any:
        return self.call(value) if rng().random() < self.probability else value


@dataclass(frozen=True, slots=True)
class _WithSampledArgs(_Call):
    def __call__(self, value: Any) -> Any:
        args = [one() if callable(one) else one for one in self.args]
        kwargs = {name: one() if callable(one) else one for name, one in self.kwargs.items()}
        return self.function(value, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Expanded(_Call):
    """Turns one sample into any number of samples."""


def _like(value: Any, fields: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*fields)
    return fields if isinstance(value, list) else tuple(fields)


def unpack_args(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """`function(*sample, *args, **kwargs)`; a mapping's fields are passed by name.

    >>> unpack_args(max)((3, 5))
    5
    """
    return _Unpacked(function, args, kwargs)


def apply_at(
    places: int | str | Sequence[int | str], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Transform:
    """Replace each of some fields by `function(field, *args, **kwargs)`.

    >>> apply_at(0, len)(("abc", "d"))
    (3, 'd')
    """
    several = (places,) if isinstance(places, (int, str)) else tuple(places)
    return _At(several, _Call(function, args, kwargs))


def zip_apply(*functions: Transform | None) -> Transform:
    """Apply the first function to the first field, and so on; `None` leaves a field as it is.

    >>> zip_apply(len, None)(("abc", "d"))
    (3, 'd')
    """
    return _Zipped(functions)


def multiply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """Apply the same function to every field.

    >>> multiply(len)({"source": "abc", "target": "de"})
    {'source': 3, 'target': 2}
    """
    return _Each(function, args, kwargs)


def random_apply(
    probability: float, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Transform:
    """`function(sample, *args, **kwargs)` with a probability, else the sample unchanged.

    Raises:
        OptionError: the probability is not between 0 and 1.
    """
    if not 0 <= probability <= 1:
        raise OptionError(f"expected a probability between 0 and 1, got {probability!r}")
    return _Sometimes(probability, _Call(function, args, kwargs))


def sample_args(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """`function(sample, *args, **kwargs)`; arguments that are callable are called first.

    They may use `transforms.rng()`.
    """
    return _WithSampledArgs(function, args, kwargs)


def expand(function: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Transform:
    """Each element of `function(sample, *args, **kwargs)` becomes a sample of its own."""
    return Expanded(function, args, kwargs)


def keep_if(predicate: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """Keep only samples for which `predicate(sample, *args, **kwargs)` is true."""
    return Expanded(_Kept(predicate), args, kwargs)


@dataclass(frozen=True, slots=True)
class _Kept:
    predicate: Callable[..., Any]

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [value] if self.predicate(value, *args, **kwargs) else []
