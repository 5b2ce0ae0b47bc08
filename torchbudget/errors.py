"""Every error and warning that torchbudget raises.

```text
TorchBudgetError
├── BudgetError          (ValueError)    a budget that cannot be read, or that holds nothing
├── CostError            (ValueError)    coefficients that are no cost
│   └── CostOverflowError (OverflowError) a cost past what 64-bit bytes can count
├── SizesError           (ValueError)    sizes of a wrong shape, type or sign
├── OptionError          (ValueError)    an option, or a pair of options, that cannot hold
├── OversizeError        (ValueError)    a sample that alone is over the budget
├── UnevenRanksError     (ValueError)    samples that cannot be dealt evenly to the ranks
├── StateError           (ValueError)    a state that is malformed
│   └── StateMismatchError               a state of another dataset, order or version
├── CollateError         (ValueError)    samples that cannot form one batch
├── SampleError          (RuntimeError)  a sample of a stream that cannot be read or made
├── MachineError         (RuntimeError)  a reading that this machine does not give
├── StepError            (RuntimeError)  an optimizer step that cannot be taken exactly
├── SampleTooLargeError        (MemoryError)   one sample alone does not fit into memory
└── MissingExtraError    (ImportError)   an optional package that is not installed

TorchBudgetWarning       (UserWarning)
├── DiscardedStateWarning                a loaded position was thrown away before it was used
├── MeasureWarning                       a measured cost may not tell the truth
├── ForgottenStepWarning                 gradients were accumulated that no step took
├── ForeignStepWarning                   somebody else stepped, or changed the gradients
├── UnsynchronizedWarning                a forward outside `micro_batch` under DDP or FSDP
├── ReductionWarning                     a mean loss where a sum is asked for, or the reverse
├── BatchNormWarning                     statistics of micro-batches, where the batch's are meant
└── ChangedParametersWarning             the optimizer has other parameters than before
```
"""

from __future__ import annotations


class TorchBudgetError(Exception):
    """The root of every error that torchbudget raises on purpose."""


class BudgetError(TorchBudgetError, ValueError):
    """A budget cannot be read, or holds nothing."""


class CostError(TorchBudgetError, ValueError):
    """Coefficients or arguments that are no cost."""


class CostOverflowError(CostError, OverflowError):
    """A cost is past what 64-bit bytes can count."""


class SizesError(TorchBudgetError, ValueError):
    """Sizes have a wrong shape, type or sign."""


class OptionError(TorchBudgetError, ValueError):
    """An option, or a pair of options, cannot hold."""


class OversizeError(TorchBudgetError, ValueError):
    """A sample alone is over the budget."""


class UnevenRanksError(TorchBudgetError, ValueError):
    """The samples cannot be dealt so that every rank has the same number of micro-batches."""


class StateError(TorchBudgetError, ValueError):
    """A state is malformed."""


class StateMismatchError(StateError):
    """A state belongs to another dataset, another order or another version."""


class CollateError(TorchBudgetError, ValueError):
    """Samples cannot form one batch."""


class SampleError(TorchBudgetError, RuntimeError):
    """A sample of a stream cannot be read or made."""


class MachineError(TorchBudgetError, RuntimeError):
    """A reading that this machine does not give."""


class StepError(TorchBudgetError, RuntimeError):
    """An optimizer step cannot be taken exactly."""


class SampleTooLargeError(TorchBudgetError, MemoryError):
    """One sample alone does not fit into memory, on this rank or on another."""


class MissingExtraError(TorchBudgetError, ImportError):
    """An optional package is not installed."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtraError:
        """The error that names the extra which brings `package`."""
        return cls(
            f"{package} is not installed; install it with: pip install 'torchbudget[{extra}]'"
        )


class TorchBudgetWarning(UserWarning):
    """The root of every warning that torchbudget gives."""


class DiscardedStateWarning(TorchBudgetWarning):
    """A loaded position was thrown away before it was used."""


class MeasureWarning(TorchBudgetWarning):
    """A measured cost may not tell the truth: of the step, of another machine, of what is seen."""


class ForgottenStepWarning(TorchBudgetWarning):
    """Gradients were accumulated that no step took: `flush` was forgotten, or a loop was left."""


class ForeignStepWarning(TorchBudgetWarning):
    """`optimizer.step()` or `zero_grad()` was called, or gradients were changed, between steps."""


class UnsynchronizedWarning(TorchBudgetWarning):
    """A distributed module's forward stands outside `GradAccumulator.micro_batch`."""


class ReductionWarning(TorchBudgetWarning):
    """A mean loss was passed where a sum is asked for, or the reverse."""


class BatchNormWarning(TorchBudgetWarning):
    """Batch normalisation sees micro-batches: the step is not the large batch's."""


class ChangedParametersWarning(TorchBudgetWarning):
    """An optimizer has other parameters than when it was given to a `GradAccumulator`."""
