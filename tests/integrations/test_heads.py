"""A planned step of `BudgetTrainerMixin` against the Trainer's own; its checks before a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from torchbudget import MemoryBudgetBatchSampler, PadCollate, PaddedCost
from torchbudget.errors import OptionError, TorchBudgetWarning
from torchbudget.train.batches import halves

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers.trainer_pt_utils import LabelSmoother  # noqa: E402

from torchbudget.integrations.transformers import BudgetTrainerMixin, check_weights  # noqa: E402

pytestmark = pytest.mark.peer

LENGTHS, MOST = [12, 3, 5, 9, 4, 7, 2], 12
BERT = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
BART = {"vocab_size": 30, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
BART |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
GPT2 = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
LLAMA = BERT | {"num_key_value_heads": 2, "pad_token_id": 0}
DISTILBERT = {"vocab_size": 30, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
WHISPER = {"num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 20}
WAV2VEC2: dict[str, Any] = BERT | {"num_conv_pos_embeddings": 4, "classifier_proj_size": 8}
WAV2VEC2 |= {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2)}
WAV2VEC2 |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "num_labels": 3}
VIT: dict[str, Any] = {key: value for key, value in BERT.items() if key != "vocab_size"}
VIT |= {"image_size": 16, "patch_size": 8, "num_labels": 3}
YOLOS = {"image_size": [16, 16], "num_detection_tokens": 5, "num_labels": 2}
SEGFORMER = {"decoder_hidden_size": 8, "num_labels": 3, "num_encoder_blocks": 2, "depths": [1, 1]}
SEGFORMER |= {"sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3]}
SEGFORMER |= {"strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [1, 1]}
CLIP = {"text_config": {**LLAMA, "max_position_embeddings": 16}, "projection_dim": 8}
CLIP["vision_config"] = {key: VIT[key] for key in VIT if key != "num_labels"}
Make = Callable[[int], Any]
PADDED = PadCollate(mask="attention_mask")


def batched(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate samples of one length, as users do; labels are padded, boxes listed."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {
        name: values
        if isinstance(values[0], dict)
        else pad_sequence(values, True, -100)
        if values[0].ndim
        else torch.stack(values)
        for name, values in columns.items()
    }


def ids(length: int) -> Tensor:
    return torch.randint(3, 30, (length,))


def tokens(most: int, share: float = 1.0) -> Make:
    """Labels of positions, some of which do not count."""

    def make(length: int) -> Tensor:
        counts = torch.rand(length) < share
        return torch.randint(1, most, (length,)).where(counts, -100)

    return make


def label(number: int = 3) -> Make:
    return lambda _: torch.randint(number, ())


def normal(*shape: int) -> Make:
    return lambda _: torch.randn(shape)


def segments(length: int) -> Tensor:
    """Pixels, more and more of which do not count."""
    return torch.randint(3, (16, 16)).where(torch.rand(16, 16) < length / MOST, 255)


def boxes(length: int) -> dict[str, Tensor]:
    number = length % 4 + 1
    found = torch.rand(number, 4) / 4 + 0.3
    return {"class_labels": torch.randint(2, (number,)), "boxes": found}


def num_samples(trainer: Any, batch: Any) -> float:
    return len(next(iter(batch.values())))


def not_255(trainer: Any, batch: Any) -> float:
    return int(batch["labels"].ne(255).sum())


def num_boxes(trainer: Any, batch: Any) -> float:
    return sum(len(labels["boxes"]) for labels in batch["labels"])


@dataclass(frozen=True)
class Head:
    """A model's head and its data.

    Attributes:
        config: the configuration's class, without "Config".
        kind: the rest of the head's class.
        options: options of the configuration.
        fields: a function from a sample's length to its value, by field.
        weight: overrides `micro_batch_weight`, which the error of the default asks for.
        refused: no weight is right.
        collate: makes a batch of samples.
    """

    config: str
    kind: str
    options: dict[str, Any]
    fields: dict[str, Make]
    weight: Callable[[Any, Any], float] | None = None
    refused: bool = False
    collate: Callable[[Any], Any] = batched

    @property
    def name(self) -> str:
        """The class's name."""
        return self.config + self.kind


