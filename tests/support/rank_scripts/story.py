"""A rank that reads two epochs, saves as it goes, and is killed after some time."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from tests.support import samplers, streams
from tests.support.tracked_streams import make
from torchbudget.errors import StateMismatchError

folder, files, chapter, after_s, kind, number, budget, at_windows, options = sys.argv[1:]
dist.init_process_group("gloo")
rank, saved, workers = dist.get_rank(), Path(files, "saved.json"), int(number)
start = {"ranks": dist.get_world_size(), "workers": workers, "budget": int(budget)}
if kind == "sampler":
    source = samplers.sampler_of(budget=int(budget), **json.loads(options))
    loader = samplers.loader_of(source, num_workers=workers)
else:
    source = make(kind, budget=int(budget), **json.loads(options))
    loader = streams.loader_of(source, workers)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_to_be_saved(done: int) -> bool:
    if at_windows == "False":
        return done % 3 == 0
    return not any(worker["rounds"] for worker in source.state_dict().get("workers", ()))


def run() -> None:
    done, log = 0, Path(files, f"{chapter}.{rank}.jsonl").open("w")  # noqa: SIM115  (until the end)
    if saved.exists():
        source.load_state_dict(json.loads(saved.read_text())["state"])
    while (epoch := source.epoch) < 2:
        for batch in source.tracked(loader):
            done += 1
            numbers = [one if kind == "sampler" else one[0] for one in batch]
            log.write(json.dumps([done, epoch, numbers]) + "\n")
            log.flush()
            if done == 1 and float(after_s):
                timer = threading.Timer(float(after_s), die)
                timer.daemon = True
                timer.start()
            time.sleep(0.01)  # a step
            dist.barrier()
            if rank == 0 and is_to_be_saved(done):
                save(done)
    dist.barrier()
    if rank == 0:
        save(done)


def save(done: int) -> None:
    state = {"chapter": chapter, "done": done, "start": start, "state": source.state_dict()}
    saved.with_suffix(".part").write_text(json.dumps(state))
    saved.with_suffix(".part").replace(saved)


if float(after_s):
    try:
        run()
    except StateMismatchError as error:
        Path(files, f"{chapter}.refused").write_text(str(error))
    finally:  # also where it is over before its time
        die()
run()
Path(folder, f"{rank}.json").write_text("null")
