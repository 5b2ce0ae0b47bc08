"""Small models of `transformers`' own classes, each with a training step, from configurations.

Only where `transformers` is installed, which is one of the `peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.support.model_classes.case import Case, case, lengths
from tests.support.training_cases import VOCABULARY, Batch, MakeBatch

WIDTH, HEADS, LAYERS, INNER = 64, 4, 2, 128
BERT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
BART_LIKE = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
T5_LIKE = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": INNER,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}


def words(n: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 10, (n, length))


def attention_mask(n: int, length: int) -> torch.Tensor:
    return (torch.arange(length) < lengths(n, length)[:, None]).long()


def labelled(n: int, length: int) -> Batch:
    x = words(n, length)
    return {"input_ids": x, "attention_mask": attention_mask(n, length), "labels": x}


def translated(n: int, size: tuple[int, int]) -> Batch:
    source, target = size
    return labelled(n, source) | {"labels": words(n, target)}


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def pooled(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss of the last hidden state, for a body without a head."""
    return model(batch["input_ids"], batch["attention_mask"]).last_hidden_state.square().mean()


def published(
    kind: Callable[[Any], nn.Module],
    config: hf.PretrainedConfig,
    max_size: int | tuple[int, ...],
    make_batch: MakeBatch = labelled,
    loss_of: Callable[[Any, Batch], torch.Tensor] = own_loss,
    *,
    attention: str | None = "eager",
    min_size: int = 1,
    multiple: int = 1,
) -> Case:
    """The model of a configuration, with `attn_implementation=attention`."""
    if attention is not None:
        config._attn_implementation = attention
    model = kind(config).train()
    return case(model, loss_of, make_batch, max_size, min_size=min_size, multiple=multiple)


def dropout_of(attention: str) -> float:
    """Dropout of the scores; with any, no fused kernel is used."""
    return 0.0 if attention == "sdpa" else 0.1


# ---------------------------------------------------------------------- text


def bert(attention: str) -> Case:
    dropout = dropout_of(attention)
    config = hf.BertConfig(
        **BERT_LIKE, max_position_embeddings=512, attention_probs_dropout_prob=dropout
    )
    return published(hf.BertForMaskedLM, config, 512, attention=attention)


def deberta() -> Case:
    config = hf.DebertaV2Config(
        **BERT_LIKE,
        max_position_embeddings=512,
        relative_attention=True,
        position_buckets=32,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    )
    return published(hf.DebertaV2ForMaskedLM, config, 512)


def t5() -> Case:
    return published(hf.T5ForConditionalGeneration, hf.T5Config(**T5_LIKE), (512, 256), translated)


def t5_encoder() -> Case:
    return published(hf.T5EncoderModel, hf.T5Config(**T5_LIKE), 2048, loss_of=pooled)


def bart(attention: str) -> Case:
    config = hf.BartConfig(**BART_LIKE, max_position_embeddings=512)
    return published(
        hf.BartForConditionalGeneration, config, (512, 256), translated, attention=attention
    )


def gpt2(attention: str) -> Case:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=512,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_pdrop=dropout_of(attention),
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return published(hf.GPT2LMHeadModel, config, 512, attention=attention, min_size=2)


def llama(attention: str) -> Case:
    config = hf.LlamaConfig(**BERT_LIKE, num_key_value_heads=2, use_cache=False)
    return published(hf.LlamaForCausalLM, config, 1024, attention=attention, min_size=2)


def qwen3() -> Case:
    config = hf.Qwen3Config(**BERT_LIKE, num_key_value_heads=2, head_dim=16, use_cache=False)
    return published(hf.Qwen3ForCausalLM, config, 1024, min_size=2)


def gemma3(attention: str) -> Case:
    """One layer sees all, the other one a window of 64."""
    config = hf.Gemma3TextConfig(
        **BERT_LIKE,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        use_cache=False,
    )
    return published(hf.Gemma3ForCausalLM, config, 1024, attention=attention, min_size=2)


def mixtral(experts: str, dtype: torch.dtype = torch.float32) -> Case:
    config = hf.MixtralConfig(
        **BERT_LIKE, num_key_value_heads=2, num_local_experts=4, use_cache=False
    )
    config._experts_implementation = experts

    def kind(config: Any) -> nn.Module:
        return hf.MixtralForCausalLM(config).to(dtype)

    return published(kind, config, 512, min_size=2)


def rwkv() -> Case:
    """A loop over the length in Python."""
    config = hf.RwkvConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2)
    return published(hf.RwkvForCausalLM, config, 128, attention=None)


def switch() -> Case:
    config = hf.SwitchTransformersConfig(
        **T5_LIKE, num_experts=4, expert_capacity=64, use_cache=False
    )
    kind = hf.SwitchTransformersForConditionalGeneration
    return published(kind, config, (256, 128), translated)


def longformer() -> Case:
    config = hf.LongformerConfig(
        **BERT_LIKE, attention_window=32, max_position_embeddings=1026, pad_token_id=1
    )
    return published(hf.LongformerForMaskedLM, config, 1024, attention=None, multiple=32)


def big_bird() -> Case:
    config = hf.BigBirdConfig(
        **BERT_LIKE, block_size=16, num_random_blocks=2, max_position_embeddings=1024
    )
    return published(hf.BigBirdForMaskedLM, config, 1024, attention=None, min_size=240, multiple=16)


