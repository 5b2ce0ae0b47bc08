"""Rows of samples in the models of transformers: each sample gives what it gives alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.support.sample_strategies import same as bitwise
from torchbudget import (
    MemoryBudgetBatchSampler,
    PackCollate,
    PackedCost,
    PadCollate,
    PaddedCost,
)
from torchbudget.cost.models.protocol import CostModel
from torchbudget.errors import OptionError
from torchbudget.integrations.kept_apart import check_kept_apart
from torchbudget.integrations.transformers import BudgetTrainerMixin

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.peer

LENGTHS = (5, 1, 17, 30, 2)
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
# The row as it is, with room of a multiple for each sample, and of a fixed length.
OPTIONS: list[dict[str, Any]] = [{}, {"size_multiple": 8}, {"size_multiple": 8, "total": 128}]


def llama(attention: str) -> nn.Module:
    config = hf.LlamaConfig(**COMMON, num_key_value_heads=2, attn_implementation=attention)
    return hf.LlamaForCausalLM(config)


def gemma(attention: str) -> nn.Module:
    """One layer sees all of a sample, the other one a window of 8."""
    config = hf.Gemma3TextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation=attention,
    )
    return hf.Gemma3ForCausalLM(config)


def gpt2(attention: str) -> nn.Module:
    """Learned positions, fewer than the row has."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = hf.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=2, attn_implementation=attention, **dropout,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 97, (n,), generator=generator)} for n in LENGTHS]


def of_each(batch: Any, row: Tensor) -> list[Tensor]:
    """What a model made of each sample in a row."""
    with_output = type(batch)({**batch, "input_ids": row}, batch._arrangement)
    return [sample["input_ids"] for sample in with_output.samples()]


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=["row", "multiple", "total"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_of", [llama, gemma, gpt2])
def test_logits_and_gradients(
    model_of: Callable[[str], nn.Module], attention: str, options: dict[str, Any]
) -> None:
    """Of one row they are those of the samples alone: 1e-5 and 1e-4, in float32."""
    torch.manual_seed(0)
    model = model_of(attention).train()
    batch = PackCollate(layout="transformers", **options)(samples())
    output = model(**batch)
    predicted = sum(LENGTHS) - len(LENGTHS)
    (output.loss * predicted).backward()  # a mean over the labels that are not -100
    together = gradients(model)
    for sample, logits in zip(samples(), of_each(batch, output.logits), strict=True):
        ids = sample["input_ids"]
        alone = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)
        cross_entropy(alone[:-1], ids[1:], reduction="sum").backward()
    for mine, expected in zip(together, gradients(model), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=["row", "multiple", "total"])
