"""Every error and warning that torchbudget raises.

```text
TorchBudgetError
├── BudgetError          (ValueError)    a budget cannot be read, or leaves no room
├── CostError            (ValueError)    invalid coefficients or arguments of a cost
│   └── CostOverflowError (OverflowError) a cost exceeds 64-bit bytes
├── SizesError           (ValueError)    sizes have a wrong shape, type or sign
├── OptionError          (ValueError)    an option, or a combination of options, is invalid
├── OversizeError        (ValueError)    one sample alone exceeds the budget
├── UnevenRanksError     (ValueError)    samples cannot be dealt evenly to the ranks
├── ShardedTwiceError    (RuntimeError)  a framework deals dealt batches again
├── StateError           (ValueError)    a state is malformed
│   └── StateMismatchError               a state is of another dataset, order or version
├── CollateError         (ValueError)    samples cannot form one batch
├── SampleError          (RuntimeError)  a stream's sample cannot be read or transformed
├── MachineError         (RuntimeError)  this machine does not provide a reading
├── StepError            (RuntimeError)  an optimizer step cannot be taken exactly
├── RankError            (RuntimeError)  another rank failed, or plans otherwise
├── SampleTooLargeError  (MemoryError)   one sample alone does not fit into memory
└── MissingExtraError    (ImportError)   an optional package that is not installed

TorchBudgetWarning       (UserWarning)
├── DiscardedStateWarning                a loaded position was discarded before it was used
├── OtherNumbersWarning                  other numbers of batches or samples than were planned
├── PaddedSizeWarning                    batches are padded to more than was planned
├── OtherSizesWarning                    sizes are not those of the samples that come
├── MeasureWarning                       a measured cost may be wrong
├── MemoryLimitWarning                   memory is nearly used up
├── MonitorWarning                       a monitor cannot read, write or call back
├── ForgottenStepWarning                 accumulated gradients were never applied
├── ForeignStepWarning                   other code stepped, or changed the gradients
├── UnsynchronizedWarning                a forward outside `micro_batch` under DDP or FSDP
├── ReductionWarning                     a mean loss where a sum is expected, or the reverse
├── BatchNormWarning                     BatchNorm sees micro-batches, not the large batch
└── MovingStateWarning                   a forward moves buffers, or parameters that are not trained
```
"""

from __future__ import annotations


class TorchBudgetError(Exception):
    """The base class of every error that torchbudget raises on purpose."""


class BudgetError(TorchBudgetError, ValueError):
    """A budget cannot be read, or leaves no room."""


class CostError(TorchBudgetError, ValueError):
    """Coefficients or arguments of a cost are invalid."""


class CostOverflowError(CostError, OverflowError):
    """A cost exceeds what 64-bit bytes can count."""


class SizesError(TorchBudgetError, ValueError):
    """Sizes have a wrong shape, type or sign."""


class OptionError(TorchBudgetError, ValueError):
    """An option, or a combination of options, is invalid."""


class OversizeError(TorchBudgetError, ValueError):
    """One sample alone exceeds the budget."""


class UnevenRanksError(TorchBudgetError, ValueError):
    """The samples cannot be dealt so that every rank has the same number of micro-batches."""


class ShardedTwiceError(TorchBudgetError, RuntimeError):
    """A framework deals to its processes the batches that are dealt to the ranks already."""


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
    """Another rank failed, is missing or plans otherwise: this one cannot go on."""


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
    """An epoch has other numbers of batches, or a batch of samples, than were planned."""


class PaddedSizeWarning(TorchBudgetWarning):
    """Batches are padded to more than was planned, so that they may be over the budget."""


class OtherSizesWarning(TorchBudgetWarning):
    """Sizes are those of other samples than come, so that batches may be over the budget."""


class MeasureWarning(TorchBudgetWarning):
    """A measured cost may be wrong: for this step, this machine or these shapes."""


class MemoryLimitWarning(TorchBudgetWarning):
    """A job has nearly used up the memory that it may use."""


class MonitorWarning(TorchBudgetWarning):
    """A `MemoryMonitor` goes on without something: a reading, its file, its writer."""


class ForgottenStepWarning(TorchBudgetWarning):
    """Accumulated gradients were never applied: a missing `flush`, or a loop that broke off."""


class ForeignStepWarning(TorchBudgetWarning):
    """`optimizer.step()` or `zero_grad()` was called, or gradients changed, between steps."""


class UnsynchronizedWarning(TorchBudgetWarning):
    """A distributed module's forward ran outside `GradAccumulator.micro_batch`."""


class ReductionWarning(TorchBudgetWarning):
    """A mean loss was passed where a sum is expected, or the reverse."""


class BatchNormWarning(TorchBudgetWarning):
    """Batch normalisation sees micro-batches, so the step is not that of the large batch."""


class MovingStateWarning(TorchBudgetWarning):
    """A forward moves buffers, or parameters that no optimizer has, once a micro-batch."""