def text(config: str, kind: str, options: dict[str, Any], *more: Any, **fields: Make) -> Head:
    weight, refused = more or (None, False)
    return Head(config, kind, options, {"input_ids": ids} | fields, weight, refused, PADDED)


def vision(config: str, kind: str, options: dict[str, Any], labels: Make, *more: Any) -> Head:
    return Head(config, kind, options, {"pixel_values": normal(3, 16, 16), "labels": labels}, *more)


def sound(kind: str, labels: Make, *more: Any, **options: Any) -> Head:
    fields = {"input_values": normal(240), "labels": labels}
    return Head("Wav2Vec2", kind, {**WAV2VEC2, **options}, fields, *more)


CLASSES, NUMBER = {"num_labels": 3}, {"num_labels": 1}
SPANS = {"start_positions": label(2), "end_positions": label(2)}
HEADS = [
    text("GPT2", "LMHeadModel", GPT2, labels=ids),
    text("Llama", "ForCausalLM", LLAMA, labels=tokens(30, 0.8)),
    text("Mixtral", "ForCausalLM", {**LLAMA, "num_local_experts": 3}, labels=ids),
    text("Bert", "ForMaskedLM", BERT, labels=tokens(30, 0.5)),
    text("Bert", "ForTokenClassification", BERT | CLASSES, labels=tokens(3)),
    text("Bert", "ForSequenceClassification", BERT | CLASSES, labels=label()),
    text("DistilBert", "ForSequenceClassification", DISTILBERT | NUMBER, labels=normal()),
    text("Bert", "ForNextSentencePrediction", BERT, labels=label(2)),
    text("Bert", "ForPreTraining", BERT, num_samples, True, labels=tokens(30, 0.5),
         next_sentence_label=label(2)),
    Head("Bert", "ForMultipleChoice", BERT,
         {"input_ids": lambda _: torch.randint(3, 30, (2, 5)), "labels": label(2)}),
    Head("Bert", "ForQuestionAnswering", BERT, {"input_ids": lambda _: ids(5), **SPANS}),
    # Its softmax goes over the padding, so that the loss of a sample depends on its batch.
    text("DistilBert", "ForQuestionAnswering", DISTILBERT, num_samples, True, **SPANS),
    text("Bart", "ForConditionalGeneration", BART, labels=tokens(30)),
    Head("Whisper", "ForConditionalGeneration", BART | WHISPER,
         {"input_features": normal(4, 20), "labels": ids}),
    sound("ForCTC", ids, num_samples, True, ctc_loss_reduction="sum"),
    sound("ForCTC", ids, num_samples, ctc_loss_reduction="mean"),
    sound("ForSequenceClassification", label()),
    vision("ViT", "ForImageClassification", VIT, label()),
    vision("DeiT", "ForImageClassification", VIT, normal(3)),
    # With its first weights all losses are nearly equal: a check could not tell.
    vision("Segformer", "ForSemanticSegmentation", SEGFORMER | {"initializer_range": 0.5}, segments,
           not_255),
    vision("Yolos", "ForObjectDetection", VIT | YOLOS, boxes, num_boxes, True),
    Head("CLIP", "Model", CLIP, {"input_ids": lambda _: ids(5), "pixel_values": normal(3, 16, 16)},
         num_samples, True),
]  # fmt: skip


class Gradients(hf.TrainerCallback):  # type: ignore[misc,name-defined]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        grads = [one.grad for one in more["model"].parameters() if one.grad is not None]
        self.found = torch.cat([grad.flatten() for grad in grads])