def test_a_split_row(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = llama("sdpa").eval()
    batch = PackCollate(layout="transformers", **options)(samples())
    whole = of_each(batch, model(**batch).logits)
    parts = [logits for part in batch.split(2) for logits in of_each(part, model(**part).logits)]
    for mine, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


@pytest.fixture
def eager_flex() -> Any:
    """Without the compiler, whose flex kernels for the CPU did not build in torch 2.13."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
class TestFlex:
    @pytest.mark.parametrize("options", OPTIONS, ids=["row", "multiple", "total"])
    @torch.no_grad()
    def test_logits(self, options: dict[str, Any]) -> None:
        """With the mask that transformers makes, and with ours."""
        torch.manual_seed(0)
        model, peer = llama("flex_attention").eval(), llama("eager").eval()
        peer.load_state_dict(model.state_dict())
        batch = PackCollate(layout="transformers", **options)(samples())
        theirs = model(**batch).logits
        ours = model(**batch, attention_mask=batch.block_mask()).logits
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        for sample, logits in zip(samples(), of_each(batch, ours), strict=True):
            alone = peer(input_ids=sample["input_ids"][None]).logits[0]
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("options", OPTIONS, ids=["row", "multiple", "total"])
    @torch.no_grad()
    def test_an_encoder(self, options: dict[str, Any]) -> None:
        """It does not look for segments by itself: it needs the mask."""
        torch.manual_seed(0)
        models = []
        for attention in ("flex_attention", "eager"):
            config = hf.BertConfig(**COMMON, attn_implementation=attention)
            models.append(hf.BertForMaskedLM(config).eval())
        model, peer = models
        peer.load_state_dict(model.state_dict())
        batch = PackCollate(layout="transformers", causal_labels=False, **options)(samples())
        row = model(**batch, attention_mask=batch.block_mask(causal=False)).logits
        for sample, logits in zip(samples(), of_each(batch, row), strict=True):
            alone = peer(input_ids=sample["input_ids"][None]).logits[0]
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


def test_without_the_flag_samples_see_each_other() -> None:
    """Why the batch says `use_cache=False`: with a cache, models do not look for segments."""
    torch.manual_seed(0)
    model = llama("sdpa").eval()
    batch = PackCollate(layout="transformers")(samples())
    expected = model(**batch).logits
    cached = model(**{**batch, "use_cache": True}).logits
    assert torch.equal(cached[:, : LENGTHS[0]], expected[:, : LENGTHS[0]])
    assert not torch.allclose(cached, expected, atol=1e-4)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 3),
)
def test_transformers_finds_the_segments(
    lengths: list[int], multiple: int, more: int, start: int
) -> None:
    """What it reads from `position_ids` is `seq_idx`, padding included."""
    from transformers.masking_utils import find_packed_sequence_indices

    total = sum(-(-length // multiple) * multiple for length in lengths) + more
    collate = PackCollate(
        layout="transformers", size_multiple=multiple, total=total, position_ids_start=start
    )
    batch = collate([{"input_ids": [1] * length} for length in lengths])
    found = find_packed_sequence_indices(batch["position_ids"])
    assert found.tolist() == batch["seq_idx"].tolist()


@pytest.mark.parametrize("labelled", [False, True])
def test_it_is_what_the_collator_of_transformers_makes(labelled: bool) -> None:
    """Where nothing is padded, bit for bit; and two keys more, which isolate the samples."""
    peer = hf.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
    )
    texts = [
        {"input_ids": s["input_ids"].tolist()}
        | ({"labels": (s["input_ids"] % 7).tolist()} if labelled else {})
        for s in samples()
    ]
    expected = peer(texts)
    batch = PackCollate(layout="transformers", position_ids_start=2)(texts)
    assert set(batch) == {*expected, "use_cache"}
    for name, value in expected.items():
        mine = batch[name]
        assert bitwise(mine, value) if isinstance(value, Tensor) else mine == value, name


def test_the_trainer_takes_it(tmp_path: Any) -> None:
    """Rebuilt by the trainer, the batch gives the same loss and knows its segments."""
    torch.manual_seed(0)
    model = llama("sdpa").eval()
    arguments = hf.TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = hf.Trainer(model, arguments)
    batch = PackCollate(layout="transformers", size_multiple=8)(samples())
    inputs = trainer._prepare_inputs(batch)
    assert type(inputs) is type(batch)
    assert trainer.compute_loss(model, inputs) == model(**batch).loss
    assert inputs.cu_seqlens.tolist() == batch.cu_seqlens.tolist()


def encoder(attention: str) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**COMMON, attn_implementation=attention))


def other_decoder(attention: str) -> nn.Module:
    """Its mask is causal, whatever `position_ids` say."""
    config = hf.OPTConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=32, attn_implementation=attention,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


@pytest.mark.parametrize("options", OPTIONS, ids=["row", "multiple", "total"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_of", [llama, gemma, gpt2, encoder, other_decoder])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_let_samples_see_each_other_are_refused(
    model_of: Callable[[str], nn.Module], attention: str, options: dict[str, Any], dtype: Any
) -> None:
    """With random weights, in training mode, and in half precision too; others pass."""
    torch.manual_seed(0)
    model = model_of(attention).to(dtype).train()
    batch = PackCollate(layout="transformers", **options)(samples())
    if model_of not in (encoder, other_decoder):
        check_kept_apart(model, batch)
    else:
        with pytest.raises(OptionError, match="lets the samples of a row see each other"):
            check_kept_apart(model, batch)
        check_kept_apart(model, PackCollate(layout="transformers")(samples()[:1]))
    assert all(part.training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class ReturnsLogits(nn.Module):
    """A model of one's own around one of transformers."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, **inputs: Any) -> Any:
        logits = self.model(**inputs).logits
        return {"tensor": logits, "tuple": (logits, 1), "dict": {"out": logits}}[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_whatever_the_model_returns_them_in(kind: str) -> None:
    torch.manual_seed(0)
    batch = PackCollate(layout="transformers")(samples())
    check_kept_apart(ReturnsLogits(llama("sdpa"), kind), batch)
    with pytest.raises(OptionError, match="ReturnsLogits lets"):
        check_kept_apart(ReturnsLogits(other_decoder("sdpa"), kind), batch)


@pytest.mark.parametrize("checks", [True, False])
def test_the_trainer_refuses_them_before_its_first_step(tmp_path: Any, checks: bool) -> None:
    run = partial(
        trained, tmp_path, PackedCost(unit_bytes=1), PackCollate(layout="transformers"),
        model_of=other_decoder, checks_rows=checks,
    )  # fmt: skip
    run(max_batch_size=1)  # each row has one sample, which sees no other
    if not checks:
        run()
        return
    with pytest.raises(OptionError, match="see each other"):
        run()


def trained(
    tmp_path: Any,
    cost: CostModel,
    collate: Any,
    *,
    model_of: Callable[[str], nn.Module] = llama,
    checks_rows: bool = True,
    max_batch_size: int | None = None,
) -> Tensor:
    """The parameters after two steps of the trainer, of the same samples whatever the cost."""
    torch.manual_seed(0)
    model = model_of("sdpa")
    data = [{**sample, "labels": sample["input_ids"]} for sample in samples() + samples()]
    sampler = MemoryBudgetBatchSampler(
        LENGTHS * 2, cost, 64, samples_per_step=5, max_batch_size=max_batch_size
    )

    class Trainer(BudgetTrainerMixin, hf.Trainer):  # type: ignore[misc,name-defined]  # untyped
        def budget_loader(self) -> DataLoader[Any]:
            return DataLoader(data, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]

    arguments = hf.TrainingArguments(
        tmp_path, report_to=[], use_cpu=True, num_train_epochs=1, optim="sgd", learning_rate=0.1,
        max_grad_norm=0, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments)
    trainer.checks_rows = checks_rows
    trainer.train()
    if isinstance(collate, PackCollate):
        assert trainer.checks_rows == (checks_rows and max_batch_size == 1)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_run_with_rows_is_one_with_padding(tmp_path: Any) -> None:
    """The whole way through the trainer: its loss, its steps and its weights of micro-batches."""
    padded = trained(tmp_path, PaddedCost(unit_bytes=1), PadCollate(mask="attention_mask"))
    packed = trained(tmp_path, PackedCost(unit_bytes=1), PackCollate(layout="transformers"))
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-6)
