"""Rows of samples in the models of transformers: each sample gives what it gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.batches import same as bitwise
from tests.support.rows import check_as_alone
from torchbudget import MemoryBudgetBatchSampler, PackCollate, PackedCost, PadCollate, PaddedCost
from torchbudget.errors import OptionError
from torchbudget.integrations.transformers import BudgetTrainerMixin, check_kept_apart

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.peer

LENGTHS = (5, 1, 17, 30, 2)
COMMON = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
# The row as it is, with room of a multiple for each sample, and of a multiple.
OPTIONS: list[dict[str, Any]] = [
    {}, {"size_multiple": 8}, {"size_multiple": 8, "total_multiple": 128},
]  # fmt: skip
rows = pytest.mark.parametrize("options", OPTIONS, ids=["row", "multiple", "rounded"])


def model_of(kind: str, attention: str) -> Any:
    """Gemma's layers see all of a sample, or a window of 8; GPT-2 has fewer positions than rows."""
    torch.manual_seed(0)
    own = {"attn_implementation": attention}
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, num_key_value_heads=2, **own))
    if kind == "gemma":
        layers = ["sliding_attention", "full_attention"]
        own |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "layer_types": layers}
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**COMMON, **own))
    if kind == "gpt2":
        own |= {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}
        own |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=1, eos_token_id=2, **own))
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**COMMON, **own))
    small = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    return hf.OPTForCausalLM(hf.OPTConfig(**small, ffn_dim=64, word_embed_proj_dim=32, **own))


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 97, (n,), generator=generator)} for n in LENGTHS]


def by_itself(sample: dict[str, Tensor]) -> dict[str, Any]:
    return {"input_ids": sample["input_ids"][None], "use_cache": False}


@rows
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2"])
def test_logits_and_gradients(kind: str, attention: str, options: dict[str, Any]) -> None:
    """Of one row, and of its parts, they are those of the samples alone: 1e-5 and 1e-4."""
    model = model_of(kind, attention).train()
    batch = PackCollate(layout="transformers", **options)(samples())
    check_as_alone(model, samples(), batch, 2, by_itself)


@pytest.mark.parametrize("labelled", [False, True])
def test_it_is_what_the_collator_of_transformers_makes(labelled: bool) -> None:
    """Where nothing is padded, bit for bit; and two keys more, which isolate the samples."""
    peer = hf.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
    )
    texts = [{"input_ids": s["input_ids"].tolist()} for s in samples()]
    if labelled:
        texts = [text | {"labels": [i % 7 for i in text["input_ids"]]} for text in texts]
    expected = peer(texts)
    batch = PackCollate(layout="transformers", position_ids_start=2)(texts)
    assert set(batch) == {*expected, "use_cache"}
    for name, value in expected.items():
        mine = batch[name]
        assert bitwise(mine, value) if isinstance(value, Tensor) else mine == value, name


@rows
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "bert", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_let_samples_see_each_other_are_refused(
    kind: str, options: dict[str, Any], dtype: Any
) -> None:
    """With random weights, in training mode, and in half precision too; others pass."""
    model = model_of(kind, "sdpa").to(dtype).train()
    batch = PackCollate(layout="transformers", **options)(samples())
    if kind not in ("bert", "opt"):
        check_kept_apart(model, batch)
    else:
        with pytest.raises(OptionError, match="lets the samples of a row see each other"):
            check_kept_apart(model, batch)
        check_kept_apart(model, PackCollate(layout="transformers")(samples()[:1]))
    assert all(part.training for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore")  # PEFT has many, one of which says so
def test_rows_after_virtual_tokens_are_refused() -> None:
    """PEFT's prompt tuning drops position ids, so the samples of a row see each other."""
    peft = pytest.importorskip("peft", reason="puts virtual tokens before a row")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(model_of("llama", "sdpa"), config)
    batch = PackCollate(layout="transformers")(samples())
    with pytest.raises(OptionError, match="lets the samples of a row see each other"):
        check_kept_apart(model, batch)


def trained(tmp_path: Any, cost: Any, collate: Any, kind: str = "llama", **own: Any) -> Tensor:
    """The parameters after two steps of the trainer, of the same samples whatever the cost."""
    model = model_of(kind, "sdpa")
    data: Any = [{**sample, "labels": sample["input_ids"]} for sample in samples() + samples()]
    sampler = MemoryBudgetBatchSampler(LENGTHS * 2, cost, 64, samples_per_step=5)

    class Trainer(BudgetTrainerMixin, hf.Trainer):  # type: ignore[misc,name-defined]  # untyped
        def budget_loader(self) -> DataLoader[Any]:
            return DataLoader(data, batch_sampler=sampler, collate_fn=collate)

    arguments = hf.TrainingArguments(
        tmp_path, report_to=[], use_cpu=True, num_train_epochs=1, optim="sgd", learning_rate=0.1,
        max_grad_norm=0, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    type("Own", (Trainer,), own)(model, arguments).train()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_run_with_rows_is_one_with_padding(tmp_path: Any) -> None:
    """The whole way through the trainer: its loss, its steps and its weights of micro-batches."""
    padded = trained(tmp_path, PaddedCost(unit_bytes=1), PadCollate(mask="attention_mask"))
    packed = trained(tmp_path, PackedCost(unit_bytes=1), PackCollate(layout="transformers"))
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-6)
    rows = tmp_path, PackedCost(unit_bytes=1), PackCollate(layout="transformers"), "opt"
    trained(*rows, checks_rows=False, checks_weights=False)
    with pytest.raises(OptionError, match="see each other"):
        trained(*rows)