def step(
    head: Head, model: nn.Module, samples: Any, path: Path, weight: Any = None, *, planned: bool
) -> Tensor:
    """Return the gradient of one step of all samples."""

    class Planned(BudgetTrainerMixin, hf.Trainer):  # type: ignore[misc,name-defined]
        def budget_loader(self) -> DataLoader[Any]:
            sampler = MemoryBudgetBatchSampler(
                LENGTHS, PaddedCost(unit_bytes=1), 24, samples_per_step=len(LENGTHS)
            )
            return DataLoader(samples, batch_sampler=sampler, collate_fn=head.collate)

    class Whole(hf.Trainer):  # type: ignore[misc,name-defined]
        def get_train_dataloader(self) -> Any:
            return DataLoader(samples, batch_size=len(LENGTHS), collate_fn=head.collate)

    if weight is not None:
        Planned.micro_batch_weight = weight  # type: ignore[method-assign]
    gradients = Gradients()
    arguments = hf.TrainingArguments(
        path, max_steps=1, report_to=[], use_cpu=True, max_grad_norm=0, learning_rate=0.0,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    (Planned if planned else Whole)(copy.deepcopy(model), arguments, callbacks=[gradients]).train()
    return gradients.found


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads turn logits into float32, which would hide errors of 1e-8."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_and_samples(head: Head, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = getattr(hf, f"{head.config}Config")(**head.options, **options)
    config._experts_implementation = "eager"
    for name in [name for name in vars(config) if "drop" in name]:
        setattr(config, name, 0.0)
    model = getattr(hf, head.name)(config)
    if head.config == "CLIP":
        model.forward = partial(model.forward, return_loss=True)
    return model, [{name: make(n) for name, make in head.fields.items()} for n in LENGTHS]


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_a_planned_step_is_the_trainers_own(head: Head, tmp_path: Path) -> None:
    """To 1e-8; or an error names the hook, by which it is; or no weight is right."""
    model, samples = model_and_samples(head)
    for part in model.modules():
        if hasattr(part, "batch_norm"):
            part.batch_norm = nn.Identity()  # it is warned of: see below
    if head.weight is not None:
        with pytest.raises(OptionError, match="micro_batch_weight"):
            step(head, model, samples, tmp_path, planned=True)
    if head.refused:
        with pytest.raises(OptionError, match=f"loss of {head.name} must be|the same first axis"):
            step(head, model, samples, tmp_path, head.weight, planned=True)
        return
    found = step(head, model, samples, tmp_path, head.weight, planned=True)
    # The Trainer counts a label too many in each sample of GPT2LMHeadModel, but not the model.
    model.accepts_loss_kwargs = head.name != "GPT2LMHeadModel"
    expected = step(head, model, samples, tmp_path, planned=False)
    assert (found - expected).norm() < 1e-8 * expected.norm()


WRAPPERS = {
    "LORA": {"r": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "compiled": {},
    "LORA, compiled": {"r": 4},
}


def wrapped(model: Any, kind: str) -> Any:
    """The model inside PEFT's, or inside the compiler's, or both."""
    method, _, is_compiled = kind.partition(", ")
    if method != "compiled":
        peft = pytest.importorskip("peft", reason="wraps models by peft")
        options = {"peft_type": method, "task_type": "CAUSAL_LM", **WRAPPERS[kind]}
        model = peft.get_peft_model(model, peft.get_peft_config(options))
    return torch.compile(model, backend="eager") if "compiled" in (method, is_compiled) else model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PEFT and the compiler have many
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_a_planned_step_of_a_wrapped_model(
    kind: str, dtype: torch.dtype, off: float, tmp_path: Path
) -> None:
    """It is the large batch's, by the labels that the model inside counts.

    In half precision, where no check would notice, too. The first label of a row counts after
    virtual tokens, as in prompt tuning.
    """
    [head] = [head for head in HEADS if head.name == "LlamaForCausalLM"]
    model, samples = model_and_samples(head)
    model.accepts_loss_kwargs = False  # the loss of the whole batch is a mean, too
    model = wrapped(model.to(dtype), kind)
    found = step(head, model, samples, tmp_path, planned=True)
    expected = step(head, model, samples, tmp_path, planned=False)
    assert (found - expected).norm() < off * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("MixtralForCausalLM", {"output_router_logits": True}, "output_router_logits adds a load"),
        ("SegformerForSemanticSegmentation", {}, "batch normalisation sees micro-batches"),
    ],
)
def test_parts_that_see_micro_batches_are_warned_of(
    name: str, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    """Once; the check of weights leaves the experts' balance out."""
    [head] = [head for head in HEADS if head.name == name]
    model, samples = model_and_samples(head, **options)
    with pytest.warns(TorchBudgetWarning, match=match) as warned:
        step(head, model, samples, tmp_path, head.weight, planned=True)
    assert len(warned) == 1


# ---------------------------------------------------------------------- checks
WORDS = 23


def num_labels(batch: Any) -> int:
    return int(batch["labels"].ne(-100).sum())


def texts(seed: int, rows: int) -> dict[str, Tensor]:
    """Texts, some of whose labels do not count; each text has one that does."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, 9), generator=generator)
    counts = torch.rand(ids.shape, generator=generator) < 0.7
    counts[:, 0] = True
    return {"ids": ids, "labels": ids.flip(1).where(counts, -100)}


def loss_of(
    seed: int, dtype: torch.dtype = torch.float32, smoothing: float = 0.0, spread: float = 1.0
) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """A model, and its mean loss over labels; smoothed as the Trainer does, with float32 sums.

    The smaller the spread, the more equal the losses of different labels.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).to(dtype)
    for parameter in model.parameters():
        parameter.data *= spread
    smoothed = LabelSmoother(epsilon=smoothing)

    def loss(batch: Any) -> Tensor:
        logits = model(batch["ids"])
        if smoothing:
            return smoothed((logits,), batch["labels"].clone())  # type: ignore[no-any-return]
        return F.cross_entropy(logits.mT, batch["labels"])

    return model, loss