def led() -> Case:
    """Counts the windows of the source, which is padded to whole ones, in tensors."""
    config = hf.LEDConfig(
        **BART_LIKE,
        attention_window=[32] * LAYERS,
        max_encoder_position_embeddings=1024,
        max_decoder_position_embeddings=256,
    )
    kind = hf.LEDForConditionalGeneration
    return published(kind, config, (768, 128), translated, attention=None, multiple=32)


# ---------------------------------------------------------------------- sound


def whisper() -> Case:
    """The encoder takes frames of one number only; the words are ragged."""
    config = hf.WhisperConfig(
        **BART_LIKE,
        num_mel_bins=40,
        max_source_positions=250,
        max_target_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )

    def make_batch(n: int, length: int) -> Batch:
        return {"input_features": torch.randn(n, 40, 500), "labels": words(n, length)}

    return published(hf.WhisperForConditionalGeneration, config, 128, make_batch)


def wav2vec2() -> Case:
    config = hf.Wav2Vec2Config(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        classifier_proj_size=32,
    )

    def make_batch(n: int, length: int) -> Batch:
        return {"input_values": torch.randn(n, length), "labels": torch.randint(0, 2, (n,))}

    kind = hf.Wav2Vec2ForSequenceClassification
    return published(kind, config, 32_000, make_batch, min_size=400, multiple=80)


# ---------------------------------------------------------------------- images


def clip() -> Case:
    """Images of one size and ragged text, all pairs of which are compared."""
    text = {**BERT_LIKE, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}
    image = {**BERT_LIKE, "image_size": 32, "patch_size": 8}
    del image["vocab_size"]
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=WIDTH)

    def make_batch(n: int, length: int) -> Batch:
        x = words(n, length)
        mask = attention_mask(n, length)
        return {"input_ids": x, "attention_mask": mask, "pixel_values": torch.randn(n, 3, 32, 32)}

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch, return_loss=True).loss

    return published(hf.CLIPModel, config, 256, make_batch, loss_of)


def pictures(n: int, size: tuple[int, int]) -> Batch:
    return {"pixel_values": torch.randn(n, 3, *size), "labels": torch.randint(0, 2, (n,))}


SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [4, 2],
    "hidden_sizes": [32, 64],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}


def segformer() -> Case:
    config = hf.SegformerConfig(**SEGFORMER)
    kind = hf.SegformerForImageClassification
    return published(kind, config, (256, 256), pictures, attention=None, min_size=16, multiple=32)


def segmented() -> Case:
    """A label for each pixel."""
    config = hf.SegformerConfig(**SEGFORMER, decoder_hidden_size=32, num_labels=10)

    def make_batch(n: int, size: tuple[int, int]) -> Batch:
        labels = torch.randint(0, 10, (n, *size))
        return {"pixel_values": torch.randn(n, 3, *size), "labels": labels}

    kind = hf.SegformerForSemanticSegmentation
    return published(kind, config, (192, 192), make_batch, attention=None, min_size=16, multiple=32)


def own_positions(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's loss on images of any size, by interpolated positions."""
    return model(**batch, interpolate_pos_encoding=True).loss


def swin() -> Case:
    """Pads to whole windows; an image of one window would change the model for later ones."""
    config = hf.SwinConfig(
        image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    kind = hf.SwinForImageClassification
    return published(
        kind, config, (192, 192), pictures, own_positions, attention=None, min_size=40, multiple=32
    )


def vit() -> Case:
    """Free sizes by interpolated positions."""
    config = hf.ViTConfig(
        **{key: value for key, value in BERT_LIKE.items() if key != "vocab_size"},
        image_size=64,
        patch_size=16,
    )
    kind = hf.ViTForImageClassification
    return published(kind, config, (256, 256), pictures, own_positions, min_size=16, multiple=16)


# Left out, since their memory depends on values: Mixtral with `experts_implementation="eager"`
# (nonzero), Wav2Vec2ForCTC (masked_select of the labels). Mixtral's grouped matrix products run in
# float32 but are traced in bfloat16 only.
CLASSES: dict[str, Callable[[], Case]] = {
    "BERT": partial(bert, "eager"),
    "BERT, sdpa": partial(bert, "sdpa"),
    "DeBERTa-v2": deberta,
    "T5": t5,
    "T5, encoder": t5_encoder,
    "BART": partial(bart, "eager"),
    "BART, sdpa": partial(bart, "sdpa"),
    "GPT-2": partial(gpt2, "eager"),
    "GPT-2, sdpa": partial(gpt2, "sdpa"),
    "Llama": partial(llama, "eager"),
    "Llama, sdpa": partial(llama, "sdpa"),
    "Qwen 3": qwen3,
    "Gemma 3": partial(gemma3, "eager"),
    "Gemma 3, sdpa": partial(gemma3, "sdpa"),
    "Mixtral, batched": partial(mixtral, "batched_mm"),
    "Mixtral, grouped": partial(mixtral, "grouped_mm", torch.bfloat16),
    "RWKV": rwkv,
    "Switch": switch,
    "Longformer": longformer,
    "BigBird": big_bird,
    "LED": led,
    "Whisper": whisper,
    "Wav2Vec2": wav2vec2,
    "CLIP": clip,
    "Segformer": segformer,
    "Segformer, pixels": segmented,
    "Swin": swin,
    "ViT": vit,
}
