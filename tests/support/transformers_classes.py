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

from tests.support.model_classes.case import Case, case, lengths
from tests.support.training_cases import Batch

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


def pictures(n: int, size: tuple[int, int]) -> Batch:
    return {"pixel_values": torch.randn(n, 3, *size), "labels": torch.randint(2, (n,))}


def waves(n: int, length: int) -> Batch:
    return {"input_values": torch.randn(n, length), "labels": torch.randint(2, (n,))}


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def published(
    kind: Any, config: Any, make: Any, max_size: int | tuple[int, ...], **options: Any
) -> Case:
    return case(kind(config).train(), own_loss, make, max_size, **options)


def text(name: str, longest: int = 512, **options: Any) -> Case:
    """A causal or masked language model of this name."""
    mapping = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        mapping = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    config = hf.AutoConfig.for_model(name, **TEXT | options)
    return published(getattr(hf, mapping[name]), config, labelled, longest, min_size=2)


def speaking(name: str, **options: Any) -> Case:
    """A model of sound and text, trained on text alone."""
    kind = getattr(hf, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[name])
    return published(kind, hf.AutoConfig.for_model(name, **options), labelled, 512, min_size=2)


def kyutai() -> Case:
    """Words and the codes of sound, position by position; the codec is not trained."""
    codec = {"hidden_size": 32, "num_filters": 4, "num_hidden_layers": 1, "intermediate_size": 32,
             "num_attention_heads": 2, "num_key_value_heads": 2, "codebook_dim": 16,
             "vector_quantization_hidden_dimension": 16, "upsample_groups": 32,
             "num_quantizers": 4, "codebook_size": 64}  # fmt: skip
    config = hf.KyutaiSpeechToTextConfig(
        **TEXT | {"num_key_value_heads": 4}, codebook_vocab_size=65, num_codebooks=4, ffn_dim=128,
        audio_bos_token_id=64, audio_pad_token_id=500, sliding_window=32, codec_config=codec,
    )  # fmt: skip

    def make(n: int, length: int) -> Batch:
        codes = torch.randint(64, (n, length, 5))
        return {"input_ids": codes, "labels": words(n, length)}

    kind = hf.KyutaiSpeechToTextForConditionalGeneration
    made = kind(config).train()
    made.codec_model.requires_grad_(requires_grad=False)
    return case(made, own_loss, make, 256, min_size=2)


def pop2piano() -> Case:
    """Frames of a spectrogram, as wide as the model, to notes."""
    config = hf.Pop2PianoConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2,
        num_heads=4,
    )  # fmt: skip
    config.decoder_start_token_id = 0

    def make(n: int, size: tuple[int, int]) -> Batch:
        return {"input_features": torch.randn(n, size[0], WIDTH), "labels": words(n, size[1])}

    return published(hf.Pop2PianoForConditionalGeneration, config, make, (256, 128), min_size=2)


def m2m_100() -> Case:
    config = hf.M2M100Config(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, pad_token_id=0, max_position_embeddings=512,
    )  # fmt: skip
    return published(hf.M2M100ForConditionalGeneration, config, translated, (256, 128), min_size=2)


def seamless() -> Case:
    small = {"layers": 2, "ffn_dim": 128, "attention_heads": 4}
    parts = {f"{part}_{key}": value for part in ("encoder", "decoder", "t2u_encoder", "t2u_decoder")
             for key, value in small.items()}  # fmt: skip
    config = hf.SeamlessM4Tv2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, **parts, speech_encoder_layers=1,
        speech_encoder_attention_heads=4, speech_encoder_intermediate_size=128,
        upsample_initial_channel=32, max_position_embeddings=512,
    )  # fmt: skip
    return published(hf.SeamlessM4Tv2ForTextToText, config, translated, (256, 128), min_size=2)


def cvt() -> Case:
    config = hf.CvtConfig(embed_dim=[16, 24, 48], num_heads=[1, 2, 3], depth=[1, 2, 3])
    return published(hf.CvtForImageClassification, config, pictures, (128, 128), min_size=48)


def dinov2() -> Case:
    config = hf.Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8
    )
    kind = hf.Dinov2ForImageClassification
    return published(kind, config, pictures, (128, 128), min_size=16, multiple=8)


def swiftformer() -> Case:
    config = hf.SwiftFormerConfig(depths=[1, 1, 1, 1], embed_dims=[16, 24, 32, 48])
    return published(
        hf.SwiftFormerForImageClassification, config, pictures, (128, 128), min_size=64
    )


def unispeech_sat() -> Case:
    config = hf.UniSpeechSatConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32, 32), conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, classifier_proj_size=32,
    )  # fmt: skip
    return published(hf.UniSpeechSatForSequenceClassification, config, waves, 32_000, min_size=1600)


WITH_SOUND = {
    "fun_asr_nano": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "audio_config": {"model_type": "fun_asr_nano_encoder", "hidden_size": 32,
                         "num_hidden_layers": 1, "num_timestamp_prediction_layers": 1,
                         "intermediate_size": 64},
        "adaptor_config": {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 16,
                           "projector_hidden_size": 64},
        "audio_token_id": VOCABULARY - 1,
    },
    "granite_speech": {
        "text_config": TEXT | {"model_type": "granite"},
        "encoder_config": {"model_type": "granite_speech_encoder", "num_layers": 1,
                           "hidden_dim": 32, "num_heads": 2, "dim_head": 16},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 32,
                             "num_hidden_layers": 1, "num_attention_heads": 2,
                             "intermediate_size": 64, "encoder_hidden_size": 32},
        "audio_token_index": VOCABULARY - 1,
        "has_lora_adapter": False,
    },
}  # fmt: skip

CLASSES: dict[str, Callable[[], Case]] = {
    "axk1": lambda: text("axk1", **LATENT),
    "bloom": lambda: text("bloom", n_head=4),
    "cvt": cvt,
    "dinov2": dinov2,
    "ernie4_5_moe": lambda: text("ernie4_5_moe", moe_num_experts=4, moe_k=2),
    "fun_asr_nano": lambda: speaking("fun_asr_nano", **WITH_SOUND["fun_asr_nano"]),
    "glm": lambda: text("glm"),
    "granite_speech": lambda: speaking("granite_speech", **WITH_SOUND["granite_speech"]),
    "hy_v4": lambda: text(
        "hy_v4", **LATENT | {"n_group": 1}, indexer_types=["full", "shared"], index_topk=32,
        index_head_dim=32, index_n_heads=2, layer_types=["indexed_attention"] * 2,
    ),
    "kyutai_speech_to_text": kyutai,
    "m2m_100": m2m_100,
    "mixtral": lambda: text("mixtral", num_local_experts=4),
    "mra": lambda: text("mra"),
    "olmo3": lambda: text(
        "olmo3", sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "pop2piano": pop2piano,
    "qwen4_exp": lambda: text(
        "qwen4_exp_text", layer_types=["linear_attention", "indexed_attention"], use_cache=False,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=64, hc_lowrank=16, indexer_n_heads=2, indexer_kv_heads=1,
        indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4,
    ),
    "seamless_m4t_v2": seamless,
    "swiftformer": swiftformer,
    "unispeech-sat": unispeech_sat,
    "xlm-roberta": lambda: text("xlm-roberta", max_position_embeddings=516),
}  # fmt: skip
