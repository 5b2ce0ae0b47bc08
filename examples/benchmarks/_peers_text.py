"""Fine-tuning on real text: an encoder learns what each docstring documents."""

from __future__ import annotations

import ast
import pickle
import random
import sysconfig
from pathlib import Path
from typing import Any

from _peers_runs import Way, Work

TITLE = "Fine-tuning on real text"
TEXT = (
    "A BERT of two layers (from a config, dropout on) learns what each docstring of the standard "
    "library documents; every batch is a step. Settings are samples, or tokens "
    "(online-dynamic-batching)."
)
LONGEST = 512  # tokens
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts() -> list[tuple[str, int]]:
    """Every distinct docstring of the standard library, with the kind of what it documents."""
    library = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [p for p in library.rglob("*.py") if excluded.isdisjoint(p.relative_to(library).parts)]
    found: dict[str, int] = {}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, KINDS) else None
            if text:
                found.setdefault(text, KINDS.index(type(node)))
    return list(found.items())


def prepare(folder: Path, samples: int) -> None:
    """Draw samples, train a tokenizer on them, and write both into the folder."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    every = texts()
    drawn = random.Random(0).sample(every, min(samples, len(every)))
    rules = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 (no password)
    rules.normalizer = normalizers.BertNormalizer()
    rules.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=8000, special_tokens=special, show_progress=False
    )
    rules.train_from_iterator([text for text, _ in every], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rules,
        pad_token="[PAD]",  # noqa: S106
        unk_token="[UNK]",  # noqa: S106
        model_max_length=LONGEST,
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    ids = tokenizer([text for text, _ in drawn], truncation=True)["input_ids"]
    data = {"ids": ids, "texts": [t for t, _ in drawn], "labels": [k for _, k in drawn]}
    (folder / "text.pickle").write_bytes(pickle.dumps(data))


def sizes(folder: Path) -> list[int]:
    data = pickle.loads(Path(folder, "text.pickle").read_bytes())  # noqa: S301 (written above)
    return [len(ids) for ids in data["ids"]]


def work(job: dict[str, Any]) -> Work:
    """Model, optimizer and samples, after a first small step."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    folder = Path(job["folder"])
    data = pickle.loads(Path(folder, "text.pickle").read_bytes())  # noqa: S301 (written above)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    samples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label, "index": index}
        for index, (ids, label) in enumerate(zip(data["ids"], data["labels"], strict=True))
    ]
    config = BertConfig(
        vocab_size=8000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512, num_labels=len(KINDS),
    )  # fmt: skip
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(batch: Any) -> None:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    collate = DataCollatorWithPadding(tokenizer)
    step(collate([dict(samples[0])]))
    return Work(
        samples=samples,
        sizes=[len(ids) for ids in data["ids"]],
        step=step,
        padded=lambda batch: batch["input_ids"].numel(),
        room=job["room"],
        folder=folder,
        extra={"collate": collate, "tokenizer": tokenizer, "texts": data["texts"], "model": model},
    )


# ---------------------------------------------------------------------- ways to make batches


def fixed(work: Work, batch_size: int) -> Any:
    from torch.utils.data import DataLoader

    collate = work.extra["collate"]
    return DataLoader(work.samples, batch_size=batch_size, shuffle=True, collate_fn=collate)


def grouped(work: Work, batch_size: int) -> Any:
    from torch.utils.data import DataLoader
    from transformers.trainer_pt_utils import LengthGroupedSampler

    collate = work.extra["collate"]
    sampler = LengthGroupedSampler(batch_size, work.samples)
    return DataLoader(work.samples, batch_size=batch_size, sampler=sampler, collate_fn=collate)


def rebalanced(work: Work, batch_size: int) -> Any:
    """As the Trainer makes it with `gradient_accumulation_steps=1`."""
    return _rebalanced(work, batch_size, 1)


def rebalanced_in_steps(work: Work, batch_size: int) -> Any:
    """Sixteen micro-batches of an optimizer step."""
    return _rebalanced(work, batch_size, 16)


