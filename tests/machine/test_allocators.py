"""Allocators keep little of what was freed, and what the environment says already stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch

import torchbudget as tb
from tests.support.commands import printed_by
from tests.support.model_classes import CLASSES
from torchbudget.errors import MeasureWarning
from torchbudget.machine import allocators
from torchbudget.machine.allocators import has_expandable_segments, trim_malloc
from torchbudget.machine.process_tree import process_memory

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
GROWING = "expandable_segments:True"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without the variables, which are restored; malloc stays as it is."""
    for name in (*NAMES, *KERNELS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocators, "trim_malloc", lambda: True)
    return monkeypatch


@pytest.mark.parametrize("stated", [None, "LRU_CACHE_CAPACITY", *NAMES])
def test_what_the_environment_says_already_stays(
    stated: str | None, environment: pytest.MonkeyPatch
) -> None:
    """CUDA's settings may have any of three names."""
    expected = dict.fromkeys(KERNELS, "32")
    if stated not in NAMES:
        expected[NAMES[0]] = GROWING
    if stated is not None:
        environment.setenv(stated, "7")
        expected[stated] = "7"
    tb.configure_allocators()
    assert {name: os.environ[name] for name in os.environ if name in NAMES + KERNELS} == expected
    assert has_expandable_segments() is (stated not in NAMES)


@pytest.mark.parametrize("in_force", [False, True])
def test_a_call_that_comes_too_late_for_cuda_is_warned_of(
    in_force: bool, environment: pytest.MonkeyPatch
) -> None:
    """CUDA is in use already; the variable is set nevertheless, for other processes."""
    said = {"allocator_settings": {"expandable_segments": in_force}}
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    environment.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    environment.setattr(torch.cuda.memory, "_snapshot", lambda: said)
    with nullcontext() if in_force else pytest.warns(MeasureWarning, match="fixed sizes"):
        tb.configure_allocators()
    assert has_expandable_segments() is in_force
    assert os.environ[NAMES[0]] == GROWING


def printed(function: Callable[[], None]) -> list[int]:
    """The numbers that a function of this file prints in a process of its own."""
    code = f"from {__name__} import {function.__name__} as run; run()"
    return [*map(int, printed_by(["-c", code]).split())]


def used() -> int:
    return process_memory().resident_bytes


def train_on_new_shapes() -> None:
    """Print what 50 shapes of a U-Net leave, after 10 of them."""
    tb.configure_allocators()
    torch.set_num_threads(1)
    case = CLASSES["U-Net"]()

    def train(lengths: Iterable[int]) -> int:
        for length in lengths:
            case.step(case.make_batch(2, (length, 48)))
        return used()

    before = train(range(20, 30))
    print(train(range(30, 80)) - before)  # noqa: T201


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is without oneDNN")
def test_new_shapes_keep_next_to_nothing() -> None:
    """The kernels of 1,024 shapes would be kept, 0.4 MiB each."""
    assert printed(train_on_new_shapes)[0] < 10 * 2**20


def leave_gaps() -> None:
    """Print what trimming frees, and what tensors of several sizes take, and leave."""
    for _ in range(2):  # by default, the second round's blocks lie in the heap
        blocks = [bytearray(b"1") * 2**18 for _ in range(400)]
        last = blocks.pop()  # noqa: F841  (the heap's end stays in use)
        del blocks[::2]
    full = used()
    if not trim_malloc(2**17, 2**17):
        return
    print(full - used())  # noqa: T201
    for large in (2**18, 2**17, 2**18, 2**22):  # the first also loads what torch needs
        before = used()
        tensors = [torch.ones(large, dtype=torch.uint8) for _ in range(2**26 // large)]
        taken = used() - before
        del tensors
        print(taken, used() - before)  # noqa: T201


def test_gaps_of_before_are_returned_and_not_used_again() -> None:
    """Training that went on before `trim_malloc` has left gaps between blocks that are in use."""
    numbers = printed(leave_gaps)
    if not numbers:
        pytest.skip("not glibc")
    first, _, _, *rounds = numbers
    assert first >= 48 * 2**20
    assert min(rounds[::2]) >= 56 * 2**20
    assert max(rounds[1::2]) <= 16 * 2**20
