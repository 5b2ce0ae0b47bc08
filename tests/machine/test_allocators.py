"""What `configure_allocators` and `trim_malloc` change, each in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.memory_groups import REPOSITORY
from torchbudget.machine.allocators import cuda_allocator_settings

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


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
    segments = "expandable_segments:True"
    assert printed_by(PRINT) == [f"32 {segments} {segments}"]
    assert printed_by(PRINT, ONEDNN_PRIMITIVE_CACHE_CAPACITY="7") == [f"7 {segments} {segments}"]
    own = "max_split_size_mb:64"
    for name in VARIABLES[1:]:  # torch 2.6 reads one only; what is stated by the other counts
        assert printed_by(PRINT, **{name: own}) == [f"32 {own} {own}"]
    both = {VARIABLES[1]: own, VARIABLES[2]: segments}
    assert printed_by(PRINT, **both) == [f"32 {own} {segments}"]


CONVOLVE = """
import torch
from torch.nn import functional as F
import torchbudget as tb

tb.configure_allocators()
weight = torch.randn(64, 64, 3, 3)
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
    for length in [*range(20, 70)] * 2:
        F.conv2d(torch.randn(2, 64, length, length), weight)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is without oneDNN")
def test_onednn_keeps_few_kernels_though_torch_was_imported_before():
    """Of 50 shapes that come twice, none is found in a cache of 32 kernels."""
    created = [line for line in printed_by(CONVOLVE) if "create" in line and ",convolution" in line]
    if not created:
        pytest.skip("this machine's convolutions do not use oneDNN")
    assert len(created) == 100
    assert not [line for line in created if "cache_hit" in line]


FREE = """
import torch
import torchbudget as tb
from torchbudget.machine.process_tree import process_memory

if not tb.trim_malloc():
    print("no glibc")
    raise SystemExit
for _ in range(2):  # by default, glibc keeps the second round's blocks
    blocks = [bytearray(b"1") * 2**18 for _ in range(400)]
    full = process_memory().resident_bytes
    del blocks[::2]
    print(full - process_memory().resident_bytes)
    del blocks
"""


def test_blocks_are_returned_when_they_are_freed():
    """Every second of 400 blocks is freed: 50 MiB are returned, in the midst of the others."""
    lines = printed_by(FREE)
    if lines == ["no glibc"]:
        pytest.skip("not glibc")
    assert int(lines[1]) >= 48 * 2**20


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (
            "max_split_size_mb: 128,roundup_power2_divisions:[64:1,>:4],expandable_segments:False",
            {
                "max_split_size_mb": "128",
                "roundup_power2_divisions": "[64:1,>:4]",
                "expandable_segments": "False",
            },
        ),
    ],
)
def test_the_settings_of_cudas_allocator_are_read(
    monkeypatch: pytest.MonkeyPatch, text: str, settings: dict[str, str]
) -> None:
    """From the name that torch reads first."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    assert cuda_allocator_settings() == settings
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert cuda_allocator_settings() == {"expandable_segments": "True"}
