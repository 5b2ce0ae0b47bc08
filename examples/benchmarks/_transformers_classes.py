"""Models of `transformers`, small, each with a training step: every 16th name of a sorted list.

The list is of all names to which the library's auto classes give a model for causal, masked or
translated text, for speech to text, images, sound or pixels, 322 in its release 5.24; the first is
the 9th. What such a model takes for text is stated by size; its other options are its own.

Only where `transformers` is installed, which is one of the `peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto as auto

from tests.support.training_cases import Batch, Training, lengths, training

VOCABULARY, WIDTH = 300, 64
KINDS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
TRANSLATING = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 2), ("ffn_dim", 128), ("attention_heads", 4))
}


def names() -> list[str]:
    known = sorted(set().union(*(getattr(auto, f"MODEL_FOR_{k}_MAPPING_NAMES") for k in KINDS)))
    return known[8::16]


def words(n: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 10, (n, length))


def labelled(n: int, length: int) -> Batch:
    ids = words(n, length)
    mask = (torch.arange(length) < lengths(n, length)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def translated(n: int, size: tuple[int, int]) -> Batch:
    return labelled(n, size[0]) | {"labels": words(n, size[1])}


def codes(n: int, length: int) -> Batch:
    """Words and the codes of sound, position by position."""
    return {"input_ids": torch.randint(64, (n, length, 5)), "labels": words(n, length)}


def frames(n: int, size: tuple[int, int]) -> Batch:
    """Frames of a spectrogram, as wide as the model, to notes."""
    return {"input_features": torch.randn(n, size[0], WIDTH), "labels": words(n, size[1])}


def pictures(n: int, size: tuple[int, int]) -> Batch:
    return {"pixel_values": torch.randn(n, 3, *size), "labels": torch.randint(2, (n,))}


def waves(n: int, length: int) -> Batch:
    return {"input_values": torch.randn(n, length), "labels": torch.randint(2, (n,))}


# Of each kind of batch the largest sizes.
LARGEST: dict[Any, int | tuple[int, int]] = {
    labelled: 512, translated: (256, 128), codes: 256, frames: (256, 128), pictures: (128, 128),
    waves: 32_000,
}  # fmt: skip


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def published(
    kind: str, make: Any, min_size: int = 2, multiple: int = 1, **options: Any
) -> Callable[[], Training]:
    """A class of the library's by its name, and options of its configuration."""

    def made() -> Training:
        named = getattr(hf, kind)
        model = named(named.config_class(**options)).train()
        if hasattr(model, "codec_model"):  # it is not trained
            model.codec_model.requires_grad_(requires_grad=False)
        limits = {"min_size": min_size, "multiple": multiple}
        return training(model, own_loss, make, LARGEST[make], **limits)

    return made


def text(name: str, **options: Any) -> Callable[[], Training]:
    """A causal, masked or speech model of this name, trained on text alone."""
    known = ("MASKED_LM", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    mappings = (getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in known)
    kind = next(mapping[name] for mapping in mappings if name in mapping)
    return published(kind, labelled, **options)


CLASSES: dict[str, Callable[[], Training]] = {
    "axk1": text("axk1", **TEXT | LATENT),
    "bloom": text("bloom", **TEXT, n_head=4),
    "cvt": published(
        "CvtForImageClassification", pictures, min_size=48, embed_dim=[16, 24, 48],
        num_heads=[1, 2, 3], depth=[1, 2, 3],
    ),
    "dinov2": published(
        "Dinov2ForImageClassification", pictures, min_size=16, multiple=8, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8,
    ),
    "ernie4_5_moe": text("ernie4_5_moe", **TEXT, moe_num_experts=4, moe_k=2),
    "fun_asr_nano": text(
        "fun_asr_nano",
        text_config=TEXT | {"model_type": "qwen3"},
        audio_config={"model_type": "fun_asr_nano_encoder", "hidden_size": 32,
                      "num_hidden_layers": 1, "num_timestamp_prediction_layers": 1,
                      "intermediate_size": 64},
        adaptor_config={"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 16,
                        "projector_hidden_size": 64},
        audio_token_id=VOCABULARY - 1,
    ),
    "glm": text("glm", **TEXT),
    "granite_speech": text(
        "granite_speech",
        text_config=TEXT | {"model_type": "granite"},
        encoder_config={"model_type": "granite_speech_encoder", "num_layers": 1, "hidden_dim": 32,
                        "num_heads": 2, "dim_head": 16},
        projector_config={"model_type": "blip_2_qformer", "hidden_size": 32,
                          "num_hidden_layers": 1, "num_attention_heads": 2,
                          "intermediate_size": 64, "encoder_hidden_size": 32},
        audio_token_index=VOCABULARY - 1, has_lora_adapter=False,
    ),
    "hy_v4": text(
        "hy_v4", **TEXT | LATENT | {"n_group": 1}, indexer_types=["full", "shared"], index_topk=32,
        index_head_dim=32, index_n_heads=2, layer_types=["indexed_attention"] * 2,
    ),
    "kyutai_speech_to_text": published(
        "KyutaiSpeechToTextForConditionalGeneration", codes,
        **TEXT | {"num_key_value_heads": 4}, codebook_vocab_size=65, num_codebooks=4, ffn_dim=128,
        audio_bos_token_id=64, audio_pad_token_id=500, sliding_window=32,
        codec_config={"hidden_size": 32, "num_filters": 4, "num_hidden_layers": 1,
                      "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
                      "codebook_dim": 16, "vector_quantization_hidden_dimension": 16,
                      "upsample_groups": 32, "num_quantizers": 4, "codebook_size": 64},
    ),
    "m2m_100": published(
        "M2M100ForConditionalGeneration", translated, vocab_size=VOCABULARY, d_model=WIDTH,
        **TRANSLATING, pad_token_id=0, max_position_embeddings=512,
    ),
    "mixtral": text("mixtral", **TEXT, num_local_experts=4),
    "mra": text("mra", **TEXT),
    "olmo3": text(
        "olmo3", **TEXT, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "pop2piano": published(
        "Pop2PianoForConditionalGeneration", frames, vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16,
        d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    "qwen4_exp": text(
        "qwen4_exp_text", **TEXT, layer_types=["linear_attention", "indexed_attention"],
        use_cache=False, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=64, hc_lowrank=16, indexer_n_heads=2, indexer_kv_heads=1,
        indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4,
    ),
    "seamless_m4t_v2": published(
        "SeamlessM4Tv2ForTextToText", translated, vocab_size=VOCABULARY, hidden_size=WIDTH,
        **TRANSLATING, **{f"t2u_{name}": value for name, value in TRANSLATING.items()},
        speech_encoder_layers=1, speech_encoder_attention_heads=4,
        speech_encoder_intermediate_size=128, upsample_initial_channel=32,
        max_position_embeddings=512,
    ),
    "swiftformer": published(
        "SwiftFormerForImageClassification", pictures, min_size=64, depths=[1, 1, 1, 1],
        embed_dims=[16, 24, 32, 48],
    ),
    "unispeech-sat": published(
        "UniSpeechSatForSequenceClassification", waves, min_size=1600, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, classifier_proj_size=32,
    ),
    "xlm-roberta": text("xlm-roberta", **TEXT, max_position_embeddings=516),
}  # fmt: skip
