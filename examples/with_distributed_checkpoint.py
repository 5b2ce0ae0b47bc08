"""Train under FSDP2, save after every step by torch.distributed.checkpoint, and go on from there.

    torchrun --nproc-per-node=2 examples/with_distributed_checkpoint.py run --stop 5
    torchrun --nproc-per-node=2 examples/with_distributed_checkpoint.py run

The second run goes on from the last whole checkpoint in the folder `run`. It may have another
number of ranks: every sample of the epoch still comes once.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import torchbudget as tb

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop", type=int, help="after so many steps")
arguments = parser.parse_args()

dist.init_process_group()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.manual_seed(0)
lengths = torch.randint(2, 60, (200,)).tolist()
samples = [{"ids": torch.randint(50, (length,))} for length in lengths]

sampler = tb.MemoryBudgetBatchSampler(
    lengths, tb.PaddedCost(unit_bytes=1), 200, samples_per_step=32
)
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=tb.PadCollate(), num_workers=2)
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1)).to(device)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
accumulator = tb.GradAccumulator(optimizer, model, steps=sampler)


def run_state():
    weights, moments = get_state_dict(model, optimizer)
    # The sampler itself: it has state_dict and load_state_dict, which dcp.save and dcp.load call.
    return {"model": weights, "optimizer": moments, "data": sampler}


# `.metadata` is written last: a checkpoint without it was interrupted.
saved = sorted(arguments.folder.glob("*/.metadata"))
if saved:
    state = run_state()
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
steps = len(saved)
while sampler.epoch < arguments.epochs and steps != arguments.stop:
    for batch in sampler.tracked(loader):  # knows which batches came, although workers read ahead
        batch = batch.to(device)
        with accumulator.micro_batch(weight=batch.num_samples):
            output = model(batch["ids"]).squeeze(-1) * batch.mask
            accumulator.backward(output.sum(dim=1).square().sum())
        if accumulator.stepped:
            steps += 1
            dcp.save(run_state(), checkpoint_id=arguments.folder / f"{steps:06}")
            if steps == arguments.stop:
                break

if dist.get_rank() == 0:
    print(f"{steps} steps; the last one's loss was {accumulator.last.loss:.9f}")
dist.destroy_process_group()
