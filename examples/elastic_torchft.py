"""Train under torchft: a replica that is lost costs the others one step, and no restart.

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --join_timeout_ms 3000
    python examples/elastic_torchft.py run --replica 0
    python examples/elastic_torchft.py run --replica 1

Each line has a terminal of its own. Kill one replica: the other repeats the step that failed, with
all of its samples, and goes on alone. Start the killed one again: it gets weights and position from
the other. Each replica writes the samples of its committed steps into the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo

import torchbudget as tb

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
add("folder", type=Path)
add("--replica", type=int, required=True)
add("--lighthouse", default="http://127.0.0.1:29510")
add("--samples", type=int, default=1000)
add("--epochs", type=int, default=2)
add("--step-s", type=float, default=0.2, help="seconds to sleep in each step")
add("--lost-at", type=int, help="a step in which this replica is killed")
arguments = parser.parse_args()

torch.manual_seed(0)  # equal weights on all replicas
lengths = torch.randint(2, 60, (arguments.samples,))
data = [torch.full((length,), length % 50) for length in lengths.tolist()]
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())


def sampler_of(**ranks: int) -> tb.MemoryBudgetBatchSampler:
    cost = tb.PaddedCost(unit_bytes=1)
    return tb.MemoryBudgetBatchSampler(lengths, cost, 400, samples_per_step=32, **ranks)


position = sampler_of(num_replicas=1, rank=0).state_dict()  # after the last committed step


def save() -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "data": position}


def load(state: dict[str, Any]) -> None:
    global position  # noqa: PLW0603
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    position = state["data"]


seconds = timedelta(seconds=10)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=seconds),
    min_replica_size=1,
    state_dict=save,
    load_state_dict=load,
    use_async_quorum=False,  # the state is there before the step is planned
    timeout=seconds,
    replica_id=f"replica_{arguments.replica}",
    lighthouse_addr=arguments.lighthouse,
    hostname="127.0.0.1",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
)
arguments.folder.mkdir(exist_ok=True)
log = (arguments.folder / f"{arguments.replica}.{os.getpid()}.jsonl").open("w")
while True:
    manager.start_quorum()
    if (epoch := position["epoch"]) == arguments.epochs:
        break
    replicas, number = manager.num_participants(), manager.participating_rank()
    sampler = sampler_of(num_replicas=replicas, rank=number)
    sampler.load_state_dict(position)
    batches = iter(sampler)
    step = [next(batches)]
    step += islice(batches, sampler.steps[0] - 1)  # the other micro-batches of this step
    optimizer.zero_grad()
    for batch in step:
        ids = nn.utils.rnn.pad_sequence([data[index] for index in batch], batch_first=True)
        model(ids).square().sum().backward()
    time.sleep(arguments.step_s)
    if manager.current_step() == arguments.lost_at:
        os.kill(os.getpid(), signal.SIGKILL)
    for parameter in model.parameters():
        manager.allreduce(parameter.grad).wait()
    if manager.should_commit():
        optimizer.step()
        position = sampler.state_dict()
        line = {"epoch": epoch, "replicas": replicas, "samples": [*chain(*step)]}
        log.write(json.dumps(line) + "\n")
        log.flush()
sys.stdout.flush()
os._exit(0)
