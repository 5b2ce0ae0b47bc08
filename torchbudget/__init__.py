"""State bytes; DataLoaders then yield ragged batches that fit those bytes and fill them."""

from torchbudget.budget import MemoryBudget
from torchbudget.cost.measuring.measure import describe_step, measure_cost
from torchbudget.cost.measuring.tracing import trace_peak_bytes
from torchbudget.cost.models.dense import DenseCost
from torchbudget.cost.models.measured import MeasuredCost, Probe, load_cost
from torchbudget.cost.models.padded import PackedCost, PaddedCost
from torchbudget.cost.models.protocol import AdditiveCost, CostModel
from torchbudget.cost.models.table import TableCost
from torchbudget.data.cache.reader import HookedCollate, ReaderDataset
from torchbudget.data.cache.sample_cache import SampleCache
from torchbudget.data.collate.jagged import JaggedBatch
from torchbudget.data.collate.pack import JaggedCollate, PackCollate
from torchbudget.data.collate.packed_batch import PackedBatch
from torchbudget.data.collate.pad import PadCollate
from torchbudget.data.collate.padded_batch import PaddedBatch
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.sizes.sizes_of import sizes_of
from torchbudget.data.stream import transforms
from torchbudget.data.stream.dataset import BudgetedIterableDataset, SkippedSamples, stop_together
from torchbudget.data.stream.forever import sample_forever
from torchbudget.errors import (
    BatchNormWarning,
    BudgetError,
    ChangedParametersWarning,
    CollateError,
    CostError,
    CostOverflowError,
    DiscardedStateWarning,
    ForeignStepWarning,
    ForgottenStepWarning,
    MachineError,
    MeasureWarning,
    MissingExtraError,
    OptionError,
    OversizeError,
    ReductionWarning,
    SampleError,
    SampleTooLargeError,
    SizesError,
    StateError,
    StateMismatchError,
    StepError,
    TorchBudgetError,
    TorchBudgetWarning,
    UnevenRanksError,
    UnsynchronizedWarning,
)
from torchbudget.machine import Peak, peak_memory, trim_malloc
from torchbudget.plan.plan import Plan
from torchbudget.plan.report import BatchFigures, PlanReport
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.determinism import determinize, largest_difference
from torchbudget.train.fit import Epoch, fit
from torchbudget.train.joint import joint_backward
from torchbudget.train.loop import evaluate, train_epoch
from torchbudget.train.stepping import Step
from torchbudget.train.summary import MemorySummary, ModuleMemory, memory_summary
from torchbudget.train.warm_up import WarmUp, warm_up
from torchbudget.units import GiB, KiB, MiB, format_bytes, parse_bytes

__version__ = "0.1.0.dev0"

__all__ = [
    "AdditiveCost",
    "BatchFigures",
    "BatchNormWarning",
    "BudgetError",
    "BudgetedIterableDataset",
    "ChangedParametersWarning",
    "CollateError",
    "CostError",
    "CostModel",
    "CostOverflowError",
    "DenseCost",
    "DiscardedStateWarning",
    "Epoch",
    "ForeignStepWarning",
    "ForgottenStepWarning",
    "GiB",
    "GradAccumulator",
    "HookedCollate",
    "JaggedBatch",
    "JaggedCollate",
    "KiB",
    "MachineError",
    "MeasureWarning",
    "MeasuredCost",
    "MemoryBudget",
    "MemoryBudgetBatchSampler",
    "MemorySummary",
    "MiB",
    "MissingExtraError",
    "ModuleMemory",
    "OptionError",
    "OversizeError",
    "PackCollate",
    "PackedBatch",
    "PackedCost",
    "PadCollate",
    "PaddedBatch",
    "PaddedCost",
    "Peak",
    "Plan",
    "PlanReport",
    "Probe",
    "ReaderDataset",
    "ReductionWarning",
    "SampleCache",
    "SampleError",
    "SampleTooLargeError",
    "SizesError",
    "SkippedSamples",
    "StateError",
    "StateMismatchError",
    "Step",
    "StepError",
    "TableCost",
    "TorchBudgetError",
    "TorchBudgetWarning",
    "UnevenRanksError",
    "UnsynchronizedWarning",
    "WarmUp",
    "__version__",
    "describe_step",
    "determinize",
    "evaluate",
    "fit",
    "format_bytes",
    "joint_backward",
    "largest_difference",
    "load_cost",
    "measure_cost",
    "memory_summary",
    "parse_bytes",
    "peak_memory",
    "sample_forever",
    "sizes_of",
    "stop_together",
    "trace_peak_bytes",
    "train_epoch",
    "transforms",
    "trim_malloc",
    "warm_up",
]