cases = {
    "seed": st.integers(0, 2**32 - 1),
    "rows": st.integers(2, 64),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "smoothing": st.sampled_from([0.0, 0.1]),
    "spread": st.sampled_from([1.0, 0.1, 0.01]),
}


@given(**cases)
def test_a_right_weight_is_not_refused(
    seed: int, rows: int, dtype: torch.dtype, smoothing: float, spread: float
) -> None:
    """Nor if the loss has sums in float32 in a model of float64, as label smoothing has."""
    model, loss = loss_of(seed, dtype, smoothing, spread)
    check_weights(model, texts(seed, rows), loss=loss, weight=num_labels)


@given(
    **cases,
    factor=st.floats(0.5, 0.98) | st.floats(1.02, 2) | st.sampled_from([0.98, 1.02]),
    half=st.sampled_from([0, 1]),
    of_whole=st.booleans(),
)
def test_a_weight_that_is_wrong_is_refused_or_not_judged(
    seed: int,
    rows: int,
    dtype: torch.dtype,
    smoothing: float,
    spread: float,
    factor: float,
    half: int,
    of_whole: bool,
) -> None:
    """By 2 % or more, of one half, with or without the whole batch: it never passes as checked."""
    model, loss = loss_of(seed, dtype, smoothing, spread)
    batch = texts(seed, rows)
    parts = halves(batch)

    def wrong(part: Any) -> float:
        """The halves that `check_weights` makes are views of the batch."""
        weights = [num_labels(one) * (factor if at == half else 1) for at, one in enumerate(parts)]
        if len(part["ids"]) == rows:
            return sum(weights) if of_whole else num_labels(batch)
        return weights[part["ids"].data_ptr() != batch["ids"].data_ptr()]

    could_tell = False
    with suppress(OptionError):
        could_tell = check_weights(model, batch, loss=loss, weight=wrong)
    assert not could_tell


