"""Train with transformers' Trainer, save after every step, and go on where a run was stopped.

    torchrun --nproc-per-node=2 examples/with_transformers.py run --stop 5
    torchrun --nproc-per-node=2 examples/with_transformers.py run

The second run goes on from the folder `run`, and ends with the loss of one that was not stopped.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import torchbudget as tb
from torchbudget.integrations.transformers import BudgetTrainerMixin

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop", type=int, default=-1, help="after so many steps")
arguments = parser.parse_args()

torch.manual_seed(0)
lengths = torch.randint(2, 60, (200,)).tolist()
samples = [{"input_ids": (ids := torch.randint(50, (n,))), "labels": ids} for n in lengths]


class BudgetTrainer(BudgetTrainerMixin, Trainer):
    """In place of `get_train_dataloader`, it has `budget_loader`."""

    def budget_loader(self):
        sampler = tb.MemoryBudgetBatchSampler(
            lengths, tb.PaddedCost(unit_bytes=1), 200, samples_per_step=32
        )
        collate = tb.PadCollate(padding_value={"input_ids": 0, "labels": -100})
        return DataLoader(samples, batch_sampler=sampler, collate_fn=collate)


size = {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
trainer = BudgetTrainer(
    model=AutoModelForCausalLM.from_config(GPT2Config(**size)),
    args=TrainingArguments(
        output_dir=arguments.folder,
        num_train_epochs=arguments.epochs,
        max_steps=arguments.stop,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=1,
        save_total_limit=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    ),
)
last = get_last_checkpoint(arguments.folder) if arguments.folder.exists() else None
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    *_, loss = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    print(f"{trainer.state.global_step} steps; the last one's loss was {loss:.9f}")