def _rebalanced(work: Work, batch_size: int, accumulated: int) -> Any:
    from torch.utils.data import DataLoader
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    collate = work.extra["collate"]
    sampler = BatchRebalanceSampler(
        work.sizes, batch_size * accumulated, 1, accumulated, drop_last=False
    )
    return DataLoader(work.samples, batch_sampler=sampler, collate_fn=collate)


def odb(work: Work, token_budget: int) -> Any:
    import odb
    from torch.utils.data import DataLoader

    collate = work.extra["collate"]
    loader = DataLoader(
        Tensors(work.samples), batch_size=1, shuffle=True, num_workers=1, prefetch_factor=256,
        collate_fn=collate,
    )  # fmt: skip
    odb.apply(loader, token_budget=token_budget)
    return loader


class Tensors:
    """Samples of tensors, which ODB asks for."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {name: torch.tensor(value) for name, value in self.samples[index].items()}


def dynabatch(work: Work, batch_size: int) -> Any:
    from dynabatch import dynabatch_sampler
    from torch.utils.data import DataLoader

    collate = work.extra["collate"]
    sampler = dynabatch_sampler(
        work.extra["texts"], work.extra["tokenizer"], batch_size=batch_size,
        max_input_token_length=LONGEST, shuffle=True, num_workers=1,
    )  # fmt: skip
    return DataLoader(work.samples, batch_sampler=sampler, collate_fn=collate)


def found_by_lightning(work: Work, tuned: bool) -> int:
    """The batch size that Lightning's finder returns; tuned: it bisects, on the longest samples."""
    import lightning
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader

    samples = work.samples
    if tuned:
        samples = sorted(samples, key=lambda sample: -len(sample["input_ids"]))

    class Module(lightning.LightningModule):
        batch_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.model = work.extra["model"]

        def train_dataloader(self) -> Any:
            return DataLoader(
                samples, batch_size=self.batch_size, shuffle=not tuned,
                collate_fn=work.extra["collate"],
            )  # fmt: skip

        def training_step(self, batch: Any, _: int) -> Any:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
            return self.model(**inputs).loss

        def configure_optimizers(self) -> Any:
            import torch

            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=work.folder,
    )  # fmt: skip
    mode = "binsearch" if tuned else "power"
    found = Tuner(trainer).scale_batch_size(Module(), mode=mode, max_val=len(samples))
    return int(found or 1)


def ours(work: Work, _: None) -> Any:
    import torchbudget

    return torchbudget.loader(
        work.samples, work.measured_or(work.step), work.budget, tokenizer=work.extra["tokenizer"],
        cost_cache=work.cost_file,
    )  # fmt: skip


def ours_tuned(work: Work, _: None) -> Any:
    """Larger windows, which have less padding."""
    import torchbudget

    return torchbudget.loader(
        work.samples, work.measured_or(work.step), work.budget, tokenizer=work.extra["tokenizer"],
        cost_cache=work.cost_file, window=2048,
    )  # fmt: skip


SMALL = "its batches are small and hardly padded, and one core gains nothing from larger ones"
ONLINE = "a process of its own makes its batches, which is not counted"
SORTED = "it sorts the whole data set, the same batches in every epoch"
WAYS = (
    Way(name="torchbudget.loader", make=ours, tuned=ours_tuned, resumed="tried"),
    Way(name="fixed batches", make=fixed, documented=16),
    Way(name="LengthGroupedSampler", make=grouped, documented=16, why=SMALL,
        needs="transformers.trainer_pt_utils"),
    Way(name="BatchRebalanceSampler", make=rebalanced, tuned=rebalanced_in_steps, documented=16,
        why=SMALL, needs="transformers.trainer_pt_utils"),
    Way(name="online-dynamic-batching", make=odb, documented=16_384, in_tokens=True, why=ONLINE,
        needs="odb"),
    Way(name="dynabatch", make=dynabatch, documented=16, why=SORTED, needs="dynabatch"),
    Way(name="Lightning's finder", make=fixed, find=found_by_lightning, needs="lightning.pytorch"),
)  # fmt: skip
BASE = "fixed batches"
