"""Rows of texts with images in a model with three axes of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.images_beside_text import (
    FIELDS,
    as_it_comes,
    collate,
    text_with_images,
    vision_model,
)
from tests.support.rows import check_as_alone
from torchbudget import PackCollate
from torchbudget.errors import OptionError
from torchbudget.integrations.transformers import check_kept_apart

pytest.importorskip("transformers")
pytest.importorskip("PIL", reason="makes images")
pytestmark = pytest.mark.peer

IMAGES = (0, 2, 1, 4, 0, 3)
COLLATES = [
    collate,
    PackCollate(layout="transformers", fields=FIELDS, size_multiple=8, total_multiple=512),
]


def samples_of(model: Any) -> list[dict[str, Tensor]]:
    return [text_with_images(model, images, seed) for seed, images in enumerate(IMAGES)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("packing", COLLATES, ids=["row", "rounded"])
def test_logits_and_gradients(attention: str, packing: PackCollate) -> None:
    """Of one row, and of its parts, they are those of samples alone: 1e-5 and 1e-4.

    Alone, the model computes its positions itself, from the grids of the images.
    """
    model = vision_model(attention)
    samples = samples_of(model)
    check_as_alone(model, samples, packing(samples), 3, as_it_comes)


@pytest.mark.parametrize("packing", COLLATES, ids=["row", "rounded"])
def test_other_positions_let_samples_see_each_other(packing: PackCollate) -> None:
    """Logits are off by more than 0.1, and the check says so; images stay in their places.

    If the model's own positions come first, an image is cut into samples: off, but kept apart.
    """
    model = vision_model().eval()
    batch = packing(samples_of(model))
    check_kept_apart(model, batch)
    right, four = model(**batch).logits, batch["position_ids"]
    running = torch.arange(four.shape[2]).expand(1, 1, -1)
    for wrong in (four[0], four[1:], four[[1, 2, 3, 0]], torch.cat([running, four[1:]])):
        row = type(batch)({**batch, "position_ids": wrong}, batch._arrangement)
        assert (model(**row).logits - right).abs().max() > 0.1
        if wrong[:1].equal(four[1:2]) and len(wrong) == 4:
            continue
        with pytest.raises(OptionError, match="lets the samples of a row see each other"):
            check_kept_apart(model, row)
