"""Two ranks that train, of which one is killed or cannot write; or both go on."""

import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from tests.support.trainings import Training, at_step
from torchbudget.errors import RankError

folder, files, fault, victim = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo")
rank = dist.get_rank()
processes: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(processes, os.getpid())
limits, save = resource.getrlimit(resource.RLIMIT_FSIZE), torch.save


def kill() -> None:
    os.kill(processes[victim], signal.SIGKILL)
    while psutil.pid_exists(processes[victim]):
        time.sleep(0.01)


def may_not_write() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))


def save_and_kill(state: Any, file: Any, **options: Any) -> None:
    if isinstance(file, io.BytesIO):  # of a tensor that is pickled
        save(state, file, **options)
        return
    whole = io.BytesIO()
    save(state, whole)
    file.write(whole.getvalue()[:4096])
    file.flush()
    kill()
    file.write(whole.getvalue()[4096:])


def kill_in_the_next_write() -> None:
    torch.save = save_and_kill


def kill_in_evaluation(model: nn.Module, _: Any) -> None:
    if not model.training:
        kill()


training, callbacks = Training(), []
if rank == victim and fault == "full":
    callbacks = [at_step(4, may_not_write)]
elif rank == victim and fault == "step":
    callbacks = [at_step(4, kill)]
elif rank == victim and fault == "evaluation":
    training.model.register_forward_pre_hook(kill_in_evaluation)
elif rank == 0 and fault == "write":  # the one that writes
    callbacks = [at_step(4, kill_in_the_next_write)]
found, start = [], time.monotonic()
try:
    training.fit(*callbacks, folder=files)
except (RankError, RuntimeError, OSError) as error:
    found = [type(error).__name__, str(error)]
seconds = time.monotonic() - start
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
result = [training.model.head.weight.tolist(), found, seconds]
(folder / f"{rank}.json").write_text(json.dumps(result))
if fault not in ("none", "full"):
    os._exit(0)
