"""What a full card says, in a process of its own for each: all of it is recognised."""

from __future__ import annotations

import pytest

from tests.gpu.epoch import printed_json

pytestmark = pytest.mark.gpu

FILL = """
import json
import sys
import torch
from torch.nn import functional as F
from torchbudget.machine.out_of_memory import failed_allocations, is_out_of_memory

kind = sys.argv[1]
torch.backends.cudnn.benchmark = kind == "convolution, benchmark"
convolution = kind.startswith("convolution")
shape = (16, 64, 256, 256) if convolution else (8192, 8192)
x = torch.randn(shape, device="cuda")
weight = torch.randn(64, 64, 3, 3, device="cuda")
out = torch.empty_like(x)
if kind == "product":
    x[:8, :8] @ x[:8, :8]  # its library has a handle already
kept = []
for chunk in (2**30, 2**26, 2**21):
    try:
        while torch.cuda.mem_get_info()[0] > chunk + 2**23:
            kept.append(torch.empty(chunk, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
failed_before, said, known = failed_allocations(), "nothing", True
try:
    if convolution:
        F.conv2d(x, weight, padding=1)
    elif kind == "first product":
        torch.mm(x, x, out=out)
    else:
        x @ x
    torch.cuda.synchronize()
except Exception as error:
    said, known = f"{type(error).__name__}: {error}", is_out_of_memory(error, failed_before)
print(json.dumps([said, known]))
"""


@pytest.mark.parametrize("expandable", ["True", "False"])
@pytest.mark.parametrize(
    "kind", ["convolution", "convolution, benchmark", "product", "first product"]
)
def test_every_error_of_a_full_card_is_recognised(kind: str, expandable: str) -> None:
    """By torch's allocator, cuDNN, or cuBLAS, whose handle does not fit."""
    said, known = printed_json("-c", FILL, kind, expandable=expandable)
    assert known, said
