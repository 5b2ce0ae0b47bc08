"""The memory of a model and its optimizer, counted."""

from __future__ import annotations

import torch
from torch import nn

from torchbudget import memory_summary


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def test_every_tensor_counts_once() -> None:
    """Parameters, frozen ones, buffers, shared ones, half precision and two moments."""
    embed = nn.Embedding(10, 4)
    head = nn.Linear(4, 10, bias=False)
    head.weight = embed.weight
    frozen = nn.Linear(4, 4).requires_grad_(False).half()
    model = nn.Sequential(embed, nn.BatchNorm1d(4), frozen, head)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    assert memory_summary(model, optimizer).total.optimizer_bytes == 0
    summary = memory_summary(model, stepped(optimizer))
    assert [one.name for one in summary.modules] == ["0", "1", "2"]
    total = summary.total
    assert (total.parameters, total.learnable) == (40 + 8 + 20, 48)
    assert total.weight_bytes == 4 * 48 + 2 * 20 + (4 * 8 + 8)
    assert total.gradient_bytes == 4 * 48
    assert total.optimizer_bytes == 2 * 4 * 48 + 2 * 4 + 4  # and a count for each of three
    lines = str(summary).splitlines()
    assert len(lines) == 1 + 3 + 1
    assert lines[-1].split()[:4] == ["total", "Sequential", "68", "48"]


def test_memory_that_tensors_share_counts_once() -> None:
    """Two parameters in one storage, a buffer that is expanded, and a view of another buffer."""
    flat = torch.zeros(30)
    one, two = nn.Module(), nn.Module()
    one.weight, two.weight = nn.Parameter(flat[:10]), nn.Parameter(flat[10:])
    one.register_buffer("mask", torch.zeros(1).expand(1000, 1000))
    two.register_buffer("positions", torch.arange(100))
    two.register_buffer("first", two.positions[:10])
    optimizer = torch.optim.SGD([one.weight, two.weight], lr=0.1, momentum=0.9)
    summary = memory_summary(nn.ModuleList([one, two]), stepped(optimizer))
    assert [one.weight_bytes for one in summary.modules] == [4 * 30 + 4, 8 * 100]
    assert summary.total.parameters == 30
    assert summary.total.gradient_bytes == 4 * 30
    assert summary.total.optimizer_bytes == 4 * 30
