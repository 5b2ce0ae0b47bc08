"""Real ranks: a script under torchrun, each process with one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def torchrun(script: str, folder: Path, ranks: int, *arguments: Any) -> list[Any]:
    """Run a script on that many gloo ranks; what each wrote as JSON to `sys.argv[1]/<rank>.json`.

    Further arguments follow as text.
    """
    path = folder / "script.py"
    path.write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={ranks}", str(path), str(folder), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
