"""Train under Lightning, save after every step, and go on where a run was stopped.

    torchrun --nproc-per-node=2 examples/with_lightning.py run --stop 5
    torchrun --nproc-per-node=2 examples/with_lightning.py run

The second run goes on from the folder `run`, and ends with the loss of one that was not stopped.
"""

import argparse
import os

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import torchbudget as tb
from torchbudget.integrations.lightning import BudgetDataMixin

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop", type=int, default=-1, help="after so many steps")
arguments = parser.parse_args()

torch.manual_seed(0)
lengths = torch.randint(2, 60, (200,)).tolist()
samples = [{"ids": torch.randint(50, (length,))} for length in lengths]


class Data(BudgetDataMixin, LightningDataModule):
    """In place of `train_dataloader`, it has `budget_loader`."""

    def budget_loader(self):
        sampler = tb.MemoryBudgetBatchSampler(lengths, tb.PaddedCost(unit_bytes=1), 400, window=32)
        return DataLoader(samples, batch_sampler=sampler, collate_fn=tb.PadCollate())


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))

    def training_step(self, batch):
        output = self.layers(batch["ids"]).squeeze(-1) * batch.mask
        loss = output.sum(dim=1).square().mean()
        self.log("loss", loss, batch_size=batch.num_samples, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
trainer = Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_epochs=arguments.epochs,
    max_steps=arguments.stop,
    callbacks=[ModelCheckpoint(arguments.folder, every_n_train_steps=1, save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), datamodule=Data(), ckpt_path="last")
if trainer.is_global_zero:
    loss = trainer.callback_metrics["loss"]
    print(f"{trainer.global_step} steps; the last one's loss was {loss:.9f}")
