"""State bytes; DataLoaders then yield ragged batches that fit those bytes and fill them."""

from torchbudget.budget import MemoryBudget
from torchbudget.cost.padded import PackedCost, PaddedCost
from torchbudget.data.sampler import MemoryBudgetBatchSampler

__version__ = "0.1.0.dev0"
