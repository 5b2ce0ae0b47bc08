"""Bytes that processes share, and a lock that does not outlive its owner."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from torchbudget.data.cache import SharedFile, bytes_to_come


def write_page_and_wait(file: SharedFile, at: int, told: Any, written: Any, done: Any) -> None:
    file.memory[at : 2 * at] = bytes(at)
    told.value = bytes_to_come([os.getpid()])
    written.set()
    done.wait(30)


def test_what_is_to_come_is_what_no_process_has_pages_of() -> None:
    """Of files that are there, by the process that made them: each byte is somebody's once."""
    here, pages = [os.getpid()], 64 * 4096
    before = bytes_to_come(here)
    file = SharedFile(4 * pages)
    assert bytes_to_come(here) == before + 4 * pages
    file.memory[:pages] = bytes(range(256)) * (pages // 256)
    assert bytes_to_come(here) == before + 3 * pages
    context = multiprocessing.get_context("fork")
    written, told, done = context.Event(), context.Value("q", -1), context.Event()
    process = context.Process(target=write_page_and_wait, args=(file, pages, told, written, done))
    process.start()
    try:
        assert written.wait(30)
        assert told.value == 0  # that process has made none
        assert bytes_to_come([*here, process.pid or 0]) == before + 2 * pages
    finally:
        done.set()
        process.join()
    assert bytes_to_come(here) == before + 3 * pages  # nobody has those pages now
    del file
    assert bytes_to_come(here) == before