def test_a_wrong_weight_of_typical_losses_is_noticed() -> None:
    """The check is not silent: of 100 models and batches, it could judge most."""
    judged = 0
    for seed in range(100):
        model, loss = loss_of(seed)
        judged += check_weights(model, texts(seed, 8), loss=loss, weight=num_labels)
    assert judged > 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_half_precision_and_quantized_parameters_are_not_judged(dtype: torch.dtype) -> None:
    """Nothing is run, since the losses would say nothing."""
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    assert not check_weights(model, {"x": torch.ones(4, 2)}, loss=pytest.fail, weight=len)


def test_an_error_in_a_check_names_its_flag() -> None:
    """A loss that needs the whole batch, say; the error of the loss is its cause."""

    def loss(batch: Any) -> Tensor:
        if len(batch["x"]) == 2:
            raise RuntimeError("pairs of pairs")
        return model(batch["x"]).mean()

    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"pairs of pairs.*checks_weights = False") as raised:
        check_weights(model, {"x": torch.ones(4, 2)}, loss=loss, weight=lambda one: len(one["x"]))
    assert isinstance(raised.value.__cause__, RuntimeError)


# ---------------------------------------------------------------------- within the Trainer


class Model(nn.Module):
    """Its loss is the same for every sample, or their number; forwards without gradients count."""

    def __init__(self, varies: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.varies, self.checks = varies, 0

    def forward(self, x: Tensor, labels: Tensor, texts: Any = None) -> dict[str, Tensor]:
        self.checks += not torch.is_grad_enabled()
        return {"loss": (self.weight * (x if self.varies else torch.ones_like(x))).mean()}


def train(model: nn.Module, path: Path, collate: Any = None, units: Any = None, **own: Any) -> None:
    """Train 20 steps of one micro-batch of four samples each."""
    samples = [{"x": torch.tensor(float(i)), "labels": torch.tensor(i)} for i in range(80)]
    sampler = MemoryBudgetBatchSampler(
        [1] * 80, PaddedCost(unit_bytes=1), 4, samples_per_step=4, units=units, shuffle=False
    )

    class Trainer(BudgetTrainerMixin, hf.Trainer):  # type: ignore[misc,name-defined]
        def budget_loader(self) -> DataLoader[Any]:
            return DataLoader(samples, batch_sampler=sampler, collate_fn=collate or PadCollate())

    arguments = hf.TrainingArguments(
        path, report_to=[], use_cpu=True, num_train_epochs=1, learning_rate=0.0, max_grad_norm=0,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    type("Own", (Trainer,), own)(model, arguments).train()


@pytest.mark.parametrize(("varies", "checks"), [(True, 1), (False, 5)])
def test_a_check_that_cannot_tell_is_repeated_ever_more_rarely(
    varies: bool, checks: int, tmp_path: Path
) -> None:
    """Of 20 items, before the first, the second, the 4th, the 8th and the 16th; not at each."""
    model = Model(varies)
    train(model, tmp_path)
    assert model.checks == 3 * checks


def listed(samples: list[Any]) -> dict[str, Any]:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "texts": ["a"]}


def test_batches_that_cannot_be_halved(tmp_path: Path) -> None:
    """The error names the flag, with which they are trained on."""
    with pytest.raises(OptionError, match="checks_weights = False"):
        train(Model(), tmp_path, listed)
    train(Model(), tmp_path, listed, checks_weights=False)


class Paired(Model):
    """Its loss compares the two samples of a pair, whose halves would be no batch."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = (x[::2] - x[1::2]).square().mean() * self.weight
        return {**super().forward(x, labels), "loss": loss}


def test_units_are_not_halved(tmp_path: Path) -> None:
    """The check of weights would cut units that stay in one micro-batch: it is left out."""
    model, pairs = Paired(), [i // 2 for i in range(80)]
    train(model, tmp_path, units=(pairs, "micro_batch"))
    assert model.checks == 0
