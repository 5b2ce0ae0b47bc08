"""A small Qwen2-VL of transformers, and texts with images as its processor makes them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from torchbudget import PackCollate

IMAGE: Final = 3  # the id of a placeholder
FIELDS: Final = {"pixel_values": ("joined", "optional"), "image_grid_thw": ("joined", "optional")}
collate: Final = PackCollate(layout="transformers", fields=FIELDS)


def vision_model(attention: str = "sdpa") -> Any:
    """A model with random weights, in training mode."""
    import transformers as hf

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(
        text_config={
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None,
            "eos_token_id": None, "rope_parameters": rope,
        },
        vision_config=vision, image_token_id=IMAGE, video_token_id=4, vision_start_token_id=1,
        vision_end_token_id=2, attn_implementation=attention,
    )  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(config).train()


def text_with_images(model: Any, images: int, seed: int) -> dict[str, Tensor]:
    """A sample, with the model's own positions."""
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    rng = np.random.default_rng(seed)
    process = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (*rng.integers(40, 200, 2), 3), dtype=np.uint8))
        for _ in range(images)
    ]
    made = dict(process(pictures, return_tensors="pt")) if pictures else {}
    ids: list[int] = []
    for patches in made["image_grid_thw"].prod(1).tolist() if made else ():
        ids += [*rng.integers(5, 64, rng.integers(1, 9)), 1, *[IMAGE] * (patches // 4), 2]
    ids += rng.integers(5, 64, rng.integers(2, 30)).tolist()
    text = torch.tensor(ids)
    kinds = (text == IMAGE).int()[None]
    grids = made.get("image_grid_thw")
    positions, _ = model.model.get_rope_index(text[None], kinds, image_grid_thw=grids)
    labels = text.masked_fill(text == IMAGE, -100)
    return {"input_ids": text, "labels": labels, "position_ids": positions[:, 0], **made}


def as_it_comes(sample: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of the model for one sample alone, which computes its positions itself."""
    own = {name: sample[name] for name in FIELDS if name in sample}
    ids = sample["input_ids"][None]
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), "use_cache": False, **own}
