"""Transforms of a stream's samples: functions that return picklable callables."""

from torchbudget.data.stream.transforms import (
    apply_at,
    expand,
    keep_if,
    random_apply,
    rng,
    sample_args,
    unpack_args,
    zip_apply,
)

__all__ = [
    "apply_at",
    "expand",
    "keep_if",
    "random_apply",
    "rng",
    "sample_args",
    "unpack_args",
    "zip_apply",
]
