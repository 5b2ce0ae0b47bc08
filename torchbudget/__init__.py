"""State bytes; DataLoaders then yield ragged batches that fit those bytes and fill them."""

from torchbudget import errors, readers, transforms
from torchbudget.budget import MemoryBudget, limit_device_memory
from torchbudget.cost.agree import agree
from torchbudget.cost.alternatives import alternatives
from torchbudget.cost.dense import DenseCost
from torchbudget.cost.measure import measure_cost
from torchbudget.cost.measured import MeasuredCost, load_cost
from torchbudget.cost.padded import PackedCost, PaddedCost, TableCost
from torchbudget.cost.protocol import CostModel
from torchbudget.cost.tracing import trace_peak_bytes
from torchbudget.data.cache import SampleCache
from torchbudget.data.collate.batch import PackedBatch, PaddedBatch
from torchbudget.data.collate.collates import PackCollate, PadCollate
from torchbudget.data.columns import sizes_of_columns
from torchbudget.data.sampler import MemoryBudgetBatchSampler, best_shapes
from torchbudget.data.sizes import sizes_of
from torchbudget.data.stream.dataset import BudgetedIterableDataset
from torchbudget.errors import TorchBudgetError
from torchbudget.host.loader import loader, predict
from torchbudget.host.options import loader_options
from torchbudget.machine.allocators import configure_allocators
from torchbudget.observe.monitor import MemoryMonitor
from torchbudget.plan.mixture import Mixture
from torchbudget.plan.step import plan_step
from torchbudget.restoring import is_measuring
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.fit import fit
from torchbudget.train.joint import joint_backward
from torchbudget.train.loop import evaluate, warm_up
from torchbudget.train.summary import memory_summary
from torchbudget.units import GiB, MiB, format_bytes, parse_bytes

__version__ = "0.1.0"

__all__ = [
    "BudgetedIterableDataset",
    "CostModel",
    "DenseCost",
    "GiB",
    "GradAccumulator",
    "MeasuredCost",
    "MemoryBudget",
    "MemoryBudgetBatchSampler",
    "MemoryMonitor",
    "MiB",
    "Mixture",
    "PackCollate",
    "PackedBatch",
    "PackedCost",
    "PadCollate",
    "PaddedBatch",
    "PaddedCost",
    "SampleCache",
    "TableCost",
    "TorchBudgetError",
    "__version__",
    "agree",
    "alternatives",
    "best_shapes",
    "configure_allocators",
    "errors",
    "evaluate",
    "fit",
    "format_bytes",
    "is_measuring",
    "joint_backward",
    "limit_device_memory",
    "load_cost",
    "loader",
    "loader_options",
    "measure_cost",
    "memory_summary",
    "parse_bytes",
    "plan_step",
    "predict",
    "readers",
    "sizes_of",
    "sizes_of_columns",
    "trace_peak_bytes",
    "transforms",
    "warm_up",
]
