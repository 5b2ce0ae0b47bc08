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
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from torchbudget.errors import OptionError

Transform: TypeAlias = Callable[[Any], Any]


# The seed of the sample that is being transformed; its generator, once it was used.
sample_random: ContextVar[int | np.random.Generator] = ContextVar("sample_random")


def rng() -> np.random.Generator:
    """Return the random generator of the sample that is being transformed.

    To make a generator of torch, use `torch.Generator().manual_seed(int(rng().integers(2**63)))`.

    Raises:
        OptionError: called outside a stream's transforms.
    """
    try:
        found = sample_random.get()
    except LookupError:
        raise OptionError("transforms.rng() works only inside a stream's transforms") from None
    if isinstance(found, int):
        found = np.random.Generator(np.random.Philox(found))
        sample_random.set(found)
    return found


@dataclass(frozen=True, slots=True)
class Expanded:
    """Turns one sample into any number of samples."""

    function: Callable[[Any], Iterable[Any]]

    def __call__(self, sample: Any) -> Iterable[Any]:
        """The samples.

        Raises:
            TypeError: the function returned one sample.
        """
        samples = self.function(sample)
        if isinstance(samples, (str, bytes, Mapping)):
            kind = type(samples).__name__
            raise TypeError(f"expand needs an iterable of samples, got a {kind}: return [sample]")
        return samples


def _then(function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> Any:
    return function(value, *args, **kwargs)


def _unpacked(function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return function(*args, **value, **kwargs)
    return function(*value, *args, **kwargs)


def _fields_replaced(functions: Any, places: Sequence[Any] | None, value: Any) -> Any:
    """A sample with other fields: by one function for all `places`, or by one for each field."""
    fields: Any = dict(value) if isinstance(value, Mapping) else list(value)
    if places is not None:
        functions = [functions] * len(places)
    else:
        places = list(fields) if isinstance(fields, dict) else range(len(fields))
    if len(functions) != len(places):
        raise ValueError(f"zip_apply has {len(functions)} functions for {len(places)} fields")
    for place, function in zip(places, functions, strict=True):
        if function is not None:
            fields[place] = function(fields[place])
    if isinstance(value, (list, Mapping)):
        return fields
    return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)


def _sometimes(probability: float, function: Transform, value: Any) -> Any:
    return function(value) if rng().random() < probability else value


def _with_sampled(function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> Any:
    args = [one() if callable(one) else one for one in args]
    kwargs = {name: one() if callable(one) else one for name, one in kwargs.items()}
    return function(value, *args, **kwargs)


def _if_kept(predicate: Transform, value: Any) -> list[Any]:
    return [value] if predicate(value) else []


def unpack_args(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """Call `function(*sample, *args, **kwargs)`; fields of a mapping are passed by name.

    >>> unpack_args(max)((3, 5))
    5
    """
    return partial(_unpacked, function, args, kwargs)


def apply_at(
    places: int | str | Sequence[int | str], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Transform:
    """Replace each named field by `function(field, *args, **kwargs)`.

    >>> apply_at(0, len)(("abc", "d"))
    (3, 'd')
    """
    several = (places,) if isinstance(places, (int, str)) else tuple(places)
    return partial(_fields_replaced, partial(_then, function, args, kwargs), several)


def zip_apply(*functions: Transform | None) -> Transform:
    """Apply the first function to the first field, and so on; `None` leaves a field as it is.

    >>> zip_apply(len, None)(("abc", "d"))
    (3, 'd')
    """
    return partial(_fields_replaced, functions, None)


def random_apply(
    probability: float, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Transform:
    """Call `function(sample, *args, **kwargs)` with a probability; otherwise keep the sample.

    Raises:
        OptionError: the probability is not between 0 and 1.
    """
    if not 0 <= probability <= 1:
        raise OptionError(f"expected a probability between 0 and 1, got {probability!r}")
    return partial(_sometimes, probability, partial(_then, function, args, kwargs))


def sample_args(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """Call `function(sample, *args, **kwargs)`; arguments that are callable are called first.

    Such arguments may use `transforms.rng()`.
    """
    return partial(_with_sampled, function, args, kwargs)


def expand(function: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Transform:
    """Make a sample of each element of `function(sample, *args, **kwargs)`.

    If the function returns a text or a mapping, an error is raised: return it in a list.
    """
    return Expanded(partial(_then, function, args, kwargs))


def keep_if(predicate: Callable[..., Any], *args: Any, **kwargs: Any) -> Transform:
    """Keep only samples for which `predicate(sample, *args, **kwargs)` is true."""
    return Expanded(partial(_if_kept, partial(_then, predicate, args, kwargs)))
