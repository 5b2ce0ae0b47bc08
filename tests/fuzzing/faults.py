"""Faults at a chosen call, wherever it happens to be."""

from __future__ import annotations

from typing import Any


class Fault(Exception):  # noqa: N818  (made by a test)
    """A call failed."""


class Killed(BaseException):
    """The process ended there, or was interrupted."""


class Fuse:
    """Fails at one of the calls that reach it; at none where `left` is 0."""

    def __init__(self) -> None:
        self.left = 0
        self.kind: type[BaseException] = Fault

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.kind


FUSE = Fuse()


def fused(sample: Any) -> Any:
    FUSE()
    return sample


def check_is_made(error: BaseException) -> None:
    """Raise an error again that is none of those made here, nor comes of one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (Fault, Killed)):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        raise error
