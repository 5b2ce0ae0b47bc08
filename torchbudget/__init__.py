"""State bytes; DataLoaders then yield ragged batches that fit those bytes and fill them."""

from torchbudget.budget import MemoryBudget
from torchbudget.cost.dense import DenseCost
from torchbudget.cost.padded import PackedCost, PaddedCost
from torchbudget.cost.protocol import AdditiveCost, CostModel
from torchbudget.data.collate import JaggedCollate, PackCollate
from torchbudget.data.jagged import JaggedBatch
from torchbudget.data.packed import PackedBatch
from torchbudget.data.pad_collate import PadCollate
from torchbudget.data.padded import PaddedBatch
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.sizes import sizes_of
from torchbudget.errors import (
    BudgetError,
    CollateError,
    CostError,
    CostOverflowError,
    DiscardedStateWarning,
    MachineError,
    MissingExtraError,
    OptionError,
    OversizeError,
    SizesError,
    StateError,
    StateMismatchError,
    TorchBudgetError,
    TorchBudgetWarning,
    UnevenRanksError,
)
from torchbudget.plan.plan import Plan
from torchbudget.plan.report import BatchFigures, PlanReport
from torchbudget.units import GiB, KiB, MiB, format_bytes, parse_bytes

__version__ = "0.1.0.dev0"

__all__ = [
    "AdditiveCost",
    "BatchFigures",
    "BudgetError",
    "CollateError",
    "CostError",
    "CostModel",
    "CostOverflowError",
    "DenseCost",
    "DiscardedStateWarning",
    "GiB",
    "JaggedBatch",
    "JaggedCollate",
    "KiB",
    "MachineError",
    "MemoryBudget",
    "MemoryBudgetBatchSampler",
    "MiB",
    "MissingExtraError",
    "OptionError",
    "OversizeError",
    "PackCollate",
    "PackedBatch",
    "PackedCost",
    "PadCollate",
    "PaddedBatch",
    "PaddedCost",
    "Plan",
    "PlanReport",
    "SizesError",
    "StateError",
    "StateMismatchError",
    "TorchBudgetError",
    "TorchBudgetWarning",
    "UnevenRanksError",
    "__version__",
    "format_bytes",
    "parse_bytes",
    "sizes_of",
]
