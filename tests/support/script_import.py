"""Import the library where everything that it could touch is watched; print what it touched."""

import json
import logging
import os
import sys
import threading
import traceback
import warnings
from typing import Any

warnings.simplefilter("error")

import numpy as np  # noqa: E402
import psutil  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed  # noqa: E402
import torch.utils.data  # noqa: E402

reads: list[str] = []


class Watched(dict[str, str]):
    """An environment that notes who reads it, also where other code does so for the library."""


def noted(method: Any) -> Any:
    def call(*arguments: Any) -> Any:
        files = [frame.filename for frame in traceback.extract_stack()]
        reads.extend(file for file in files if "/torchbudget/" in file)
        return method(*arguments)

    return call


for name in ("__getitem__", "get", "__contains__"):
    setattr(Watched, name, noted(getattr(dict, name)))


def state() -> list[str]:
    generators = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return list(map(str, (torch.get_default_dtype(), torch.get_num_threads(), *generators)))


os.environ = Watched(os.environ)  # type: ignore[assignment]  # noqa: B003
os.getenv = os.environ.get
before, modules, threads, files = state(), set(sys.modules), threading.active_count(), os.listdir()

import torchbudget  # noqa: E402, F401

found = {
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "reads": reads,
    "cuda": torch.cuda.is_initialized(),
    "distributed": torch.distributed.is_initialized(),
    "threads": threading.active_count() - threads,
    "files": sorted(set(os.listdir()) - set(files)),
    "handlers": len(logging.getLogger("torchbudget").handlers),
    "same": state() == before,
}
sys.stdout.write(json.dumps(found))
