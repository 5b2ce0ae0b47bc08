"""What `configure_allocators` and `trim_malloc` change, each in a process of its own."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from tests.support.memory_groups import REPOSITORY
from torchbudget.errors import MeasureWarning
from torchbudget.machine import allocators
from torchbudget.machine.allocators import cuda_allocator_settings

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
VARIABLES = (*KERNELS, *NAMES)


def printed_by(code: str, **environment: str) -> list[str]:
    """The lines that the code prints in a new process, without the variables of this one."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": str(REPOSITORY), **environment},
        timeout=120,
    )
    return done.stdout.splitlines()


PRINT = f"""
import os
import torchbudget as tb
tb.configure_allocators()
print(*(os.environ.get(name) for name in {VARIABLES}))
"""


@pytest.mark.slow
def test_what_the_environment_says_already_stays():
    """Not every torch reads all names; what is stated by one counts."""
    segments, own = "expandable_segments:True", "max_split_size_mb:64"
    assert printed_by(PRINT) == [f"32 32 {segments} None {segments}"]
    assert printed_by(PRINT, LRU_CACHE_CAPACITY="7") == [f"32 7 {segments} None {segments}"]
    for name in NAMES:
        hip = own if name == NAMES[1] else None
        assert printed_by(PRINT, **{name: own}) == [f"32 32 {own} {hip} {own}"]
    stated = {NAMES[0]: own, NAMES[2]: segments}
    assert printed_by(PRINT, **stated) == [f"32 32 {own} None {segments}"]


GROW = """
import torch
import torchbudget as tb
from torchbudget.machine.process_tree import process_memory

tb.configure_allocators()
from tests.support.model_classes import CLASSES

torch.set_num_threads(1)
case = CLASSES["U-Net"]()
def train(lengths):
    for length in lengths:
        case.step(case.make_batch(2, (length, 48)))
    return process_memory().resident_bytes
before = train(range(20, 30))
print(train(range(30, 80)) - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is without oneDNN")
def test_new_shapes_keep_next_to_nothing():
    """Of 50 shapes of a U-Net, where the kernels of 1,024 would be kept 0.4 MiB each."""
    assert int(*printed_by(GROW)) < 10 * 2**20


GAPS = """
import torch
from torchbudget.machine.allocators import trim_malloc
from torchbudget.machine.process_tree import process_memory

def used():
    return process_memory().resident_bytes

for _ in range(2):  # by default, the second round's blocks lie in the heap
    blocks = [bytearray(b"1") * 2**18 for _ in range(400)]
    last = blocks.pop()
    del blocks[::2]
full = used()
if not trim_malloc():
    print("no glibc")
    raise SystemExit
print(full - used())
for large in (2**18, 2**17, 2**18, 2**22):  # the first also loads what torch needs
    before = used()
    tensors = [torch.ones(large, dtype=torch.uint8) for _ in range(2**26 // large)]
    taken = used() - before
    del tensors
    print(taken, used() - before)
again = used()
trim_malloc()
print(again - used())
"""


def test_gaps_of_before_are_returned_and_not_used_again():
    """Training that went on before `trim_malloc` has left gaps between blocks that are in use."""
    lines = printed_by(GAPS)
    if lines == ["no glibc"]:
        pytest.skip("not glibc")
    first, _, *rounds, again = lines
    assert int(first) >= 48 * 2**20
    for line in rounds:
        taken, kept = map(int, line.split())
        assert taken >= 56 * 2**20
        assert kept <= 16 * 2**20
    assert int(again) <= 16 * 2**20


READ = """
import torch
from torchbudget.machine.allocators import cuda_allocator_settings
print(*map(":".join, cuda_allocator_settings().items()))
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.skipif(torch.__version__ < "2.10", reason="other names count, or torch does not say")
@pytest.mark.parametrize("names", [NAMES, NAMES[1:], NAMES[2:]])
def test_torch_reads_the_same_name_first(names: tuple[str, ...]) -> None:
    """The answer of torch itself, in a process of its own, since it reads the environment once."""
    stated = {one: f"max_split_size_mb:{64 + NAMES.index(one)}" for one in names}
    assert printed_by(READ, **stated) == [stated[names[0]]] * 2


def test_settings_in_force_count_once_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may have been changed since, as by a late `configure_allocators`."""
    text = "max_split_size_mb: 128,roundup_power2_divisions:[64:1,>:4],expandable_segments:True"
    stated = {"max_split_size_mb": "128", "roundup_power2_divisions": "[64:1,>:4]"}
    said = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "expandable_segments": False}
    monkeypatch.setenv(NAMES[0], text)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": said})
    assert cuda_allocator_settings() == stated | {"expandable_segments": "True"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    in_force = {"max_split_size_mb": "64", "expandable_segments": "False"}
    assert cuda_allocator_settings() == in_force


@pytest.mark.parametrize(("kept", "warns"), [(False, True), (True, False)])
def test_a_call_that_comes_too_late_for_cuda_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, kept: bool, warns: bool
) -> None:
    """CUDA is in use already; the variables are set nevertheless, for other processes."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that they are restored
        monkeypatch.delenv(name)
    said = {"expandable_segments": kept}
    monkeypatch.setattr(allocators, "trim_malloc", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": said})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        allocators.configure_allocators()
    texts = [str(one.message) for one in caught if one.category is MeasureWarning]
    assert len(texts) == warns
    assert all("keeps the settings that it has: expandable_segments:False" in one for one in texts)
    assert os.environ[NAMES[0]] == "expandable_segments:True"
