"""Ranks of which one is killed at any moment of a training of `examples/`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from typing import Any
from unittest.mock import patch

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.rank_scripts import error_of, tell


def lose(victim: str, steps: str, delay_s: str, *argv: str) -> None:
    """Run a script, of which one rank is killed, some time after so many of its steps; or none.

    The other ranks end; their result is the error that they met.
    """
    taken, is_victim = [0], os.environ["RANK"] == victim

    def count(*_: Any) -> None:
        taken[0] += 1
        if is_victim and taken[0] == int(steps):
            timer = threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    register_optimizer_step_post_hook(count)
    tell("")  # for a script that ends its process itself
    with patch.object(sys, "argv", [*argv]):
        error = error_of(lambda: runpy.run_path(argv[0], run_name="__main__"))
    tell(error)
    os._exit(0)
