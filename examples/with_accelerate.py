"""Train under Hugging Face Accelerate, save after every step, and go on where a run was stopped.

    torchrun --nproc-per-node=2 examples/with_accelerate.py run --stop 5
    torchrun --nproc-per-node=2 examples/with_accelerate.py run

The second run goes on from the folder `run`, and ends with the loss of one that was not stopped.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import torchbudget as tb
from torchbudget.integrations.accelerate import prepare

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop", type=int, help="after so many steps")
arguments = parser.parse_args()

torch.manual_seed(0)
lengths = torch.randint(2, 60, (200,)).tolist()
samples = [{"ids": torch.randint(50, (length,))} for length in lengths]

accelerator = Accelerator(cpu=not torch.cuda.is_available())
sampler = tb.MemoryBudgetBatchSampler(
    lengths, tb.PaddedCost(unit_bytes=1), 200, samples_per_step=32
)
loader = DataLoader(samples, batch_sampler=sampler, collate_fn=tb.PadCollate())
loader = prepare(accelerator, loader)  # in place of accelerator.prepare(loader)
model = accelerator.prepare(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters())
accelerator.register_for_checkpointing(optimizer)
accumulator = tb.GradAccumulator(optimizer, model, steps=sampler)

if arguments.folder.exists():
    accelerator.load_state(arguments.folder)  # the loader's position, too
steps = 0
while sampler.epoch < arguments.epochs and steps != arguments.stop:
    for batch in loader:
        with accumulator.micro_batch(weight=batch.num_samples):
            output = model(batch["ids"]).squeeze(-1) * batch.mask
            accumulator.backward(output.sum(dim=1).square().sum())
        if accumulator.stepped:
            steps += 1
            accelerator.save_state(arguments.folder)
            if steps == arguments.stop:
                break

accelerator.print(f"{steps} steps; the last one's loss was {accumulator.last.loss:.9f}")
accelerator.end_training()
