"""Runs a script as one rank under torchrun, and ends it as ranks of tests end (see `ranks`).

python -m torch.distributed.run … -m tests.support.script_rank SCRIPT …
"""

import runpy
import sys

from tests.support.ranks import leave

if __name__ == "__main__":
    del sys.argv[0]
    script = runpy.run_path(sys.argv[0], run_name="__main__")  # kept: its model and its group
    leave()
