"""Every error and warning that torchbudget raises, and `warn`, which points at the user's own line.

```text
TorchBudgetError
├── BudgetError          (ValueError)    a budget cannot be read, or leaves no room
├── CostError            (ValueError)    invalid coefficients or arguments of a cost
│   ├── CostOverflowError (OverflowError) a cost exceeds 64-bit bytes
│   └── BatchError                       batches to measure on do not follow n and size
├── SizesError           (ValueError)    sizes have a wrong shape, type or sign
├── OptionError          (ValueError)    an option, or a combination of options, is invalid
├── OversizeError        (ValueError)    one sample alone exceeds the budget
├── UnevenRanksError     (ValueError)    samples cannot be split evenly over the ranks
├── ShardedTwiceError    (RuntimeError)  a framework splits the batches of a rank again
├── StateError           (ValueError)    a state is malformed
│   └── StateMismatchError               a state belongs to another dataset, order or version
├── CollateError         (ValueError)    samples cannot form one batch
├── SampleError          (RuntimeError)  a stream's sample cannot be read or transformed
├── MachineError         (RuntimeError)  this machine does not provide a reading
├── StepError            (RuntimeError)  an optimizer step cannot be taken exactly
├── RankError            (RuntimeError)  another rank failed, or plans differently
├── SampleTooLargeError  (MemoryError)   one sample alone does not fit into memory
└── MissingExtraError    (ImportError)   an optional package that is not installed

TorchBudgetWarning       (UserWarning)
├── DiscardedStateWarning                a loaded position was discarded before it was used
├── OtherNumbersWarning                  numbers of batches or samples differ from the plan
├── PaddedSizeWarning                    batches are padded to more than planned
├── OtherSizesWarning                    sizes are not those of the samples
├── MeasureWarning                       a measured cost may be wrong
├── MemoryLimitWarning                   memory is nearly used up
├── MonitorWarning                       a monitor cannot read, write or call back
├── ForgottenStepWarning                 accumulated gradients were never applied
├── ForeignStepWarning                   other code stepped, or changed the gradients
├── UnsynchronizedWarning                a forward outside `micro_batch` under DDP or FSDP
├── ReductionWarning                     a mean loss where a sum is expected, or the reverse
├── BatchNormWarning                     BatchNorm sees micro-batches, not the large batch
└── MovingStateWarning                   a forward changes buffers or untrained parameters
```
"""

from __future__ import annotations

import sys
import warnings
from typing import Final

# What calls in between: torch calls hooks and iterates over samplers, finalizers call at the end.
_INSIDE: Final = frozenset({"torchbudget", "torch", "contextlib", "weakref"})


class TorchBudgetError(Exception):
    """The base class of every error that torchbudget raises on purpose."""


class BudgetError(TorchBudgetError, ValueError):
    """A budget cannot be read, or leaves no room."""


class CostError(TorchBudgetError, ValueError):
    """Coefficients or arguments of a cost are invalid."""


class CostOverflowError(CostError, OverflowError):
    """A cost exceeds what 64-bit bytes can count."""


class BatchError(CostError):
    """`make_batch` or a collate fails or ignores its arguments, so that no step is measured."""


class SizesError(TorchBudgetError, ValueError):
    """Sizes have a wrong shape, type or sign."""


class OptionError(TorchBudgetError, ValueError):
    """An option, or a combination of options, is invalid."""


class OversizeError(TorchBudgetError, ValueError):
    """One sample alone exceeds the budget."""


class UnevenRanksError(TorchBudgetError, ValueError):
    """The samples cannot be shared so that all ranks have equal numbers of micro-batches."""


class ShardedTwiceError(TorchBudgetError, RuntimeError):
    """A framework splits the batches of a rank among its processes once more."""


class StateError(TorchBudgetError, ValueError):
    """A state is malformed."""


class StateMismatchError(StateError):
    """A state belongs to another dataset, another order or another version."""


class CollateError(TorchBudgetError, ValueError):
    """Samples cannot form one batch."""


class SampleError(TorchBudgetError, RuntimeError):
    """A sample of a stream cannot be read or transformed."""


class MachineError(TorchBudgetError, RuntimeError):
    """This machine does not provide a reading."""


class StepError(TorchBudgetError, RuntimeError):
    """An optimizer step cannot be taken exactly."""


class RankError(TorchBudgetError, RuntimeError):
    """Another rank failed, is missing or plans differently, so this rank cannot continue."""


class SampleTooLargeError(TorchBudgetError, MemoryError):
    """One sample alone does not fit into memory, on this rank or on another."""


class MissingExtraError(TorchBudgetError, ImportError):
    """An optional package is not installed."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtraError:
        """The error for a missing package, naming the extra that installs it."""
        return cls(
            f"{package} is not installed; install it with: pip install 'torchbudget[{extra}]'"
        )


class TorchBudgetWarning(UserWarning):
    """The base class of every warning that torchbudget issues."""


class DiscardedStateWarning(TorchBudgetWarning):
    """A loaded position was discarded before it was used."""


class OtherNumbersWarning(TorchBudgetWarning):
    """The number of batches in an epoch, or of samples in a batch, differs from the plan."""


class PaddedSizeWarning(TorchBudgetWarning):
    """Batches are padded to more than planned, so they may exceed the budget."""


class OtherSizesWarning(TorchBudgetWarning):
    """Sizes are not those of the samples, so batches may exceed the budget."""


class MeasureWarning(TorchBudgetWarning):
    """A measured cost may be wrong: for this step, this machine or these shapes."""


class MemoryLimitWarning(TorchBudgetWarning):
    """A job is near a limit of its memory."""


class MonitorWarning(TorchBudgetWarning):
    """A `MemoryMonitor` continues without a reading, its file, its writer or a callback."""


class ForgottenStepWarning(TorchBudgetWarning):
    """Accumulated gradients were never applied: a missing `flush`, or a loop that broke off."""


class ForeignStepWarning(TorchBudgetWarning):
    """`optimizer.step()` or `zero_grad()` was called, or gradients changed, between steps."""


class UnsynchronizedWarning(TorchBudgetWarning):
    """A distributed module's forward ran outside `GradAccumulator.micro_batch`."""


class ReductionWarning(TorchBudgetWarning):
    """A mean loss was passed where a sum is expected, or the reverse."""


class BatchNormWarning(TorchBudgetWarning):
    """A module counts or averages over a micro-batch, so the step is not the large batch's."""


class MovingStateWarning(TorchBudgetWarning):
    """A forward changes buffers, or parameters without an optimizer, in every micro-batch."""


# ---------------------------------------------------------------------- how to warn


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line of none of these packages.

    In a worker or a thread, which no line of the user's has called, that is one of Python's.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _package(module: dict[str, object]) -> str:
    # By names, since paths of files are written in several ways.
    return str(module.get("__name__", "")).partition(".")[0]
